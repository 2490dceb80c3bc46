"""Notes: what the engine keeps beside the blocks. Whole or not at all, within the bound, gone with an erased tenant."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from octavo.errors import StorageError
from octavo.storage.base import MOST_NOTES, Tier, TierGeometry
from octavo.storage.disk import DiskTier
from octavo.storage.files.filesystem import Filesystem
from octavo.storage.manager.settings import ManagerSettings
from octavo.storage.manager.tier_manager import Mounted, TierManager
from octavo.storage.naming import tenant_digest
from octavo.storage.snapshot.backend import FolderBackend
from octavo.storage.snapshot.format import decode_manifest, encode_manifest
from octavo.storage.snapshot.verify import verify_snapshot
from octavo.storage.testing.contract import Fault, FaultyTier, MemoryTier, SampleBlocks
from octavo.telemetry.logging import get_logger

pytestmark = pytest.mark.asyncio

SAMPLES = SampleBlocks(block_size=4, payload_bytes=256)
SHELF = SAMPLES.shelf()
NOTES = b"\0what was learned\xff"


async def snapshot(location: Path, notes: bytes | None) -> None:
    backend = FolderBackend.create({"free_floor": 0})
    sink = await backend.begin(str(location), SAMPLES.geometry)
    await sink.add(SHELF, SAMPLES.chain(SHELF, 3))
    await sink.add(SAMPLES.shelf("t"), SAMPLES.chain(SAMPLES.shelf("t"), 2))
    if notes is not None:
        await sink.note(notes)
    await sink.commit()


async def found_in(location: Path) -> bytes | None:
    tier = await FolderBackend.create({}).open(str(location), SAMPLES.geometry)
    try:
        return await tier.notes()
    finally:
        await tier.close()


# snapshots


@pytest.mark.parametrize("notes", [NOTES, b"x" * MOST_NOTES])
async def test_a_snapshot_gives_them_back(notes: bytes, tmp_path: Path) -> None:
    await snapshot(tmp_path / "s", notes)
    assert await found_in(tmp_path / "s") == notes
    assert verify_snapshot(tmp_path / "s", Filesystem()).problems == []


@pytest.mark.parametrize("notes", [None, b""])
async def test_a_snapshot_without_them_is_of_the_first_version(notes: bytes | None, tmp_path: Path) -> None:
    """So whoever reads only that can read it."""
    await snapshot(tmp_path / "s", notes)
    assert await found_in(tmp_path / "s") is None
    data = (tmp_path / "s" / "manifest.json").read_bytes()
    assert msgspec.json.decode(data)["version"] == 1
    assert "notes" not in msgspec.json.decode(data)["snapshot"]


async def test_too_many_are_refused_and_the_snapshot_before_stays(tmp_path: Path) -> None:
    await snapshot(tmp_path / "s", NOTES)
    sink = await FolderBackend.create({"free_floor": 0}).begin(str(tmp_path / "s"), SAMPLES.geometry)
    with pytest.raises(StorageError, match="notes"):
        await sink.note(b"x" * (MOST_NOTES + 1))
    await sink.abandon()
    assert await found_in(tmp_path / "s") == NOTES


async def test_every_altered_byte_of_them_shows(tmp_path: Path) -> None:
    await snapshot(tmp_path / "s", NOTES)
    data = (tmp_path / "s" / "manifest.json").read_bytes()
    at = data.index(b'"notes"')
    for place in range(at, len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(StorageError):
            decode_manifest(bytes(altered))


async def test_version_one_has_none(tmp_path: Path) -> None:
    """A manifest that says so and has some was made by nobody."""
    await snapshot(tmp_path / "s", NOTES)
    manifest = decode_manifest((tmp_path / "s" / "manifest.json").read_bytes())
    plain = encode_manifest(msgspec.structs.replace(manifest, notes=None))
    assert decode_manifest(plain).notes is None
    with pytest.raises(StorageError):
        decode_manifest(encode_manifest(manifest).replace(b'"version":2', b'"version":1'))


async def test_erasing_a_tenant_from_a_snapshot_forgets_them(tmp_path: Path) -> None:
    await snapshot(tmp_path / "s", NOTES)
    backend = FolderBackend.create({"free_floor": 0})
    assert await backend.erase(str(tmp_path / "s"), tenant_digest("nobody")) == 0
    assert await found_in(tmp_path / "s") == NOTES
    assert await backend.erase(str(tmp_path / "s"), tenant_digest("t")) == 2
    assert await found_in(tmp_path / "s") is None


# the disk tier


async def disk(path: Path, **more: object) -> DiskTier:
    tier = DiskTier.create({"path": str(path), "bytes": 8 << 20, "free_floor": 0, **more}, SAMPLES.geometry)
    await tier.open()
    return tier


def file_of(path: Path) -> Path:
    (found,) = path.glob("*/notes")
    return found


def has_some(path: Path) -> bool:
    return any(path.glob("*/notes*"))


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


async def test_a_disk_gives_the_last_ones_back_after_a_restart(tmp_path: Path) -> None:
    tier = await disk(tmp_path)
    assert await tier.notes() is None
    await tier.note(b"first")
    await tier.note(NOTES)
    await tier.close()
    tier = await disk(tmp_path)
    assert await tier.notes() == NOTES
    assert file_of(tmp_path).stat().st_mode & 0o077 == 0, "private"
    await tier.note(b"")
    assert await tier.notes() is None
    assert not has_some(tmp_path)
    await tier.close()


async def test_they_count_and_stay_within_the_bound(tmp_path: Path) -> None:
    tier = await disk(tmp_path)
    before = tier.stats().bytes
    await tier.note(b"x" * 5000)
    assert 5000 < tier.stats().bytes - before < 5100
    await tier.note(b"x" * 1000)
    assert 1000 < tier.stats().bytes - before < 1100
    for seed in range(40):
        await tier.put(SHELF, SAMPLES.chain(SHELF, 50, seed=seed))
        await tier.note(bytes([seed]) * MOST_NOTES)
        assert size_of(tmp_path) <= 8 << 20
        assert tier.stats().bytes <= 8 << 20
    assert await tier.notes() == bytes([39]) * MOST_NOTES
    used = tier.stats().bytes
    await tier.close()
    tier = await disk(tmp_path)
    assert abs(tier.stats().bytes - used) < MOST_NOTES // 2, "they are found again by their size"
    await tier.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
async def test_damaged_ones_are_none(damage: str, tmp_path: Path) -> None:
    tier = await disk(tmp_path)
    await tier.note(NOTES)
    await tier.close()
    data = bytearray(file_of(tmp_path).read_bytes())
    data[-1] ^= damage == "flip"
    spoiled = {"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b"", "other": b"{}"}[damage]
    file_of(tmp_path).write_bytes(spoiled)
    tier = await disk(tmp_path)
    assert await tier.notes() is None
    await tier.note(NOTES)
    assert await tier.notes() == NOTES
    await tier.close()


async def test_a_disk_that_only_reads_has_them_and_takes_none(tmp_path: Path) -> None:
    tier = await disk(tmp_path)
    await tier.note(NOTES)
    await tier.close()
    tier = await disk(tmp_path, read_only=True)
    await tier.note(b"other")
    assert await tier.notes() == NOTES
    await tier.close()
    with pytest.raises(StorageError):
        await tier.notes()


async def test_erasing_a_tenant_from_a_disk_forgets_them(tmp_path: Path) -> None:
    tier = await disk(tmp_path)
    await tier.note(NOTES)
    before = tier.stats().bytes
    await tier.erase(tenant_digest("t"))
    assert await tier.notes() is None
    assert tier.stats().bytes < before
    await tier.close()


# through the manager


def managed(*tiers: Tier) -> TierManager:
    return TierManager(
        [Mounted(f"tier {number}", tier) for number, tier in enumerate(tiers)],
        SAMPLES.codec,
        ManagerSettings(deadline=1.0),
        clock=lambda: 0.0,
        wall=lambda: 0.0,
        logger=get_logger("octavo.test"),
    )


class NotedTier(MemoryTier):
    """Keeps notes in memory, and outlives the process as far as the manager knows."""

    persistent = True

    def __init__(self, geometry: TierGeometry) -> None:
        super().__init__(geometry)
        self.kept: object = None

    async def note(self, notes: bytes) -> None:
        self.kept = notes

    async def notes(self) -> bytes | None:
        return self.kept  # type: ignore[return-value]  # tests put anything there


class CommonTier(NotedTier):
    shared = True


async def test_a_manager_notes_in_what_is_the_engines_own_and_persistent() -> None:
    volatile, own, common = MemoryTier(SAMPLES.geometry), NotedTier(SAMPLES.geometry), CommonTier(SAMPLES.geometry)
    manager = managed(volatile, own, common)
    await manager.open()
    await manager.note(NOTES)
    assert (own.kept, common.kept) == (NOTES, None)
    common.kept = NOTES
    assert await manager.notes() == [NOTES]
    await manager.close(1.0)
    assert await manager.notes() == []


@pytest.mark.parametrize("wrong", ["text", 5, b"", b"x" * (MOST_NOTES + 1), [b"x"]])
async def test_what_is_no_notes_is_none(wrong: object) -> None:
    tier = NotedTier(SAMPLES.geometry)
    manager = managed(tier)
    await manager.open()
    tier.kept = wrong
    assert await manager.notes() == []
    await manager.close(1.0)


@pytest.mark.parametrize("call", ["note", "notes"])
async def test_a_tier_that_fails_has_none_and_keeps_nobody(call: str) -> None:
    tier = FaultyTier(NotedTier(SAMPLES.geometry))
    manager = managed(tier)
    await manager.open()
    tier.inject(Fault(call, "fail"))
    await manager.note(NOTES)
    assert await manager.notes() == []
    assert sum(report.failures for report in manager.stats()) == 1
    await manager.close(1.0)
