"""Starting cold: what this engine's own tiers kept is forgotten, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.testing import FakeRunner
from octavo.errors import ContractBroken, InvalidRequest, StorageError
from octavo.policies.eviction.lru import Lru
from octavo.policies.scheduling.fcfs import Fcfs
from octavo.storage.base import Tier, TierGeometry
from octavo.storage.snapshot.backend import FolderBackend
from octavo.storage.testing.contract import Fault, MemoryStore, SharedMemoryTier
from octavo.tests.engine.conftest import DEFAULTS
from octavo.tests.engine.tier_rig import EngineOf, Faulty, ask, lasting, prompt, settled


class BrokenEviction(Lru):
    def __init__(self, *args: object) -> None:
        raise RuntimeError("cannot be made")


class BrokenScheduling(Fcfs):
    def __init__(self, *args: object) -> None:
        raise RuntimeError("cannot be made")


async def filled(engine_of: EngineOf, snapshot: Path | None = None) -> MemoryStore:
    """A persistent tier with prompt 1, and perhaps a snapshot of the same."""
    store = MemoryStore()
    async with engine_of(mounts={"m": lasting(store)}) as engine:
        await ask(engine, prompt(1))
        if snapshot is not None:
            await engine.snapshot(snapshot)
    assert len(store.blocks) == 5
    return store


@pytest.mark.asyncio
async def test_the_snapshot_that_was_asked_for_is_used(engine_of: EngineOf, tmp_path: Path) -> None:
    store = await filled(engine_of, tmp_path / "s")
    cold = {"mounts": {"m": lasting(store)}, "restore_from_disk": False}
    async with engine_of(restore=tmp_path / "s", **cold) as engine:
        assert store.blocks == {}
        assert (engine.stats().restore.stored_blocks, engine.stats().restore.refused) == (5, None)
        assert [hit.tier for hit in (await engine.explain(prompt(1))).tier_tokens] == ["snapshot"]
        assert (await ask(engine, prompt(1))).cached_tokens == 16
        await settled(engine)
    async with engine_of(restore=tmp_path / "s") as engine:
        assert engine.stats().restore.stored_blocks == 5, "it is there the next time, too"


@pytest.mark.asyncio
async def test_what_others_share_stays(engine_of: EngineOf) -> None:
    store = await filled(engine_of)
    common = MemoryStore(store.blocks.copy())

    def shared(geometry: TierGeometry) -> Tier:
        return SharedMemoryTier(geometry, store=common)

    async with engine_of(mounts={"m": lasting(store), "r": shared}, restore_from_disk=False):
        assert (len(store.blocks), len(common.blocks)) == (0, 5)


@pytest.mark.asyncio
async def test_what_cannot_be_forgotten_is_not_served(engine_of: EngineOf) -> None:
    faulty = Faulty(lasting(await filled(engine_of)))
    faulty.prepare(Fault("delete", "fail", times=1))
    with pytest.raises(StorageError, match="injected"):
        async with engine_of(mounts={"m": faulty}, restore_from_disk=False):
            pass


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("setting", "name"), [("eviction_policy", "BrokenEviction"), ("scheduling_policy", "BrokenScheduling")]
)
async def test_no_snapshot_is_left_open_by_a_policy_that_cannot_be_made(
    setting: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    async def open_(self: FolderBackend, location: str, geometry: TierGeometry) -> Tier:
        opened.append(location)
        raise StorageError("not in this test")

    monkeypatch.setattr(FolderBackend, "open", open_)
    policy = f"octavo.tests.engine.test_cold_start:{name}"
    config = EngineConfig(**DEFAULTS | {setting: policy})  # type: ignore[arg-type]  # names and values come from the tests
    with pytest.raises(ContractBroken, match=name):
        async with AsyncEngine(runner=FakeRunner(), config=config, restore=tmp_path / "s"):
            pass
    assert opened == []


@pytest.mark.asyncio
async def test_a_restored_snapshot_alone_is_no_place_to_import_into(engine_of: EngineOf, tmp_path: Path) -> None:
    await filled(engine_of, tmp_path / "s")
    async with engine_of(restore=tmp_path / "s") as engine:
        with pytest.raises(InvalidRequest, match="tier"):
            await engine.import_snapshot(tmp_path / "s")
