"""A snapshot made from another one. Everything here blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from ...errors import CorruptBlock
from ..base import Record, TierGeometry
from .files import OpenSnapshot, open_snapshot, read_manifest, resolved
from .writer import SnapshotSettings, SnapshotWriter

_BATCH: Final = 32
"""Blocks that are read at a time."""


def erase_tenant(settings: SnapshotSettings, location: Path, tenant: bytes) -> int:
    """Write the snapshot at ``location`` anew without the blocks of ``tenant`` (``Shelf.tenant``) and remove the old
    files; returns how many blocks they were. With none, nothing is written. Blocks that are bad go, too.

    :raises StorageError: when that cannot be done; the snapshot is as it was then.
    """
    location = resolved(location)
    manifest = read_manifest(settings.fs, location)
    geometry = TierGeometry(manifest.identity, manifest.record_bytes)
    writer = SnapshotWriter(location, geometry, settings)
    try:
        writer.begin()  # first: what is read after it is what is replaced
        with closing(open_snapshot(settings.fs, location, geometry)) as source:
            others = [row for row in source.tree.rows() if source.tree.shelf(row).tenant != tenant]
            erased = len(source.tree) - len(others)
            if erased:
                copy_blocks(source, others, writer)
                writer.commit()
            return erased
    finally:
        writer.abandon()


def copy_blocks(source: OpenSnapshot, rows: Sequence[int], writer: SnapshotWriter) -> int:
    """Add the good ones among ``rows`` of ``source`` to a snapshot; returns how many were bad."""
    bad = 0
    for at in range(0, len(rows), _BATCH):
        batch = rows[at : at + _BATCH]
        for row, found in zip(batch, source.read(batch), strict=True):
            if isinstance(found, CorruptBlock):
                bad += 1
            else:
                writer.add(source.tree.shelf(row), [Record(source.tree.head(row), found.data, found.meta)])
    return bad
