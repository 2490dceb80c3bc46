"""The disk tier when the disk is full: it never pushes out the beginning of the prompt whose end it is to keep."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from octavo.storage.base import Record
from octavo.storage.disk.store import DiskStore
from octavo.storage.files.filesystem import File
from octavo.storage.testing.contract import SampleBlocks
from octavo.tests.storage.disk_samples import SAMPLES, SHELF, Bench, QuickFilesystem, kept, names

CHAIN = SAMPLES.chain(SHELF, 40)
OTHER = SAMPLES.chain(SHELF, 20, seed=1)
FLOOR = 1 << 16


class FullDisk(QuickFilesystem):
    """Refuses segments more than ``limit`` bytes altogether."""

    limit = 1 << 40

    def __init__(self, root: Path) -> None:
        self.root = root

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*.seg"))

    def fill(self) -> None:
        """From now on there is room for nothing more."""
        self.limit = self.used()

    def write(self, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        more = offset + sum(map(len, buffers)) - self.size(file)
        if file.path.suffix == ".seg" and self.used() + more > self.limit:
            raise OSError(errno.ENOSPC, "full", str(file.path))
        super().write(file, offset, buffers)


class LowDisk(FullDisk):
    """Writes everything, but says that others need what is left beyond ``limit``."""

    def write(self, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        QuickFilesystem.write(self, file, offset, buffers)

    def free_bytes(self, folder: Path) -> int:
        return self.limit + FLOOR - self.used()


Disk = Callable[[Path], FullDisk]
DISKS = pytest.mark.parametrize("disk", [FullDisk, LowDisk])


def is_reachable(store: DiskStore, records: Sequence[Record]) -> bool:
    """Whether every block that is kept can be reached from the beginning."""
    return sum(kept(store, records)) == store.peek(SHELF, names(records))


@DISKS
def test_the_end_of_a_prompt_does_not_push_out_its_beginning(tmp_path: Path, disk: Disk) -> None:
    fs = disk(tmp_path)
    with Bench(tmp_path / "disk", fs=fs).opened(free_floor=FLOOR) as store:
        assert all(store.put(SHELF, CHAIN[:30]))
        fs.fill()
        assert store.put(SHELF, CHAIN[30:]) == [False] * 10
        assert kept(store, CHAIN) == [True] * 30 + [False] * 10
        assert store.stats().evicted == 0


@DISKS
def test_other_prompts_make_room_for_it(tmp_path: Path, disk: Disk) -> None:
    fs = disk(tmp_path)
    with Bench(tmp_path / "disk", fs=fs).opened(free_floor=FLOOR) as store:
        assert all(store.put(SHELF, OTHER))
        assert all(store.put(SHELF, CHAIN[:30]))
        fs.fill()
        store.put(SHELF, CHAIN[30:])
        assert store.peek(SHELF, names(CHAIN)) == 40
        assert store.stats().evicted > 0
        assert is_reachable(store, OTHER)


@DISKS
def test_whatever_is_put_on_a_full_disk_can_be_reached(tmp_path: Path, disk: Disk) -> None:
    fs = disk(tmp_path)
    chains = [SAMPLES.chain(SHELF, 24, seed=seed) for seed in range(3)]
    with Bench(tmp_path / "disk", fs=fs).opened(free_floor=FLOOR) as store:
        for at in range(0, 24, 4):
            for chain in chains:
                store.put(SHELF, chain[: at + 4])
                assert all(is_reachable(store, each) for each in chains)
            if at == 8:
                fs.fill()


def test_a_database_that_has_outgrown_a_smaller_bound_is_started_over(tmp_path: Path) -> None:
    samples = SampleBlocks(block_size=512, payload_bytes=512)  # many tokens: the database is what is large
    bench = Bench(tmp_path / "disk")
    shelf = samples.shelf()
    with bench.opened(samples.geometry, bytes=1 << 30) as store:
        assert all(store.put(shelf, samples.chain(shelf, 1200)))
    with bench.opened(samples.geometry, bytes=2 << 20) as store:
        more = samples.chain(shelf, 2, seed=1)
        assert store.put(shelf, more) == [True, True]
        assert kept(store, more, shelf) == [True, True]
        assert store.stats().bytes <= 2 << 20
