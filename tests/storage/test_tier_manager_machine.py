"""The manager under random use over tiers that fail, hang, fill up and lie, against a memory of what was offered.

Whatever the tiers do: every block that comes out is the right one, nothing that was forgotten comes back, nobody waits
longer than deadlines allow, nothing is held afterwards, and once the tiers are well again so is the manager.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import StorageError
from octavo.storage.base import Meta, Record
from octavo.storage.manager.settings import ManagerSettings
from octavo.storage.manager.tier_manager import Target
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import Fault, FaultyTier
from octavo.storage.testing.fakes import FaultKind
from octavo.tests.storage.manager_rig import HANG, RECORD, SAMPLES, Rig, batch_of, memory, names_of, remote

SHELVES = (SAMPLES.shelf(), SAMPLES.shelf("a"), SAMPLES.shelf("a", adapter="x"))
CHAINS = {(at, seed): SAMPLES.chain(shelf, 9, seed=seed) for at, shelf in enumerate(SHELVES) for seed in range(2)}
PATIENCE = 30.0

whole = st.integers(0, 9)
chain = st.sampled_from(sorted(CHAINS))
tier = st.integers(0, 2)
kinds = st.sampled_from(
    ["fail", "hang", "full", "flip", "other", "short", "long", "reorder", "fewer", "more", "nonsense", "invert"]
)
calls = st.sampled_from(["put", "get", "contains", "delete", "erase", "spill", "touch", "flush", "children", "*"])
use = st.one_of(
    st.tuples(st.just("offer"), chain, whole, st.sampled_from(["first", "all", "persistent"])),
    st.tuples(st.just("load"), chain, whole),
    st.tuples(st.just("ask"), chain, whole),
    st.tuples(st.just("prefetch"), chain, whole),
    st.tuples(st.just("forget"), chain, whole),
    st.tuples(st.just("children"), chain, whole),
    st.tuples(st.just("touch"), chain, whole),
    st.tuples(st.just("erase"), st.integers(0, 2)),
    st.tuples(st.sampled_from(["flush", "persist", "listing", "pause", "turn"])),
)
fault = st.tuples(st.just("fault"), tier, calls, kinds, st.integers(1, 3))
Step = tuple[object, ...]


@dataclass
class World:
    """A manager and what may come out of it."""

    rig: Rig
    faulty: tuple[FaultyTier, ...]
    may_come: set[tuple[Shelf, BlockName]] = field(default_factory=set)
    """Offered and not forgotten since."""
    patience: float = PATIENCE
    """Seconds for flushing; a tier that hangs takes them all."""
    misled: bool = False
    """Whether the last tier, which has to be asked, may have claimed what it does not have."""

    def part(self, key: object, count: object) -> tuple[Shelf, list[Record]]:
        assert isinstance(key, tuple)
        assert isinstance(count, int)
        return SHELVES[key[0]], CHAINS[key][:count]

    async def offer(self, key: object, count: object, to: Target) -> None:
        shelf, records = self.part(key, count)
        if records:
            self.rig.manager.offer(batch_of(records, shelf), to=to)
        self.may_come |= {(shelf, name) for name in names_of(records)}

    async def load(self, key: object, count: object) -> None:
        shelf, records = self.part(key, count)
        blocks, outcome = await self.rig.load(names_of(records), shelf)
        for block, record in zip(blocks, records, strict=False):
            assert block.head == record.head
            assert (shelf, block.head.name) in self.may_come
        assert (outcome.reason == "complete") == (len(blocks) == len(records))

    async def ask(self, key: object, count: object) -> None:
        shelf, records = self.part(key, count)
        await self.rig.manager.ask(shelf, names_of(records))

    async def prefetch(self, key: object, count: object) -> None:
        shelf, records = self.part(key, count)
        await self.rig.manager.prefetch(shelf, names_of(records))

    async def forget(self, key: object, count: object) -> None:
        shelf, records = self.part(key, count)
        before = [report.failures for report in self.rig.manager.stats()]
        await self.rig.manager.forget(shelf, names_of(records))
        if before == [report.failures for report in self.rig.manager.stats()]:
            self.may_come -= {(shelf, name) for name in names_of(records)}

    async def children(self, key: object, count: object) -> None:
        shelf, records = self.part(key, count)
        for record in records:
            for listed in await self.rig.manager.children(shelf, record.head.name):
                assert (shelf, listed.head.name) in self.may_come

    async def touch(self, key: object, count: object) -> None:
        shelf, records = self.part(key, count)
        await self.rig.manager.touch(shelf, {name: Meta(hits=1) for name in names_of(records)})

    async def erase(self, at: object) -> None:
        assert isinstance(at, int)
        tenant = SHELVES[at].tenant
        try:
            await self.rig.manager.erase(tenant)
        except StorageError:
            return
        self.may_come = {key for key in self.may_come if key[0].tenant != tenant}

    async def flush(self) -> None:
        await self.rig.manager.flush(self.patience)

    async def persist(self) -> None:
        await self.rig.manager.persist(self.patience)

    async def listing(self) -> None:
        listed = [(each.shelf, each.head.name) async for each in self.rig.manager.listing()]
        assert len(set(listed)) == len(listed)
        assert set(listed) <= self.may_come

    async def pause(self) -> None:
        self.rig.clock.now += 7.0

    async def turn(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def fault(self, at: int, call: str, kind: FaultKind, times: int) -> None:
        self.faulty[at].inject(Fault(call, kind, times))
        self.misled |= kind in ("invert", "reorder")

    async def step(self, step: Step) -> None:
        act: Callable[..., Awaitable[None]] = getattr(self, str(step[0]))
        with anyio.fail_after(PATIENCE):
            await act(*step[1:])
        for mount, each in zip(self.rig.manager._mounts, self.rig.manager.stats(), strict=True):
            assert each.queued_bytes <= mount.settings.queue_bytes
            assert each.abandoned == 0
        for (at, _), records in CHAINS.items():
            shelf = SHELVES[at]
            coverage = self.rig.manager.peek(shelf, names_of(records))
            for record, where in zip(records, coverage.tiers, strict=False):
                assert (shelf, record.head.name) in self.may_come or (self.misled and where == len(self.faulty) - 1)

    async def is_well_again(self) -> bool:
        """Whether a block of each chain goes in and comes out."""
        self.rig.clock.now += 61.0
        for (at, _), records in CHAINS.items():
            self.rig.manager.offer(batch_of(records[:1], SHELVES[at]), to="first")
            await self.rig.manager.flush(PATIENCE)
            blocks, _ = await self.rig.load(names_of(records[:1]), SHELVES[at])
            if not blocks:
                return False
        return True


async def play(steps: list[Step], *, bound: int | None, with_writers: bool) -> World:
    tiers = tuple(FaultyTier(inner) for inner in (memory(bound), memory(), remote()))
    knobs = ManagerSettings(
        deadline=HANG, erase_deadline=HANG, batch_blocks=3, queue_bytes=7 * RECORD, breaker_failures=2
    )
    world = World(Rig(*tiers, settings=knobs), tiers, patience=4 * HANG)
    await world.rig.manager.open()
    async with anyio.create_task_group() as group:
        if with_writers:
            group.start_soon(world.rig.manager.run)
        for step in steps:
            await world.step(step)
        for each in tiers:
            each.heal()
        with anyio.fail_after(PATIENCE):
            while not await world.is_well_again():  # noqa: ASYNC110  # a busy machine may miss a deadline
                await anyio.sleep(HANG)
        await world.rig.manager.close(PATIENCE)
    world.rig.census()
    assert all(not each.running.total() for each in tiers)
    return world


@settings(max_examples=80)
@given(st.lists(use | use | fault, max_size=30), st.none() | st.integers(2, 8), st.booleans())
def test_right_blocks_or_none_whatever_the_tiers_do(steps: list[Step], bound: int | None, with_writers: bool) -> None:
    async def run() -> None:
        await play(steps, bound=bound, with_writers=with_writers)

    anyio.run(run)


@given(st.lists(use, max_size=25), st.sampled_from([4, 8, 300]))
@example([("offer", (0, 0), 4, "all")], 4)  # what is spilled waits below already
def test_with_sound_tiers_all_that_was_taken_comes_back(steps: list[Step], bound: int) -> None:
    async def run() -> None:
        rig = Rig(memory(bound), memory(), settings=ManagerSettings(batch_blocks=2, deadline=PATIENCE))
        world = World(rig, ())
        await rig.manager.open()
        for step in steps:
            if step[0] != "offer" or step[3] != "persistent":
                await world.step(step)
        await world.flush()
        for (at, _), records in CHAINS.items():
            there = [(SHELVES[at], record.head.name) in world.may_come for record in records]
            expected = there.index(False) if False in there else len(there)
            _, outcome = await rig.load(names_of(records), SHELVES[at])
            assert outcome.blocks == expected
        assert sum(report.dropped for report in rig.manager.stats()) == 0
        await rig.manager.close(PATIENCE)

    anyio.run(run)
