"""Nothing grows with what has gone through the tiers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from octavo import AsyncEngine, EngineConfig, Retention, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.storage.base import Tier, TierGeometry
from octavo.storage.manager import mount
from octavo.storage.manager.remembered import Remembered
from octavo.storage.testing.contract import Fault, FaultyTier, MemoryStore, MemoryTier, SharedMemoryTier
from octavo.tests.engine.conftest import DEFAULTS
from octavo.tests.engine.test_growth import octavo_objects, reachable_items
from octavo.tests.engine.tier_rig import LastingTier, MakeTier, settled, threaded

SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


def broken(geometry: TierGeometry) -> Tier:
    tier = FaultyTier(MemoryTier(geometry, blocks=16))
    tier.inject(*(Fault(call, "fail", after=3) for call in ("get", "put", "touch")))
    return tier


TIERS: dict[str, Callable[[TierGeometry], Tier]] = {
    "memory": lambda geometry: MemoryTier(geometry, blocks=16),
    "lasting": lambda geometry: LastingTier(geometry, blocks=16),
    "remote": lambda geometry: SharedMemoryTier(geometry, blocks=16, store=MemoryStore()),
    "broken": broken,
}


class Traffic:
    """Requests that hit, miss, load, are aborted, pinned, evicted and erased; texts come again, tenants do not."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._number = 0

    async def some(self, requests: int) -> None:
        engine = self._engine
        for _ in range(requests // 10):
            batch = []
            for _ in range(10):
                self._number += 1
                number = self._number
                ids = [number % 5, number % 7, 3, 4, 5, 6, 7, 8, 9, number % 64]
                how = {"retention": [Retention(0, 4, number % 3, ttl=0.01)]}
                tenant = None if number % 3 else f"t{number}"
                params = SamplingParams(max_tokens=2, temperature=0.0, n=1 + (number % 11 == 0))
                batch.append(asyncio.create_task(engine.complete(ids, params, tenant=tenant, **how)))  # type: ignore[arg-type]  # by name
            await asyncio.sleep(0)
            batch[number % 9].cancel()
            await asyncio.gather(*batch, return_exceptions=True)
            pin = await engine.pin([1, 2, 3, 4], ttl=0.01)
            await engine.explain([1, 2, 3, number % 64, 5], tenant=f"t{number}")
            await engine.unpin(pin)
            await asyncio.gather(
                engine.evict([number % 5, number % 7]), engine.erase(f"t{number}"), return_exceptions=True
            )
        await settled(engine)


async def low_water(engine: AsyncEngine, traffic: Traffic) -> tuple[Counter[str], int]:
    """The least of several readings: what was held for a while comes and goes, what leaked is in all of them."""
    own, items = octavo_objects(), reachable_items(engine)
    for _ in range(5):
        await traffic.some(20)
        own &= octavo_objects()
        items = min(items, reachable_items(engine))
    return own, items


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "count", "demotion"),
    [
        pytest.param("lasting", 120, "write_through", marks=pytest.mark.slow),
        ("broken", 120, "write_through"),
        *[
            pytest.param(kind, 6000, demotion, marks=SLOW)
            for kind in TIERS
            for demotion in ("write_back", "write_through", "selective")
        ],
    ],
)
async def test_nothing_grows_with_what_went_through_tiers(
    kind: str, count: int, demotion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GROWTH-01, LEAK-07: containers and objects are the same in number after many requests as after some."""
    monkeypatch.setattr(mount, "Remembered", partial(Remembered, 64))  # else its bound is far away
    mounts: dict[str, MakeTier] = {"a": TIERS["memory"], "b": TIERS[kind]}
    how = {"num_blocks": 24, "demotion": demotion, "checkpoint_interval": 0.01, "check_every_step": False}
    async with threaded(monkeypatch, mounts, **how) as engine:
        traffic = Traffic(engine)
        await traffic.some(200)
        own, items = await low_water(engine, traffic)
        await traffic.some(count)
        still_own, still_items = await low_water(engine, traffic)
        assert {name: more for name, more in (still_own - own).items() if more > 40} == {}
        assert still_items < items + 400


@pytest.mark.asyncio
async def test_nothing_is_left_of_an_engine_that_was_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def once() -> None:
        async with threaded(monkeypatch, {"a": TIERS["memory"], "b": TIERS["lasting"]}, num_blocks=24) as engine:
            await Traffic(engine).some(20)
            await engine.snapshot(tmp_path / "s")

    await once()
    before = octavo_objects()
    for _ in range(5):
        await once()
    assert octavo_objects() - before <= Counter(dict.fromkeys(octavo_objects(), 3))


@pytest.mark.asyncio
async def test_a_real_host_and_disk_do_not_grow_either(tmp_path: Path) -> None:
    settings = EngineConfig(
        **DEFAULTS
        | {  # type: ignore[arg-type]  # names are known
            "tiers": ("octavo.storage.host.tier:HostTier", "octavo.storage.disk.tier:DiskTier"),
            "tier_options": {
                "octavo.storage.host.tier:HostTier": {"bytes": 8_000},
                "octavo.storage.disk.tier:DiskTier": {"path": str(tmp_path / "d"), "bytes": 8 << 20, "free_floor": 0},
            },
            "num_blocks": 24,
            "check_every_step": False,
        }
    )
    async with AsyncEngine(runner=FakeRunner(), config=settings) as engine:
        traffic = Traffic(engine)
        await traffic.some(100)
        own = octavo_objects()
        await traffic.some(100)
        grown = {name: more for name, more in (octavo_objects() - own).items() if more > 150}
        assert grown == {}
