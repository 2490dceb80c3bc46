from __future__ import annotations

import anyio
import pytest

from octavo.storage.base import Tier, TierGeometry
from octavo.storage.testing.contract import (
    Fault,
    FaultyTier,
    MemoryStore,
    MemoryTier,
    SampleBlocks,
    SharedMemoryTier,
    TierContract,
)
from octavo.storage.testing.fakes import FaultKind


class TestMemoryTier(TierContract):
    def make_tier(self, geometry: TierGeometry) -> Tier:
        return MemoryTier(geometry, blocks=32)


class TestSharedMemoryTier(TierContract):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.store = MemoryStore()

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return SharedMemoryTier(geometry, store=self.store)


class TestFaultyTierWithoutFaults(TierContract):
    def make_tier(self, geometry: TierGeometry) -> Tier:
        return FaultyTier(MemoryTier(geometry, blocks=32))

    async def break_tier(self, tier: Tier) -> bool:
        assert isinstance(tier, FaultyTier)
        tier.inject(Fault("*", "fail"))
        return True


SAMPLES = SampleBlocks()
SHELF = SAMPLES.shelf()
RECORDS = SAMPLES.chain(SHELF, 3)
NAMES = [record.head.name for record in RECORDS]


async def faulty() -> FaultyTier:
    tier = FaultyTier.create({"blocks": 8}, SAMPLES.geometry)
    await tier.open()
    await tier.put(SHELF, RECORDS)
    return tier


@pytest.mark.asyncio
async def test_a_fault_happens_as_often_as_told() -> None:
    tier = await faulty()
    tier.inject(Fault("get", "fail", times=2, after=1, error=lambda: OSError("disk on fire")))
    await tier.get(SHELF, NAMES)
    for _ in range(2):
        with pytest.raises(OSError, match="on fire"):
            await tier.get(SHELF, NAMES)
    await tier.get(SHELF, NAMES)
    assert tier.calls["get"] == 4
    assert await tier.contains(SHELF, NAMES) == [True] * 3


@pytest.mark.asyncio
async def test_what_hangs_is_counted_until_it_is_cancelled() -> None:
    tier = await faulty()
    tier.inject(Fault("*", "hang"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tier.get, SHELF, NAMES)
        await anyio.wait_all_tasks_blocked()
        assert tier.running["get"] == 1
        tasks.cancel_scope.cancel()
    assert tier.running["get"] == 0
    tier.heal()
    assert None not in await tier.get(SHELF, NAMES)


@pytest.mark.asyncio
async def test_what_is_slow_waits_for_its_gate() -> None:
    tier = await faulty()
    gate = anyio.Event()
    tier.inject(Fault("flush", "slow", gate=gate))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tier.flush)
        await anyio.wait_all_tasks_blocked()
        assert tier.running["flush"] == 1
        gate.set()
    assert tier.running["flush"] == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["flip", "other", "short", "long", "reorder", "fewer", "more", "nonsense"])
async def test_lies_are_lies(kind: FaultKind) -> None:
    tier = await faulty()
    truth = await tier.get(SHELF, NAMES)
    tier.inject(Fault("get", kind, times=1))
    assert await tier.get(SHELF, NAMES) != truth
    assert await tier.get(SHELF, NAMES) == truth, "the lie got into the tier"


@pytest.mark.asyncio
async def test_a_full_tier_keeps_nothing_and_truths_can_be_inverted() -> None:
    tier = await faulty()
    new = SAMPLES.chain(SHELF, 2, seed=1)
    tier.inject(Fault("put", "full"), Fault("contains", "invert", times=1))
    assert await tier.put(SHELF, new) == [False, False]
    names = [record.head.name for record in new]
    assert await tier.contains(SHELF, NAMES + names) == [False] * 3 + [True] * 2
    assert await tier.contains(SHELF, NAMES + names) == [True] * 3 + [False] * 2


@pytest.mark.asyncio
async def test_it_is_as_shared_and_persistent_as_the_tier_inside() -> None:
    shared = FaultyTier(SharedMemoryTier(SAMPLES.geometry))
    assert (shared.shared, shared.persistent) == (True, True)
    assert ((await faulty()).shared, (await faulty()).persistent) == (False, False)


@pytest.mark.asyncio
async def test_tiers_share_a_store() -> None:
    store = MemoryStore()
    mine, theirs = SharedMemoryTier(SAMPLES.geometry, store=store), SharedMemoryTier(SAMPLES.geometry, store=store)
    await mine.open()
    await theirs.open()
    await mine.put(SHELF, RECORDS)
    assert await theirs.contains(SHELF, NAMES) == [True] * 3
    await mine.close()
    assert None not in await theirs.get(SHELF, NAMES)
