"""The host tier: blocks in main memory, copied in and out of a slab that is taken once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

import anyio
import msgspec
import numpy as np

from ...errors import InvalidRequest, StorageError
from ..base import Listed, Meta, Options, Record, Stored, Tier, TierGeometry, TierStats
from ..naming import BlockName, Shelf
from ..options import PositiveInt, Text, read_options
from ..ranking import Recency, priority_of, rankings
from .index import HostEntry, HostIndex
from .slab import Copy, Slab, pieces


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the host tier."""

    bytes: PositiveInt
    """Memory for records. The index comes on top, about 1 KB for each block."""
    pin: bool = False
    """Page-locked memory, for faster copies to and from a CUDA device; needs torch and such a device."""
    eviction_policy: Text | None = None
    """Name of the eviction policy that says what goes, as for the cache on the device; ``None``: the longest unused."""


@dataclass(slots=True, eq=False)
class _Writing:
    """A ``put`` under way."""

    shelf: Shelf
    kin: frozenset[BlockName]
    """Its blocks and those before them: never evicted for one another."""
    doomed: bool = False
    """The tenant was erased meanwhile: whatever is still to come is dropped."""


class HostTier(Tier):
    """Keeps blocks in host memory; what is put and what is handed out are copies.

    Full means that the least valuable blocks go: lowest priority (while its time to live lasts), then longest unused or
    as ``eviction_policy`` says, a block never before those that follow it. What would only push out blocks of its own
    batch, blocks of higher priority, its own parent, or blocks that are being read, is declined.
    """

    evicts_by_name: ClassVar[bool] = True

    def __init__(
        self,
        options: HostOptions,
        geometry: TierGeometry,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """:raises InvalidRequest: when ``options.bytes`` does not hold a single record, or a policy is named and
            ``geometry`` knows none.
        :raises PluginError: when there is no such policy, or it cannot be used.
        """
        if options.bytes < geometry.record_bytes:
            raise InvalidRequest(
                f"option 'bytes' of host tier is {options.bytes}: one block takes {geometry.record_bytes}; give more"
            )
        self._options = options
        self._record_bytes = geometry.record_bytes
        self._clock = clock
        self._wall = wall
        self._rank = rankings(
            options.eviction_policy,
            Recency,
            geometry,
            blocks=options.bytes // geometry.record_bytes,
            what="host tier",
        )
        self._index = HostIndex(self._rank())
        self._slab: Slab | None = None
        self._writings: set[_Writing] = set()
        self._spilling: set[HostEntry] = set()
        self._ending: dict[int, HostEntry] = {}  # erased or deleted, by slots that are still being read
        self._ended = anyio.Event()
        self._evicted = 0
        self._declined = 0

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        """See :class:`HostOptions`.

        :raises InvalidRequest, PluginError: as the class itself, and for an unknown option.
        """
        return cls(read_options(HostOptions, options, "host tier"), geometry)

    async def open(self) -> None:
        """Take the memory."""
        self._slab = Slab(self._options.bytes // self._record_bytes, self._record_bytes, pin=self._options.pin)

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Copy in what there is room for, in order; see the class for what is declined."""
        slab = self._opened()
        heads = [record.head for record in records]
        writing = _Writing(shelf, frozenset(name for head in heads for name in (head.name, head.parent)))
        self._writings.add(writing)
        kept: list[bool] = []
        try:
            for piece in pieces(records, self._record_bytes):
                kept += await self._put_piece(slab, writing, piece)
        finally:
            self._writings.discard(writing)
        return kept

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """Copies of what is there."""
        slab = self._opened()
        entries = [self._index.find(shelf, name) for name in names]
        found = [entry for entry in entries if entry is not None]
        metas = [entry.meta for entry in found]
        with self._held(slab, found):
            now = self._clock()
            for entry in dict.fromkeys(found):
                self._index.use(entry, now)
            copies = iter(zip(await self._copies(slab, found), metas, strict=True))
        return [None if entry is None else Stored(*next(copies)) for entry in entries]

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """Answered from memory."""
        self._opened()
        here = self._index.names(shelf)
        return [name in here for name in names]

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Answered from memory; 0 when the tier is not open."""
        here = self._index.names(shelf)
        return next((at for at, name in enumerate(names) if name not in here), len(names))

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Forget ``names``; their slots are free as soon as nobody reads them any more."""
        slab = self._opened()
        entries = [entry for name in names if (entry := self._index.find(shelf, name)) is not None]
        for entry in entries:
            self._remove(slab, entry, wipe=False)
        named = set(names)
        self._end({entry for entry in self._spilling if entry.shelf == shelf and entry.head.name in named})
        return len(entries)

    async def erase(self, tenant: bytes) -> int:
        """Overwrite all slots of a tenant with zeros; waits for copies out of them that are under way."""
        slab = self._opened()
        for writing in self._writings:
            writing.doomed = writing.doomed or writing.shelf.tenant == tenant
        entries = self._index.of_tenant(tenant)
        for entry in entries:
            self._remove(slab, entry, wipe=True)
        self._end({entry for entry in self._spilling if entry.shelf.tenant == tenant})
        self._index.ranking.forgotten(tenant)
        while any(entry.shelf.tenant == tenant for entry in self._ending.values()):
            await self._ended.wait()
        return len(entries)

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """As of the first step of the iteration."""
        self._opened()
        for listed in self._index.listed(shelf):
            yield listed

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        """Answered from memory."""
        self._opened()
        return [Listed(shelf, entry.head, entry.meta) for entry in self._index.followers(shelf, parent)]

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Recency and priority decide what goes next."""
        self._opened()
        for name, meta in metas.items():
            entry = self._index.find(shelf, name)
            if entry is not None:
                self._note(entry, meta)

    async def spill(self, count: int) -> list[tuple[Shelf, Record]]:
        """Take out the least valuable blocks. A call that is cancelled has taken out none."""
        slab = self._opened()
        taken = self._take_out(count)
        with self._held(slab, taken):
            self._spilling.update(taken)
            try:
                copies = await self._copies(slab, taken)
            except BaseException:
                self._bring_back(taken)
                raise
            else:
                pairs = zip(taken, copies, strict=True)
                return [
                    (entry.shelf, Record(entry.head, copy, entry.meta))
                    for entry, copy in pairs
                    if entry in self._spilling
                ]
            finally:
                self._spilling.difference_update(taken)

    async def flush(self) -> None:
        """Memory is as durable as it gets."""
        self._opened()

    async def close(self) -> None:
        """Forget everything and give the memory back, at the latest when copies under way have ended."""
        self._slab = None
        self._index = HostIndex(self._rank())
        self._spilling.clear()
        for writing in self._writings:
            writing.doomed = True

    def stats(self) -> TierStats:
        """Slots that are being filled or emptied count as used."""
        slab = self._slab
        return TierStats(
            blocks=len(self._index),
            bytes=0 if slab is None else slab.used * self._record_bytes,
            capacity=self._options.bytes,
            evicted=self._evicted,
            declined=self._declined,
            policy=self._index.ranking.name,
            policy_faults=self._index.ranking.faults,
        )

    def _opened(self) -> Slab:
        if self._slab is None:
            raise StorageError("the host tier is not open")
        return self._slab

    async def _put_piece(self, slab: Slab, writing: _Writing, records: Sequence[Record]) -> list[bool]:
        slots: dict[BlockName, int] = {}
        try:
            kept = [self._reserve(slab, writing, record, slots) for record in records]
            fresh = [record for record in records if record.head.name in slots]
            await slab.copy([Copy(record.data, slab.view(slots[record.head.name])) for record in fresh])
            if writing.doomed:
                return [False] * len(records)
            for record in fresh:
                if record.head.name in slots:
                    self._take_in(slab, writing.shelf, record, slots.pop(record.head.name))
            return kept
        finally:
            for slot in slots.values():
                self._release(slab, slot, wipe=writing.doomed)

    def _reserve(self, slab: Slab, writing: _Writing, record: Record, slots: dict[BlockName, int]) -> bool:
        """Whether the record is kept; a slot for it is in ``slots`` then, unless it is here already."""
        name = record.head.name
        there = self._index.find(writing.shelf, name)
        if there is not None:
            self._note(there, record.meta)
        elif name not in slots:
            slot = self._room(slab, writing, record)
            if slot is None:
                self._declined += 1
                return False
            slots[name] = slot
        return True

    def _room(self, slab: Slab, writing: _Writing, record: Record) -> int | None:
        if len(record.data) != self._record_bytes or writing.doomed:
            return None
        slot = slab.take()
        return self._evict_for(writing, record.meta) if slot is None else slot

    def _evict_for(self, writing: _Writing, meta: Meta) -> int | None:
        """The slot of the least valuable block, if it may go for one with ``meta``."""
        aged = meta.aged(self._wall())
        priority = 0 if aged.ttl == 0.0 else aged.priority
        now = self._clock()
        with closing(self._index.leaving(1, now)) as leaving:
            for entry in leaving:
                if priority_of(entry, now) > priority:
                    return None
                if entry.shelf != writing.shelf or entry.head.name not in writing.kin:
                    self._index.remove(entry, now, evicted=True)
                    self._evicted += 1
                    return entry.slot
        return None

    def _take_in(self, slab: Slab, shelf: Shelf, record: Record, slot: int) -> None:
        there = self._index.find(shelf, record.head.name)
        if there is not None:  # another put was faster
            self._note(there, record.meta)
            self._release(slab, slot, wipe=False)
            return
        self._index.add(HostEntry(shelf, record.head, slot, *self._dated(record.meta)), self._clock())

    def _note(self, entry: HostEntry, meta: Meta) -> None:
        self._index.note(entry, *self._dated(meta), self._clock())

    def _dated(self, meta: Meta) -> tuple[Meta, float, float | None]:
        """What is known by now, the last use, and when the priority expires, on the clock that nobody sets."""
        now = self._clock()
        aged = meta.aged(self._wall())
        return aged, now - aged.idle, None if aged.ttl is None else now + aged.ttl

    def _take_out(self, count: int) -> list[HostEntry]:
        taken: list[HostEntry] = []
        now = self._clock()
        with closing(self._index.leaving(count, now)) as leaving:
            for entry in leaving:
                if len(taken) >= count:
                    break
                self._index.remove(entry, now, evicted=True)
                taken.append(entry)
        return taken

    def _bring_back(self, taken: Sequence[HostEntry]) -> None:
        now = self._clock()
        for entry in taken:
            if entry in self._spilling and self._index.find(entry.shelf, entry.head.name) is None:
                self._index.add(entry, now)

    async def _copies(self, slab: Slab, entries: Sequence[HostEntry]) -> list[memoryview]:
        copies: list[memoryview] = []
        for piece in pieces(entries, self._record_bytes):
            memory = np.empty((len(piece), self._record_bytes), dtype=np.uint8)
            rows = [row.data for row in memory]
            await slab.copy([Copy(slab.view(entry.slot), row) for entry, row in zip(piece, rows, strict=True)])
            copies += rows
        return copies

    @contextmanager
    def _held(self, slab: Slab, entries: Sequence[HostEntry]) -> Iterator[None]:
        """Nobody gets the slots of ``entries`` meanwhile, whatever becomes of the entries."""
        index = self._index  # another one when the tier is closed meanwhile
        for entry in entries:
            index.hold(entry)
        try:
            yield
        finally:
            now = self._clock()
            for entry in entries:
                index.release(entry, now)
                if not entry.readers and not entry.present:
                    self._release(slab, entry.slot, wipe=self._ending.pop(entry.slot, None) is not None)
                    self._ended.set()
                    self._ended = anyio.Event()

    def _remove(self, slab: Slab, entry: HostEntry, *, wipe: bool) -> None:
        self._index.remove(entry, self._clock())
        if entry.readers:
            self._ending[entry.slot] = entry
        else:
            self._release(slab, entry.slot, wipe=wipe)

    def _end(self, spilling: set[HostEntry]) -> None:
        """Blocks on their way out that are not wanted any more."""
        self._spilling -= spilling
        self._ending.update((entry.slot, entry) for entry in spilling)

    def _release(self, slab: Slab, slot: int, *, wipe: bool) -> None:
        if wipe:
            slab.wipe(slot)
        slab.give_back(slot)
