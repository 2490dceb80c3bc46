"""The disk tier: blocks that survive the process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import anyio.lowlevel
import msgspec

from ...errors import InvalidRequest
from ...telemetry.logging import Logger, get_logger
from ..base import Listed, Meta, Options, Record, Stored, Tier, TierGeometry, TierStats
from ..files.compression import compression
from ..files.filesystem import Filesystem
from ..files.frame import ALIGN, frame_bytes
from ..naming import TOKEN_BYTES, BlockName, Shelf
from ..options import NaturalFloat, NaturalInt, PositiveInt, Text, read_options
from ..ranking import Recency, rankings
from ..threads import Threads
from .erase import VerifyReport
from .store import DiskStore, StoreSettings

HIT_SECONDS = 3600.0
"""Each doubling of a block's hits keeps it as much longer as if it had been used that much later."""
_READERS = 4
_INDEX_BYTES = 1 << 20  # of the smallest tier: index and its log, with room to change them
_SEGMENTS = 8  # at least so many fit into the bound, so that rewriting one needs little room


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of :class:`DiskTier`."""

    path: Text
    """Folder; made if it is not there. A link is followed."""
    bytes: PositiveInt
    """Bound of everything in it, index and folders of other identities included."""
    free_floor: NaturalInt = 256 << 20
    """Bytes that stay free on the file system for others."""
    compression: Literal["none", "zstd"] = "none"
    itemsize: Annotated[int, msgspec.Meta(ge=1, le=255)] = 2
    """Bytes of one number, for compression."""
    segment_bytes: PositiveInt = 64 << 20
    """Length of one file; smaller ones are used when ``bytes`` is small."""
    strict: bool = False
    """Whether a folder that cannot be written is an error at ``open``."""
    read_only: bool = False
    """Only look: no lock is taken and nothing is written."""
    keep_foreign_seconds: NaturalFloat = 7 * 86400.0
    """How long blocks of other identities stay, counted from their last use."""
    retry_seconds: NaturalFloat = 30.0
    """How long writes pause after one failed."""
    eviction_policy: Text | None = None
    """Name of the eviction policy that says what goes, as for the cache on the device; ``None``: the longest unused,
    later the more often it was used."""


class DiskTier(Tier):
    """Blocks in segment files with an SQLite index, for one engine at a time.

    ``put`` returns when its blocks are durable: frames are written, fsynced, and only then named in the index. So
    whatever happens, a block is there whole or not at all, and everything that is read is checked again. A block that
    was given to a cancelled ``put`` may be there or not; its buffer must be left alone until then all the same.

    A folder that cannot be written, or that another engine holds, is opened for reading only (``strict``: an error).
    When the disk is full or broken, writes pause and are tried again later; reads go on. Blocks are not encrypted:
    files have mode 0600 and folders 0700, and whoever can read them can read what was computed. Network file systems
    are not supported, since their locks and ``fsync`` mean too little.
    """

    persistent: ClassVar[bool] = True
    evicts_by_name: ClassVar[bool] = True

    def __init__(
        self,
        options: DiskOptions,
        geometry: TierGeometry,
        *,
        fs: Filesystem | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        logger: Logger | None = None,
    ) -> None:
        """``clock`` and ``wall`` give seconds, monotonic and since the epoch.

        :raises InvalidRequest: when ``options`` cannot work.
        :raises PluginError: when there is no such eviction policy, or it cannot be used.
        """
        self._writers = Threads(1)
        self._readers = Threads(_READERS)
        self._store = DiskStore(
            store_settings(options, geometry),
            geometry,
            compression(options.compression, options.itemsize),
            fs=fs or Filesystem(),
            clock=clock,
            wall=wall,
            logger=logger or get_logger("octavo.storage.disk.tier"),
        )

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        """See :class:`DiskOptions`.

        :raises InvalidRequest: for an unknown option or a value out of range.
        :raises PluginError: when there is no such eviction policy, or it cannot be used.
        """
        return cls(read_options(DiskOptions, options, "disk tier"), geometry)

    async def open(self) -> None:
        """Find the blocks that are there: one pass over the index, no data is read.

        :raises StorageError: in strict mode when the folder cannot be written.
        """
        await self._writers.run(self._store.open)

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Keep ``records``; durable when it returns. A disk that takes no writes declines.

        :raises StorageError: when the tier is not open.
        """
        return await self._writers.run(lambda: self._store.put(shelf, records))

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """Neighbours on the disk are read in one go into one buffer, which lives as long as one of them is held.

        :raises StorageError: when the folder cannot be read.
        """
        return await self._readers.run(lambda: self._store.get(shelf, names))

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """From memory.

        :raises StorageError: when the tier is not open.
        """
        return self._store.contains(shelf, names)

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        """From memory; 0 when the tier is not open."""
        return self._store.peek(shelf, names)

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Forget ``names`` for good. In a tier that only reads, until it is closed.

        :raises StorageError: when the index could not be written.
        """
        return await self._writers.run(lambda: self._store.delete(shelf, names))

    async def erase(self, tenant: bytes) -> int:
        """Overwrite all blocks of a tenant, those of other identities in the same folder included.

        :raises StorageError: when something could not be overwritten, or another engine holds a part of the folder.
        """
        return await self._writers.run(lambda: self._store.erase(tenant))

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """As of the call; parents before children.

        :raises StorageError: when the tier is not open.
        """
        for number, each in enumerate(await self._readers.run(lambda: self._store.listing(shelf))):
            if number % 1024 == 0:
                await anyio.lowlevel.checkpoint()
            yield each

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        """From memory.

        :raises StorageError: when the tier is not open.
        """
        return self._store.children(shelf, parent)

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """In memory; durable with the next ``flush``.

        :raises StorageError: when the tier is not open.
        """
        self._store.touch(shelf, metas)

    async def note(self, notes: bytes) -> None:
        """Durable when it returns. Where nothing can be written nothing happens.

        :raises StorageError: when it could not be written.
        """
        await self._writers.run(lambda: self._store.note(notes))

    async def notes(self) -> bytes | None:
        """From the disk.

        :raises StorageError: when it cannot be read.
        """
        return await self._readers.run(self._store.notes)

    async def flush(self) -> None:
        """Write what ``touch`` and ``get`` have changed; blocks are durable already.

        :raises StorageError: when it could not be written.
        """
        await self._writers.run(self._store.flush)

    async def compact(self) -> int:
        """Rewrite all segments that have dead bytes; returns how many there were.

        :raises StorageError: when something could not be written; nothing is lost then.
        """
        return await self._writers.run(self._store.compact)

    async def verify(self) -> VerifyReport:
        """Read and check everything.

        :raises StorageError: when the tier is not open.
        """
        return await self._writers.run(self._store.verify)

    async def close(self) -> None:
        """Flush and give everything back. When it is cancelled, a write under way does that as it ends."""
        self._store.begin_close()
        await self._writers.run(self._store.close)

    def stats(self) -> TierStats:
        """From memory."""
        return self._store.stats()


def store_settings(options: DiskOptions, geometry: TierGeometry) -> StoreSettings:
    """What the options come to for blocks of this size.

    :raises InvalidRequest: when they cannot work.
    :raises PluginError: when there is no such eviction policy, or it cannot be used.
    """
    if "\x00" in options.path:
        raise InvalidRequest("option 'path' of disk tier: it must not contain a NUL character")
    frame = frame_bytes(geometry.identity.block_size * TOKEN_BYTES, geometry.record_bytes)
    least = _INDEX_BYTES + _SEGMENTS * (frame + ALIGN)
    if options.bytes < least:
        raise InvalidRequest(
            f"option 'bytes' of disk tier: {options.bytes} is too little; with blocks of {geometry.record_bytes} bytes "
            f"it needs at least {least}"
        )
    segment = min(options.segment_bytes, (options.bytes - _INDEX_BYTES) // _SEGMENTS)
    return StoreSettings(
        path=Path(options.path),
        capacity=options.bytes,
        segment_bytes=max(segment, frame + ALIGN),
        free_floor=options.free_floor,
        retry_seconds=options.retry_seconds,
        keep_foreign_seconds=options.keep_foreign_seconds,
        strict=options.strict,
        read_only=options.read_only,
        rank=rankings(
            options.eviction_policy,
            partial(Recency, HIT_SECONDS),
            geometry,
            blocks=(options.bytes - _INDEX_BYTES) // frame,
            what="disk tier",
        ),
    )
