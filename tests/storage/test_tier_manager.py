from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

import anyio
import pytest

from octavo.errors import InvalidRequest, StorageError
from octavo.storage.base import Listed, Meta, Record, Stored, TierStats
from octavo.storage.manager import mount
from octavo.storage.manager.bounded_call import GRACE
from octavo.storage.manager.copier import most_valuable_first
from octavo.storage.manager.settings import ManagerSettings
from octavo.storage.manager.tier_manager import CLOSE_GRACE, Coverage, Loaded, Mounted, Target, TierManager
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import Fault, FaultyTier, MemoryStore, MemoryTier
from octavo.tests.storage.manager_rig import (
    HANG,
    RECORD,
    SAMPLES,
    SHELF,
    Rig,
    batch_of,
    memory,
    names_of,
    remote,
    running,
    settle,
    until,
)

CHAIN = SAMPLES.chain(SHELF, 12)
NAMES = names_of(CHAIN)
LATER = (HANG, 10 * HANG, 100 * HANG)
"""Deadlines to try one after the other: blocks are checked in a thread, which may be late."""
FAST = ManagerSettings(deadline=HANG, batch_blocks=4)
OTHER = SAMPLES.shelf("other")
pytestmark = pytest.mark.asyncio


class Tattered(MemoryTier):
    """Persistent, and able to ignore its cancellation."""

    persistent = True

    def __init__(self, *, blocks: int | None = None) -> None:
        super().__init__(SAMPLES.geometry, blocks=blocks)
        self.stuck: asyncio.Event | None = None
        self.reached = 0
        """Puts that have begun."""
        self.log: list[str] = []

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        self.reached += 1
        while self.stuck is not None and not self.stuck.is_set():
            try:
                await self.stuck.wait()
            except asyncio.CancelledError:  # what must not be done
                continue
        self.log.append("put")
        return await super().put(shelf, records)

    async def erase(self, tenant: bytes) -> int:
        self.log.append("erase")
        return await super().erase(tenant)

    async def close(self) -> None:
        self.log.append("close")
        self._open = False


# writing


async def test_what_is_offered_comes_back_from_queue_and_tier() -> None:
    rig = Rig(memory())
    await rig.manager.open()
    assert rig.manager.offer(batch_of(CHAIN), to="first") == 12
    assert rig.manager.peek(SHELF, NAMES) == Coverage((0,) * 12)
    blocks, outcome = await rig.load(NAMES)  # nothing was written yet
    assert outcome.reason == "complete"
    assert all(block.own for block in blocks)
    assert await rig.manager.flush(10.0) == 0
    rig.census()
    blocks, outcome = await rig.load(NAMES)
    assert outcome == (12, "complete")
    (report,) = rig.manager.stats()
    assert (report.put_blocks, report.loaded_blocks, report.gets, report.foreign_blocks) == (12, 24, 1, 0)
    await rig.manager.close(1.0)


@pytest.mark.parametrize(
    ("to", "expected"), [("first", [12, 0, 0]), ("all", [12, 12, 12]), ("persistent", [0, 12, 12])]
)
async def test_an_offer_goes_where_it_is_meant_to(to: Target, expected: list[int]) -> None:
    async with running(Rig(memory(), Tattered(), remote())) as rig:
        assert rig.manager.absent(SHELF, NAMES, to=to) == list(range(12))
        assert rig.manager.offer(batch_of(CHAIN), to=to) == 12
        assert rig.manager.absent(SHELF, NAMES, to=to) == []
        await rig.manager.flush(10.0)
        assert [len(cast("MemoryTier", tier).store.blocks) for tier in rig.tiers] == expected
        assert rig.manager.absent(SHELF, NAMES, to=to) == []  # a tier that must be asked was seen to take them


async def test_what_finds_no_room_goes_to_the_next_tier_or_is_counted_as_dropped() -> None:
    settings = ManagerSettings(queue_bytes=4 * RECORD)
    rig = Rig(memory(), memory(), settings=settings)
    await rig.manager.open()
    assert rig.manager.offer(batch_of(CHAIN), to="first") == 8
    assert rig.manager.peek(SHELF, NAMES) == Coverage((0,) * 4 + (1,) * 4)
    assert rig.manager.offer(batch_of(CHAIN), to="all") == 8
    assert [report.dropped for report in rig.manager.stats()] == [4 + 8, 8]
    assert not rig.manager.room("first")
    await rig.manager.flush(10.0)
    assert rig.manager.room("first")
    assert (await rig.load(NAMES))[1] == (8, "missing")
    await rig.manager.close(1.0)
    assert rig.manager.room("first")  # waiting would not help
    assert rig.manager.offer(batch_of(CHAIN), to="first") == 0
    assert rig.manager.peek(SHELF, NAMES) == Coverage(())


async def test_what_a_tier_declines_or_fails_to_take_goes_further_down() -> None:
    first, second = FaultyTier(memory()), FaultyTier(memory())
    async with running(Rig(first, second, memory())) as rig:
        first.inject(Fault("put", "full"))
        second.inject(Fault("put", "fail", times=1))
        rig.manager.offer(batch_of(CHAIN[:4]), to="first")
        assert await rig.manager.flush(10.0) == 0
        assert rig.manager.peek(SHELF, NAMES) == Coverage((2,) * 4)
        rig.manager.offer(batch_of(CHAIN[4:8]), to="all")
        assert await rig.manager.flush(10.0) == 4  # written to the others
        assert [report.dropped for report in rig.manager.stats()] == [4, 0, 0]


async def test_a_nearly_full_tier_hands_its_coldest_down() -> None:
    rig = Rig(memory(10), Tattered(), settings=ManagerSettings(batch_blocks=2))
    async with running(rig):
        for at in range(0, 12, 2):
            rig.manager.offer(batch_of(CHAIN[at : at + 2]), to="first")
            await rig.manager.flush(10.0)
        assert rig.manager.stats()[0].spilled > 0
        assert (await rig.load(NAMES))[1] == (12, "complete")  # nothing was lost on the way
        assert rig.manager.stats()[0].tier.bytes <= 10 * RECORD


async def test_blocks_that_are_there_are_touched_and_not_written_again() -> None:
    tier = FaultyTier(memory())
    async with running(Rig(tier)) as rig:
        rig.manager.offer(batch_of(CHAIN), to="first")
        await rig.manager.flush(10.0)
        newer = [record._replace(meta=Meta(hits=7)) for record in CHAIN]
        rig.manager.offer(batch_of(newer), to="first")
        await rig.manager.flush(10.0)
        assert tier.calls["put"] == 1
        blocks, _ = await rig.load(NAMES)
        assert {block.meta.hits for block in blocks} == {7}


async def test_the_engine_never_waits_for_a_tier_that_hangs() -> None:
    tier = FaultyTier(memory())
    settings = ManagerSettings(deadline=HANG, queue_bytes=4 * RECORD, breaker_failures=1)
    async with running(Rig(tier, settings=settings)) as rig:
        tier.inject(Fault("put", "hang"))
        assert rig.manager.offer(batch_of(CHAIN[:4]), to="first") == 4
        assert rig.manager.offer(batch_of(CHAIN[4:8]), to="first") == 0  # at once
        await until(lambda: rig.manager.stats()[0].timeouts == 1)
        await until(lambda: rig.manager.stats()[0].queued_blocks == 0)
        assert rig.manager.offer(batch_of(CHAIN), to="first") == 0  # it is left alone now
        report = rig.manager.stats()[0]
        assert (report.write_breaker, report.breaker, report.dropped) == ("open", "closed", 4 + 4 + 12)
        tier.heal()
        rig.clock.now += 6.0
        assert rig.manager.offer(batch_of(CHAIN[:4]), to="first") == 4  # on trial
        await until(lambda: rig.manager.stats()[0].queued_blocks == 0)
        assert rig.manager.stats()[0].write_breaker == "closed"


async def test_what_waits_for_a_tier_that_fails_goes_down_with_the_rest() -> None:
    tier = FaultyTier(memory())
    settings = ManagerSettings(batch_blocks=2, breaker_failures=1)
    async with running(Rig(tier, memory(), settings=settings)) as rig:
        tier.inject(Fault("put", "fail"))
        rig.manager.offer(batch_of(CHAIN), to="first")
        assert await rig.manager.flush(10.0) == 0
        assert tier.calls["put"] == rig.manager.stats()[0].puts == 1  # nothing more was prepared for it
        assert rig.manager.peek(SHELF, NAMES) == Coverage((1,) * 12)


async def test_a_tier_that_takes_no_writes_is_left_alone_but_read() -> None:
    class Full(MemoryTier):
        async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
            return [False] * len(records)

        def stats(self) -> TierStats:
            return TierStats(healthy=False, problem="no space")

    tier = Full(SAMPLES.geometry, store=MemoryStore())
    async with running(Rig(tier, settings=ManagerSettings(breaker_failures=2))) as rig:
        await MemoryTier.put(tier, SHELF, CHAIN[:4])
        for _ in range(2):
            rig.manager.offer(batch_of(CHAIN[4:8]), to="first")
            await rig.manager.flush(10.0)
        assert rig.manager.absent(SHELF, NAMES, to="first") == []
        assert (await rig.load(NAMES[:4]))[1] == (4, "complete")


async def test_read_only_tiers_are_not_offered_anything() -> None:
    class Fixed(Tattered):
        read_only = True

    async with running(Rig(memory(), Fixed())) as rig:
        assert not rig.manager.has_persistent
        assert rig.manager.absent(SHELF, NAMES, to="persistent") == []
        assert rig.manager.offer(batch_of(CHAIN), to="persistent") == 0
        assert rig.manager.offer(batch_of(CHAIN), to="all") == 12
        await rig.manager.flush(10.0)
        assert cast("Fixed", rig.tiers[1]).reached == 0


# reading


async def test_each_block_comes_from_the_fastest_tier_that_has_it() -> None:
    async with running(Rig(memory(), memory(), memory())) as rig:
        await rig.stored(CHAIN[2:5], 0)
        await rig.stored(CHAIN[:3], 1)
        await rig.stored(CHAIN[4:], 2)
        assert rig.manager.peek(SHELF, NAMES) == Coverage((1, 1, 0, 0, 0) + (2,) * 7)
        blocks, outcome = await rig.load(NAMES)
        assert outcome == (12, "complete")
        assert [block.tier for block in blocks] == ["tier1"] * 2 + ["tier0"] * 3 + ["tier2"] * 7
        assert rig.manager.peek(OTHER, NAMES) == Coverage(())
        assert (await rig.load(NAMES, OTHER))[1] == (0, "missing")


async def test_a_tier_that_must_be_asked_is_asked_and_remembered() -> None:
    store = MemoryStore()
    async with running(Rig(memory(), remote(store))) as rig:
        assert rig.manager.must_ask()
        await rig.stored(CHAIN[:6], 1)
        assert rig.manager.peek(SHELF, NAMES) == Coverage(())
        await rig.manager.ask(SHELF, NAMES)
        assert rig.manager.peek(SHELF, NAMES) == Coverage((1,) * 6)
        store.blocks.clear()  # somebody else did that
        assert (await rig.load(NAMES))[1] == (0, "missing")
        assert rig.manager.peek(SHELF, NAMES) == Coverage(())


async def test_only_tiers_that_have_to_be_asked_are() -> None:
    async with running(Rig(memory())) as rig:
        assert not rig.manager.must_ask()


@pytest.mark.parametrize("kind", ["fail", "hang", "fewer", "more", "nonsense"])
async def test_asking_a_faulty_tier_finds_nothing_and_raises_nothing(kind: str) -> None:
    tier = FaultyTier(remote())
    async with running(Rig(tier, settings=FAST)) as rig:
        await rig.stored(CHAIN, 0)
        tier.inject(Fault("contains", kind, times=1))  # type: ignore[arg-type]  # they are among the kinds
        await rig.manager.ask(SHELF, NAMES)
        assert len(rig.manager.peek(SHELF, NAMES).tiers) == (12 if kind == "nonsense" else 0)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fail", "failed"),
        ("hang", "failed"),
        ("fewer", "failed"),
        ("more", "failed"),
        ("flip", "corrupt"),
        ("other", "corrupt"),
        ("short", "corrupt"),
        ("long", "corrupt"),
        ("reorder", "corrupt"),
        ("nonsense", "corrupt"),
    ],
)
@pytest.mark.parametrize("spare", [False, True])
async def test_a_fault_in_reading_is_a_miss_or_the_next_tiers_turn(kind: str, reason: str, spare: bool) -> None:
    bad = FaultyTier(memory())
    async with running(Rig(bad, memory(), settings=FAST)) as rig:
        await rig.stored(CHAIN, 0)
        if spare:
            await rig.stored(CHAIN, 1)
        bad.inject(Fault("get", kind, times=1, after=1))  # type: ignore[arg-type]  # they are among the kinds
        blocks, outcome = await rig.load(NAMES)
        if spare:
            assert outcome == (12, "complete")
            assert {block.tier for block in blocks} == {"tier0", "tier1"}
        else:
            assert outcome == (4, reason)
        report = rig.manager.stats()[0]
        assert (report.corrupt, report.failures) == ((4, 0) if reason == "corrupt" else (0, 1))
        assert report.timeouts == (kind == "hang")
        assert rig.log.count("stored_block_corrupt") == (reason == "corrupt")


async def test_a_corrupt_block_is_deleted_and_can_be_written_again() -> None:
    store = MemoryStore()
    async with running(Rig(memory(store=store))) as rig:
        await rig.stored(CHAIN, 0)
        kept = store.blocks[SHELF, NAMES[5]]
        store.blocks[SHELF, NAMES[5]] = kept._replace(data=kept.data[:-1] + bytes([kept.data[-1] ^ 1]))
        assert (await rig.load(NAMES))[1] == (5, "corrupt")
        assert (SHELF, NAMES[5]) not in store.blocks
        assert rig.manager.absent(SHELF, NAMES, to="first") == [5]
        rig.manager.offer(batch_of(CHAIN), to="first")
        await rig.manager.flush(10.0)
        assert (await rig.load(NAMES))[1] == (12, "complete")


async def test_repeated_faults_are_logged_once_and_open_the_breaker() -> None:
    tier = FaultyTier(memory())
    async with running(Rig(tier)) as rig:
        await rig.stored(CHAIN, 0)
        tier.inject(Fault("get", "fail", error=lambda: MemoryError("any type")))
        for _ in range(3):
            assert (await rig.load(NAMES[:4]))[1] == (0, "failed")
        assert rig.log.count("tier_failed") == 1
        assert rig.manager.stats()[0].breaker == "open"
        assert rig.manager.peek(SHELF, NAMES) == Coverage(())
        assert (await rig.load(NAMES))[1] == (0, "missing")
        assert tier.calls["get"] == 3
        tier.heal()
        rig.clock.now += 5.0
        assert (await rig.load(NAMES[:4]))[1] == (4, "complete")
        assert rig.manager.stats()[0].breaker == "closed"


async def test_the_deadline_of_a_load_ends_it_between_two_batches() -> None:
    gate = anyio.Event()
    tier = FaultyTier(memory())
    async with running(Rig(tier, settings=ManagerSettings(batch_blocks=4, deadline=600.0))) as rig:
        await rig.stored(CHAIN, 0)
        for seconds in LATER:
            tier.heal()
            tier.inject(Fault("get", "slow", after=1, gate=gate))
            _, outcome = await rig.load(NAMES, deadline=seconds)
            if outcome.blocks:
                break
        assert outcome == (4, "deadline")
        assert tier.running["get"] == 0
        assert (await rig.load(NAMES, deadline=0.0))[1] == (0, "deadline")


async def test_what_was_read_in_time_is_not_delivered_after_the_deadline() -> None:
    async with running(Rig(memory(), settings=ManagerSettings(batch_blocks=4))) as rig:
        await rig.stored(CHAIN, 0)

        async def deliver(_: list[Loaded]) -> None:
            await anyio.sleep(2 * seconds)

        for seconds in LATER:
            outcome = await rig.manager.load(SHELF, NAMES, deliver, deadline=seconds)
            if outcome.blocks:
                break
        assert outcome == (4, "deadline")


async def test_a_tier_that_was_not_asked_still_helps_out() -> None:
    store = MemoryStore()
    async with running(Rig(memory(store=store), remote())) as rig:
        await rig.stored(CHAIN, 0)
        await rig.stored(CHAIN, 1)
        kept = store.blocks[SHELF, NAMES[5]]
        store.blocks[SHELF, NAMES[5]] = kept._replace(data=b"")
        blocks, outcome = await rig.load(NAMES)
        assert outcome == (12, "complete")
        assert [at for at, block in enumerate(blocks) if block.tier == "tier1"] == [5]


async def test_reads_ahead_while_a_batch_is_delivered_and_not_further() -> None:
    tier = FaultyTier(memory())
    settings = ManagerSettings(batch_blocks=1, read_ahead=2)
    async with running(Rig(tier, settings=settings)) as rig:
        await rig.stored(CHAIN, 0)
        seen: list[int] = []

        async def deliver(batch: list[Loaded]) -> None:
            await until(lambda: tier.calls["get"] >= min(len(seen) + 3, 12))
            await settle()
            seen.append(tier.calls["get"])

        assert await rig.manager.load(SHELF, NAMES, deliver, deadline=None) == (12, "complete")
        assert seen == [min(at + 3, 12) for at in range(12)]


async def test_what_deliver_raises_ends_the_load_and_is_raised_as_it_is() -> None:
    async with running(Rig(memory(), settings=ManagerSettings(batch_blocks=1))) as rig:
        await rig.stored(CHAIN, 0)

        async def deliver(_: list[Loaded]) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await rig.manager.load(SHELF, NAMES, deliver, deadline=None)


async def test_waiting_for_a_busy_tier_is_not_its_fault() -> None:
    gate = anyio.Event()
    tier = FaultyTier(memory())
    settings = ManagerSettings(batch_blocks=1, concurrent_reads=1, read_ahead=1)
    async with running(Rig(tier, settings=settings)) as rig:
        await rig.stored(CHAIN, 0)
        tier.inject(Fault("get", "slow", gate=gate, times=1))
        outcomes: list[object] = []

        async def load() -> None:
            outcomes.append((await rig.load(NAMES[:3]))[1])

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(load)
            await until(lambda: tier.running["get"] == 1)
            await settle()
            assert tier.running["get"] == 1
            gate.set()
        assert outcomes == [(3, "complete")] * 8
        assert rig.manager.stats()[0].failures == 0


async def test_a_call_that_never_ends_is_left_behind_and_heard_of_no_more() -> None:
    tier = Tattered()
    async with running(Rig(tier, settings=ManagerSettings(deadline=HANG))) as rig:
        tier.stuck = asyncio.Event()
        rig.manager.offer(batch_of(CHAIN), to="first")
        await until(lambda: rig.manager.stats()[0].timeouts == 1)
        assert rig.manager.stats()[0].abandoned == 1
        tier.stuck.set()
        await until(lambda: rig.manager.stats()[0].abandoned == 0)
        assert (await rig.load(NAMES))[1] == (12, "complete")  # it did store them after all, and they are right


async def test_foreign_blocks_are_told_apart() -> None:
    async with running(Rig(memory())) as rig:
        foreign = type(SAMPLES)(block_size=4, payload_bytes=128)
        foreign.codec._run = b"another-"
        await rig.stored(foreign.chain(SHELF, 3), 0)
        blocks, _ = await rig.load(NAMES[:3])
        assert [block.own for block in blocks] == [False] * 3
        assert rig.manager.stats()[0].foreign_blocks == 3


# cost


async def test_a_slow_tier_is_not_worth_waiting_for_until_that_is_long_ago() -> None:
    rig = Rig(FaultyTier(memory()))

    class Slow(MemoryTier):
        async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
            rig.clock.now += 2.0 * len(names)
            return await super().get(shelf, names)

    rig = Rig(memory(), Slow(SAMPLES.geometry))
    async with running(rig):
        coverage = Coverage((0, 0, 1, 1))
        assert rig.manager.reload_seconds(1) is None
        assert rig.manager.worth(coverage, [1.0] * 4) == 4
        await rig.stored(CHAIN, 1)
        await rig.load(NAMES)
        assert rig.manager.reload_seconds(1) == pytest.approx(2.0)
        assert rig.manager.worth(coverage, [1.0] * 4) == 2
        assert rig.manager.worth(coverage, [3.0] * 4) == 4
        assert rig.manager.worth(coverage, [0.0] * 4) == 4
        rig.clock.now += 61.0
        assert rig.manager.worth(coverage, [1.0] * 4) == 4
        assert rig.manager.reload_seconds(1) == pytest.approx(2.0)


# copying


async def test_prefetch_brings_blocks_up_as_far_as_there_is_room() -> None:
    settings = ManagerSettings(queue_bytes=8 * RECORD, batch_blocks=4)
    rig = Rig(memory(), Tattered(), settings=settings)
    await rig.manager.open()
    assert rig.manager.can_prefetch
    await rig.stored(CHAIN, 1)
    await rig.stored(CHAIN[:2], 0)
    assert await rig.manager.prefetch(SHELF, NAMES) == 8
    await rig.manager.flush(10.0)
    assert rig.manager.peek(SHELF, NAMES) == Coverage((0,) * 10 + (1,) * 2)
    blocks, _ = await rig.load(NAMES)
    assert [block.tier for block in blocks] == ["tier0"] * 10 + ["tier1"] * 2
    await rig.manager.close(1.0)
    assert await rig.manager.prefetch(SHELF, NAMES) == 0


async def test_persist_saves_what_only_volatile_tiers_have() -> None:
    disk = Tattered()
    async with running(Rig(memory(), disk)) as rig:
        await rig.stored(CHAIN[:6], 0)
        await rig.stored(CHAIN[:2], 1)
        rig.manager.offer(batch_of(CHAIN[6:]), to="first")  # still in the queue, or just written
        assert await rig.manager.persist(10.0) == 10
        assert await rig.manager.persist(10.0) == 0
        assert len(disk.store.blocks) == 12


async def test_persist_leaves_alone_what_outlives_the_process_elsewhere() -> None:
    async with running(Rig(memory(), Tattered(), Tattered(), remote())) as rig:
        await rig.stored(CHAIN[:4], 2)
        await rig.stored(CHAIN[4:], 3)
        assert await rig.manager.persist(10.0) == 0


async def test_persist_keeps_its_deadline() -> None:
    disk = Tattered()
    async with running(Rig(memory(), disk, settings=ManagerSettings(deadline=60.0))) as rig:
        await rig.stored(CHAIN, 0)
        disk.stuck = asyncio.Event()
        assert await rig.manager.persist(HANG) == 0
        disk.stuck.set()


async def test_the_most_valuable_come_first_and_ancestors_before_all() -> None:
    metas = [Meta(hits=1), Meta(), Meta(hits=5), Meta(), Meta(priority=2), Meta(priority=9, ttl=1.0)]
    listed = [Listed(SHELF, record.head, meta) for record, meta in zip(CHAIN, metas, strict=False)]
    loose = [Listed(OTHER, SAMPLES.chain(OTHER, 2)[1].head, Meta(hits=3))]
    order = most_valuable_first([*reversed(listed), *loose], now=5.0)
    assert order == [*listed[:5], *loose, listed[5]]


# control


@pytest.mark.parametrize("what", ["forget", "erase"])
async def test_what_is_forgotten_is_gone_from_queues_and_tiers(what: str) -> None:
    rig = Rig(memory(), remote(), memory())
    await rig.manager.open()
    await rig.stored(CHAIN[:4], 0)
    await rig.stored(CHAIN[:6], 1)
    await rig.manager.ask(SHELF, NAMES)
    rig.manager.offer(batch_of(CHAIN[8:]), to="first")
    theirs = SAMPLES.chain(OTHER, 2)
    await rig.stored(theirs, 0, OTHER)
    forget = rig.manager.forget(SHELF, NAMES) if what == "forget" else rig.manager.erase(SHELF.tenant)
    assert await forget == 14
    await rig.manager.flush(10.0)
    await rig.manager.ask(SHELF, NAMES)
    assert rig.manager.peek(SHELF, NAMES) == Coverage(())
    assert (await rig.load(NAMES))[1] == (0, "missing")
    assert (await rig.load(names_of(theirs), OTHER))[1] == (2, "complete")
    await rig.manager.close(1.0)


@pytest.mark.parametrize("what", ["forget", "erase"])
@pytest.mark.parametrize("late", [False, True])
async def test_a_write_under_way_does_not_bring_back_what_was_forgotten(what: str, late: bool) -> None:
    tier = Tattered()
    settings = ManagerSettings(deadline=HANG if late else 60.0)
    async with running(Rig(tier, settings=settings)) as rig:
        stuck = tier.stuck = asyncio.Event()
        rig.manager.offer(batch_of(CHAIN), to="first")
        await until(lambda: tier.reached == 1)

        async def forget() -> None:
            if what == "forget":
                await rig.manager.forget(SHELF, NAMES)
            else:
                await rig.manager.erase(SHELF.tenant)

        async with anyio.create_task_group() as group:
            group.start_soon(forget)
            if not late:  # it waits for the write, and what is offered meanwhile goes as well
                await settle()
                rig.manager.offer(batch_of(CHAIN), to="first")
                stuck.set()
        stuck.set()
        await until(lambda: "put" in tier.log)
        await until(lambda: not tier.store.blocks)
        if what == "erase":
            await until(lambda: tier.log.count("erase") == 1 + late)  # not only deleted: its bytes must go


class Pondering(MemoryTier):
    """Has the answer of ``get`` and keeps it to itself until ``gate`` is open."""

    gate: anyio.Event | None = None
    reached = False

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        answer = await super().get(shelf, names)
        self.reached = True
        if self.gate is not None:
            await self.gate.wait()
        return answer


@pytest.mark.parametrize("up", [True, False])
async def test_a_copy_under_way_does_not_bring_back_what_was_forgotten(up: bool) -> None:
    slow = Pondering(SAMPLES.geometry)
    other = Tattered()
    async with running(Rig(*((other, slow) if up else (slow, other)))) as rig:
        await rig.stored(CHAIN, int(up))
        slow.gate = anyio.Event()
        copied: list[int] = []

        async def copy() -> None:
            copied.append(await (rig.manager.prefetch(SHELF, NAMES) if up else rig.manager.persist(60.0)))

        async with anyio.create_task_group() as group:
            group.start_soon(copy)
            await until(lambda: slow.reached)
            await rig.manager.forget(SHELF, NAMES)
            slow.gate.set()
        assert copied == [0]
        await rig.manager.flush(10.0)
        assert not other.store.blocks
        assert not slow.store.blocks


async def test_a_tier_that_leaves_many_calls_hanging_is_not_called_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount, "MOST_ABANDONED", 2)
    tier = Tattered()
    settings = ManagerSettings(deadline=HANG, breaker_failures=1000)
    async with running(Rig(tier, settings=settings)) as rig:
        stuck = tier.stuck = asyncio.Event()
        for at in range(4):
            rig.manager.offer(batch_of(CHAIN[at : at + 1]), to="first")
            await until(lambda: rig.manager.stats()[0].queued_blocks == 0)
        assert tier.reached == 2
        assert not rig.manager.must_ask()
        assert rig.manager.peek(SHELF, NAMES) == Coverage(())
        stuck.set()
        await until(lambda: rig.manager.stats()[0].abandoned == 0)
        assert rig.manager.peek(SHELF, NAMES) == Coverage((0, 0))


async def test_erasing_says_which_tier_could_not_and_does_the_others() -> None:
    bad = FaultyTier(memory())
    async with running(Rig(bad, memory())) as rig:
        await rig.stored(CHAIN, 0)
        await rig.stored(CHAIN, 1)
        bad.inject(Fault("erase", "fail", times=1))
        with pytest.raises(StorageError, match="tier0"):
            await rig.manager.erase(SHELF.tenant)
        assert rig.manager.peek(SHELF, NAMES) == Coverage((0,) * 12)
        assert await rig.manager.erase(SHELF.tenant) == 12


async def test_children_listing_and_touch_see_all_tiers_once() -> None:
    rig = Rig(memory(), Tattered(), remote())
    await rig.manager.open()
    await rig.stored(CHAIN[:3], 0)
    await rig.stored(CHAIN[:6], 1)
    await rig.stored(CHAIN, 2)
    rig.manager.offer(batch_of(CHAIN[6:8]), to="persistent")
    assert [listed.head for listed in await rig.manager.children(SHELF, NAMES[5])] == [CHAIN[6].head]
    assert [listed.head for listed in await rig.manager.children(SHELF, SHELF.namespace)] == [CHAIN[0].head]
    heads = [listed.head async for listed in rig.manager.listing()]
    assert sorted(head.start for head in heads) == [record.head.start for record in CHAIN[:8]]
    assert [listed async for listed in rig.manager.listing(OTHER)] == []
    await rig.manager.touch(SHELF, dict.fromkeys(NAMES, Meta(hits=3)))
    blocks, _ = await rig.load(NAMES[:8])
    assert {block.meta.hits for block in blocks} == {3}
    await rig.manager.close(1.0)


async def test_listing_can_be_left_early() -> None:
    async with running(Rig(memory(), Tattered())) as rig:
        await rig.stored(CHAIN, 0)
        async for listed in rig.manager.listing():
            assert listed.head == CHAIN[0].head
            break


class Liar(MemoryTier):
    """Raises or returns nonsense wherever it is synchronous or loosely typed."""

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        return cast("int", "many")

    def stats(self) -> TierStats:
        raise ZeroDivisionError

    def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        raise ZeroDivisionError

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        return [cast("Listed", None)]

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        return cast("int", None)

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        raise SystemExit

    async def spill(self, count: int) -> list[tuple[Shelf, Record]]:
        return cast("list[tuple[Shelf, Record]]", [None, 3])

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        return cast("list[bool]", "yes")

    async def flush(self) -> None:
        raise OSError("disk on fire")

    async def close(self) -> None:
        raise OSError("disk on fire")


async def test_a_tier_that_lies_everywhere_harms_nobody() -> None:
    async with running(Rig(Liar(SAMPLES.geometry), memory())) as rig:
        rig.manager.offer(batch_of(CHAIN[:4]), to="first")
        await rig.manager.flush(10.0)
        assert (await rig.load(NAMES[:4]))[1] == (4, "complete")  # the next one took them
        await rig.manager.touch(SHELF, {NAMES[0]: Meta()})
        await rig.manager.children(SHELF, SHELF.namespace)
        assert len([listed async for listed in rig.manager.listing()]) == 4
        assert not rig.manager.stats()[0].tier.healthy
        assert await rig.manager.forget(SHELF, NAMES) == 4


# opening and closing


class Broken(MemoryTier):
    async def open(self) -> None:
        raise PermissionError("no")


async def test_a_tier_that_cannot_be_opened_is_left_out_with_one_warning() -> None:
    async with running(Rig(Broken(SAMPLES.geometry), memory())) as rig:
        assert [name for name, _ in rig.log.events] == ["tier_left_out"]
        rig.manager.offer(batch_of(CHAIN), to="first")
        assert rig.manager.peek(SHELF, NAMES) == Coverage((1,) * 12)
        assert [report.opened for report in rig.manager.stats()] == [False, True]


async def test_strict_settings_refuse_to_open_and_close_the_others() -> None:
    other = Tattered()
    rig = Rig(other, Broken(SAMPLES.geometry), settings=ManagerSettings(strict=True))
    with pytest.raises(StorageError, match="tier1"):
        await rig.manager.open()
    assert other.log == ["close"]


async def test_all_that_waits_is_written_before_the_tiers_are_closed() -> None:
    disk = Tattered()
    rig = Rig(disk, settings=ManagerSettings(batch_blocks=1))
    async with running(rig):
        rig.manager.offer(batch_of(CHAIN), to="first")
    assert disk.log == ["put"] * 12 + ["close"]
    assert not rig.log.events


async def test_writers_have_ended_before_their_tier_is_closed() -> None:
    log: list[str] = []

    class Careful(MemoryTier):
        async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
            log.append("put")
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await settle()
                log.append("put ended")
            return []

        async def close(self) -> None:
            log.append("close")

    rig = Rig(Careful(SAMPLES.geometry), settings=ManagerSettings(deadline=600.0))
    await rig.manager.open()
    async with anyio.create_task_group() as group:
        group.start_soon(rig.manager.run)
        rig.manager.offer(batch_of(CHAIN), to="first")
        await until(lambda: log == ["put"])  # what is put is sealed in a thread before
        group.start_soon(rig.manager.close, HANG)
        await settle()
        assert rig.manager.offer(batch_of(SAMPLES.chain(SHELF, 1, seed=1)), to="first") == 0  # it is closing
        await until(lambda: len(log) == 3)
        assert log == ["put", "put ended", "close"]
    assert rig.manager.stats()[0].dropped == 12


async def test_closing_without_writers_writes_all_the_same() -> None:
    disk = Tattered()
    rig = Rig(disk)
    await rig.manager.open()
    rig.manager.offer(batch_of(CHAIN), to="first")
    assert await rig.manager.close(10.0) == 0
    assert len(disk.store.blocks) == 12
    assert await rig.manager.close(10.0) == 0
    await rig.manager.run()  # too late: ends at once
    assert disk.log == ["put", "close"]


@pytest.mark.parametrize("with_writers", [False, True])
async def test_closing_keeps_its_deadline_when_a_tier_hangs_and_counts_what_is_lost(with_writers: bool) -> None:
    tier = FaultyTier(memory())
    settings = ManagerSettings(deadline=60.0, batch_blocks=4)
    rig = Rig(tier, settings=settings)
    await rig.manager.open()
    tier.inject(Fault("put", "hang"), Fault("close", "hang"))
    async with anyio.create_task_group() as group:
        if with_writers:
            group.start_soon(rig.manager.run)
        rig.manager.offer(batch_of(CHAIN), to="first")
        await settle()
        with anyio.fail_after(10 * (HANG + CLOSE_GRACE + GRACE)):
            assert await rig.manager.close(HANG) == 12
    rig.census()
    assert rig.manager.stats()[0].dropped == 12
    assert rig.log.count("blocks_not_written") == 1
    assert tier.running["put"] == 0


async def test_an_open_tier_is_not_opened_again() -> None:
    tier = FaultyTier(memory())
    await tier.open()
    await tier.put(SHELF, CHAIN)
    rig = Rig()
    manager = TierManager(
        [Mounted("ready", tier, is_open=True)],
        SAMPLES.codec,
        ManagerSettings(),
        clock=rig.clock,
        wall=rig.clock,
        logger=rig.log,
    )
    assert manager.peek(SHELF, NAMES) == Coverage((0,) * 12)
    await manager.open()
    assert tier.calls["open"] == 1
    assert await Rig().manager.prefetch(SHELF, NAMES) == 0  # no tiers at all are fine too
    await manager.close(1.0)
    assert tier.calls["close"] == 1


@pytest.mark.parametrize(
    "wrong",
    [{"deadline": 0.0}, {"deadline": float("nan")}, {"batch_blocks": 0}, {"read_ahead": -1}, {"queue_bytes": 0}],
)
async def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        ManagerSettings(**wrong)  # type: ignore[arg-type]  # whole numbers among them


async def test_memory_of_answers_is_bounded() -> None:
    rig = Rig(remote())
    await rig.manager.open()
    remembered = rig.manager._mounts[0].remembered
    remembered._most = 8
    await rig.stored(CHAIN, 0)
    await rig.manager.ask(SHELF, NAMES)
    assert len(remembered) == 8
    await rig.manager.close(1.0)


async def test_many_rounds_leave_nothing_behind() -> None:
    tier = FaultyTier(memory(8))
    async with running(Rig(tier, memory(8))) as rig:
        tier.inject(Fault("put", "fail", after=3, times=40))
        for at in range(60):
            chain = SAMPLES.chain(SHELF, 3, seed=at)
            rig.manager.offer(batch_of(chain), to="first")
            await rig.manager.flush(10.0)
            await rig.load(names_of(chain))
            rig.clock.now += 20.0
        rig.census()
        for mount in rig.manager._mounts:
            assert not mount.revoked
            assert not mount._erased
            assert len(mount.remembered) == 0
