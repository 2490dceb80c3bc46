"""Small snapshots for tests, written without an event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from octavo.errors import CorruptBlock
from octavo.storage.base import Record
from octavo.storage.files.filesystem import Filesystem
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.snapshot.files import open_snapshot
from octavo.storage.snapshot.writer import SnapshotSettings, SnapshotWriter
from octavo.storage.testing.contract import SampleBlocks

SAMPLES = SampleBlocks(block_size=4, payload_bytes=512)
Content = Mapping[Shelf, Sequence[Record]]
Blocks = dict[tuple[Shelf, BlockName], bytes]


def settings(fs: Filesystem | None = None, *, wall: float = 1000.0, segment_bytes: int = 3 * 4096) -> SnapshotSettings:
    """Two blocks fit in a segment."""
    return SnapshotSettings(
        fs=fs or Filesystem(),
        wall=lambda: wall,
        segment_bytes=segment_bytes,
        free_floor=0,
    )


def content(seed: int, tenants: Sequence[str | None] = (None, "a")) -> Content:
    """Three blocks for each of ``tenants``."""
    return {SAMPLES.shelf(tenant): SAMPLES.chain(SAMPLES.shelf(tenant), 3, seed=seed) for tenant in tenants}


def blocks(of: Content) -> Blocks:
    return {(shelf, record.head.name): bytes(record.data) for shelf, records in of.items() for record in records}


def write(location: Path, of: Content, how: SnapshotSettings) -> None:
    writer = SnapshotWriter(location, SAMPLES.geometry, how)
    try:
        writer.begin()
        for shelf, records in of.items():
            writer.add(shelf, records)
        writer.commit()
    finally:
        writer.abandon()


def read(location: Path, bad: Callable[[str], None] | None = None) -> Blocks:
    """Every good block of the snapshot; ``bad`` is told why others are not."""
    found: Blocks = {}
    with closing(open_snapshot(Filesystem(), location, SAMPLES.geometry)) as snapshot:
        rows = list(snapshot.tree.rows())
        for row, item in zip(rows, snapshot.read(rows), strict=True):
            if not isinstance(item, CorruptBlock):
                found[snapshot.tree.shelf(row), snapshot.tree.name(row)] = bytes(item.data)
            elif bad is None:
                raise item
            else:
                bad(str(item))
    return found


def files(location: Path) -> list[Path]:
    return sorted(path for path in location.rglob("*") if path.is_file())


def open_files(location: Path) -> list[str]:
    """Files below ``location`` that this process has open; those that were removed end in ``(deleted)``."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(each.readlink()))
    return [target for target in found if target.startswith(str(location))]
