"""How the disk tier finds its blocks again: from the index, or, where that is of no use, from the segments."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...errors import CorruptBlock, FingerprintMismatch, StorageError, describe
from ...telemetry.logging import Logger
from ..base import Head
from ..files.filesystem import File, Filesystem
from ..files.segment import SegmentReader
from ..identity import Identity
from ..naming import name_after
from ..ranking import Ranking
from .entries import Entries, Entry
from .folder import DiskFolder, OtherHome, read_identity
from .index import BrokenIndex, DiskIndex, Row
from .segments import SegmentSet
from .state import DiskState
from .writer import BATCH_ROWS


class DiskOpener:
    """Opens one folder. Blocks."""

    def __init__(
        self,
        fs: Filesystem,
        root: Path,
        identity: Identity,
        *,
        segment_bytes: int,
        rank: Callable[[], Ranking],
        clock: Callable[[], float],
        wall: Callable[[], float],
        logger: Logger,
    ) -> None:
        """``rank`` gives the blocks that are found an order of eviction."""
        self._fs = fs
        self._root = root
        self._identity = identity
        self._segment_bytes = segment_bytes
        self._rank = rank
        self._clock = clock
        self._wall = wall
        self._logger = logger

    def open(self) -> DiskState:
        """To read and write.

        :raises OSError, sqlite3.Error: when that cannot be. ``BlockingIOError`` when another engine has the folder.
        """
        folder = self._folder()
        lock = folder.prepare()
        if folder.newer is not None:
            self._logger.warning("disk_tier_set_aside", path=str(folder.newer), problem="a later Octavo wrote it")
        try:
            return self._claimed(folder, lock)
        except BaseException:
            lock.close()
            raise

    def view(self) -> DiskState:
        """To read only, as the folder is now; without a lock, and without writing anything. Empty when there is none.

        :raises OSError: when the folder cannot be read.
        """
        state = self._state(self._folder(), None, None)
        try:
            found = state.folder.segments()
        except FileNotFoundError:
            return state
        for number, size in found.items():
            state.segments.found(number, size)
        try:
            index = DiskIndex.open(self._fs, state.folder.index, read_only=True)
        except (StorageError, OSError):
            self._fill(state, self._walk(state))
            return state
        with contextlib.closing(index):
            self._fill(state, self._rows(state, index))
        return state

    def nothing(self) -> DiskState:
        """An empty one, to read only."""
        return self._state(self._folder(), None, None)

    def _claimed(self, folder: DiskFolder, lock: File, problem: str = "") -> DiskState:
        """``problem``: what was wrong with the database that was there."""
        try:
            index = DiskIndex.open(self._fs, folder.index, read_only=False)
        except BrokenIndex as err:
            folder.set_aside(folder.index)
            return self._claimed(folder, lock, str(err))
        try:
            state = self._filled(folder, lock, index, problem)
        except BrokenIndex as err:
            index.close()
            folder.set_aside(folder.index)
            return self._claimed(folder, lock, str(err))
        except BaseException:
            index.close()
            raise
        return state

    def _filled(self, folder: DiskFolder, lock: File, index: DiskIndex, problem: str) -> DiskState:
        state = self._state(folder, index, lock)
        for number, size in folder.segments().items():
            state.segments.found(number, size)
        if index.is_new:
            self._rebuild(state, index, problem or "it was missing")
        else:
            self._fill(state, index.load())
        state.removed += index.dropped
        if index.dropped:
            self._logger.warning("disk_tier_rows_dropped", path=str(folder.home), rows=len(index.dropped))
        state.notes_bytes = folder.notes_bytes()
        state.stray_bytes = sum(item.bytes for item in folder.strays())
        if state.entries.ranking.follows:
            state.entries.wake()
        others = folder.others()
        state.other_bytes = sum(other.bytes for other in others)
        if others and not len(state.entries):
            self._tell_why_cold(folder, others[-1])
        return state

    def _tell_why_cold(self, folder: DiskFolder, other: OtherHome) -> None:
        """There are blocks, but of another identity; ``other`` is the one used last."""
        found = read_identity(self._fs, other.path)
        if found is not None:
            self._logger.warning(
                "disk_tier_starts_cold",
                path=str(folder.root),
                problem=f"its blocks are of another model: {'; '.join(self._identity.differences(found.identity))}",
            )

    def _rebuild(self, state: DiskState, index: DiskIndex, problem: str) -> None:
        """Fill a new database with what the headers of the segments say."""
        self._fill(state, self._walk(state))
        renew(state, index)
        if state.segments.sizes:
            self._logger.warning(
                "disk_tier_index_rebuilt", path=str(state.folder.home), problem=problem, blocks=len(state.entries)
            )

    def _walk(self, state: DiskState) -> Iterator[Row]:
        row = 0
        for number in sorted(state.segments.sizes):
            try:
                with state.segments.reader(number) as reader:
                    reader.check()
                    for each in _frames(reader):
                        row += 1
                        yield each._replace(id=row)
            except (CorruptBlock, FingerprintMismatch, OSError) as err:
                self._logger.warning("disk_tier_segment_unusable", segment=number, problem=describe(err))

    def _rows(self, state: DiskState, index: DiskIndex) -> Iterator[Row]:
        """Of a database that somebody else may be writing: what cannot be read of it is left out."""
        try:
            yield from index.load()
        except BrokenIndex:
            yield from self._walk(state)

    def _fill(self, state: DiskState, rows: Iterable[Row]) -> None:
        """Take over the rows whose place exists. The later one of two for the same block counts."""
        sizes, inside, now = state.segments.sizes, state.entries.meta_inside, self._wall()
        last = 0
        for number, shelf, head, location, meta in rows:
            last = max(last, number)
            state.segments.taken(location.segment)
            if location.offset + location.length > sizes.get(location.segment, 0):
                state.removed.append(number)
                continue
            if (old := state.entries.get(shelf, head.name)) is not None:
                state.forget(old)
            entry = Entry(shelf, head, location, number, inside(meta))
            state.entries.add((entry,))
            if meta.written > now:  # put it right in the index too, or it would be new again at each start
                state.dirty[number] = entry
            state.segments.keep(location)
        state.next_row = max(state.next_row, last + 1)

    def _folder(self) -> DiskFolder:
        return DiskFolder(self._fs, self._root, self._identity, self._wall)

    def _state(self, folder: DiskFolder, index: DiskIndex | None, lock: File | None) -> DiskState:
        segments = SegmentSet(self._fs, folder.home, identity=self._identity.digest, segment_bytes=self._segment_bytes)
        entries = Entries(self._rank(), self._clock, self._wall)
        return DiskState(fs=self._fs, folder=folder, entries=entries, segments=segments, index=index, lock=lock)


def renew(state: DiskState, index: DiskIndex) -> None:
    """Write all blocks into an empty database, which counts from then on.

    :raises sqlite3.Error: when that fails.
    """
    state.settle()
    entries = state.entries.all()
    for at in range(0, len(entries), 16 * BATCH_ROWS):
        some = entries[at : at + 16 * BATCH_ROWS]
        index.tidy()
        index.commit(put=[Row(e.row, e.shelf, e.head, e.location, state.entries.meta_outside(e)) for e in some])
    index.complete()
    state.removed.clear()
    state.dirty.clear()


def repair(fs: Filesystem, state: DiskState) -> None:
    """Replace a database that turned out to be damaged while in use.

    :raises OSError, sqlite3.Error, StorageError: when that fails.
    """
    if state.index is not None:
        state.index.close()
    state.folder.set_aside(state.folder.index)
    state.index = DiskIndex.open(fs, state.folder.index, read_only=False)
    renew(state, state.index)


def is_damage(error: Exception) -> bool:
    """Whether an error of SQLite says that the database itself is damaged."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _frames(reader: SegmentReader) -> Iterator[Row]:
    for location, head in reader.walk():
        if head is None:
            continue
        tokens = reader.tokens(location, head)
        if name_after(head.parent, tokens) == head.name:
            yield Row(0, head.shelf, Head(head.name, head.parent, head.start, tokens), location, head.meta)
