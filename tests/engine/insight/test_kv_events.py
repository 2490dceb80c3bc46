"""KV events of whole engines: a mirror that is made of events alone is right whenever somebody looks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from random import Random

import anyio
import anyio.lowlevel
import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.insight.kv_events import KvEvents
from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.engine.kv import names as naming
from octavo.engine.kv.node import Node
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import EngineClosed
from octavo.policies.eviction import Lru
from octavo.storage.base import Head, TierStats
from octavo.storage.manager.mount import Mount
from octavo.storage.manager.watching import Witness
from octavo.storage.naming import Shelf, names_after, tenant_digest
from octavo.storage.testing.contract import MemoryStore, SharedMemoryTier
from octavo.telemetry.events.log import DEVICE, Cleared, EventBatch, Removed, Stored, Subscription
from octavo.tests.engine.test_random_workloads import EOS, EVICTION, SCHEDULING, VOCAB
from octavo.tests.engine.test_tier_workloads import Operators, Read, Troubled
from octavo.tests.engine.tier_rig import (
    ONE,
    B,
    EngineOf,
    MakeTier,
    ask,
    cool,
    lasting,
    memory,
    prompt,
    settled,
    stored,
    tiering,
)

PATIENCE = 20.0


class Mirror:
    """The digests that are where, with their tenants."""

    def __init__(self, reader: Subscription) -> None:
        self.reader = reader
        self.places: dict[str, dict[bytes, bytes]] = {}
        self.before_the_end: dict[str, dict[bytes, bytes]] = {}
        self.batches: list[EventBatch] = []

    def catch_up(self) -> None:
        while (batch := self.reader.next_nowait()) is not None:
            self.apply(batch)

    async def follow(self) -> None:
        async for batch in self.reader:
            self.apply(batch)

    def apply(self, batch: EventBatch) -> None:
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, Stored):
                self.store(event, is_snapshot=batch.is_snapshot)
            elif isinstance(event, Removed):
                place = self.place(event.tier)
                assert event.tier != DEVICE or place.keys() >= set(event.names), "what is not there is removed"
                for name in event.names:
                    place.pop(name, None)
            else:
                self.clear(event)

    def store(self, event: Stored, *, is_snapshot: bool) -> None:
        place = self.place(event.tier)
        assert list(event.names) == names_after(event.parent or event.namespace, event.tokens, event.block_size)
        if event.tier == DEVICE:
            assert not place.keys() & set(event.names), "what is there is stored again"
            assert event.parent is None or event.parent in place, "a block is stored before its parent"
        place.update(dict.fromkeys(event.names, event.tenant))

    def clear(self, event: Cleared) -> None:
        self.before_the_end = {tier: dict(names) for tier, names in self.places.items()}
        for tier in [event.tier] if event.tier is not None else list(self.places):
            place = self.place(tier)
            for name in [name for name, tenant in place.items() if event.tenant in (None, tenant)]:
                del place[name]

    def place(self, tier: str) -> dict[bytes, bytes]:
        return self.places.setdefault(tier, {})

    @property
    def device(self) -> set[bytes]:
        return set(self.place(DEVICE))


def cached(engine: AsyncEngine) -> set[bytes]:
    """What is in the tree, named anew: the names that events use are not looked at."""
    found: set[bytes] = set()
    tree = engine._loop.cache.tree
    for node in tree.nodes():
        path = list(tree.path(node))[::-1]
        tokens = b"".join(bytes(part.tokens) for part in path)
        found |= set(names_after(node.namespace.shelf().namespace, tokens, tree.block_size)[-len(node.ids) :])
    return found


def subscribe(engine: AsyncEngine) -> Mirror:
    return Mirror(engine.kv_events())


class Watched(Operators):
    """Operators and readers: one reads from the start, others come and go, and all are looked at in every step."""

    def __init__(self, random: Random, read: Read, folder: Path) -> None:
        super().__init__(random, read, folder)
        self.mirrors: list[Mirror] = []
        self.late: list[Mirror] = []

    async def on_step(self, step: int) -> None:
        assert self.engine is not None
        present = cached(self.engine)
        for mirror in self.mirrors:
            mirror.catch_up()
            assert mirror.device == present
        if self._random.random() < 0.05 and len(self.mirrors) < 4:
            self.mirrors.append(subscribe(self.engine))
        if self._random.random() < 0.03 and len(self.mirrors) > 1:
            self.mirrors.pop().reader.close()
        await super().on_step(step)


async def is_told(mirror: Mirror, mount: Mount) -> bool:
    return {name for _, name in await stored(mount.tier)} == set(mirror.place(mount.name))


async def until_told(mirror: Mirror, mount: Mount) -> None:
    """Of all that the tier has, and that what it dropped by itself to make room is gone. It may be surveying still."""
    with anyio.move_on_after(PATIENCE):
        while not await is_told(mirror, mount):  # noqa: ASYNC110  # tasks tell it
            await anyio.sleep(0.005)
    assert await is_told(mirror, mount)


async def run_workload(seed: int, engine_of: EngineOf, read: Read, folder: Path, *, trouble: bool) -> None:
    random = Random(seed)  # noqa: S311  # nothing is secret here
    crowd = Watched(random, read, folder)
    block_size = random.choice((1, 2, 4, 5))
    least = -(-37 // block_size) + 1
    first, second = random.choice((3, 20, None)), random.choice((6, None))
    mounts: dict[str, MakeTier] = {"first": memory(first), "second": memory(second)}
    if trouble:
        mounts = {"first": Troubled(random, memory(20)), "second": Troubled(random, lasting(MemoryStore()))}
    async with engine_of(
        runner=FakeRunner(vocab_size=VOCAB, eos_token_ids=EOS),
        codec=FakeCodec(VOCAB),
        on_step=crowd.on_step,
        mounts=mounts,
        block_size=block_size,
        num_blocks=random.choice((least, least + 2, 2 * least)),
        max_batch_tokens=random.choice((3, 8, 16, 64)),
        max_running=random.choice((3, 4, 16)),
        scheduling_policy=random.choice(SCHEDULING),
        eviction_policy=random.choice(EVICTION),
        demotion=random.choice(("write_back", "write_through", "selective")),
        promotion=random.choice(("timeout", "wait", "best_effort")),
        checkpoint_interval=0,
        kv_events_buffer=random.choice((3, 10_000)),
    ) as engine:
        crowd.engine, crowd.widest = engine, least
        follower = Mirror(engine.kv_events())
        crowd.mirrors.append(subscribe(engine))
        for make in mounts.values():
            if isinstance(make, Troubled):
                make.trouble()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.follow)
            while len(crowd.sent) < 4:
                await crowd.send()
            while not all(sent.answer.done() for sent in crowd.sent.values()):
                await asyncio.gather(*(sent.answer for sent in crowd.sent.values()))
            for ended in await asyncio.gather(*crowd.errands, return_exceptions=True):
                assert ended is None or trouble, repr(ended)
            for pin in crowd.pins:
                await engine.unpin(pin)
            await settled(engine)
            await anyio.wait_all_tasks_blocked()
            assert follower.device == cached(engine)
            if not trouble:
                for mount in tiering(engine).manager._mounts:
                    await until_told(follower, mount)
            tasks.cancel_scope.cancel()
        assert len(engine._life.parts.kv_events.log._batches) <= engine.config.kv_events_buffer


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(12))
async def test_mirrors_are_right_in_every_step(seed: int, engine_of: EngineOf, read: Read, tmp_path: Path) -> None:
    await run_workload(seed, engine_of, read, tmp_path, trouble=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(100, 106))
async def test_faults_of_tiers_do_not_spoil_what_is_told_of_the_device(
    seed: int, engine_of: EngineOf, read: Read, tmp_path: Path
) -> None:
    await run_workload(seed, engine_of, read, tmp_path, trouble=True)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(1000, 1200))
async def test_mirrors_in_many_more_workloads(seed: int, engine_of: EngineOf, read: Read, tmp_path: Path) -> None:
    await run_workload(seed, engine_of, read, tmp_path, trouble=bool(seed % 2))


@pytest.mark.asyncio
async def test_one_that_comes_late_is_told_of_the_device_and_of_each_tier(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}) as engine:
        for number in range(3):
            await ask(engine, prompt(number), tenant="t" if number else None)
        await cool(engine)
        await ask(engine, prompt(7))
        await settled(engine)
        mirror = subscribe(engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mirror.follow)
            await anyio.wait_all_tasks_blocked()
            await ask(engine, prompt(8))
            await cool(engine)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        tier = {name: shelf.tenant for shelf, name in await stored(tiering(engine).manager._mounts[0].tier)}
        assert mirror.place("m") == tier
        assert set(tier.values()) == {tenant_digest(None), tenant_digest("t")}
        assert mirror.device == set()
        first, second, *rest = mirror.batches
        assert (first.is_snapshot, second.is_snapshot) == (True, True)
        assert not any(batch.is_snapshot for batch in rest)


@pytest.mark.asyncio
async def test_what_a_tier_drops_to_make_room_is_told_as_well(engine_of: EngineOf) -> None:
    """Also of what it had before anybody listened."""
    async with engine_of(mounts={"m": memory(12)}) as engine:
        for number in range(2):
            await ask(engine, prompt(number))
        await cool(engine)
        (mount,) = tiering(engine).manager._mounts
        mirror = subscribe(engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mirror.follow)
            for number in range(2, 12):
                await ask(engine, prompt(number))
                await cool(engine)
                await anyio.wait_all_tasks_blocked()
                assert set(mirror.place("m")) == {name for _, name in await stored(mount.tier)}
            tasks.cancel_scope.cancel()
        assert mount.report().tier.evicted > 12
        assert mount.witness is not None
        assert len(mount.witness._told) == 12


def test_looking_for_what_a_tier_dropped_is_bounded_and_comes_to_an_end() -> None:
    """Also when it has dropped nothing that was told, or does not say what it has."""
    shelf, looks = Namespace("m").shelf(), list[bytes]()
    heads = [Head(bytes([at // 256, at % 256]) * 16, shelf.namespace, 0, b"") for at in range(1000)]
    missing: set[bytes] = set()
    stats, told = TierStats(), list[bytes]()

    class Watcher:
        def stored(self, tier: str, shelf: Shelf, heads: SequenceOf[Head]) -> None:
            """Whatever."""

        def removed(self, tier: str, shelf: Shelf, names: SequenceOf[bytes]) -> None:
            told.extend(names)

        def erased(self, tier: str, tenant: bytes) -> None:
            """Whatever."""

    def has(shelf: Shelf, name: bytes) -> bool | None:
        looks.append(name)
        return name not in missing

    witness = Witness("m", Watcher(), has=has, asks=lambda: False, stats=lambda: stats)
    witness.stored(shelf, heads)
    assert looks == [], "nothing was dropped"
    missing.add(heads[900].name)
    stats = TierStats(evicted=2)  # one of which was never told
    for _ in range(40):
        before = len(looks)
        witness.stored(shelf, [])
        assert len(looks) - before <= 100
    assert told == [heads[900].name]
    assert len(looks) <= 2000
    quiet = len(looks)
    witness.stored(shelf, [])
    assert len(looks) == quiet


@pytest.mark.asyncio
async def test_blocks_that_come_back_from_a_tier_are_stored_on_the_device(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        mirror = subscribe(engine)
        assert (await ask(engine, prompt(1), ONE)).cached_tokens == 16
        mirror.catch_up()
        assert mirror.device == cached(engine)
        assert len(mirror.device) == 4


@pytest.mark.asyncio
async def test_of_a_tier_that_others_share_only_our_own_acts_are_told(engine_of: EngineOf) -> None:
    store = MemoryStore()

    def shared(geometry: object) -> SharedMemoryTier:
        return SharedMemoryTier(geometry, store=store)  # type: ignore[arg-type]  # it is one

    async with engine_of(mounts={"m": shared}) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        mirror = subscribe(engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mirror.follow)
            await anyio.wait_all_tasks_blocked()
            assert mirror.place("m") == {}
            await ask(engine, prompt(2))
            await cool(engine)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert len(mirror.place("m")) == 5
        assert len(store.blocks) == 10


@pytest.mark.asyncio
async def test_erasing_a_tenant_clears_its_blocks_and_no_others(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}, demotion="write_through") as engine:
        mirror = subscribe(engine)
        for tenant in ("a", "b", None):
            await ask(engine, prompt(1), tenant=tenant)
        await settled(engine)
        mirror.catch_up()
        assert {len(place) for place in mirror.places.values()} == {15}
        assert await engine.erase("a") == 10
        mirror.catch_up()
        for place in (mirror.place(DEVICE), mirror.place("m")):
            assert sorted(place.values()) == sorted([tenant_digest("b"), tenant_digest(None)] * 5)
        told = [event for batch in mirror.batches for event in batch.events]
        gone = [name for event in told if isinstance(event, Removed) and event.tier == "m" for name in event.names]
        assert len(gone) == 5, "they are named: no reader has to begin anew"
        assert [event for event in told if isinstance(event, Cleared)] == [Cleared()]
        text = repr(mirror.batches)
        assert "salt" not in text
        assert "'b'" not in text, "no tenant is named"


@pytest.mark.asyncio
async def test_forgetting_a_prefix_removes_it_everywhere(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}, demotion="write_through") as engine:
        mirror = subscribe(engine)
        await ask(engine, prompt(1))
        await ask(engine, prompt(2))
        await settled(engine)
        await engine.evict(prompt(1))
        mirror.catch_up()
        assert mirror.device == cached(engine) == set(mirror.place("m"))
        assert len(mirror.device) == 5


@pytest.mark.asyncio
async def test_a_slow_reader_neither_holds_up_the_engine_nor_grows(engine_of: EngineOf) -> None:
    async with engine_of(kv_events_buffer=3) as engine:
        mirror = subscribe(engine)
        mirror.catch_up()
        for number in range(20):
            await ask(engine, prompt(number))
        log = engine._life.parts.kv_events.log
        assert len(log._batches) == 3
        assert log._pending == []
        mirror.catch_up()
        assert mirror.batches[1].has_gap
        assert mirror.batches[1].seq > mirror.batches[0].seq + 1
        assert mirror.device == cached(engine)


@pytest.mark.asyncio
async def test_a_reader_goes_on_after_a_break(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        keeps_it_on = engine.kv_events()
        mirror = subscribe(engine)
        await ask(engine, prompt(1))
        mirror.catch_up()
        mirror.reader.close()
        await ask(engine, prompt(2))
        mirror.reader = engine.kv_events(replay_from=mirror.batches[-1].seq + 1)
        mirror.catch_up()
        assert [batch.is_snapshot for batch in mirror.batches].count(True) == 1
        assert mirror.device == cached(engine)
        assert keeps_it_on.next_nowait() is not None


@pytest.mark.asyncio
async def test_nothing_is_named_and_nothing_noted_while_nobody_listens(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[object] = []
    complete = naming._complete

    def counted(node: Node) -> None:
        named.append(node)
        complete(node)

    monkeypatch.setattr(naming, "_complete", counted)

    async def serve(engine: AsyncEngine, first: int) -> None:
        for number in range(first, first + 8):  # more than fits
            await ask(engine, prompt(number))

    async with engine_of(num_blocks=16) as engine:
        log = engine._life.parts.kv_events.log
        await serve(engine, 0)
        assert engine.stats().cache.evictions
        assert (named, log._batches, log._pending) == ([], {}, [])
        async with engine.kv_events():
            await serve(engine, 10)
        assert named
        assert log.counts["stored"] > 0
        await serve(engine, 20)  # what is left of before has names
        named.clear()
        counts = dict(log.counts)
        await serve(engine, 30)
        assert (named, log._batches, log._pending, dict(log.counts)) == ([], {}, [], counts)
        forgotten = engine.kv_events()
        del forgotten
        gc.collect()
        await serve(engine, 40)
        await serve(engine, 50)
        named.clear()
        await serve(engine, 60)
        assert (named, log._batches, log._pending) == ([], {}, [])


@pytest.mark.asyncio
async def test_it_ends_with_the_engine_which_has_nothing_left_then() -> None:
    config = EngineConfig(num_blocks=64, block_size=B)
    async with AsyncEngine(runner=FakeRunner(), config=config) as engine:
        mirror = subscribe(engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mirror.follow)
            await ask(engine, prompt(1))
            await engine.close()
        assert mirror.batches[-1].events[-1] == Cleared()
        assert len(mirror.before_the_end[DEVICE]) == 5
        with pytest.raises(EngineClosed):
            engine.kv_events()


@pytest.mark.asyncio
async def test_a_cache_is_named_in_parts_whatever_happens_between_them(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "PART_BLOCKS", 2)
    async with engine_of() as engine:
        for number in range(4):
            await ask(engine, prompt(number, 5 * B))
        parts = engine._loop.cache.naming()
        next(parts)
        await ask(engine, [*prompt(0, 2 * B), *prompt(9, 2 * B)])  # one edge is split
        await ask(engine, prompt(1, 9 * B))  # one grows
        engine._loop.cache.evict(engine._loop.cache.pool.num_blocks)  # all go
        assert list(parts) == []
        for number in range(4):
            await ask(engine, prompt(number, 5 * B))
        await engine.name_cache()
        with monkeypatch.context() as patch:
            patch.delattr(naming, "names_after")  # nothing is left to be named
            mirror = subscribe(engine)
        mirror.catch_up()
        assert mirror.device == cached(engine)
        assert len(mirror.device) >= 20


@pytest.mark.asyncio
async def test_others_have_their_turn_while_a_cache_is_named(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "PART_BLOCKS", 1)
    async with engine_of() as engine, anyio.create_task_group() as tasks:
        for number in range(6):
            await ask(engine, prompt(number, 2 * B))
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        tasks.start_soon(others)
        await engine.name_cache()
        assert turns >= 6
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_an_engine_tells_other_event_loops_nothing() -> None:
    engine = AsyncEngine(runner=FakeRunner(), config=EngineConfig(num_blocks=64, block_size=B))
    with pytest.raises(EngineClosed):
        engine.kv_events()
    with pytest.raises(EngineClosed):
        await engine.name_cache()

    async def elsewhere() -> None:
        engine.kv_events()

    async with engine:
        for call in (elsewhere, engine.name_cache):
            with pytest.raises(EngineClosed, match="another event loop"):
                await anyio.to_thread.run_sync(lambda call=call: asyncio.run(call()))  # type: ignore[misc]


class Books:
    """A cache alone, and who watches it."""

    def __init__(self, blocks: int = 16) -> None:
        self.faults: list[str] = []
        self.cache = CacheManager(
            blocks, B, Lru(blocks), clock=lambda: 0.0, on_fault=lambda where, _: self.faults.append(where)
        )
        self.names: set[bytes] = set()
        self._ids = 0

    def published(self, runs: object) -> None:
        raise RuntimeError("a fault of who watches")

    def evicted(self, run: object) -> None:
        raise RuntimeError("a fault of who watches")

    def dropped(self, run: object) -> None:
        raise RuntimeError("a fault of who watches")

    def serve(self, tokens: list[int]) -> Sequence:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens(tokens), Namespace("m"), block_size=B)
        self.cache.copied(self.cache.admit(sequence).copies)
        self.cache.commit(sequence, sequence.uncomputed, 0)
        return sequence


def test_who_watches_cannot_harm_the_cache() -> None:
    books = Books()
    books.cache.watch(books)
    books.cache.watch_publication(books)
    books.cache.finish(books.serve(prompt(1)))
    books.cache.evict(2)
    books.cache.discard(books.serve(prompt(2)))
    assert books.faults == ["publication hook", "eviction hook"] * 2
    assert books.cache.stats().hook_faults == 4
    books.cache.unwatch(books)
    books.cache.unwatch_publication(books)
    books.cache.finish(books.serve(prompt(3)))
    books.cache.evict(1)
    assert len(books.faults) == 4
    books.cache.census()


@pytest.mark.asyncio
async def test_what_is_distrusted_is_removed(engine_of: EngineOf) -> None:
    """Of a sequence whose results cannot be trusted, all that nobody else holds."""
    async with engine_of() as engine:
        events: KvEvents = engine._life.parts.kv_events
        mirror = Mirror(events.subscribe())
        await ask(engine, prompt(1))
        cache = engine._loop.cache
        sequence = Sequence(10_000, encode_tokens(prompt(1) + prompt(2)), Namespace("other"), block_size=B)

        def distrust() -> None:
            cache.copied(cache.admit(sequence).copies)
            cache.commit(sequence, sequence.uncomputed, 0)
            mirror.catch_up()
            assert len(mirror.device) == 5 + 9
            cache.discard(sequence)

        await engine._loop.at_edge(distrust)
        mirror.catch_up()
        assert mirror.device == cached(engine)
        assert len(mirror.device) == 5
