"""The disk tier without its event loop: everything here blocks and may be called from any thread."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import StorageError, describe
from ...telemetry.logging import Logger, RateLimited
from ..base import Listed, Meta, Record, Stored, TierGeometry, TierStats
from ..files.compression import Compression, unpacker
from ..files.filesystem import Filesystem
from ..files.frame import ALIGN
from ..naming import BlockName, Shelf
from ..ranking import Ranking
from .erase import VerifyReport, erase, verify
from .opening import DiskOpener
from .puts import DiskPuts, Parts
from .reader import DiskReader
from .room import DiskRoom
from .state import DiskState
from .writer import DiskWriter

LOG_SECONDS = 60.0
_NOTHING: frozenset[BlockName] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Bounds in bytes, times in seconds; see :class:`~octavo.storage.disk.tier.DiskTier` for what they mean. ``rank``
    makes orders of eviction, one for each time that the folder is opened.
    """

    path: Path
    capacity: int
    segment_bytes: int
    free_floor: int
    retry_seconds: float
    keep_foreign_seconds: float
    strict: bool
    read_only: bool
    rank: Callable[[], Ranking]


class DiskStore:
    """Keeps blocks in one folder. Writes wait for each other, reads for nobody."""

    def __init__(
        self,
        settings: StoreSettings,
        geometry: TierGeometry,
        compression: Compression,
        *,
        fs: Filesystem,
        clock: Callable[[], float],
        wall: Callable[[], float],
        logger: Logger,
    ) -> None:
        self._settings = settings
        self._geometry = geometry
        self._compression = compression
        self._fs = fs
        self._clock = clock
        self._logger = logger
        self._log = RateLimited(LOG_SECONDS, clock)
        self._opener = DiskOpener(
            fs,
            settings.path,
            geometry.identity,
            segment_bytes=settings.segment_bytes,
            rank=settings.rank,
            clock=clock,
            wall=wall,
            logger=logger,
        )
        self._writing = threading.Lock()
        self._parts: Parts | None = None
        self._closing = False
        self._puts = DiskPuts(
            fs,
            settings.path,
            retry_seconds=settings.retry_seconds,
            clock=clock,
            logger=logger,
            log=self._log,
        )

    def open(self) -> None:
        """Find the blocks that are there.

        :raises StorageError: in strict mode when the folder cannot be written; otherwise it is only read then, and if
            that is not possible either, the store is empty.
        """
        with self._exclusive():
            if self._settings.read_only:
                self._puts.problem = "opened with read_only"
                self._parts = self._view()
            elif (problem := self._claim()) is not None:
                if self._settings.strict:
                    raise StorageError(self._why(problem)) from problem
                self._puts.pause(self._why(problem))
                self._parts = self._view()

    def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Keep ``records``; for each, whether it is kept."""
        with self._exclusive():
            parts = self._open_parts()
            self._note(parts, shelf, {record.head.name: record.meta for record in records})
            new = {
                record.head.name: record
                for record in records
                if len(record.data) == self._geometry.record_bytes
                and parts.state.entries.get(shelf, record.head.name) is None
            }
            if new and self._puts.may_try and self._is_writable():
                parts = self._open_parts()
                self._puts.put(parts, shelf, new)
            kept = [parts.state.entries.get(shelf, record.head.name) is not None for record in records]
            self._puts.note(records, kept)
            parts.state.counters.declined += kept.count(False)
            return kept

    def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """Read and check blocks."""
        return self._open_parts().reader.get(shelf, names)

    def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """From memory."""
        entries = self._open_parts().state.entries
        return [entries.get(shelf, name) is not None for name in names]

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        """How many leading ones are there; from memory."""
        parts = self._parts
        if parts is None:
            return 0
        for number, name in enumerate(names):
            if parts.state.entries.get(shelf, name) is None:
                return number
        return len(names)

    def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Take what policies know; in the index with the next ``flush``."""
        self._note(self._open_parts(), shelf, metas)

    def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Forget blocks, in the index too; where that cannot be written, only in memory, and that is an error."""
        with self._exclusive():
            parts = self._open_parts()
            found = [entry for name in dict.fromkeys(names) if (entry := parts.state.entries.get(shelf, name))]
            if parts.state.index is None:
                parts.state.gone += [(shelf, entry.head.name) for entry in found]
            gone = sum(parts.state.forget(entry) for entry in found)
            if gone and parts.state.index is not None:
                with self._mapped("delete from"):
                    self._puts.flush(parts)
            return gone

    def note(self, notes: bytes) -> None:
        """Keep ``notes`` instead of those before. Where nothing can be written, or there is no room, they are lost."""
        with self._exclusive(), self._mapped("note in"):
            parts = self._open_parts()
            if parts.state.index is None or (notes and not parts.room.make(len(notes), 0, _NOTHING)):
                return
            parts.state.notes_bytes = parts.state.folder.note(notes)

    def notes(self) -> bytes | None:
        """What was noted, if it is there and whole."""
        with self._mapped("read the notes in"):
            return self._open_parts().state.folder.notes()

    def erase(self, tenant: bytes) -> int:
        """Overwrite a tenant's blocks."""
        with self._exclusive(), self._mapped("erase from"):
            parts = self._open_parts()
            self._puts.flush(parts)
            return erase(parts.state, parts.writer, parts.room, tenant)

    def flush(self) -> None:
        """Write to the index what policies know; blocks are durable since their ``put`` returned."""
        with self._exclusive():
            parts = self._open_parts()
            if parts.state.index is not None:
                with self._mapped("flush"):
                    self._puts.flush(parts)

    def compact(self) -> int:
        """Rewrite the segments that have dead bytes; returns how many. Reads go on meanwhile."""
        with self._exclusive(), self._mapped("compact"):
            parts = self._open_parts()
            self._puts.flush(parts)
            return parts.room.compact()

    def verify(self) -> VerifyReport:
        """Read everything and report what is wrong; nothing is changed."""
        with self._exclusive():
            return verify(self._open_parts().state)

    def listing(self, shelf: Shelf | None) -> list[Listed]:
        """All blocks, parents before children."""
        entries = self._open_parts().state.entries
        return [entries.listed(entry) for entry in entries.all(shelf)]

    def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        """From memory."""
        entries = self._open_parts().state.entries
        return [entries.listed(entry) for entry in entries.children(shelf, parent)]

    def stats(self) -> TierStats:
        """From memory."""
        parts, problem = self._parts, self._puts.problem
        if parts is None:
            return TierStats(capacity=self._settings.capacity, healthy=False, problem=problem or "not open")
        state = parts.state
        return TierStats(
            blocks=len(state.entries),
            bytes=state.bytes,
            capacity=self._settings.capacity,
            evicted=state.counters.evicted,
            declined=state.counters.declined,
            corrupt=state.counters.corrupt,
            healthy=not problem,
            problem=problem,
            policy=state.entries.ranking.name,
            policy_faults=state.entries.ranking.faults,
        )

    def begin_close(self) -> None:
        """From now on everything is refused, and whoever holds the store gives it back. Never blocks."""
        self._closing = True

    def close(self) -> None:
        """Flush what can be flushed and give everything back, as soon as a write under way has ended. Idempotent."""
        self._closing = True
        with self._exclusive():
            pass

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One writer at a time. Whoever leaves last after ``close`` was called cleans up, be it a caller that was
        given up long ago.
        """
        with self._writing:
            try:
                yield
            finally:
                if self._closing:
                    self._shut()

    def _shut(self) -> None:
        parts = self._parts
        if parts is not None and parts.state.index is not None:
            with contextlib.suppress(OSError, sqlite3.Error, StorageError):
                parts.writer.flush()
                parts.state.index.tidy(always=True)
                parts.state.folder.stamp()
        self._parts = None
        _release(parts)

    def _open_parts(self) -> Parts:
        parts = self._parts
        if parts is None or self._closing:
            raise StorageError("the disk tier is not open")
        return parts

    def _assemble(self, state: DiskState) -> Parts:
        settings = self._settings
        writer = DiskWriter(state, self._compression, settings.segment_bytes - ALIGN)
        room = DiskRoom(
            state,
            writer,
            capacity=settings.capacity,
            reserve=settings.segment_bytes,
            free_floor=settings.free_floor,
        )
        reader = DiskReader(state, unpacker(), self._geometry.record_bytes, self._logger, self._log)
        return Parts(state, writer, room, reader)

    def _is_writable(self) -> bool:
        """Whether blocks can be written; a folder that could not be, or was another engine's, is tried again."""
        if self._open_parts().state.index is not None:
            return True
        if self._settings.read_only:
            return False
        if (problem := self._claim()) is not None:
            self._puts.pause(self._why(problem))
            return False
        self._puts.resume()
        return True

    def _claim(self) -> Exception | None:
        """Open the folder for writing; what was open before stays when that fails."""
        before, parts = self._parts, None
        try:
            parts = self._assemble(self._opener.open())
            for shelf, name in () if before is None else before.state.gone:
                if (entry := parts.state.entries.get(shelf, name)) is not None:
                    parts.state.forget(entry)
            self._trim(parts)
        except (OSError, sqlite3.Error, StorageError) as err:
            _release(parts)
            return err
        self._parts = parts
        return None

    def _view(self) -> Parts:
        """For reading only; empty when that is not possible either."""
        try:
            return self._assemble(self._opener.view())
        except OSError as err:
            self._puts.problem += f"; and nothing can be read: {describe(err)}"
            return self._assemble(self._opener.nothing())

    def _trim(self, parts: Parts) -> None:
        """After opening: what has become useless goes, and the bound may be a smaller one than last time."""
        self._puts.flush(parts)
        parts.room.remove_dead()
        parts.room.remove_others(self._settings.keep_foreign_seconds)
        parts.room.make(0, 0, _NOTHING)

    def _note(self, parts: Parts, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        entries = parts.state.entries
        for name, meta in metas.items():
            if (entry := entries.get(shelf, name)) is not None:
                entries.note(entry, entries.meta_inside(meta))
                parts.state.dirty[entry.row] = entry

    @contextlib.contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as err:
            raise StorageError(f"cannot {what} {self._settings.path}: {describe(err)}") from err

    def _why(self, error: Exception) -> str:
        path = self._settings.path
        if isinstance(error, BlockingIOError):
            return f"{path} is in use by another engine; give each engine that writes a folder of its own"
        return f"cannot write to {path}: {describe(error)}"


def _release(parts: Parts | None) -> None:
    if parts is None:
        return
    parts.state.segments.seal()
    if parts.state.index is not None:
        parts.state.index.close()
    if parts.state.lock is not None:
        parts.state.lock.close()
