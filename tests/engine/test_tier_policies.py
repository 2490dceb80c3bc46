"""Eviction policies by name in storage tiers: the right victims, in the right order, whatever a policy does."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import ClassVar

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import AsyncEngine, EngineConfig
from octavo.engine import tier_policies
from octavo.engine.kv.containment import ContainedPolicy
from octavo.engine.mounting import check_tiers
from octavo.engine.testing import FakeRunner
from octavo.engine.tier_policies import PolicyRanking, TierPolicies
from octavo.errors import ContractBroken, InvalidRequest, UnknownPlugin
from octavo.policies.eviction.arc import Arc
from octavo.policies.eviction.base import NAME_BYTES, Entry, EvictionPolicy, Returned
from octavo.policies.eviction.cost_aware import CostAware
from octavo.policies.eviction.fifo import Fifo
from octavo.policies.eviction.gdsf import Gdsf
from octavo.policies.eviction.lfu import Lfu
from octavo.policies.eviction.lru import Lru
from octavo.policies.eviction.lru_k import LruK
from octavo.policies.eviction.priority_ttl import PriorityTtl
from octavo.policies.eviction.s3_fifo import S3Fifo
from octavo.policies.eviction.sieve import Sieve
from octavo.policies.eviction.slru import Slru
from octavo.policies.eviction.two_q import TwoQ
from octavo.policies.eviction.w_tinylfu import WTinyLfu
from octavo.policies.replica import Replica
from octavo.storage.base import Meta, Record, Tier, TierGeometry
from octavo.storage.disk.entries import Entries
from octavo.storage.disk.entries import Entry as DiskEntry
from octavo.storage.disk.tier import DiskOptions, DiskTier
from octavo.storage.files.segment import Location
from octavo.storage.host.tier import HostOptions, HostTier
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.ranking import Ranking
from octavo.storage.testing.contract import SampleBlocks, TierContract
from octavo.telemetry import names as shown_as
from octavo.tests.engine.conftest import DEFAULTS, FakeClock
from octavo.tests.engine.insight.trace_rig import at_peace, recording, traced
from octavo.tests.engine.tier_rig import ask, prompt
from octavo.tests.storage.disk_samples import Bench, QuickFilesystem, kept, names

SAMPLES = SampleBlocks()
SHELF = SAMPLES.shelf("a")
OTHER = SAMPLES.shelf("b")
SINGLES = [SAMPLES.chain(SHELF, 1, seed=seed)[0] for seed in range(40)]
POLICIES = (Lru, Fifo, Lfu, LruK, Slru, TwoQ, Arc, S3Fifo, Sieve, WTinyLfu, Gdsf, CostAware)


class Raises(Lru):
    """Fails in everything, now and then where it was asked to."""

    def on_hit(self, entry: Entry, now: float) -> None:
        raise RuntimeError("no hits here")

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise RuntimeError("no victims here")


class Stutters(Lru):
    """Fails in every third call, for as long as it is asked."""

    calls = 0

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("not now")
        return super().victims(count, now)


class Lies(EvictionPolicy):
    """Names nothing, rubbish, and what is none of its entries."""

    turn = 0

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        self.turn += 1
        if self.turn % 3 == 0:
            return iter(())
        return iter([Entry(1, 4, 0.0, 0.0)] if self.turn % 3 == 1 else ["rubbish"])  # type: ignore[list-item]  # wrong


class Unmakeable(Lru):
    def __init__(self, capacity: int) -> None:
        raise RuntimeError("no capacity suits me")


class Notes(Lru):
    """Writes down what it hears."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.log: list[tuple[object, ...]] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        self.log.append(("insert", entry.depth, entry.hits, entry.priority))

    def on_candidate(self, entry: Entry, now: float) -> None:
        self.log.append(("candidate", entry.depth))
        super().on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        self.log.append(("held", entry.depth))
        super().on_held(entry)

    def on_hit(self, entry: Entry, now: float) -> None:
        self.log.append(("hit", entry.depth, now - entry.last_use))
        super().on_hit(entry, now)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        self.log.append(("evict", entry.depth, blocks, entry.blocks))
        super().on_evict(entry, blocks, now)
        return "memory"

    def on_forget(self, entry: Entry) -> None:
        self.log.append(("forget", entry.depth))

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self.log.append(("ghost", entry.depth, *returned[:3]))

    def heard(self) -> list[tuple[object, ...]]:
        heard, self.log = self.log, []
        return heard


class Busy(Lru):
    """Cannot stand two threads at a time."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._turn = threading.Lock()

    def on_hit(self, entry: Entry, now: float) -> None:
        self._alone(lambda: super(Busy, self).on_hit(entry, now))

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._alone(lambda: super(Busy, self).on_candidate(entry, now))

    def _alone(self, work: Callable[[], None]) -> None:
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("somebody is here already")
        try:
            work()
            threading.Event().wait(0.0005)  # lets the others come, if anything does
        finally:
            self._turn.release()


def here(cls: type) -> str:
    """How it is named in a configuration, wherever tests are started."""
    module = cls.__module__ if cls.__module__.startswith("octavo.") else f"octavo.{cls.__module__}"
    return f"{module}:{cls.__qualname__}"


def pass_time(bench: Bench, seconds: float) -> None:
    bench.clock.now += seconds
    bench.wall.now += seconds


async def cool(engine: AsyncEngine) -> None:
    """Everything goes down."""
    await engine._loop.at_edge(lambda: engine._loop.cache.evict(engine._loop.cache.pool.num_blocks))
    await at_peace(engine)


@dataclass
class Faults:
    heard: list[str] = field(default_factory=list)

    def __call__(self, where: str, error: BaseException | str) -> None:
        self.heard.append(f"{where}: {error}")


def geometry_with(make: Callable[[], Ranking], geometry: TierGeometry = SAMPLES.geometry) -> TierGeometry:
    """Whatever policy is named, it is this one."""
    return geometry._replace(rankings=lambda _policy, _blocks: make)


def ranking(policy: EvictionPolicy, on_fault: Callable[[str, BaseException | str], None] | None = None) -> Ranking:
    return PolicyRanking(ContainedPolicy(policy, on_fault or Faults(), clock=FakeClock()))


@asynccontextmanager
async def host(slots: int, make: Callable[[], Ranking], clock: FakeClock) -> AsyncIterator[HostTier]:
    geometry = geometry_with(make)
    options = HostOptions(bytes=slots * geometry.record_bytes, eviction_policy="any")
    tier = HostTier(options, geometry, clock=clock, wall=clock)
    await tier.open()
    yield tier
    await tier.close()


def noted(record: Record, now: float, priority: int = 0) -> Record:
    return record._replace(meta=Meta(written=now, priority=priority))


# the same victims as everywhere

Story = list[tuple[bool, int]]
"""After each prompt: whether it was there, and the blocks that are there now, as bits."""


def replayed(policy: EvictionPolicy, capacity: int, asked: Sequence[int], clock: FakeClock) -> Story:
    """What a replica of the cache finds and has, after each of the prompts, which are one block long each."""
    replica, story = Replica(capacity, policy, block_tokens=SAMPLES.codec.block_size, most_ghosts=capacity), Story()
    for number in asked:
        clock.now += 1.0
        name = number.to_bytes(NAME_BYTES, "little")
        found = bool(replica.match(name).blocks)
        lease = replica.admit(name, 0, clock.now)
        assert lease is not None
        replica.publish(lease, 1, clock.now)
        replica.finish(lease, clock.now)
        there = sum(1 << int.from_bytes(run.names, "little") for run in replica.runs())
        story.append((found, there))
    return story


async def in_host(
    policy: EvictionPolicy, capacity: int, asked: Sequence[int], clock: FakeClock
) -> list[tuple[bool, int]]:
    story = Story()
    async with host(capacity, lambda: ranking(policy), clock) as tier:
        for number in asked:
            clock.now += 1.0
            record = noted(SINGLES[number], clock.now)
            (stored,) = await tier.get(SHELF, names([record]))
            if stored is None:
                assert await tier.put(SHELF, [record]) == [True]
            there = await tier.contains(SHELF, names(SINGLES))
            story.append((stored is not None, sum(1 << at for at, is_there in enumerate(there) if is_there)))
    return story


def on_disk(policy: EvictionPolicy, capacity: int, asked: Sequence[int], clock: FakeClock) -> Story:
    """The disk evicts some blocks at a time; its order is that of its entries."""
    story, entries = Story(), Entries(ranking(policy), clock, clock)
    entries.wake()
    for number in asked:
        clock.now += 1.0
        head = SINGLES[number].head
        there = entries.get(SHELF, head.name)
        if there is not None:
            entries.used(there)
        else:
            if len(entries) == capacity:
                assert entries.coldest(frozenset()) is not None
            entries.add([DiskEntry(SHELF, head, Location(1, number, 1), number, Meta(clock.now))])
        left = sum(1 << at for at, record in enumerate(SINGLES) if entries.get(SHELF, record.head.name))
        story.append((there is not None, left))
    return story


def skewed(seed: int, length: int = 400) -> list[int]:
    random = Random(seed)  # noqa: S311  # for a load that is always the same
    return [min(int(random.paretovariate(0.6)) - 1, len(SINGLES) - 1) for _ in range(length)]


@pytest.mark.asyncio
@pytest.mark.parametrize("cls", POLICIES)
async def test_tiers_choose_the_same_victims_as_the_device(cls: type[EvictionPolicy]) -> None:
    asked = skewed(3)
    expected = replayed(PriorityTtl(10, cls), 10, asked, FakeClock())
    assert 50 < sum(found for found, _ in expected) < 380, "else nothing is compared"
    assert await in_host(PriorityTtl(10, cls), 10, asked, FakeClock()) == expected
    assert on_disk(PriorityTtl(10, cls), 10, asked, FakeClock()) == expected


# any policy, any workload

TRUNK = SAMPLES.chain(SHELF, 3)
CHAINS = [
    *(TRUNK[: seed + 1] + SAMPLES.chain(SHELF, 3, seed=seed + 1, after=TRUNK[seed].head) for seed in range(3)),
    SAMPLES.chain(OTHER, 4),
]
SLOTS = 5
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["get", "put", "delete", "evict"]), st.integers(0, 3), st.integers(1, 6), st.integers(0, 1)
    ),
    max_size=40,
)
Key = tuple[Shelf, BlockName]


class Known:
    """What the model knows of a block."""

    def __init__(self, parent: Key, last_use: float, priority: int) -> None:
        self.parent, self.last_use, self.priority = parent, last_use, priority


class Model:
    """The least recently used leaf of the lowest priority goes, found by looking at all blocks."""

    def __init__(self) -> None:
        self.blocks: dict[Key, Known] = {}

    def get(self, shelf: Shelf, records: Sequence[Record], now: float) -> None:
        for name in names(records):
            if (shelf, name) in self.blocks:
                self.blocks[shelf, name].last_use = now

    def put(self, shelf: Shelf, records: Sequence[Record], now: float) -> list[bool]:
        """Room is made for all of them before any is there."""
        kin = kin_of(shelf, records)
        kept, taken = list[bool](), list[Record]()
        for record in records:
            if (shelf, record.head.name) in self.blocks:
                self.note(shelf, record, now)
                kept.append(True)
                continue
            room = len(self.blocks) + len(taken) < SLOTS or self.evict(kin, record.meta.priority) is not None
            kept.append(room)
            if room:
                taken.append(record)
        for record in taken:
            self.note(shelf, record, now)
        return kept

    def note(self, shelf: Shelf, record: Record, now: float) -> None:
        self.blocks[shelf, record.head.name] = Known((shelf, record.head.parent), now, record.meta.priority)

    def delete(self, shelf: Shelf, records: Sequence[Record]) -> None:
        for name in names(records):
            self.blocks.pop((shelf, name), None)

    def evict(self, kin: set[Key], priority: int) -> Key | None:
        inner = {known.parent for known in self.blocks.values()}
        leaves = [(known.priority, known.last_use, key) for key, known in self.blocks.items() if key not in inner | kin]
        if not leaves or min(leaves)[0] > priority:
            return None
        key = min(leaves)[2]
        del self.blocks[key]
        return key


def kin_of(shelf: Shelf, records: Sequence[Record]) -> set[Key]:
    return {(shelf, name) for each in records for name in (each.head.name, each.head.parent)}


def chosen_blocks(chain: int, length: int, priority: int, now: float) -> tuple[Shelf, list[Record]]:
    records = [noted(record, now, priority) for record in CHAINS[chain][:length]]
    return OTHER if chain == 3 else SHELF, records


@pytest.mark.parametrize("cls", [Lru, Raises, Stutters, Lies])
@settings(max_examples=30, deadline=None)
@given(acts=ACTS)
def test_the_host_tier_lets_go_as_it_should_whatever_the_policy_does(
    cls: type[EvictionPolicy], acts: list[tuple[str, int, int, int]]
) -> None:
    async def run() -> None:
        clock, model = FakeClock(), Model()
        async with host(SLOTS, lambda: ranking(PriorityTtl(SLOTS, cls)), clock) as tier:
            for what, chain, length, priority in acts:
                clock.now += 1.0
                shelf, records = chosen_blocks(chain, length, priority, clock.now)
                if what == "get":
                    stored = await tier.get(shelf, names(records))
                    model.get(shelf, records, clock.now)
                    right = [
                        item is None or item.data == record.data for item, record in zip(stored, records, strict=True)
                    ]
                    assert all(right)
                elif what == "put":
                    assert await tier.put(shelf, records) == model.put(shelf, records, clock.now)
                elif what == "delete":
                    await tier.delete(shelf, names(records))
                    model.delete(shelf, records)
                else:
                    spilled = [(where, record.head.name) for where, record in await tier.spill(1)]
                    assert spilled == [key for key in [model.evict(set(), 9)] if key is not None]
                listed = {(each.shelf, each.head.name) async for each in tier.listing()}
                assert listed == set(model.blocks)

    anyio.run(run)


@pytest.mark.parametrize("cls", [Lru, Raises, Stutters, Lies])
@settings(max_examples=30, deadline=None)
@given(acts=ACTS)
def test_the_disk_tier_lets_go_as_it_should_whatever_the_policy_does(
    cls: type[EvictionPolicy], acts: list[tuple[str, int, int, int]]
) -> None:
    clock, model = FakeClock(), Model()
    entries = Entries(ranking(PriorityTtl(SLOTS, cls)), clock, clock)
    entries.wake()
    for number, (what, chain, length, priority) in enumerate(acts):
        clock.now += 1.0
        shelf, records = chosen_blocks(chain, length, priority, clock.now)
        there = [entry for name in names(records) if (entry := entries.get(shelf, name)) is not None]
        if what == "get":
            for entry in there:
                entries.used(entry)
            model.get(shelf, records, clock.now)
        elif what == "put":
            for record in records:
                if (old := entries.get(shelf, record.head.name)) is not None:
                    entries.note(old, record.meta)
                else:
                    entries.add([DiskEntry(shelf, record.head, Location(1, 0, 1), number, record.meta)])
                model.note(shelf, record, clock.now)
        elif what == "delete":
            for entry in there:
                entries.remove(entry)
            model.delete(shelf, records)
        else:
            kin = kin_of(shelf, records)
            gone = entries.coldest(frozenset(name for _, name in kin))
            assert (None if gone is None else (gone.shelf, gone.head.name)) == model.evict(kin, 9)
        assert {(each.shelf, each.head.name) for each in entries.all()} == set(model.blocks)


@pytest.mark.parametrize("cls", [S3Fifo, Arc, WTinyLfu, Gdsf])
@settings(max_examples=15, deadline=None)
@given(acts=ACTS)
def test_no_policy_breaks_its_contract_in_a_tier(
    cls: type[EvictionPolicy], acts: list[tuple[str, int, int, int]]
) -> None:
    """Nor is a block left without the one before it, or room lost."""

    async def run() -> None:
        clock, faults = FakeClock(), Faults()
        async with host(SLOTS, lambda: ranking(PriorityTtl(SLOTS, cls), faults), clock) as tier:
            for what, chain, length, priority in acts:
                clock.now += 1.0
                shelf, records = chosen_blocks(chain, length, priority, clock.now)
                if what == "get":
                    await tier.get(shelf, names(records))
                elif what == "delete":
                    await tier.delete(shelf, [*reversed(names(CHAINS[chain]))][:length])
                elif what == "evict":
                    await tier.spill(1)
                else:
                    await tier.put(shelf, records)
                heads = {each.head.name: each.head async for each in tier.listing()}
                assert tier.stats().bytes == len(heads) * SAMPLES.geometry.record_bytes
                assert tier.stats().blocks <= SLOTS
        assert faults.heard == []

    anyio.run(run)


# what a policy hears


@pytest.mark.asyncio
async def test_the_events_come_in_the_order_of_the_contract() -> None:
    clock, policy = FakeClock(), Notes(2)
    chain, other = SAMPLES.chain(SHELF, 2), SINGLES[1]
    async with host(2, lambda: ranking(policy), clock) as tier:
        await tier.put(SHELF, [noted(each, clock.now) for each in chain])
        assert policy.heard() == [
            ("insert", 4, 0, 0), ("candidate", 4), ("held", 4), ("insert", 8, 0, 0), ("candidate", 8),
        ]  # fmt: skip
        clock.now += 3.0
        await tier.get(SHELF, names(chain))
        assert policy.heard() == [("held", 8), ("hit", 4, 3.0), ("hit", 8, 3.0), ("candidate", 8)]
        await tier.put(SHELF, [noted(other, clock.now, priority=1)])
        assert policy.heard() == [("evict", 4, 1, 0), ("candidate", 4), ("insert", 4, 0, 1), ("candidate", 4)]
        clock.now += 2.0
        await tier.delete(SHELF, names([other]))
        assert policy.heard() == [("held", 4), ("forget", 4)]
        await tier.put(SHELF, [noted(chain[1], clock.now)])
        assert policy.heard() == [
            ("held", 4), ("insert", 8, 0, 0), ("ghost", 8, "memory", 4, 2.0), ("candidate", 8),
        ]  # fmt: skip


@pytest.mark.asyncio
async def test_news_of_a_use_above_is_a_use_and_other_news_is_none() -> None:
    clock, policy = FakeClock(), Notes(2)
    record = noted(SINGLES[0], clock.now)
    async with host(2, lambda: ranking(policy), clock) as tier:
        await tier.put(SHELF, [record])
        policy.heard()
        clock.now += 10.0
        (name,) = names([record])
        await tier.touch(SHELF, {name: Meta(clock.now, idle=10.0, recompute_seconds=2.0)})
        assert policy.heard() == []
        await tier.touch(SHELF, {name: Meta(clock.now, idle=4.0, hits=1)})
        assert policy.heard() == [("held", 4), ("hit", 4, 10.0), ("candidate", 4)]
        await tier.touch(SHELF, {name: Meta(clock.now, idle=4.0, hits=1, priority=2)})
        assert policy.heard() == [("held", 4), ("candidate", 4)]


@pytest.mark.asyncio
async def test_nothing_is_remembered_of_a_tenant_that_was_erased() -> None:
    clock, policy = FakeClock(), Notes(4)
    mine, theirs = noted(SINGLES[0], clock.now), noted(SAMPLES.chain(OTHER, 1)[0], clock.now)
    async with host(1, lambda: ranking(policy), clock) as tier:
        for shelf, record in [(SHELF, mine), (OTHER, theirs)]:
            await tier.put(shelf, [record])
        await tier.erase(SHELF.tenant)
        policy.heard()
        await tier.put(SHELF, [mine])
        assert "ghost" not in {event[0] for event in policy.heard()}


@pytest.mark.asyncio
async def test_memories_are_bounded_by_the_blocks_of_the_tier() -> None:
    clock, policy = FakeClock(), Notes(3)
    async with host(3, lambda: ranking(policy), clock) as tier:
        for record in SINGLES[:10]:  # the last three of the seven that go are remembered
            await tier.put(SHELF, [noted(record, clock.now)])
        policy.heard()
        await tier.put(SHELF, [noted(SINGLES[3], clock.now)])
        assert "ghost" not in {event[0] for event in policy.heard()}
        await tier.put(SHELF, [noted(SINGLES[6], clock.now)])
        assert "ghost" in {event[0] for event in policy.heard()}


def test_after_a_restart_the_policy_hears_of_all_that_is_there(tmp_path: Path) -> None:
    """A parent before its children, and of the rest the oldest first: a beginning that all share makes none young."""
    bench = Bench(tmp_path / "disk")
    trunk = SAMPLES.chain(SHELF, 1)
    branches = [SAMPLES.chain(SHELF, count, seed=count, after=trunk[0].head) for count in (3, 1, 2)]
    heads = {record.head.name: record.head for record in trunk + [each for branch in branches for each in branch]}
    with bench.opened() as store:
        for at, branch in enumerate(branches):
            pass_time(bench, 10.0)
            store.put(SHELF, [noted(each, bench.wall()) for each in [*trunk, *branch]])
            assert at == 0 or store.stats().blocks > 1
        pass_time(bench, 10.0)
        kept(store, branches[0], SHELF)
        pass_time(bench, 10.0)
        store.get(SHELF, names(trunk))
    policy = Notes(100)
    with bench.opened(geometry_with(lambda: ranking(policy)), eviction_policy="any") as store:
        log = policy.heard()
        inserted = [event[1] for event in log if event[0] == "insert"]
        assert inserted == [4, 8, 8, 12, 8, 12, 16]
        assert [event[1] for event in log if event[0] == "candidate"] == [8, 12, 16]
        assert len(log) == len(heads) + 3
        assert store.stats().policy == "Notes"
        kept(store, branches[1], SHELF)
        assert [event[0] for event in policy.heard()] == ["held", "hit", "candidate"]


def test_what_went_first_before_a_restart_does_after_it(tmp_path: Path) -> None:
    bench, geometry = Bench(tmp_path / "disk"), geometry_with(lambda: ranking(PriorityTtl(100, Lru)))
    chains = [SAMPLES.chain(SHELF, 8, seed=seed) for seed in range(24)]
    with bench.opened(geometry, eviction_policy="any") as store:
        for chain in chains[:8]:
            pass_time(bench, 1.0)
            store.put(SHELF, [noted(each, bench.wall()) for each in chain])
        pass_time(bench, 1.0)
        kept(store, chains[0], SHELF)
    bench.wall.now += 5.0
    with bench.opened(geometry, eviction_policy="any") as store:
        for chain in chains[8:]:
            pass_time(bench, 1.0)
            assert all(store.put(SHELF, [noted(each, bench.wall()) for each in chain]))
            there = [store.peek(SHELF, names(each)) or 0 for each in chains[:8]]
            assert there[1:] == sorted(there[1:]), "the older one goes first"
            assert there[0] == 8 or there[1:] == [0] * 7, "what was used last goes last"
        assert there == [8] + [0] * 7


def test_a_disk_with_a_policy_that_fails_loses_nothing(tmp_path: Path) -> None:
    bench, faults = Bench(tmp_path / "disk"), Faults()
    geometry = geometry_with(lambda: ranking(PriorityTtl(100, Raises), faults))
    chains = [SAMPLES.chain(SHELF, 8, seed=seed) for seed in range(24)]
    for _ in range(2):
        with bench.opened(geometry, eviction_policy="any") as store:
            for chain in chains:
                pass_time(bench, 1.0)
                assert all(store.put(SHELF, chain))
                assert kept(store, chain, SHELF) == [True] * 8
            stats = store.stats()
            assert stats.evicted > 0
            assert stats.policy_faults > 0
            assert stats.policy == "Lru", "it has been set aside"
    assert any("no victims here" in fault for fault in faults.heard)


def test_a_policy_is_used_by_one_thread_at_a_time(tmp_path: Path) -> None:
    bench, faults = Bench(tmp_path / "disk"), Faults()
    geometry = geometry_with(lambda: ranking(Busy(100), faults))
    chains = [SAMPLES.chain(SHELF, 4, seed=seed) for seed in range(12)]
    with bench.opened(geometry, eviction_policy="any") as store:
        for chain in chains[:6]:
            store.put(SHELF, chain)

        def read() -> None:
            for chain in chains[:6]:
                store.get(SHELF, names(chain))

        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        for chain in chains[6:]:
            store.put(SHELF, chain)
            store.touch(SHELF, {name: Meta(bench.wall(), hits=2, priority=1) for name in names(chain)})
        for reader in readers:
            reader.join()
    assert faults.heard == []


# who is asked for a policy, and what becomes of it


def test_a_policy_that_can_be_made_only_once_gives_way_to_another() -> None:
    made, faults = list[int](), Faults()

    class Once(S3Fifo):
        def __init__(self, capacity: int) -> None:
            made.append(capacity)
            if len(made) > 2:
                raise RuntimeError("enough")
            super().__init__(capacity)

    class Group:
        def resolve(self, _: str) -> type[EvictionPolicy]:
            return Once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_policies, "EVICTION_POLICIES", Group())
        make = TierPolicies("host", faults, FakeClock())("once", 7)
    assert [make().name for _ in range(2)] == ["Once", "Lru"]
    assert made == [7, 7, 7]
    assert len(faults.heard) == 1
    assert "of tier 'host', could not be made: enough" in faults.heard[0]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        ("lur", UnknownPlugin, "lru"),
        (here(Model), ContractBroken, "EvictionPolicy"),
        (here(Unmakeable), ContractBroken, "no capacity suits me"),
        (3, InvalidRequest, "eviction_policy"),
        ("", InvalidRequest, "eviction_policy"),
    ],
)
@pytest.mark.asyncio
async def test_a_policy_that_cannot_be_is_told_by_name(
    tier: str, policy: object, error: type[Exception], says: str, tmp_path: Path
) -> None:
    sizes = {"host": {"host_bytes": 1 << 20}, "disk": {"disk_path": tmp_path / "d", "disk_bytes": 32 << 20}}[tier]
    config = EngineConfig(tiers=(tier,), tier_options={tier: {"eviction_policy": policy}}, **sizes)  # type: ignore[arg-type]  # of the right types
    with pytest.raises(error, match=says):
        await AsyncEngine(runner=FakeRunner(), config=config).__aenter__()
    assert not (tmp_path / "d").exists(), "it was opened"
    if error is UnknownPlugin:
        with pytest.raises(UnknownPlugin):  # before a model is loaded
            check_tiers(config)


@pytest.mark.parametrize("tier", ["redis", "octavo.storage.testing.contract:MemoryTier"])
@pytest.mark.asyncio
async def test_other_tiers_have_no_such_option(tier: str) -> None:
    config = EngineConfig(tiers=(tier,), tier_options={tier: {"eviction_policy": "lur"}})
    check_tiers(config)  # it is none of ours
    with pytest.raises(InvalidRequest, match="'eviction_policy'"):
        await AsyncEngine(runner=FakeRunner(), config=config).__aenter__()


def test_a_tier_alone_knows_no_policies(tmp_path: Path) -> None:
    for kind, options in ((HostTier, {"bytes": 1 << 20}), (DiskTier, {"path": str(tmp_path), "bytes": 32 << 20})):
        with pytest.raises(InvalidRequest, match="in an engine only"):
            kind.create({**options, "eviction_policy": "lru"}, SAMPLES.geometry)


@pytest.mark.parametrize(("cls", "name"), [(S3Fifo, "S3Fifo"), (Raises, "Lru")])
@pytest.mark.asyncio
async def test_an_engine_shows_who_decides(
    cls: type[EvictionPolicy], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, mount = FakeRunner(), "octavo.storage.host.tier:HostTier"
    options = {"bytes": 10_000, "eviction_policy": here(cls)}
    provider, recorder = recording()
    settings = {**DEFAULTS, "tiers": (mount,), "tier_options": {mount: options}}
    async with traced(monkeypatch, provider, runner=runner, settings=settings) as engine:
        for number in (*range(12), *range(12), 11):
            await ask(engine, prompt(number))
            await cool(engine)
        (report,) = engine.stats().tiers
        assert report.hits > 0
        assert report.tier.policy == name
        assert report.tier.evicted > 0
        assert (report.tier.policy_faults > 0) == (cls is Raises)
    spans = [span.attributes or {} for span in recorder.ended if span.name == shown_as.EVICT]
    evicted = [span for span in spans if span[shown_as.TIER] == mount]
    assert sum(int(str(span[shown_as.BLOCKS])) for span in evicted) == report.tier.evicted
    assert evicted[-1][shown_as.POLICY] == name
    assert any(shown_as.POLICY_FAULT in span for span in evicted) == (cls is Raises)


# the contract of tiers holds with any of them


class TestHostTierWithArc(TierContract):
    policy: ClassVar[type[EvictionPolicy]] = Arc

    def make_tier(self, geometry: TierGeometry) -> Tier:
        named = geometry._replace(rankings=TierPolicies("host", Faults(), FakeClock()))
        return HostTier(HostOptions(bytes=32 * geometry.record_bytes, eviction_policy=here(self.policy)), named)


class TestHostTierWithAPolicyThatFails(TestHostTierWithArc):
    policy = Raises


class TestDiskTierWithS3Fifo(TierContract):
    samples: ClassVar[SampleBlocks] = SampleBlocks(payload_bytes=16 << 10)
    path: Path

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"

    def make_tier(self, geometry: TierGeometry) -> Tier:
        named = geometry._replace(rankings=TierPolicies("disk", Faults(), FakeClock()))
        options = DiskOptions(path=str(self.path), bytes=2 << 20, free_floor=0, eviction_policy=here(S3Fifo))
        return DiskTier(options, named, fs=QuickFilesystem())
