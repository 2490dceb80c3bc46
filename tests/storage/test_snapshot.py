"""Snapshots in folders: what goes in comes out, and what is at a location is whole at any time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from octavo.errors import FingerprintMismatch, InvalidRequest, StorageError
from octavo.plugins import PluginGroup
from octavo.storage.base import Meta, PersistenceBackend, TierGeometry
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.identity import Identity
from octavo.storage.naming import tenant_digest
from octavo.storage.snapshot.backend import FolderBackend, FolderSink
from octavo.storage.snapshot.writer import SnapshotWriter
from octavo.storage.testing.contract import SampleBlocks
from octavo.tests.storage.snapshot_samples import SAMPLES, blocks, content, files, open_files, read, settings, write

SHELF = SAMPLES.shelf()


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "snap"


@pytest.fixture
def backend() -> FolderBackend:
    return FolderBackend(settings())


def entries(location: Path) -> list[str]:
    return sorted(path.name for path in location.iterdir())


@pytest.mark.asyncio
async def test_what_goes_in_comes_out(backend: FolderBackend, location: Path) -> None:
    first = SAMPLES.chain(SHELF, 5, meta=Meta(100.0, 2.0, 7, 3, 60.0, 0.5))
    branch = SAMPLES.chain(SHELF, 2, seed=1, after=first[1].head)
    other = SAMPLES.chain(SAMPLES.shelf("a"), 3)
    sink = await backend.begin(str(location), SAMPLES.geometry)
    await sink.add(SHELF, first[:2])
    await sink.add(SHELF, [*first[2:], *branch])
    await sink.add(SAMPLES.shelf("a"), other)
    await sink.add(SHELF, first)  # they are there already
    assert await sink.commit() == 10
    await sink.abandon()

    tier = await backend.open(str(location), SAMPLES.geometry)
    assert tier.stats().blocks == 10
    for shelf, records in ((SHELF, [*first, *branch]), (SAMPLES.shelf("a"), other)):
        found = await tier.get(shelf, [record.head.name for record in records])
        for record, stored in zip(records, found, strict=True):
            assert stored is not None
            assert (bytes(stored.data), stored.meta) == (bytes(record.data), record.meta)
            assert SAMPLES.codec.open(shelf, record.head.name, stored.data).head == record.head
    assert [item.head async for item in tier.listing(SHELF)] == [record.head for record in [*first, *branch]]
    await tier.close()


@pytest.mark.asyncio
async def test_an_empty_snapshot_is_one(backend: FolderBackend, location: Path) -> None:
    sink = await backend.begin(str(location), SAMPLES.geometry)
    assert await sink.commit() == 0
    await sink.abandon()
    tier = await backend.open(str(location), SAMPLES.geometry)
    assert [item async for item in tier.listing()] == []
    await tier.close()


@pytest.mark.asyncio
async def test_until_it_is_committed_the_one_before_is_seen(backend: FolderBackend, location: Path) -> None:
    with pytest.raises(StorageError, match="no snapshot"):
        await backend.open(str(location), SAMPLES.geometry)
    write(location, content(1), settings())
    sink = await backend.begin(str(location), SAMPLES.geometry)
    await sink.add(SHELF, content(2)[SHELF])
    assert read(location) == blocks(content(1))
    await sink.abandon()
    assert read(location) == blocks(content(1))
    assert len(entries(location)) == 3  # manifest, lock, one generation


@pytest.mark.asyncio
async def test_a_snapshot_is_read_to_the_end_while_the_next_takes_its_place(
    backend: FolderBackend, location: Path
) -> None:
    write(location, content(1), settings())
    tier = await backend.open(str(location), SAMPLES.geometry)
    write(location, content(2), settings(wall=2.0))
    names = [record.head.name for record in content(1)[SHELF]]
    assert [bytes(item.data) for item in await tier.get(SHELF, names) if item] == [
        bytes(record.data) for record in content(1)[SHELF]
    ]
    await tier.close()
    assert read(location) == blocks(content(2))
    assert len(entries(location)) == 3


@pytest.mark.asyncio
async def test_only_one_writes_at_a_time(backend: FolderBackend, location: Path) -> None:
    sink = await backend.begin(str(location), SAMPLES.geometry)
    with pytest.raises(StorageError, match="somebody else is writing"):
        await backend.begin(str(location), SAMPLES.geometry)
    await sink.add(SHELF, content(1)[SHELF])
    await sink.commit()
    await sink.abandon()
    await (await backend.begin(str(location), SAMPLES.geometry)).abandon()


@pytest.mark.asyncio
async def test_a_sink_is_used_once(backend: FolderBackend, location: Path) -> None:
    sink = await backend.begin(str(location), SAMPLES.geometry)
    await sink.commit()
    for _ in range(2):
        await sink.abandon()
    with pytest.raises(StorageError, match="begin another"):
        await sink.add(SHELF, content(1)[SHELF])
    with pytest.raises(StorageError, match="begin another"):
        await sink.commit()
    assert read(location) == {}


@pytest.mark.parametrize("seen", ["identity", "block size", "record"])
@pytest.mark.asyncio
async def test_another_model_is_refused(backend: FolderBackend, location: Path, seen: str) -> None:
    write(location, content(1), settings())
    geometry = {
        "identity": TierGeometry(
            Identity.of({"weights": "other"}, block_size=4, payload_bytes=512), SAMPLES.geometry.record_bytes
        ),
        "block size": SampleBlocks(block_size=8).geometry,
        "record": TierGeometry(SAMPLES.identity, SAMPLES.geometry.record_bytes + 64),
    }[seen]
    with pytest.raises(FingerprintMismatch, match=r"weights is other here|block size is 8 here|records of"):
        await backend.open(str(location), geometry)


@pytest.mark.asyncio
async def test_a_snapshot_of_another_model_is_replaced(backend: FolderBackend, location: Path) -> None:
    write(location, content(1), settings())
    other = SampleBlocks(block_size=8)
    sink = await backend.begin(str(location), other.geometry)
    await sink.add(other.shelf(), other.chain(other.shelf(), 2))
    await sink.commit()
    tier = await backend.open(str(location), other.geometry)
    assert tier.stats().blocks == 2
    await tier.close()


def test_files_are_private_and_their_names_say_nothing(location: Path) -> None:
    before = os.umask(0)
    try:
        location.mkdir(mode=0o777)
        write(location, content(1, ["secret"]), settings())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in files(location)} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (location, *location.iterdir()) if path.is_dir()} == {0o700}
    assert {path.name for path in files(location)} <= {"manifest.json", "lock", "tree"} | {
        f"blocks-{number:05d}.seg" for number in range(9)
    }
    assert not any(b"secret" in path.read_bytes() for path in files(location))


def test_blocks_lie_in_several_files(location: Path) -> None:
    write(location, content(1), settings())
    assert len(list(location.rglob("blocks-*.seg"))) == 3


@pytest.mark.parametrize("place", ["nul\x00", "file", "file/below", "x" * 300, "loop"])
@pytest.mark.asyncio
async def test_places_that_cannot_be_used_are_storage_errors(
    backend: FolderBackend, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("something")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError):
        await backend.begin(str(tmp_path / place), SAMPLES.geometry)
    with pytest.raises(StorageError):
        await backend.open(str(tmp_path / place), SAMPLES.geometry)
    assert (tmp_path / "file").read_text() == "something"


def test_a_folder_with_something_else_is_left_alone(location: Path) -> None:
    location.mkdir(mode=0o755)
    (location / "thesis.txt").write_text("words")
    with pytest.raises(StorageError, match="something else than a snapshot"):
        write(location, content(1), settings())
    assert location.stat().st_mode & 0o777 == 0o755
    assert entries(location) == ["thesis.txt"]


def test_what_a_crash_left_behind_goes_with_the_next_snapshot(location: Path) -> None:
    write(location, content(1), settings())
    stray = location / ("f" * 16)
    stray.mkdir()
    (stray / "blocks-00000.seg").write_bytes(b"half a block")
    (location / "notes").mkdir()
    writer = SnapshotWriter(location, SAMPLES.geometry, settings())
    writer.begin()
    assert not stray.exists()
    writer.abandon()
    assert (location / "notes").exists()  # not ours
    assert read(location) == blocks(content(1))


@pytest.mark.parametrize("damage", ["random", "empty", "half", "folder", "foreign", "link"])
def test_a_damaged_manifest_is_no_snapshot_and_is_replaced(location: Path, damage: str) -> None:
    write(location, content(1), settings())
    manifest = location / "manifest.json"
    good = manifest.read_bytes()
    manifest.unlink()
    if damage == "folder":
        manifest.mkdir()
    elif damage == "link":
        manifest.symlink_to("/etc/hostname")
    else:
        content_of = {"random": b"\x13" * 100, "empty": b"", "half": good[:50], "foreign": b"SQLite format 3\x00" * 99}
        manifest.write_bytes(content_of[damage])
    with pytest.raises(StorageError):
        read(location)
    write(location, content(2), settings())
    assert read(location) == blocks(content(2))


def test_records_of_another_length_are_not_taken(location: Path) -> None:
    odd = SampleBlocks(block_size=4, payload_bytes=64)
    with pytest.raises(StorageError, match="bytes instead of"):
        write(location, {SHELF: odd.chain(SHELF, 1)}, settings())
    with pytest.raises(StorageError, match="no snapshot"):
        read(location)


def test_space_that_must_stay_free_stays_free(location: Path) -> None:
    class Nearly(Filesystem):
        def free_bytes(self, folder: Path) -> int:
            return 20_000

    write(location, content(1), settings(Nearly()))
    full = settings(Nearly())
    with pytest.raises(StorageError, match="would stay free"):
        write(location, content(2), type(full)(fs=full.fs, generation=lambda: "e" * 16, free_floor=19_000))
    assert read(location) == blocks(content(1))


class Slow(Filesystem):
    """Waits in every ``fsync`` until it is let go."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.go = threading.Event()

    def fsync(self, file: File) -> None:
        self.waiting.set()
        assert self.go.wait(30)
        super().fsync(file)


@pytest.fixture
def slow() -> Iterator[Slow]:
    fs = Slow()
    yield fs
    fs.go.set()


@pytest.mark.asyncio
async def test_a_slow_disk_holds_neither_the_loop_nor_a_cancel(slow: Slow, location: Path) -> None:
    sink = await FolderBackend(settings(slow)).begin(str(location), SAMPLES.geometry)
    await sink.add(SHELF, content(1)[SHELF][:1])
    async with anyio.create_task_group() as group:
        group.start_soon(sink.commit)
        await anyio.to_thread.run_sync(slow.waiting.wait, 30)  # the loop goes on
        group.cancel_scope.cancel()
    slow.go.set()
    await sink.abandon()  # waits for the thread, which either was too late to stop or left nothing
    assert read(location) == blocks({SHELF: content(1)[SHELF][:1]})


@pytest.mark.asyncio
async def test_a_cancelled_begin_leaves_nothing_held(backend: FolderBackend, location: Path) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await backend.begin(str(location), SAMPLES.geometry)
    await (await backend.begin(str(location), SAMPLES.geometry)).abandon()


@pytest.mark.asyncio
async def test_a_cancelled_open_leaves_no_file_open(backend: FolderBackend, location: Path) -> None:
    write(location, content(1), settings())
    for _ in range(5):
        with anyio.move_on_after(0):
            await backend.open(str(location), SAMPLES.geometry)
    tier = await backend.open(str(location), SAMPLES.geometry)
    await tier.close()
    with anyio.fail_after(10):  # threads that were left behind close what they opened
        while open_files(location):  # noqa: ASYNC110  # threads tell nobody
            await anyio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_tenant_is_erased_from_what_is_there(backend: FolderBackend, location: Path) -> None:
    write(location, content(1), settings())
    assert await backend.erase(str(location), tenant_digest("a")) == 3
    assert await backend.erase(str(location), tenant_digest("a")) == 0
    assert read(location) == blocks({SHELF: content(1)[SHELF]})
    for place in (location / "none", "nul\x00"):
        with pytest.raises(StorageError):
            await backend.erase(str(place), tenant_digest("a"))


def test_options_are_checked() -> None:
    assert isinstance(FolderBackend.create({"segment_bytes": 1 << 20, "free_floor": 0}), FolderBackend)
    with pytest.raises(InvalidRequest, match="segment_bites"):
        FolderBackend.create({"segment_bites": 1})
    with pytest.raises(InvalidRequest, match="segment_bytes"):
        FolderBackend.create({"segment_bytes": 0})


def test_it_is_found_by_its_name() -> None:
    group = PluginGroup("octavo.persistence_backends", PersistenceBackend)
    assert group.resolve("octavo.storage.snapshot.backend:FolderBackend") is FolderBackend


@pytest.mark.asyncio
async def test_what_is_abandoned_while_it_is_written_stops_soon(location: Path) -> None:
    writer = SnapshotWriter(location, SAMPLES.geometry, settings())
    sink = FolderSink(writer)
    await sink.begin()
    writer.stop()
    with pytest.raises(StorageError):
        await sink.add(SHELF, content(1)[SHELF])
    await sink.abandon()
    assert entries(location) == ["lock"]
