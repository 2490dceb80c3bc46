"""WriteQueue: blocks on their way into one tier, bounded in bytes, readable while they wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import anyio
import anyio.to_thread

from ...errors import StorageError
from ..base import Head, Meta, Record, Stored
from ..naming import BlockName, Shelf
from ..record import RecordCodec, UInt8Array


class Outgoing(NamedTuple):
    """A block that leaves the device; its payload is the row of the same index in the batch's buffer."""

    head: Head
    meta: Meta


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one shelf, exported from the device, not sealed yet."""

    shelf: Shelf
    blocks: Sequence[Outgoing]
    buffer: UInt8Array
    """From :meth:`RecordCodec.buffer`, at least ``len(blocks)`` rows, the payloads in place. Given away: whoever made
    it must not write there again."""


Rows: TypeAlias = Mapping[int, UInt8Array] | Sequence[UInt8Array]


class Cargo:
    """The memory of some records. Rows exported by this engine are sealed when the first writer needs them; the payload
    behind the header never changes, so it may be read all the time.
    """

    def __init__(self, shelf: Shelf, rows: Rows) -> None:
        self.shelf = shelf
        self.rows = rows
        self._sealed: dict[int, memoryview] = {}
        self._lock = anyio.Lock()

    async def seal(
        self, codec: RecordCodec, heads: Mapping[int, Head], created: float, limiter: anyio.CapacityLimiter
    ) -> dict[int, memoryview]:
        """The records of the rows in ``heads``, sealed once however many tiers take them."""
        async with self._lock:  # two writers must not write one header at a time
            missing = {row: head for row, head in heads.items() if row not in self._sealed}
            if missing:
                work = partial(_seal, codec, self.shelf, self.rows, missing, created)
                self._sealed |= await anyio.to_thread.run_sync(work, limiter=limiter)
        return {row: self._sealed[row] for row in heads}


def _seal(
    codec: RecordCodec, shelf: Shelf, rows: Rows, heads: Mapping[int, Head], created: float
) -> dict[int, memoryview]:
    return {row: codec.seal(rows[row], shelf, head, created) for row, head in heads.items()}


@dataclass(frozen=True, slots=True)
class Item:
    """One block in a queue: a row of a cargo, or a record as another tier gave it."""

    shelf: Shelf
    head: Head
    meta: Meta
    source: Cargo | memoryview
    """The memoryview: a sealed record that was not checked."""
    row: int = 0
    pass_on: bool = False
    """Whether a lower tier may have it when this one does not take it."""

    def payload(self, header_bytes: int) -> memoryview | None:
        """K and V as this engine exported them; ``None`` for a record that must be checked first."""
        if isinstance(self.source, Cargo):
            return self.source.rows[self.row].data[header_bytes:]
        return None

    def stored(self) -> Stored | None:
        """The record of another tier, not checked; ``None`` where ``payload`` has it."""
        return Stored(self.source, self.meta) if isinstance(self.source, memoryview) else None


async def seal_items(
    items: Sequence[Item], codec: RecordCodec, created: float, limiter: anyio.CapacityLimiter
) -> list[Record]:
    """The records of ``items``, in order."""
    heads: dict[Cargo, dict[int, Head]] = {}
    for item in items:
        if isinstance(item.source, Cargo):
            heads.setdefault(item.source, {})[item.row] = item.head
    sealed = {cargo: await cargo.seal(codec, rows, created, limiter) for cargo, rows in heads.items()}
    return [Record(i.head, sealed[i.source][i.row] if isinstance(i.source, Cargo) else i.source, i.meta) for i in items]


class Bell:
    """Wakes everybody who waits at that moment."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def ring(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


USUAL_BATCH = 64
_Key = tuple[Shelf, BlockName]


class WriteQueue:
    """What waits for one tier, and what its writer has in hand: both are found by ``find`` and count against the bound.

    Everything but the bells is synchronous.
    """

    def __init__(self, bound: int, record_bytes: int) -> None:
        """``bound`` in bytes."""
        self._most = bound // record_bytes
        self._record_bytes = record_bytes
        self._waiting: OrderedDict[_Key, Item] = OrderedDict()
        self._writing: dict[_Key, Item] = {}
        self._reserved = 0
        self.work = Bell()
        """Rings when something was added."""
        self.settled = Bell()
        """Rings when something has left, written or not."""

    @property
    def blocks(self) -> int:
        """Waiting and being written."""
        return len(self._waiting) + len(self._writing)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        return self.blocks * self._record_bytes

    def room(self) -> int:
        """How many more blocks would be taken."""
        return max(self._most - self.blocks - self._reserved, 0)

    def ready_for(self) -> int:
        """How many blocks to bring now: none before there is room for a usual batch, or for as much as there ever is.
        Then at least one, which is dropped where no block fits at all.
        """
        room = self.room()
        return max(room, 1) if room >= USUAL_BATCH or not self.blocks else 0

    def reserve(self, count: int) -> int:
        """Keep room for up to ``count`` blocks until ``release``; returns for how many."""
        granted = min(count, self.room())
        self._reserved += granted
        return granted

    def release(self, count: int) -> None:
        self._reserved -= count
        self.settled.ring()

    def find(self, shelf: Shelf, name: BlockName) -> Item | None:
        """A block that waits or is being written."""
        key = shelf, name
        return self._waiting.get(key) or self._writing.get(key)

    def add(self, items: Iterable[Item]) -> int:
        """Take ``items`` that are not here yet, as long as there is room; returns how many it did."""
        taken = 0
        for item in items:
            if self.find(item.shelf, item.head.name) is not None:
                continue
            if not self.room():
                break
            self._waiting[item.shelf, item.head.name] = item
            taken += 1
        self.work.ring()
        return taken

    def take(self, count: int) -> list[Item]:
        """The next up to ``count`` blocks, all of one shelf, for writing; ``done`` must follow."""
        taken: list[Item] = []
        for key, item in self._waiting.items():
            if len(taken) == count or (taken and item.shelf != taken[0].shelf):
                break
            taken.append(item)
            self._writing[key] = item
        for item in taken:
            del self._waiting[item.shelf, item.head.name]
        return taken

    def done(self, items: Iterable[Item]) -> None:
        """Writing these is over, whether it worked or not."""
        for item in items:
            self._writing.pop((item.shelf, item.head.name), None)
        self.settled.ring()

    def remove(self, gone: Callable[[Item], bool]) -> int:
        """Drop those waiting for which ``gone`` is true; returns how many."""
        keys = [key for key, item in self._waiting.items() if gone(item)]
        for key in keys:
            del self._waiting[key]
        self.settled.ring()
        return len(keys)

    def clear(self) -> list[Item]:
        """Take out everything that waits."""
        items = list(self._waiting.values())
        self._waiting.clear()
        self.settled.ring()
        return items

    def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Newer knowledge about blocks that wait."""
        for name, meta in metas.items():
            item = self._waiting.get((shelf, name))
            if item is not None:
                self._waiting[shelf, name] = replace(item, meta=meta)

    def items(self) -> list[Item]:
        """Everything that waits or is being written."""
        return [*self._writing.values(), *self._waiting.values()]


class Offer:
    """A batch that is offered to one tier after the other."""

    def __init__(self, batch: Batch, *, pass_on: bool) -> None:
        """:raises StorageError: when the batch has more blocks than its buffer has rows."""
        if len(batch.blocks) > len(batch.buffer):
            raise StorageError(f"a batch of {len(batch.blocks)} blocks has a buffer of {len(batch.buffer)} rows")
        self._batch = batch
        self._pass_on = pass_on
        self._whole = Cargo(batch.shelf, list(batch.buffer))

    def to(self, queue: WriteQueue, indices: Sequence[int]) -> set[int]:
        """Put the blocks ``indices`` in ``queue`` as far as there is room; returns those that are there now.

        They share the memory of the batch, unless they are less than half of it: then they are copied, so that a few
        rows do not hold on to many. What waits takes at most twice the memory that is counted.
        """
        shelf, blocks = self._batch.shelf, self._batch.blocks
        known = {at for at in indices if queue.find(shelf, blocks[at].head.name)}
        chosen = [at for at in indices if at not in known][: queue.room()]
        cargo = self._cargo(chosen)
        queue.add(Item(shelf, *blocks[at], cargo, at, self._pass_on) for at in chosen)
        return known | set(chosen)

    def _cargo(self, indices: Sequence[int]) -> Cargo:
        if len(indices) * 2 >= len(self._whole.rows):
            return self._whole
        return Cargo(self._batch.shelf, {at: self._whole.rows[at].copy() for at in indices})
