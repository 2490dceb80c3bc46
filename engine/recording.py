"""Recorder: writes what the cache tells into a file, for replays with other policies.

The file has no tokens, no text and no names of tenants. Blocks go by keyed digests of their names, and the key is in
no file: who has the recording and guesses a prompt cannot test the guess. The loop only appends events to a queue; a
thread encodes and writes them. When the disk cannot follow, events are left out and the file says how many and where.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from typing import BinaryIO

import anyio
import anyio.to_thread
import msgspec

from ..errors import TelemetryError
from ..policies.eviction.base import NAME_BYTES
from ..policies.history import FORMAT, Admitted, Done, End, Gap, Header, Line, Told
from .config import EngineConfig
from .insight.measures import Measures
from .kv import CacheManager
from .request import FinishReason
from .sequence import SequenceGroup
from .surroundings import Surroundings

MOST_BYTES = 32 * 2**20
"""Bound of the queue, about: what waits for a disk that is slow."""
EVENT_BYTES = 200
"""An event in memory without its names, about."""
PAUSE = 0.1
"""Seconds between two batches: a batch costs a switch to a thread, and a crash loses one."""
CLOSE_SECONDS = 5.0
"""How long closing waits for the disk."""


class Recorder:
    """One recording. All calls from the event loop, except for what writes."""

    def __init__(self, path: str, file: BinaryIO, outside: Surroundings) -> None:
        self.path = path
        self.lost = 0
        """Events that were left out so far."""
        self._file = file
        self._clock, _, self._logger, _ = outside
        self._keyed = blake2b(digest_size=NAME_BYTES, key=secrets.token_bytes(16))
        self._encoder = msgspec.json.Encoder()
        self._queue: deque[Line] = deque()
        self._queued_bytes = 0
        self._lost_now = 0
        self._news = anyio.Event()
        self._is_on = True
        self._writing = threading.Lock()
        self._cache: CacheManager | None = None

    # life

    @classmethod
    async def create(cls, path: str, config: EngineConfig, outside: Surroundings) -> Recorder:
        """Begin a file that is readable for this user alone.

        :raises TelemetryError: when there is one already, or it cannot be made.
        """
        header = Header(
            format=FORMAT,
            block_tokens=config.block_size,
            num_blocks=config.num_blocks,
            eviction_policy=config.eviction_policy,
            octavo=version("octavo"),
            started=outside.wall(),
            clock=outside.clock(),
        )
        try:
            file = await anyio.to_thread.run_sync(_begin, path, header)
        except FileExistsError as error:
            raise TelemetryError(
                f"record={path!r}: there is such a file, and recordings never overwrite. Remove it or name another"
            ) from error
        except OSError as error:
            raise TelemetryError(f"record={path!r} cannot be written: {error.strerror or error}") from error
        return cls(path, file, outside)

    def follow(self, cache: CacheManager, measures: Measures) -> None:
        """Record what happens to ``cache`` from now on: it should be empty still."""
        self._cache = cache
        cache.watch_requests(self, self.alias)
        measures.when_done.append(self.request_done)

    async def run(self) -> None:
        """Write what was heard, a batch at a time. Until cancelled."""
        while self._is_on:
            await self._news.wait()
            self._news = anyio.Event()
            await self._write()
            await anyio.sleep(PAUSE)

    async def close(self) -> None:
        """Hear no more, write the rest, and say that it is complete. Idempotent. Waits ``CLOSE_SECONDS`` at most."""
        if self._cache is not None:
            self._cache.unwatch_requests(self)
        if self._is_on:
            self._note(End(self._clock(), self.lost), always=True)
            with anyio.move_on_after(CLOSE_SECONDS, shield=True) as scope:
                await self._write()
            if scope.cancelled_caught:
                self._fail("the disk does not answer")
        self._is_on = False
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await anyio.to_thread.run_sync(self._close_file, abandon_on_cancel=True)

    async def discard(self) -> None:
        """The engine did not open: leave nothing behind."""
        self._is_on = False
        await self.close()
        with suppress(OSError):
            await anyio.to_thread.run_sync(os.unlink, self.path)

    # what is heard

    def heard(self, event: Told) -> None:
        """From the cache."""
        self._note(event)

    def request_done(self, group: SequenceGroup, reason: FinishReason) -> None:
        """A request is over."""
        job = group.job
        tokens = len(group.prompt_ids), group.generated
        self._note(Done(self._clock(), job.order, job.arrival, job.priority, *tokens, reason.value))

    def alias(self, names: bytes) -> bytes:
        """How the recording calls blocks: digests with a key of its own."""
        digests = []
        for at in range(0, len(names), NAME_BYTES):
            digest = self._keyed.copy()  # faster than beginning with the key each time
            digest.update(names[at : at + NAME_BYTES])
            digests.append(digest.digest())
        return b"".join(digests)

    def _note(self, event: Line, *, always: bool = False) -> None:
        if not self._is_on:
            return
        size = _size(event)
        if not always and self._queued_bytes + size > MOST_BYTES:
            self.lost += 1
            self._lost_now += 1
            return
        if self._lost_now:
            self._queue.append(Gap(event.now, self._lost_now))
            self._lost_now = 0
        self._queue.append(event)
        self._queued_bytes += size
        if not self._news.is_set():
            self._news.set()

    # writing

    async def _write(self) -> None:
        """Write what waits; a disk that is full or gone ends the recording, and nothing else."""
        try:
            written = await anyio.to_thread.run_sync(self._put, abandon_on_cancel=True)
            self._queued_bytes -= written  # a statement of its own: what is noted during the write counts, too
        except (OSError, ValueError) as error:
            self._fail(error)

    def _fail(self, why: object) -> None:
        if self._cache is not None:
            self._cache.unwatch_requests(self)
        if self._is_on:
            self._is_on = False
            self._logger.warning("the recording ends here", path=self.path, error=str(why))

    def _put(self) -> int:
        """In a thread. Takes from the queue only what it is about to write: it may be cancelled before it begins.
        Returns the size of that.
        """
        with self._writing:
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            self._file.write(b"".join(map(self._line, batch)))
            self._file.flush()
        return sum(map(_size, batch))

    def _line(self, event: Line) -> bytes:
        names = getattr(event, "names", b"")
        if isinstance(event, Admitted):  # those before are the ones that it holds
            names = names[event.found * NAME_BYTES :]
        shown = msgspec.structs.replace(event, names=self.alias(names)) if hasattr(event, "names") else event
        return self._encoder.encode(shown) + b"\n"

    def _close_file(self) -> None:
        with self._writing, suppress(OSError):
            self._file.close()


def _size(event: Line) -> int:
    return EVENT_BYTES + len(getattr(event, "names", b""))


def _begin(path: str, header: Header) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    try:
        file.write(msgspec.json.encode(header) + b"\n")
        file.flush()
    except OSError:
        file.close()
        raise
    return file
