"""An eviction policy that breaks its contract, in each way there is, under the whole engine: outputs stay what they
are, the books are clean, the fault is counted, in the metrics, in the log and in the trace, and the least recently used
goes.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client import CollectorRegistry

from octavo import AsyncEngine, SamplingParams
from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.engine.kv.containment import MOST_FAULTS, SAMPLED, WINDOW, ContainedPolicy
from octavo.engine.kv.standby import Standby
from octavo.policies.eviction import Entry, EvictionPolicy, Lru
from octavo.policies.eviction.base import Json, Tail
from octavo.telemetry import names
from octavo.tests.engine.insight.trace_rig import Recorder, Watch, recording, traced

pytestmark = pytest.mark.asyncio

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPTS = [[n, n + 1, n + 2, *range(1, 8)] for n in range(1, 40, 3)] * 2
SETTINGS: Mapping[str, object] = {"num_blocks": 12, "evict_below": 0.3, "evict_until": 0.5}


class Knowing(Lru):
    """Knows every entry that ever was, and names what ``wrong`` makes of that."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.entries: list[Entry] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self.entries.append(entry)


class Raises(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise RuntimeError("no idea")


class RaisesLater(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield next(super().victims(count, now))
        raise LookupError("no idea whom next")


class Exits(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        sys.exit("enough")


class IsCancelled(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise asyncio.CancelledError


class Recurses(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return self.victims(count + 1, now)


class Sleeps(Lru):
    """For a second of the test's clock."""

    clock: ClassVar[Watch] = Watch()

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        for entry in super().victims(count, now):
            self.clock.now += 1.0
            yield entry


class NamesTheHeld(Knowing):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield from (entry for entry in self.entries if entry.blocks and not entry.candidate)
        yield from super().victims(count, now)


class NamesTheGone(Knowing):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield from (entry for entry in self.entries if not entry.blocks)
        yield from super().victims(count, now)


class NamesStrangers(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield Entry(blocks=3, depth=7, insert_time=0.0, last_use=0.0, candidate=True)


class Posing:
    """Says of itself that it is an entry."""

    __class__ = Entry  # type: ignore[assignment]  # the lie

    def __hash__(self) -> int:
        raise RuntimeError("not even that")


class NamesPosers(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield Posing()  # type: ignore[misc]  # that it is none is the point


class NamesTailsOfNothing(Knowing):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        for entry in super().victims(count, now):
            yield Tail(entry, 0)  # type: ignore[misc]  # no such tail


class ReturnsNone(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return None  # type: ignore[return-value]  # that it is none is the point


class ReturnsANumber(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return 7  # type: ignore[return-value]  # that it is none is the point


class ReturnsNothing(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(())


class NeverEnds(Knowing):
    """Names the same one again and again, also when it is gone, and refuses to be closed."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        first = next(super().victims(count, now))
        while True:
            try:
                yield first
            except GeneratorExit:
                yield first


class RaisesWhenClosed(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        try:
            yield from super().victims(count, now)
        finally:
            raise ValueError("closed")


class Scribbles(Knowing):
    """Writes into what it may only read."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        for entry in self.entries:
            entry.blocks, entry.depth, entry.candidate = -5, "deep", not entry.candidate  # type: ignore[assignment]
            entry.last_use, entry.hits, entry.insert_time = math.nan, "many", None  # type: ignore[assignment]
            entry.recompute_seconds, entry.reload_tier, entry.priority = [], 5, "high"  # type: ignore[assignment]
            entry.expires, entry.tenant = {}, 7  # type: ignore[assignment]
        yield from self.entries


class RaisesInEvents(Lru):
    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        super().on_evict(entry, blocks, now)
        raise RuntimeError("evict")


FAULTS: dict[type[EvictionPolicy], str] = {
    Raises: "victims: RuntimeError",
    RaisesLater: "victims: LookupError",
    Exits: "victims: SystemExit",
    IsCancelled: "victims: CancelledError",
    Recurses: "victims: RecursionError",
    Sleeps: "victims: took 1 s, more than 0.1",
    NamesTheHeld: "victims: named what ",
    NamesTheGone: "victims: named what was evicted before",
    NamesStrangers: "victims: named Entry, which is none of its entries",
    NamesPosers: "victims: named Posing, which is none of its entries",
    NamesTailsOfNothing: "victims: named a tail of no blocks",
    ReturnsNone: "victims: TypeError",
    ReturnsANumber: "victims: TypeError",
    ReturnsNothing: "victims: named nothing",
    NeverEnds: "victims: ",
    RaisesWhenClosed: "victims: ValueError",
    Scribbles: "victims: ",
    RaisesInEvents: "on_evict: RuntimeError",
}


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("octavo_breaches")
    module.__dict__.update({cls.__name__: cls for cls in FAULTS})
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """What the prompts give in a pool that is large enough."""

    async def answers() -> list[tuple[int, ...]]:
        with pytest.MonkeyPatch.context() as patch:
            async with traced(patch, None, num_blocks=512, enable_prefix_caching=False) as engine:
                return [(await engine.complete(prompt, GREEDY))[0].token_ids for prompt in PROMPTS]

    return asyncio.run(answers())


async def run(engine: AsyncEngine) -> list[tuple[int, ...]]:
    outputs = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in PROMPTS))
    return [output[0].token_ids for output in outputs]


def value(registry: CollectorRegistry, policy: str) -> float | None:
    return registry.get_sample_value("octavo_policy_faults_total", {"policy": policy})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("policy", FAULTS, ids=lambda cls: cls.__name__)
async def test_the_engine_goes_on(
    policy: type[EvictionPolicy],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider, recorder = recording()
    watch = Watch()
    monkeypatch.setattr(Sleeps, "clock", watch)
    settings = {**SETTINGS, "eviction_policy": f"octavo_breaches:{policy.__name__}"}
    async with traced(monkeypatch, provider, watch=watch, settings=settings) as engine:
        assert await run(engine) == expected
        cache = engine.stats().cache
        assert sum(cache.evictions.values()) > 20
        assert cache.policy_faults == cache.faults_by_policy[policy.__name__] > 0
        assert value(engine.registry, policy.__name__) == cache.policy_faults
        engine.census()
    assert any("a plug-in broke its contract" in record.getMessage() for record in caplog.get_records("call"))
    check_traces(recorder, policy, FAULTS[policy])


def check_traces(recorder: Recorder, policy: type[EvictionPolicy], fault: str) -> None:
    evictions = [span for span in recorder.ended if span.name == names.EVICT]
    faults = [text(span, names.POLICY_FAULT) for span in evictions if text(span, names.POLICY_FAULT)]
    assert any(told.startswith(fault) for told in faults), faults
    if policy is RaisesInEvents:
        told = {text(span, names.POLICY_FAULT) for span in recorder.ended if span.name == names.POLICY_FAULTED}
        assert told == {"on_evict: RuntimeError"}


def text(span: ReadableSpan, name: str) -> str:
    return str((span.attributes or {}).get(name, ""))


async def test_one_that_fails_again_and_again_is_set_aside_and_another_can_be_chosen(
    expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SETTINGS, "eviction_policy": "octavo_breaches:Raises"}
    async with traced(monkeypatch, None, settings=settings) as engine:
        assert await run(engine) == expected
        cache = engine.stats().cache
        assert (cache.policy, cache.policy_set_aside, cache.policy_faults) == ("Lru", "Raises", MOST_FAULTS)
        assert {policy for _, policy in cache.evictions_by_policy} == {"Raises", "Lru"}
        assert await engine.set_eviction_policy("octavo_breaches:ReturnsNothing") == "Lru"
        cache = engine.stats().cache
        assert (cache.policy, cache.policy_set_aside) == ("ReturnsNothing", None)
        assert await run(engine) == expected
        assert engine.stats().cache.faults_by_policy == {"Raises": MOST_FAULTS, "ReturnsNothing": MOST_FAULTS}
        assert await run(engine) == expected
    told = [record.getMessage() for record in caplog.get_records("call") if "is set aside" in record.getMessage()]
    assert len(told) == 2, "each once"


async def test_what_a_policy_scribbles_gets_into_no_snapshot(
    expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "eviction_policy": "octavo_breaches:Scribbles"}
    async with traced(monkeypatch, None, settings=settings) as engine:
        assert await run(engine) == expected
        blocks = (await engine.snapshot(tmp_path / "s")).blocks
        assert blocks == engine.census().idle > 0
    async with traced(monkeypatch, None, restore=str(tmp_path / "s"), num_blocks=64) as engine:
        assert await run(engine) == expected
        assert engine.stats().restore.saved_tokens > 0


async def test_a_policy_that_keeps_its_contract_is_never_at_fault(
    expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider, settings=SETTINGS) as engine:
        assert await run(engine) == expected
        assert engine.stats().cache.policy_faults == 0
    assert not [span for span in recorder.ended if names.POLICY_FAULT in (span.attributes or {})]


# the box alone


class Box:
    """A contained policy with a clock that moves when told."""

    def __init__(self, policy: EvictionPolicy, timeout: float = 0.1) -> None:
        self.now = 0.0
        self.faults: list[tuple[str, str]] = []
        self.policy = ContainedPolicy(policy, self._note, clock=lambda: self.now, timeout=timeout)

    def _note(self, where: str, error: BaseException | str) -> None:
        self.faults.append((where, str(error)))

    def lasts(self, seconds: float) -> Callable[..., None]:
        def event(*_: object) -> None:
            self.now += seconds

        return event


ENTRY = Entry(1, 4, 0.0, 0.0)


async def test_slow_events_are_noticed_by_samples_and_then_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(Lru(8))
    monkeypatch.setattr(box.policy.policy, "on_extend", box.lasts(0.2), raising=True)
    for _ in range(SAMPLED):
        box.policy.on_extend(ENTRY, 1, 0.0)
    assert len(box.faults) == 1
    for _ in range(MOST_FAULTS - 2):
        box.policy.on_extend(ENTRY, 1, 0.0)
    assert (len(box.faults), box.policy.discarded) == (MOST_FAULTS - 1, None)
    box.policy.on_extend(ENTRY, 1, 0.0)
    assert (box.policy.discarded, box.policy.name) == ("Lru", "Lru")
    before = box.now
    box.policy.on_extend(ENTRY, 1, 0.0)
    assert box.now == before, "it is told nothing any more"


async def test_a_call_of_just_the_time_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(Lru(8), timeout=0.5)
    monkeypatch.setattr(box.policy.policy, "on_extend", box.lasts(0.5))
    for _ in range(4 * SAMPLED):
        box.policy.on_extend(ENTRY, 1, 0.0)
    assert box.faults == []


async def test_what_a_slow_call_returns_is_not_used() -> None:
    class Slow(Lru):
        def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
            box.now += 1.0
            return "memory"

    box = Box(Slow(8))
    returned = [box.policy.on_evict(ENTRY, 1, 0.0) for _ in range(SAMPLED)]
    assert returned == ["memory"] * (SAMPLED - 1) + [None]


async def test_faults_far_apart_are_forgiven() -> None:
    class Forgetful(Lru):
        calls = 0

        def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
            self.calls += 1
            if self.calls % (WINDOW // MOST_FAULTS + 2) == 0:
                raise RuntimeError("again")

    box = Box(Forgetful(8))
    for _ in range(40 * WINDOW):
        box.policy.on_extend(ENTRY, 1, 0.0)
    assert len(box.faults) > 10 * MOST_FAULTS
    assert not box.policy.set_aside


async def test_saving_and_loading_may_take_their_time_and_fail() -> None:
    class Learned(Lru):
        def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
            box.now += 9.0
            return {"a": 1}

        def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
            raise KeyError("a")

    box = Box(Learned(8))
    assert box.policy.dump(id) == {"a": 1}
    box.policy.load({}, lambda _: None)
    assert box.faults == [("load", "'a'")]


@pytest.mark.parametrize("state", [None, 5, "text", [1]])
async def test_a_state_that_is_no_mapping_is_none(state: object) -> None:
    class Odd(Lru):
        def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
            return state  # type: ignore[return-value]  # that it is none is the point

    box = Box(Odd(8))
    assert box.policy.dump(id) == {}
    assert len(box.faults) == (state is not None)


async def test_events_that_only_some_policies_hear_are_passed_on() -> None:
    heard: list[tuple[object, ...]] = []

    class Curious(Lru):
        wants_requests = True

        def on_request(self, number: int, names: bytes, now: float) -> None:
            heard.append((number, names, now))

        def on_complete(self, number: int, names: bytes, now: float) -> None:
            heard.append((-number, names, now))

        def on_forget(self, entry: Entry) -> None:
            heard.append((entry,))

    box = Box(Curious(8))
    assert box.policy.wants_requests
    assert not Box(Lru(8)).policy.wants_requests
    box.policy.on_request(1, b"12345678", 2.0)
    box.policy.on_complete(1, b"", 3.0)
    box.policy.on_forget(ENTRY)
    assert heard == [(1, b"12345678", 2.0), (-1, b"", 3.0), (ENTRY,)]


# the stand-in


class Pile:
    """A cache of single blocks under a policy that never names anything."""

    def __init__(self, blocks: int) -> None:
        self.now = 0.0
        self.manager = CacheManager(blocks, 4, ReturnsNothing(blocks), clock=self.clock, on_fault=lambda *_: None)
        self._ids = 0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def serve(self, first: int) -> None:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens([first, 1, 2, 3, 4]), Namespace("w"), block_size=4)
        self.manager.copied(self.manager.admit(sequence).copies)
        self.manager.commit(sequence, sequence.uncomputed, 1)
        self.manager.finish(sequence)

    def is_standing_by(self) -> bool:
        return self.manager.policy._standby is not None

    @property
    def oldest(self) -> float:
        return min(node.used for node in self.manager.tree.candidates)


async def test_the_stand_in_goes_by_last_use_through_everything() -> None:
    """Also while the policy is given one more chance after the other, and when it is set aside."""
    pile = Pile(24)
    for number in range(400):
        pile.serve(number * 7 % 30)
        if number % 3 == 0 and pile.manager.tree.candidates:
            before, oldest = {node.used for node in pile.manager.tree.candidates}, pile.oldest
            pile.manager.evict(1)
            assert before - {node.used for node in pile.manager.tree.candidates} == {oldest}
    assert pile.manager.stats().policy_set_aside == "ReturnsNothing"


async def test_the_stand_in_stays_as_small_as_the_candidates_are_many() -> None:
    """GROWTH-01."""
    pile = Pile(16)
    for number in range(2000):
        pile.serve(number % 20)
    standby = pile.manager.policy._standby
    assert isinstance(standby, Standby)
    assert sum(map(len, standby._heaps.values())) <= 2 * 16 + 65


async def test_the_stand_in_goes_when_nobody_needs_it() -> None:
    class Once(Lru):
        calls = 0

        def victims(self, count: int, now: float) -> Iterator[Entry]:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("once")
            return super().victims(count, now)

    pile = Pile(16)
    pile.manager.use_policy(Once(16))
    pile.serve(1)
    pile.manager.evict(1)
    assert pile.is_standing_by()
    for number in range(WINDOW + 2):
        pile.serve(number)
        pile.manager.evict(1)
    assert not pile.is_standing_by()
    assert pile.manager.stats().policy_faults == 1
