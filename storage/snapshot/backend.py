"""Snapshots in folders: the persistence backend ``folder``.

The format is in ``FORMAT.md``, how it is written safely in :mod:`octavo.storage.snapshot.writer`. What is stored is
not encrypted: K and V and the tokens of prompts can be read by whoever can read the files, which have mode 0600 in
folders of mode 0700. File names say nothing. Who may write to the folder is trusted not to forge blocks, unless the
engine has a key; then forged ones are misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import anyio
import msgspec

from ..base import Options, PersistenceBackend, Record, SnapshotSink, TierGeometry
from ..naming import Shelf
from ..options import NaturalInt, PositiveInt, read_options
from ..threads import Threads
from .rewrite import erase_tenant
from .tier import SnapshotTier
from .writer import SnapshotSettings, SnapshotWriter

_GRACE = 5.0
"""Seconds that giving up waits for a disk that does not answer. The rest happens when it does."""


class FolderOptions(msgspec.Struct, frozen=True):
    """What the backend can be told."""

    segment_bytes: PositiveInt = 256 << 20
    """Where a file of records is full, in bytes."""
    free_floor: NaturalInt = 256 << 20
    """Bytes that a snapshot leaves free on its file system; one that would take more fails and is removed."""


class FolderBackend(PersistenceBackend):
    """Keeps each snapshot in a folder. Local file systems only."""

    def __init__(self, settings: SnapshotSettings) -> None:
        self._settings = settings
        self._threads = Threads(1)

    @classmethod
    def create(cls, options: Options) -> Self:
        chosen = read_options(FolderOptions, options, "persistence backend folder")
        return cls(SnapshotSettings(segment_bytes=chosen.segment_bytes, free_floor=chosen.free_floor))

    async def begin(self, location: str, geometry: TierGeometry) -> FolderSink:
        sink = FolderSink(SnapshotWriter(Path(location), geometry, self._settings))
        try:
            await sink.begin()
        except BaseException:
            await sink.abandon()
            raise
        return sink

    async def open(self, location: str, geometry: TierGeometry) -> SnapshotTier:
        tier = SnapshotTier(Path(location), geometry, self._settings)
        try:
            await tier.open()
        except BaseException:
            await tier.close()
            raise
        return tier

    async def erase(self, location: str, tenant: bytes) -> int:
        return await self._threads.run(lambda: erase_tenant(self._settings, Path(location), tenant))


class FolderSink(SnapshotSink):
    """A snapshot that is being written, from an event loop. The work is done in threads, one call at a time; a call
    that is cancelled goes on there until it can be dropped, so whoever cancels one abandons the sink.
    """

    def __init__(self, writer: SnapshotWriter) -> None:
        """Use :meth:`FolderBackend.begin`."""
        self._writer = writer
        self._threads = Threads(4)  # one call at a time, those that were cancelled and still run, and one to give up

    async def begin(self) -> None:
        """Claim the location; see :meth:`FolderBackend.begin`."""
        await self._threads.run(self._writer.begin)

    async def add(self, shelf: Shelf, records: Sequence[Record]) -> None:
        batch = list(records)
        await self._threads.run(lambda: self._writer.add(shelf, batch))

    async def note(self, notes: bytes) -> None:
        await self._threads.run(lambda: self._writer.note(notes))

    async def commit(self) -> int:
        return await self._threads.run(self._writer.commit)

    async def abandon(self) -> None:
        self._writer.stop()
        with anyio.move_on_after(_GRACE, shield=True):
            await self._threads.run(self._writer.abandon)
