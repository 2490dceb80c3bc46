"""How the disk tier writes when the disk may be full or broken: one more try, then a pause, then again."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import StorageError, describe
from ...telemetry.logging import Logger, RateLimited
from ..base import Record
from ..files.filesystem import Filesystem
from ..files.frame import Frame
from ..naming import BlockName, Shelf
from .opening import is_damage, repair
from .reader import DiskReader
from .refused import Refused
from .room import DiskRoom
from .state import DiskState
from .writer import DiskWriter, bytes_of

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SQLITE_FULL = 13


class Parts(NamedTuple):
    """What works on one open folder."""

    state: DiskState
    writer: DiskWriter
    room: DiskRoom
    reader: DiskReader


class DiskPuts:
    """Writes blocks, and never raises for a fault of the disk. One thread at a time."""

    def __init__(
        self,
        fs: Filesystem,
        path: Path,
        *,
        retry_seconds: float,
        clock: Callable[[], float],
        logger: Logger,
        log: RateLimited,
    ) -> None:
        self.problem = ""
        """Why nothing is written now; empty when all is well."""
        self._fs = fs
        self._path = path
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._logger = logger
        self._log = log
        self._refused = Refused(clock)
        self._paused_until: float | None = None

    @property
    def may_try(self) -> bool:
        """Whether writes do not pause, or have paused for long enough."""
        return self._paused_until is None or self._clock() >= self._paused_until

    def put(self, parts: Parts, shelf: Shelf, records: Mapping[BlockName, Record]) -> None:
        """Write those of ``records``, none of which is there, that there is room for."""
        wanted = self._refused.without_followers(records)
        keep = frozenset(record.head.parent for record in wanted)
        for batch in parts.writer.batches(parts.writer.frames(shelf, wanted)):
            if not self._store(parts, batch, keep):
                break

    def note(self, records: Sequence[Record], kept: Sequence[bool]) -> None:
        """What became of ``records``."""
        self._refused.note(records, kept)

    def flush(self, parts: Parts) -> None:
        """Write to the index what is due. One that turns out to be damaged is made anew.

        :raises OSError, sqlite3.Error, StorageError: when that fails.
        """
        try:
            parts.writer.flush()
        except sqlite3.Error as err:
            if not is_damage(err):
                raise
            self._repair(parts, err)

    def pause(self, problem: str) -> None:
        """Write nothing for a while."""
        self._paused_until = self._clock() + self._retry_seconds
        self.problem = problem
        self._log.log(self._logger.warning, "disk_tier_takes_no_writes", problem=problem)

    def resume(self) -> None:
        """A write has gone well."""
        if self._paused_until is not None:
            self._paused_until, self.problem = None, ""
            self._logger.info("disk_tier_takes_writes_again", path=str(self._path))

    def _store(self, parts: Parts, frames: Sequence[Frame], keep: frozenset[BlockName]) -> bool:
        """Write one batch; a second time after a failure, with some old blocks less when the disk is full."""
        result = self._try_store(parts, frames, keep)
        if isinstance(result, Exception):
            with contextlib.suppress(OSError, sqlite3.Error, StorageError):
                self.make_amends(parts, result, sum(map(bytes_of, frames)), keep)
            result = self._try_store(parts, frames, keep)
        if isinstance(result, Exception):
            self.pause(f"cannot write to {self._path}: {describe(result)}")
            return False
        return result

    def _try_store(self, parts: Parts, frames: Sequence[Frame], keep: frozenset[BlockName]) -> bool | Exception:
        """Whether there was room, or what went wrong."""
        need = sum(map(bytes_of, frames))
        try:
            parts.state.settle()
            if not parts.room.make(need, max(len(frame.head.tokens) for frame in frames), keep):
                return False
            parts.writer.write(frames)
        except (OSError, sqlite3.Error) as err:
            return err
        self.resume()
        return True

    def make_amends(self, parts: Parts, failure: Exception, need: int, keep: frozenset[BlockName]) -> None:
        """Do what may let the next write of ``need`` bytes succeed, without losing any of ``keep``.

        :raises OSError, sqlite3.Error, StorageError: when that fails, too.
        """
        if is_damage(failure):
            self._repair(parts, failure)
        elif _is_full(failure):
            parts.room.free(2 * need, keep)

    def _repair(self, parts: Parts, damage: Exception) -> None:
        self._log.log(self._logger.warning, "disk_tier_index_rebuilt", problem=describe(damage))
        repair(self._fs, parts.state)


def _is_full(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) == _SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _FULL
