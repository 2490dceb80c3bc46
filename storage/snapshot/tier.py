"""A snapshot as a tier that takes no writes: the tree from memory, the records on demand.

What policies knew of its blocks comes with the tree. A record is read, and checked, only when it is asked for; a bad
one is dropped, counted, and a miss. The files stay open, so a snapshot can be read to the end while the next one takes
its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import msgspec
from anyio.lowlevel import checkpoint

from ...errors import CorruptBlock, StorageError
from ...telemetry.logging import RateLimited, get_logger
from ..base import Listed, Options, Record, Stored, Tier, TierGeometry, TierStats
from ..naming import BlockName, Shelf
from ..options import Text, read_options
from ..threads import Threads
from .files import OpenSnapshot, open_snapshot, read_manifest
from .rewrite import erase_tenant
from .writer import SnapshotSettings

_READERS = 4
_ROWS_PER_TURN = 256  # of a listing, before others get the event loop
_LOG_SECONDS = 30.0


class SnapshotOptions(msgspec.Struct, frozen=True):
    """What the tier can be told when it is made by name."""

    path: Text
    """Folder of the snapshot."""


class SnapshotTier(Tier):
    """The blocks of one snapshot. ``put`` declines everything."""

    persistent: ClassVar[bool] = True
    read_only: ClassVar[bool] = True

    def __init__(
        self,
        location: Path,
        geometry: TierGeometry,
        settings: SnapshotSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``settings``: for its files, and to write it anew when a tenant is erased. ``clock``: monotonic."""
        self._location = location
        self._geometry = geometry
        self._settings = settings
        self._threads = Threads(_READERS)
        self._swapping = threading.Lock()
        self._snapshot: OpenSnapshot | None = None
        self._closed = False
        self._gone: set[tuple[Shelf, BlockName]] = set()
        self._corrupt = 0
        self._declined = 0
        self._logger = get_logger("octavo.storage")
        self._limited = RateLimited(_LOG_SECONDS, clock)

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        return cls(Path(read_options(SnapshotOptions, options, "snapshot tier").path), geometry, SnapshotSettings())

    async def open(self) -> None:
        await self._threads.run(self._load)

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        self._opened()
        self._declined += len(records)
        return [False] * len(records)

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        snapshot = self._opened()
        rows = {name: row for name in names if (row := self._row(snapshot, shelf, name)) is not None}
        if not rows:
            return [None] * len(names)
        wanted = list(rows.values())
        found = dict(zip(rows, await self._threads.run(lambda: snapshot.read(wanted)), strict=True))
        if self._snapshot is not snapshot:  # something was erased meanwhile
            found = {name: each for name, each in found.items() if self._row(self._opened(), shelf, name) is not None}
        return [self._checked(shelf, name, found.get(name)) for name in names]

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        snapshot = self._opened()
        return [self._row(snapshot, shelf, name) is not None for name in names]

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        snapshot = self._snapshot
        if snapshot is None or self._closed:
            return 0
        for count, name in enumerate(names):
            if self._row(snapshot, shelf, name) is None:
                return count
        return len(names)

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Forget ``names`` until the snapshot is opened again: it is not written anew for single blocks."""
        snapshot = self._opened()
        there = {name for name in names if self._row(snapshot, shelf, name) is not None}
        self._gone.update((shelf, name) for name in there)
        return len(there)

    async def erase(self, tenant: bytes) -> int:
        """Forget the tenant, and write what is at the location anew without its blocks; the old files are removed.

        :raises StorageError: when that cannot be done; here they are forgotten all the same.
        """
        snapshot = self._opened()
        rows = [
            row
            for shelf in snapshot.tree.shelves
            if shelf.tenant == tenant
            for row in snapshot.tree.rows(shelf)
            if self._there(snapshot, row)
        ]
        self._gone.update((snapshot.tree.shelf(row), snapshot.tree.name(row)) for row in rows)
        await self._threads.run(lambda: self._erase_below(snapshot, tenant))
        tree = self._opened().tree  # may be another one now
        self._gone = {at for at in self._gone if tree.row(*at) is not None}
        return len(rows)

    async def notes(self) -> bytes | None:
        """From memory."""
        return self._opened().manifest.notes

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        snapshot = self._opened()
        for row in snapshot.tree.rows(shelf):
            if row % _ROWS_PER_TURN == 0:
                await checkpoint()
            if self._there(snapshot, row):
                yield snapshot.tree.listed(row)

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        snapshot = self._opened()
        rows = snapshot.tree.children(shelf, parent)
        return [snapshot.tree.listed(row) for row in rows if self._there(snapshot, row)]

    async def flush(self) -> None:
        self._opened()

    async def close(self) -> None:
        with self._swapping:
            self._closed = True
            if self._snapshot is not None:
                self._snapshot.close()

    def stats(self) -> TierStats:
        snapshot = self._snapshot
        if snapshot is None or self._closed:
            return TierStats(declined=self._declined, corrupt=self._corrupt, healthy=False, problem="not open")
        return TierStats(
            blocks=len(snapshot.tree) - len(self._gone),
            bytes=snapshot.manifest.bytes,
            declined=self._declined,
            corrupt=self._corrupt,
        )

    def _checked(self, shelf: Shelf, name: BlockName, found: Stored | CorruptBlock | None) -> Stored | None:
        if (shelf, name) in self._gone:  # forgotten while it was read
            return None
        if not isinstance(found, CorruptBlock):
            return found
        self._gone.add((shelf, name))
        self._corrupt += 1
        self._limited.log(
            self._logger.warning, "snapshot_block_corrupt", location=str(self._location), reason=str(found)
        )
        return None

    def _erase_below(self, snapshot: OpenSnapshot, tenant: bytes) -> None:
        erase_tenant(self._settings, self._location, tenant)
        if read_manifest(self._settings.fs, self._location).generation != snapshot.manifest.generation:
            self._load()  # the files that are open here still have the bytes

    def _load(self) -> None:
        fresh = open_snapshot(self._settings.fs, self._location, self._geometry)
        with self._swapping:
            if self._closed:  # while this waited for the disk
                fresh.close()
                return
            before, self._snapshot = self._snapshot, fresh
        if before is not None:
            before.close()

    def _opened(self) -> OpenSnapshot:
        snapshot = self._snapshot
        if snapshot is None or self._closed:
            raise StorageError("the snapshot is not open; open it once, before anything else")
        return snapshot

    def _row(self, snapshot: OpenSnapshot, shelf: Shelf, name: BlockName) -> int | None:
        return None if (shelf, name) in self._gone else snapshot.tree.row(shelf, name)

    def _there(self, snapshot: OpenSnapshot, row: int) -> bool:
        return (snapshot.tree.shelf(row), snapshot.tree.name(row)) not in self._gone
