"""Tools and what is not theirs: blocks of other models, of engines with other settings, folders of the user."""

from __future__ import annotations

import asyncio
import errno
import stat
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from octavo.errors import StorageError
from octavo.storage.base import Record
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.maintenance import tools as maintenance
from octavo.storage.testing.contract import SampleBlocks
from octavo.tests.storage.disk_samples import SAMPLES, SHELF, Bench, Clock, kept
from octavo.tests.storage.snapshot_samples import settings, write

HOW = settings()
OTHER = SampleBlocks(block_size=4, payload_bytes=256)
WIDE = SampleBlocks(block_size=4, payload_bytes=16 << 10)
WIDE_SHELF = WIDE.shelf()


def compressible(count: int) -> list[Record]:
    """Blocks of numbers of four bytes, each of which is the number of its place."""
    records = []
    for record in WIDE.chain(WIDE_SHELF, count):
        row = WIDE.codec.buffer(1)
        WIDE.codec.payloads(row)[0].data[:] = array("I", range(WIDE.codec.payload_bytes // 4)).tobytes()
        records.append(Record(record.head, WIDE.codec.seal(row[0], WIDE_SHELF, record.head, 0.0)))
    return records


def test_compressed_blocks_of_long_numbers_are_sound_to_tools_that_do_not_know_the_length(tmp_path: Path) -> None:
    records = compressible(3)
    with Bench(tmp_path / "disk").opened(WIDE.geometry, compression="zstd", itemsize=4) as store:
        assert all(store.put(WIDE_SHELF, records))
        assert store.stats().bytes < 3 * WIDE.codec.payload_bytes + (256 << 10)
    report = asyncio.run(maintenance.verify(tmp_path / "disk", HOW))
    assert (report.blocks, list(report.problems)) == (3, [])
    assert asyncio.run(maintenance.create(tmp_path / "disk", tmp_path / "snap", HOW)) == (3, 0, 0)


@pytest.mark.parametrize("itemsize", [1, 2, 8])
def test_compressed_blocks_are_read_whatever_the_setting_is_now(tmp_path: Path, itemsize: int) -> None:
    records = compressible(3)
    bench = Bench(tmp_path / "disk")
    with bench.opened(WIDE.geometry, compression="zstd", itemsize=4) as store:
        store.put(WIDE_SHELF, records)
    with bench.opened(WIDE.geometry, compression="zstd", itemsize=itemsize) as store:
        assert kept(store, records, WIDE_SHELF) == [True] * 3


def two_old_models(path: Path) -> None:
    """A folder with blocks of two models that nobody has used for years."""
    for samples in (SAMPLES, OTHER):
        with Bench(path, wall=Clock(1e9)).opened(samples.geometry, keep_foreign_seconds=1e300) as store:
            assert all(store.put(samples.shelf(), samples.chain(samples.shelf(), 3)))


async def compact(path: Path) -> None:
    await maintenance.compact(path / "disk", HOW)


async def erase_somebody(path: Path) -> None:
    await maintenance.erase(path / "disk", SAMPLES.shelf("nobody").tenant, HOW)


async def bring_in(path: Path) -> None:
    await maintenance.import_snapshot(path / "snap", path / "disk", HOW)


@pytest.mark.parametrize("tool", [compact, erase_somebody, bring_in])
def test_no_tool_removes_the_blocks_of_other_models(tmp_path: Path, tool: Callable[[Path], Awaitable[None]]) -> None:
    two_old_models(tmp_path / "disk")
    write(tmp_path / "snap", {SHELF: SAMPLES.chain(SHELF, 3)}, HOW)

    async def run() -> list[int]:
        await tool(tmp_path)
        return [each.blocks for each in await maintenance.inspect(tmp_path / "disk", HOW)]

    assert asyncio.run(run()) == [3, 3]


@pytest.mark.parametrize("prompts", [1, 4])
@pytest.mark.parametrize("room", [0, 100_000])
def test_an_import_for_which_the_disk_is_too_small_is_an_error(
    tmp_path: Path, prompts: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [SAMPLES.chain(SHELF, 100 // prompts, seed=seed) for seed in range(prompts)]
    write(tmp_path / "snap", {SHELF: [record for chain in chains for record in chain]}, HOW)
    real = Filesystem.write

    def write_or_not(fs: Filesystem, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        used = sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.seg"))
        if file.path.suffix == ".seg" and used + sum(map(len, buffers)) > room:
            raise OSError(errno.ENOSPC, "full")
        real(fs, file, offset, buffers)

    monkeypatch.setattr(Filesystem, "write", write_or_not)
    with pytest.raises(StorageError, match=r"the others not: .*full"):
        asyncio.run(maintenance.import_snapshot(tmp_path / "snap", tmp_path / "disk", HOW))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_holds_other_things_keeps_its_mode(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    (root / "mine").mkdir(parents=True)
    root.chmod(0o755)
    bench = Bench(root)
    with bench.opened() as store:
        assert store.put(SHELF, SAMPLES.chain(SHELF, 1)) == [True]
    assert mode(root) == 0o755
    assert mode(bench.home) == 0o700
    assert (root / "mine").is_dir()


def test_a_folder_of_our_own_is_closed_to_others(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    root.chmod(0o755)
    with Bench(root).opened():
        assert mode(root) == 0o700
