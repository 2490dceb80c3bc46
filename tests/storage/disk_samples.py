"""Small disk stores for tests, without an event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from octavo.storage.base import Record, TierGeometry
from octavo.storage.disk.store import DiskStore
from octavo.storage.disk.tier import DiskOptions, store_settings
from octavo.storage.files.compression import compression
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import SampleBlocks
from octavo.telemetry.logging import get_logger

SAMPLES = SampleBlocks(block_size=4, payload_bytes=512)
SHELF = SAMPLES.shelf()
BYTES = (1 << 20) + (256 << 10)
"""About a hundred small blocks fit beside the index."""


class QuickFilesystem(Filesystem):
    """For tests that cut no power: nothing waits for the disk."""

    database_sync = "OFF"

    def fsync(self, file: File) -> None:
        pass

    def fsync_folder(self, path: Path) -> None:
        pass


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """Makes stores in one folder, with clocks that a test moves."""

    path: Path
    fs: Filesystem = field(default_factory=QuickFilesystem)
    clock: Clock = field(default_factory=Clock)
    wall: Clock = field(default_factory=lambda: Clock(1.7e9))

    def store(self, geometry: TierGeometry = SAMPLES.geometry, **options: object) -> DiskStore:
        chosen = DiskOptions(**{"path": str(self.path), "bytes": BYTES, "free_floor": 0, **options})  # type: ignore[arg-type]  # checked by the class
        return DiskStore(
            store_settings(chosen, geometry),
            geometry,
            compression(chosen.compression, chosen.itemsize),
            fs=self.fs,
            clock=self.clock,
            wall=self.wall,
            logger=get_logger("test"),
        )

    @contextmanager
    def opened(self, geometry: TierGeometry = SAMPLES.geometry, **options: object) -> Iterator[DiskStore]:
        store = self.store(geometry, **options)
        store.open()
        try:
            yield store
        finally:
            store.close()

    @property
    def home(self) -> Path:
        return self.path / SAMPLES.identity.digest[:16]


def names(records: Sequence[Record]) -> list[BlockName]:
    return [record.head.name for record in records]


def kept(store: DiskStore, records: Sequence[Record], shelf: Shelf = SHELF) -> list[bool]:
    """Which are there; each that is must be right."""
    found = store.get(shelf, names(records))
    for record, stored in zip(records, found, strict=True):
        assert stored is None or stored.data == record.data, "a wrong byte"
    return [stored is not None for stored in found]
