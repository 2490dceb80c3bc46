from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import aclosing

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.telemetry.events.log import Cleared, EventBatch, EventLog, KvEvent, Removed, Stored, Subscription

SPACE, TENANT = b"s" * 32, b"t" * 32


def stored(name: int, tier: str = "device") -> Stored:
    return Stored((bytes([name]),), None, b"", 4, tier, SPACE, TENANT, is_private=False)


def removed(name: int, tier: str = "device") -> Removed:
    return Removed((bytes([name]),), tier, SPACE)


class Cache:
    """What is stored, and the log of it; ``later`` are the calls that the event loop would make."""

    def __init__(self, most: int = 4, places: Sequence[str] = ()) -> None:
        self.names: dict[int, None] = {}
        self.below: dict[str, list[int]] = {place: [] for place in places}
        self.places = list(places)
        self.later: list[Callable[[], None]] = []
        self.turns: list[bool] = []
        self.time = 0.0
        self.gate: anyio.Event | None = None
        self.log = EventLog(self, most=most, wall=lambda: self.time, soon=self.later.append)

    def turn(self, *, on: bool) -> None:
        self.turns.append(on)

    def standing(self) -> list[KvEvent]:
        return [stored(name) for name in self.names]

    async def survey(self, tier: str, note: Callable[[Sequence[KvEvent]], None]) -> None:
        if self.gate is not None:
            await self.gate.wait()
        note([stored(name, tier) for name in self.below[tier]])

    def put(self, *names: int) -> None:
        """In one go."""
        for name in names:
            self.names[name] = None
            self.note(stored(name))
        self.rest()

    def drop(self, name: int) -> None:
        del self.names[name]
        self.note(removed(name))
        self.rest()

    def note(self, event: KvEvent) -> None:
        if self.turns[-1:] == [True]:
            self.log.note(event)

    def rest(self) -> None:
        """The event loop comes round."""
        later, self.later[:] = list(self.later), []
        for call in later:
            call()


class Mirror:
    """What a reader makes of the events."""

    def __init__(self) -> None:
        self.names: set[tuple[str, bytes]] = set()
        self.seqs: list[int] = []

    def apply(self, batch: EventBatch) -> None:
        self.seqs.append(batch.seq)
        for event in batch.events:
            if isinstance(event, Stored):
                self.names |= {(event.tier, name) for name in event.names}
            elif isinstance(event, Removed):
                self.names -= {(event.tier, name) for name in event.names}
            else:
                assert event == Cleared()
                self.names.clear()

    def drain(self, reader: Subscription) -> list[EventBatch]:
        batches = []
        while (batch := reader.next_nowait()) is not None:
            self.apply(batch)
            batches.append(batch)
        return batches

    @property
    def device(self) -> set[int]:
        return {name[0] for tier, name in self.names if tier == "device"}


def test_a_batch_is_what_happened_in_one_go() -> None:
    cache = Cache()
    reader = cache.log.subscribe()
    cache.time = 7.5
    cache.put(1, 2)
    cache.drop(1)
    snapshot, first, second = Mirror().drain(reader)
    assert (snapshot.events, snapshot.is_snapshot, snapshot.has_gap) == ((Cleared(),), True, False)
    assert first == EventBatch(snapshot.seq + 1, 7.5, (stored(1), stored(2)))
    assert second == EventBatch(snapshot.seq + 2, 7.5, (removed(1),))
    assert cache.log.counts == {"stored": 2, "removed": 1, "cleared": 0}


def test_what_is_not_a_batch_yet_is_told_to_whoever_asks_and_once() -> None:
    cache = Cache()
    reader = cache.log.subscribe()
    reader.next_nowait()
    cache.log.note(stored(1))
    batch = reader.next_nowait()
    assert batch is not None
    assert batch.events == (stored(1),)
    cache.rest()
    assert reader.next_nowait() is None


@given(
    acts=st.lists(st.one_of(st.integers(0, 7), st.sampled_from(["read", "join", "leave"])), max_size=60),
    most=st.integers(1, 6),
)
def test_every_reader_has_the_right_mirror_whenever_it_has_read_all(acts: list[int | str], most: int) -> None:
    """Also those that come later, and those that fell behind what the log keeps."""
    cache = Cache(most)
    readers: list[tuple[Subscription, Mirror]] = []
    for act in acts:
        if isinstance(act, int):
            cache.drop(act) if act in cache.names else cache.put(act)
        elif act == "join":
            readers.append((cache.log.subscribe(), Mirror()))
        elif act == "leave" and readers:
            readers.pop()[0].close()
        elif readers:
            reader, mirror = readers[0]
            mirror.drain(reader)
            assert mirror.device == set(cache.names)
        assert len(cache.log._batches) <= most
    for reader, mirror in readers:
        mirror.drain(reader)
        assert mirror.device == set(cache.names)
        assert mirror.seqs == sorted(mirror.seqs)


def test_a_slow_reader_loses_whole_batches_and_sees_it() -> None:
    cache = Cache(most=3)
    reader, mirror = cache.log.subscribe(), Mirror()
    mirror.drain(reader)
    cache.put(1)
    for name in range(2, 7):
        cache.put(name)
    cache.drop(1)
    (batch,) = mirror.drain(reader)
    assert (batch.has_gap, batch.is_snapshot) == (True, True)
    assert batch.seq == cache.log.next_seq - 1
    assert mirror.device == {2, 3, 4, 5, 6}
    cache.put(9)
    (batch,) = mirror.drain(reader)
    assert not batch.has_gap, "from there on it is told everything again"


def test_a_reader_goes_on_where_it_stopped() -> None:
    cache = Cache(most=3)
    other = cache.log.subscribe()
    reader, mirror = cache.log.subscribe(), Mirror()
    cache.put(1)
    last = mirror.drain(reader)[-1].seq
    reader.close()
    cache.put(2)
    cache.put(3)
    again = mirror.drain(cache.log.subscribe(last + 1))
    assert [batch.seq for batch in again] == [last + 1, last + 2]
    assert not any(batch.is_snapshot for batch in again)
    assert mirror.device == {1, 2, 3}
    assert other.next_nowait() is not None


@pytest.mark.parametrize("past", [-5, 0, 99])
def test_what_is_not_kept_cannot_be_replayed_and_a_snapshot_comes_instead(past: int) -> None:
    cache = Cache(most=2)
    other, mirror = cache.log.subscribe(), Mirror()
    for name in range(5):
        cache.put(name)
    (batch,) = mirror.drain(cache.log.subscribe(past))
    assert (batch.has_gap, batch.is_snapshot) == (True, True)
    assert mirror.device == set(range(5))
    other.close()


def test_what_happened_while_nobody_listened_is_a_gap_as_well() -> None:
    cache = Cache()
    first, mirror = cache.log.subscribe(), Mirror()
    cache.put(1)
    last = mirror.drain(first)[-1].seq
    first.close()
    cache.names = {2: None}  # nobody notes it
    (batch,) = mirror.drain(cache.log.subscribe(last + 1))
    assert batch.has_gap
    assert mirror.device == {2}


def test_events_are_made_as_long_as_somebody_listens_and_nothing_is_kept_after() -> None:
    cache = Cache()
    first, second = cache.log.subscribe(), cache.log.subscribe()
    assert cache.turns == [True]
    first.close()
    cache.put(1)
    assert (cache.turns, cache.log.is_on) == ([True], True)
    second.close()
    second.close()
    assert not cache.log.is_on
    assert cache.turns[-1] is False
    assert (cache.log._batches, cache.log._pending) == ({}, [])


def test_a_subscription_that_was_forgotten_ends_with_the_next_batch() -> None:
    cache = Cache()
    reader = cache.log.subscribe()
    del reader
    gc.collect()
    cache.put(1)
    assert cache.turns == [True, False]
    assert cache.log._batches == {}


@pytest.mark.asyncio
async def test_reading_waits_for_the_next_batch() -> None:
    cache = Cache()
    read: list[EventBatch] = []

    async def follow(reader: Subscription) -> None:
        async for batch in reader:
            read.append(batch)  # noqa: PERF401  # one by one, as they come

    async with anyio.create_task_group() as tasks:
        reader = cache.log.subscribe()
        tasks.start_soon(follow, reader)
        await anyio.wait_all_tasks_blocked()
        assert len(read) == 1
        cache.put(1)
        await anyio.wait_all_tasks_blocked()
        assert [batch.events for batch in read[1:]] == [(stored(1),)]
        reader.close()
    assert not cache.log.is_on


@pytest.mark.asyncio
async def test_leaving_early_unsubscribes() -> None:
    cache = Cache()
    async with cache.log.subscribe() as batches:
        async for _ in batches:
            break
    assert cache.turns == [True, False]
    async with aclosing(cache.log.subscribe()) as others:
        assert cache.log.is_on
    assert cache.turns == [True, False] * 2
    assert others.next_nowait() is None
    with pytest.raises(StopAsyncIteration):
        await anext(others)


@pytest.mark.asyncio
async def test_a_reader_that_is_cancelled_while_it_waits_loses_nothing() -> None:
    cache = Cache()
    reader, mirror = cache.log.subscribe(), Mirror()
    mirror.drain(reader)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(reader)
    cache.put(1)
    mirror.apply(await anext(reader))
    assert mirror.device == {1}


@pytest.mark.asyncio
async def test_the_end_of_the_log_ends_the_iteration_after_all_was_read() -> None:
    cache = Cache()
    reader = cache.log.subscribe()
    cache.put(1)
    cache.log.note(Cleared())
    cache.log.close()
    cache.log.close()
    cache.rest()
    events = [batch.events async for batch in reader]
    assert events == [(Cleared(),), (stored(1),), (Cleared(),)]
    assert cache.turns[-1] is False


@pytest.mark.asyncio
async def test_one_that_fell_behind_a_closed_log_hears_that_nothing_is_left() -> None:
    cache = Cache(most=1)
    reader = cache.log.subscribe()
    reader.next_nowait()
    cache.put(1)
    cache.put(2)
    cache.log.close()
    (batch,) = [batch async for batch in reader]
    assert batch.has_gap
    assert batch.events == (Cleared(),)


@pytest.mark.asyncio
async def test_tiers_are_told_after_the_device_and_before_the_news() -> None:
    cache = Cache(places=("host", "disk", "empty"))
    cache.below["host"], cache.below["disk"] = [1, 2], [3]
    cache.names = {5: None}
    reader, mirror = cache.log.subscribe(), Mirror()
    batches = [await anext(reader), await anext(reader), await anext(reader)]
    cache.put(6)
    batches.append(await anext(reader))
    assert [batch.is_snapshot for batch in batches] == [True, True, True, False]
    assert [[event.tier for event in batch.events if isinstance(event, Stored)] for batch in batches] == [
        ["device"],
        ["host", "host"],
        ["disk"],
        ["device"],
    ]
    for batch in batches:
        mirror.apply(batch)
    assert mirror.seqs == sorted(mirror.seqs)


@pytest.mark.asyncio
async def test_a_tier_that_is_told_late_is_told_as_it_is_by_then() -> None:
    """What happened in it meanwhile comes afterwards, and leads to the same."""
    cache = Cache(places=("host",))
    cache.below["host"] = [1]
    cache.gate = anyio.Event()
    reader, mirror = cache.log.subscribe(), Mirror()
    mirror.apply(await anext(reader))
    with anyio.move_on_after(0):
        await anext(reader)
    cache.below["host"] = [2, 3]
    for event in (stored(2, "host"), removed(1, "host"), stored(3, "host")):
        cache.log.note(event)
        cache.rest()
    cache.gate.set()
    while mirror.seqs[-1] != cache.log.next_seq - 1:
        mirror.apply(await anext(reader))
    assert mirror.names == {("host", bytes([2])), ("host", bytes([3]))}
