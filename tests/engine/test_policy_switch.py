"""Another eviction policy takes over in a running engine: the cache stays, nothing is lost or evicted, and it is told
of everything.
"""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import ClassVar

import pytest

from octavo import AsyncEngine, EngineConfig, Retention, SamplingParams
from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.engine.testing import FakeRunner
from octavo.errors import ContractBroken, EngineClosed, InvalidRequest, PluginError, UnknownPlugin
from octavo.policies.eviction import Entry, Lru, Returned
from octavo.telemetry import names
from octavo.tests.engine.conftest import Alone, EngineOf
from octavo.tests.engine.insight.trace_rig import recording, traced

pytestmark = pytest.mark.asyncio

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LRU = "octavo.policies.eviction.lru:Lru"
LFU = "octavo.policies.eviction.lfu:Lfu"
COST = "octavo.policies.eviction.cost_aware:CostAware"


class Diary(Lru):
    """Writes down what it hears, and remembers the evicted by number."""

    made: ClassVar[list[Diary]] = []

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.heard: list[tuple[str, Entry]] = []
        self.memories: list[object] = []
        self.made.append(self)

    def on_insert(self, entry: Entry, now: float) -> None:
        self.heard.append(("insert", entry))
        super().on_insert(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self.heard.append(("candidate", entry))
        super().on_candidate(entry, now)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        super().on_evict(entry, blocks, now)
        return self, blocks

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self.memories.append(returned.memory)


class Unmakable(Lru):
    def __init__(self, capacity: int) -> None:
        raise RuntimeError("cannot be made")


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("octavo_switched")
    module.__dict__.update({"Diary": Diary, "Unmakable": Unmakable})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Diary, "made", [])


def prompt(number: int, length: int = 12) -> list[int]:
    return [number, *((number * 5 + at) % 60 for at in range(1, length))]


async def test_it_hears_of_all_that_is_cached_and_nothing_goes(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=64) as engine:
        for number in (1, 2, 3):
            await engine.complete(prompt(number), GREEDY)
        await engine.complete([*prompt(1), 9, 9, 9, 9], GREEDY)
        await engine.complete(prompt(2), GREEDY, retention=[Retention(0, None, 4)])
        before, stored = engine.census(), engine._loop.cache.tree.blocks
        assert await engine.set_eviction_policy("octavo_switched:Diary") == "Lru"
        assert engine.census() == before
        nodes = list(engine._loop.cache.tree.nodes())
        heard = [each for diary in Diary.made for each in diary.heard]
        assert sum(entry.blocks for what, entry in heard if what == "insert") == stored
        assert {entry for what, entry in heard if what == "insert"} == set(nodes)
        assert {entry for what, entry in heard if what == "candidate"} == set(engine._loop.cache.tree.candidates)
        stats = engine.stats().cache
        assert (stats.policy, stats.evictions, stats.policy_faults) == ("Diary", {}, 0)
        assert (await engine.complete(prompt(3), GREEDY))[0].cached_tokens > 0


async def test_parents_come_first_and_then_who_was_used_first(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=64) as engine:
        for number in (1, 2, 3):
            await engine.complete(prompt(number), GREEDY)
            await engine.complete([*prompt(number), *range(number, number + 8)], GREEDY)
        await engine.complete(prompt(1), GREEDY)
        await engine.set_eviction_policy("octavo_switched:Diary")
        (diary,) = Diary.made
        order = {entry: at for at, (what, entry) in enumerate(diary.heard) if what == "insert"}
        for node in engine._loop.cache.tree.nodes():
            if node.parent in order:
                assert order[node.parent] < order[node]
        told = [entry.last_use for what, entry in diary.heard if what == "candidate"]
        assert told == sorted(told)


async def test_requests_go_on_under_load(engine_of: EngineOf, alone: Alone) -> None:
    """In every step another one; the pool is always full."""
    prompts = [prompt(number % 7, 10 + number % 9) for number in range(30)]
    expected = [(await alone(each, GREEDY))[0].token_ids for each in prompts]
    specs = [LFU, "octavo_switched:Diary", COST, LRU]
    switched: list[str] = []

    async def on_step(number: int) -> None:
        if number % 2 == 0:
            task = asyncio.create_task(engine.set_eviction_policy(specs[number // 2 % len(specs)]))
            task.add_done_callback(lambda done: switched.append(done.result()))

    async with engine_of(num_blocks=16, evict_below=0.2, evict_until=0.4, on_step=on_step) as engine:
        outputs = await asyncio.gather(*(engine.complete(each, GREEDY) for each in prompts))
        assert [each[0].token_ids for each in outputs] == expected
        stats = engine.stats().cache
    assert stats.policy_faults == 0
    assert len(stats.evictions_by_policy) > 3, "several of them evicted"
    assert len(set(switched)) > 2
    assert sum(stats.evictions_by_policy.values()) == sum(stats.evictions.values())


async def test_the_same_class_again_starts_afresh(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=64, eviction_policy="octavo_switched:Diary") as engine:
        await engine.complete(prompt(1), GREEDY)
        await engine.set_eviction_policy("octavo_switched:Diary")
        first, second = Diary.made
        assert second is not first
        before = list(first.heard)
        await engine.complete(prompt(2), GREEDY)
        assert first.heard == before, "it is told nothing any more"


async def test_memories_of_another_policy_never_come_back(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=8, eviction_policy="octavo_switched:Diary") as engine:
        for number in (1, 2, 3, 1):
            await engine.complete(prompt(number, 20), GREEDY)
        (first,) = Diary.made
        assert first.memories
        assert all(isinstance(memory, tuple) and memory[0] is first for memory in first.memories)
        await engine.set_eviction_policy("octavo_switched:Diary")
        for number in (2, 3, 1, 2):
            await engine.complete(prompt(number, 20), GREEDY)
        second = Diary.made[1]
        owners = {memory[0] if isinstance(memory, tuple) else None for memory in second.memories}
        assert None in owners, "runs that the first one evicted came back without its memory"
        assert owners <= {None, second}


async def test_a_memory_on_its_way_back_is_forgotten() -> None:
    """A sequence is admitted whose prefix was evicted, and the policy changes before that is computed."""
    heard: list[object] = []

    class Listening(Diary):
        def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
            heard.append(returned.memory)

    manager = CacheManager(8, 4, Listening(8), clock=lambda: 0.0, on_fault=lambda *_: None)
    sequences = [Sequence(number, encode_tokens([1, 2, 3, 4, 5]), Namespace("w"), block_size=4) for number in (1, 2)]
    for sequence in sequences:
        manager.copied(manager.admit(sequence).copies)
        if sequence is sequences[1]:
            manager.use_policy(Listening(8))
        manager.commit(sequence, sequence.uncomputed, 1)
        manager.finish(sequence)
        manager.evict(8)
    assert heard == [None]
    manager.census()


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("nobody-offers-this", UnknownPlugin),
        ("octavo_nowhere:Policy", PluginError),
        ("builtins:int", ContractBroken),
        ("octavo_switched:Unmakable", ContractBroken),
        ("", InvalidRequest),
        (5, InvalidRequest),
    ],
)
async def test_one_that_cannot_be_had_changes_nothing(
    spec: object, error: type[Exception], engine_of: EngineOf
) -> None:
    async with engine_of(num_blocks=64, eviction_policy="octavo_switched:Diary") as engine:
        await engine.complete(prompt(1), GREEDY)
        policy = engine._loop.cache.policy.policy
        with pytest.raises(error):
            await engine.set_eviction_policy(spec)  # type: ignore[arg-type]  # what is tested
        assert engine._loop.cache.policy.policy is policy
        assert engine.stats().cache.policy == "Diary"
        assert (await engine.complete(prompt(1), GREEDY))[0].cached_tokens > 0


async def test_it_is_traced_and_the_labels_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "octavo.engine")
    provider, recorder = recording()
    async with traced(monkeypatch, provider, num_blocks=16) as engine:
        await engine.complete(prompt(1), GREEDY)
        await engine.set_eviction_policy("octavo_switched:Diary")
        for number in range(2, 8):
            await engine.complete(prompt(number, 20), GREEDY)
        stats = engine.stats().cache
        info = [sample for family in engine.registry.collect() for sample in family.samples if "info" in sample.name]
        assert [each.labels["eviction_policy"] for each in info if "eviction_policy" in each.labels] == ["Diary"]
        for (reason, policy), blocks in stats.evictions_by_policy.items():
            labels = {"reason": reason, "policy": policy, "tier": "device"}
            assert engine.registry.get_sample_value("octavo_evictions_total", labels) == blocks
        assert {policy for _, policy in stats.evictions_by_policy} == {"Diary"}
    (switch,) = [span for span in recorder.ended if span.name == names.POLICY_SWITCH]
    attributes = switch.attributes or {}
    assert (attributes[names.POLICY], attributes[names.POLICY_BEFORE]) == ("Diary", "Lru")
    assert {(span.attributes or {})[names.POLICY] for span in recorder.ended if span.name == names.EVICT} == {"Diary"}
    assert any("policy was changed" in record.getMessage() for record in caplog.records)


async def test_other_threads_can_do_it_too() -> None:
    config = EngineConfig(num_blocks=64, block_size=4, eviction_policy="lru")
    async with AsyncEngine(runner=FakeRunner(), config=config) as engine:
        blocking = engine.blocking()
        assert await asyncio.to_thread(blocking.set_eviction_policy, LFU) == "Lru"
        assert engine.stats().cache.policy == "Lfu"
        with pytest.raises(UnknownPlugin):
            await asyncio.to_thread(blocking.set_eviction_policy, "nobody-offers-this")
    with pytest.raises(EngineClosed):
        await asyncio.to_thread(blocking.set_eviction_policy, LFU)
    with pytest.raises(EngineClosed):
        await engine.set_eviction_policy(LFU)
