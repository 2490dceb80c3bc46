"""Snapshots: one consistent image of the cache, written beside the running loop.

The image is taken at one step edge: which blocks are cached, and what policies know of them. Their contents cannot
change while they are cached, and are copied out a few at a time; one that is evicted meanwhile is copied before it can
be overwritten. So what gets into the snapshot is what the cache held at that one moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from ..storage.base import Record, SnapshotSink, Tier
from ..storage.manager.settings import ManagerSettings
from ..storage.manager.tier_manager import Batch, Loaded, Mounted, Outgoing, TierManager
from ..storage.naming import BlockName, Namespace, Shelf, names_after
from ..storage.record import RecordCodec
from .counters import Counters
from .edges import Edges
from .enlisting import SLICE_BLOCKS, Enlistment
from .exports import EXPORT_BLOCKS, Export, Exports, heads_of
from .kv import CacheManager, ImageRun
from .learned import Learned
from .surroundings import Surroundings

POLL = 0.005
"""Seconds between two looks for what has been exported."""
WAITING_BATCHES = 4
"""Batches that may wait to be written; more are not exported meanwhile."""

Give = Callable[[Batch], Awaitable[None]]


class Prefix(NamedTuple):
    """The beginning of a prompt."""

    namespace: Namespace
    tokens: bytes
    """int32."""


class SnapshotReport(NamedTuple):
    """What went into a snapshot."""

    location: str
    blocks: int
    device_blocks: int
    """Of them from the device."""
    lost: int
    """Blocks of the image that could not be copied; with them what comes after them in a prompt."""


class SnapshotFeed:
    """Exported blocks on their way into a snapshot."""

    def __init__(self, codec: RecordCodec, sink: SnapshotSink, wall: Callable[[], float]) -> None:
        self.written = 0
        self.bytes = 0
        self._codec = codec
        self._sink = sink
        self._wall = wall
        self._batches: deque[Batch] = deque()

    @property
    def room(self) -> int:
        return (WAITING_BATCHES - len(self._batches)) * EXPORT_BLOCKS

    @property
    def goes_to(self) -> str:
        return "snapshot"

    @property
    def is_empty(self) -> bool:
        return not self._batches

    def take(self, batch: Batch) -> None:
        self._batches.append(batch)

    async def write_one(self) -> None:
        """Seal and write the batch that waits longest, if any."""
        if self._batches:
            await self.write(self._batches.popleft())

    async def write(self, batch: Batch) -> None:
        records = await anyio.to_thread.run_sync(self._sealed, batch)
        await self._sink.add(batch.shelf, records)
        self.written += len(records)
        self.bytes += sum(len(record.data) for record in records)

    def _sealed(self, batch: Batch) -> list[Record]:
        now = self._wall()
        return [
            Record(block.head, self._codec.seal(row, batch.shelf, block.head, now), block.meta)
            for row, block in zip(batch.buffer, batch.blocks, strict=True)
        ]


class Snapshots:
    """Writes the cache of one engine out."""

    def __init__(
        self,
        cache: CacheManager,
        exports: Exports,
        manager: TierManager,
        learned: Learned,
        codec: RecordCodec,
        outside: Surroundings,
        loop: Edges,
        counters: Counters,
    ) -> None:
        self._cache = cache
        self._exports = exports
        self._manager = manager
        self._learned = learned
        self._codec = codec
        self._outside = outside
        self._loop = loop
        self._counters = counters

    async def write(self, sink: SnapshotSink, location: str, *, within: Prefix | None, tiers: bool) -> SnapshotReport:
        """Write everything, or the whole blocks of the prefix ``within``. ``tiers``: also what only local tiers have.

        :raises StorageError: when it cannot be written; what was at the location before is untouched.
        """
        feed = SnapshotFeed(self._codec, sink, self._outside.wall)
        try:
            known, notes = await self._enlist(feed, within)
            await self._drain(feed, 0)
            device = feed.written
            if tiers and within is None:
                await self._copy_all(self._manager, feed.write, known)
            elif tiers and within is not None:
                missing = [name for name in self._names_of(within) if name not in known]
                await self._copy(self._manager, within.namespace.shelf(), missing, feed.write)
            if notes is not None:
                await sink.note(notes)
            blocks = await sink.commit()
        except BaseException:
            self._exports.withdraw(lambda export: export.sink is feed)
            with anyio.CancelScope(shield=True):
                await sink.abandon()
            raise
        self._counters.snapshot_at, self._counters.snapshot_bytes = self._outside.clock(), feed.bytes
        return SnapshotReport(location, blocks, device, len(known) - device)

    async def take_in(self, snapshot: Tier, erased: set[bytes]) -> int:
        """Copy what an open snapshot holds into the tiers; returns how many blocks they took."""
        source = TierManager(
            [Mounted("import", snapshot, is_open=True)],
            self._codec,
            ManagerSettings(),
            clock=self._outside.clock,
            wall=self._outside.wall,
            logger=self._outside.logger,
        )
        taken = 0

        async def offer(batch: Batch) -> None:
            nonlocal taken
            start = 0
            while start < len(batch.blocks) and batch.shelf.tenant not in erased:
                while not (room := self._manager.room("all")):  # noqa: ASYNC110  # room comes from many sides
                    await anyio.sleep(POLL)
                if batch.shelf.tenant in erased:
                    return
                part = slice(start, start + room)
                taken += self._manager.offer(Batch(batch.shelf, batch.blocks[part], batch.buffer[part]), to="all")
                start += room

        await self._copy_all(source, offer, known=set())
        return taken

    async def _enlist(self, feed: SnapshotFeed, within: Prefix | None) -> tuple[set[BlockName], bytes | None]:
        """See that the cache as it is at the next step edge is copied, or a prefix of it. Returns the names, and what
        the eviction policy has learned by then.
        """
        wanted = None if within is None else frozenset(self._names_of(within))
        found, journal = set[BlockName](), self._outside.tracing.background

        def exported(run: ImageRun, indices: Sequence[int]) -> list[Export]:
            shelf, heads = run.namespace.shelf(), heads_of(run)
            chosen = [index for index in indices if wanted is None or heads[index].name in wanted]
            found.update(heads[index].name for index in chosen)
            return [Export(run.ids[index], shelf, heads[index], run.meta, feed, journal) for index in chosen]

        notes: list[bytes | None] = []

        def begin() -> Enlistment:
            image = self._cache.image(self._outside.wall())
            if within is None:  # what was learned of other prefixes does not belong to this one
                notes.append(self._learned.dump())  # after the image, which names all blocks
            return Enlistment(image, self._exports, exported)

        with closing(await self._loop.at_edge(begin, Enlistment.close)) as enlistment:
            while await self._loop.at_edge(enlistment.advance):
                await self._drain(feed, SLICE_BLOCKS)
        return found, notes[0] if notes else None

    def _names_of(self, prefix: Prefix) -> list[BlockName]:
        return names_after(prefix.namespace.shelf().namespace, prefix.tokens, self._cache.block_size)

    async def _drain(self, feed: SnapshotFeed, left: int) -> None:
        """Write until no more than ``left`` blocks are still to be exported, and nothing waits to be written."""
        while self._exports.outstanding(feed) > left or not feed.is_empty:
            if feed.is_empty:
                await anyio.sleep(POLL)
            await feed.write_one()
            await self._loop.at_edge(lambda: None)  # an idle loop exports on; one that has ended says so

    async def _copy_all(self, source: TierManager, give: Give, known: set[BlockName]) -> None:
        by_shelf: dict[Shelf, list[BlockName]] = {}
        async for listed in source.listing():
            if listed.head.name not in known:
                by_shelf.setdefault(listed.shelf, []).append(listed.head.name)
        for shelf, names in by_shelf.items():
            await self._copy(source, shelf, names, give)

    async def _copy(self, source: TierManager, shelf: Shelf, names: list[BlockName], give: Give) -> None:
        async def deliver(blocks: list[Loaded]) -> None:
            buffer = self._codec.buffer(len(blocks))
            for row, block in zip(self._codec.payloads(buffer), blocks, strict=True):
                row[:] = np.frombuffer(block.payload, dtype=np.uint8)
            await give(Batch(shelf, [Outgoing(block.head, block.meta) for block in blocks], buffer))

        while names:  # a load ends at the first block that cannot be had: go on behind it
            outcome = await source.load(shelf, names, deliver, deadline=None)
            names = names[outcome.blocks + 1 :]
