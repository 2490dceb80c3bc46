"""A snapshot as a tier."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

from octavo.errors import FingerprintMismatch, InvalidRequest, StorageError
from octavo.storage.base import Meta, TierGeometry
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.identity import Identity
from octavo.storage.naming import tenant_digest
from octavo.storage.snapshot.tier import SnapshotTier
from octavo.tests.storage.snapshot_samples import SAMPLES, blocks, content, files, open_files, read, settings, write

SHELF, OTHER = SAMPLES.shelf(), SAMPLES.shelf("a")
RECORDS = content(1)[SHELF]
NAMES = [record.head.name for record in RECORDS]


@pytest.fixture
def location(tmp_path: Path) -> Path:
    write(tmp_path / "snap", content(1), settings())
    return tmp_path / "snap"


@pytest_asyncio.fixture
async def tier(location: Path) -> AsyncIterator[SnapshotTier]:
    made = SnapshotTier(location, SAMPLES.geometry, settings())
    await made.open()
    yield made
    await made.close()


@pytest.mark.asyncio
async def test_it_answers_from_memory(tier: SnapshotTier, location: Path) -> None:
    assert tier.peek(SHELF, NAMES) == 3
    assert tier.peek(SHELF, [NAMES[0], b"x" * 32, NAMES[1]]) == 1
    assert tier.peek(OTHER, NAMES) == 0
    assert await tier.contains(SHELF, [NAMES[2], b"x" * 32]) == [True, False]
    assert await tier.contains(OTHER, NAMES) == [False] * 3
    assert [item.head for item in await tier.children(SHELF, SHELF.namespace)] == [RECORDS[0].head]
    assert [item.head for item in await tier.children(SHELF, NAMES[0])] == [RECORDS[1].head]
    assert await tier.children(SHELF, NAMES[2]) == await tier.children(OTHER, NAMES[0]) == []
    assert {item.shelf async for item in tier.listing()} == {SHELF, OTHER}
    assert tier.stats()[:2] == (6, sum(path.stat().st_size for path in files(location) if path.parent != location))


@pytest.mark.asyncio
async def test_get_keeps_order_and_says_none(tier: SnapshotTier) -> None:
    wanted = [NAMES[2], b"x" * 32, NAMES[0], NAMES[2]]
    found = await tier.get(SHELF, wanted)
    assert [None if item is None else bytes(item.data) for item in found] == [
        bytes(RECORDS[2].data),
        None,
        bytes(RECORDS[0].data),
        bytes(RECORDS[2].data),
    ]
    assert await tier.get(OTHER, NAMES) == [None] * 3
    assert await tier.get(SHELF, []) == []


@pytest.mark.asyncio
async def test_it_takes_nothing(tier: SnapshotTier) -> None:
    assert await tier.put(SHELF, content(2)[SHELF]) == [False] * 3
    await tier.touch(SHELF, {NAMES[0]: Meta(hits=9)})
    await tier.flush()
    assert tier.stats().declined == 3
    assert tier.stats().blocks == 6


@pytest.mark.asyncio
async def test_a_bad_block_is_a_miss_and_counted_once(tier: SnapshotTier, location: Path) -> None:
    flip(next(path for path in files(location) if path.name == "blocks-00000.seg"), 4096 + 700)
    for _ in range(2):
        found = await tier.get(SHELF, NAMES)
        assert found[0] is None
        assert found[1] is not None
    assert tier.stats().corrupt == 1
    assert tier.stats().blocks == 5
    assert tier.peek(SHELF, NAMES) == 0
    assert [item.head async for item in tier.listing(SHELF)] == [record.head for record in RECORDS[1:]]
    assert await tier.children(SHELF, SHELF.namespace) == []


@pytest.mark.asyncio
async def test_what_is_deleted_is_forgotten(tier: SnapshotTier) -> None:
    assert await tier.delete(SHELF, [NAMES[1], b"x" * 32]) == 1
    assert await tier.delete(SHELF, [NAMES[1]]) == 0
    assert [item is None for item in await tier.get(SHELF, NAMES)] == [False, True, False]
    assert tier.stats().blocks == 5


@pytest.mark.asyncio
async def test_an_erased_tenant_is_gone_from_the_disk_too(tier: SnapshotTier, location: Path) -> None:
    secret = [bytes(record.data) for record in content(1)[OTHER]]
    assert await tier.erase(tenant_digest("a")) == 3
    assert await tier.get(OTHER, [record.head.name for record in content(1)[OTHER]]) == [None] * 3
    assert read(location) == blocks({SHELF: RECORDS})
    assert not any(data in path.read_bytes() for path in files(location) for data in secret)
    assert await tier.erase(tenant_digest("a")) == 0
    assert [bytes(item.data) for item in await tier.get(SHELF, NAMES) if item] == [bytes(each.data) for each in RECORDS]
    assert tier.stats().blocks == 3
    assert not [target for target in open_files(location) if "deleted" in target]


@pytest.mark.asyncio
async def test_deleted_blocks_stay_forgotten_when_a_tenant_is_erased(tier: SnapshotTier) -> None:
    await tier.delete(SHELF, [NAMES[2]])
    await tier.erase(tenant_digest("a"))
    assert tier.peek(SHELF, NAMES) == 2
    assert tier.stats().blocks == 2


@pytest.mark.asyncio
async def test_erasing_reaches_a_snapshot_that_took_the_place(tier: SnapshotTier, location: Path) -> None:
    write(location, content(2), settings())
    assert await tier.erase(tenant_digest("a")) == 3
    assert read(location) == blocks({SHELF: content(2)[SHELF]})


@pytest.mark.asyncio
async def test_a_tenant_that_cannot_be_erased_from_the_disk_is_forgotten_and_said(location: Path) -> None:
    class Full(Filesystem):
        def create(self, path: Path) -> File:
            raise OSError(28, "No space left on device")

    tier = SnapshotTier(location, SAMPLES.geometry, settings(Full()))
    await tier.open()
    with pytest.raises(StorageError, match="No space left"):
        await tier.erase(tenant_digest("a"))
    assert tier.peek(OTHER, [record.head.name for record in content(1)[OTHER]]) == 0
    assert read(location) == blocks(content(1))
    await tier.close()


@pytest.mark.asyncio
async def test_after_close_nothing_is_answered(tier: SnapshotTier) -> None:
    for _ in range(2):
        await tier.close()
    assert tier.peek(SHELF, NAMES) == 0
    assert not tier.stats().healthy
    for call in (tier.get, tier.contains, tier.delete):
        with pytest.raises(StorageError):
            await call(SHELF, NAMES)
    with pytest.raises(StorageError):
        await tier.put(SHELF, RECORDS)
    with pytest.raises(StorageError):
        await tier.flush()
    with pytest.raises(StorageError):
        await tier.erase(bytes(32))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


class Stuck(Filesystem):
    """Holds reads of segments until it is let go."""

    def __init__(self) -> None:
        self.reading = threading.Event()
        self.go = threading.Event()

    def read_into(self, file: File, offset: int, buffer: memoryview) -> int:
        if file.path.suffix == ".seg":
            self.reading.set()
            assert self.go.wait(30)
        return super().read_into(file, offset, buffer)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    fs = Stuck()
    yield fs
    fs.go.set()


@pytest.mark.asyncio
async def test_a_stuck_read_holds_neither_a_cancel_nor_the_others(stuck: Stuck, location: Path) -> None:
    tier = SnapshotTier(location, SAMPLES.geometry, settings(stuck))
    await tier.open()
    async with anyio.create_task_group() as group:
        group.start_soon(tier.get, SHELF, NAMES)
        await anyio.to_thread.run_sync(stuck.reading.wait, 30)
        assert await tier.contains(SHELF, NAMES) == [True] * 3
        group.cancel_scope.cancel()
    await tier.close()  # the read that still runs keeps its file until it ends
    stuck.go.set()


@pytest.mark.asyncio
async def test_a_block_forgotten_while_it_is_read_is_not_handed_out(stuck: Stuck, location: Path) -> None:
    tier = SnapshotTier(location, SAMPLES.geometry, settings(stuck))
    await tier.open()
    found: list[object] = []

    async def get() -> None:
        found.extend(await tier.get(SHELF, NAMES[:1]))

    async with anyio.create_task_group() as group:
        group.start_soon(get)
        await anyio.to_thread.run_sync(stuck.reading.wait, 30)
        await tier.delete(SHELF, NAMES[:1])
        stuck.go.set()
    assert found == [None]
    await tier.close()


@pytest.mark.asyncio
async def test_a_read_that_runs_while_it_is_closed_ends_well(stuck: Stuck, location: Path) -> None:
    tier = SnapshotTier(location, SAMPLES.geometry, settings(stuck))
    await tier.open()
    found: list[bytes] = []

    async def get() -> None:
        found.extend(bytes(item.data) for item in await tier.get(SHELF, NAMES) if item)

    async with anyio.create_task_group() as group:
        group.start_soon(get)
        await anyio.to_thread.run_sync(stuck.reading.wait, 30)
        await tier.close()
        stuck.go.set()
    assert found == [bytes(record.data) for record in RECORDS]
    assert open_files(location) == []


@pytest.mark.asyncio
async def test_it_can_be_made_by_name_as_a_tier(location: Path) -> None:
    tier = SnapshotTier.create({"path": str(location)}, SAMPLES.geometry)
    await tier.open()
    assert tier.peek(SHELF, NAMES) == 3
    await tier.close()
    with pytest.raises(InvalidRequest, match="path"):
        SnapshotTier.create({}, SAMPLES.geometry)
    with pytest.raises(StorageError):
        await SnapshotTier.create({"path": str(location / "none")}, SAMPLES.geometry).open()
    other = TierGeometry(Identity.of({}, block_size=4, payload_bytes=512), SAMPLES.geometry.record_bytes)
    with pytest.raises(FingerprintMismatch):
        await SnapshotTier.create({"path": str(location)}, other).open()


@pytest.mark.asyncio
async def test_many_read_side_by_side(tier: SnapshotTier) -> None:
    async def get(shelf_seed: int) -> None:
        shelf = (SHELF, OTHER)[shelf_seed % 2]
        records = content(1)[shelf]
        found = await tier.get(shelf, [record.head.name for record in records])
        assert [bytes(item.data) for item in found if item] == [bytes(record.data) for record in records]

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(get, number)
