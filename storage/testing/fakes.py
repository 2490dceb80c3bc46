"""Tiers for tests: one in memory that can be shared and bounded, and one that makes another misbehave."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast

import anyio
import msgspec

from ...errors import StorageError
from ..base import Head, Listed, Meta, Options, Record, Stored, Tier, TierGeometry, TierStats
from ..naming import BlockName, Shelf
from ..options import PositiveInt, read_options

_T = TypeVar("_T")


class _Kept(NamedTuple):
    head: Head
    data: bytes
    meta: Meta


@dataclass(slots=True)
class MemoryStore:
    """What a :class:`MemoryTier` keeps. Give one store to several tiers and they share it, or find it again."""

    blocks: OrderedDict[tuple[Shelf, BlockName], _Kept] = field(default_factory=OrderedDict)
    """Longest unused first."""


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of :class:`MemoryTier`."""

    blocks: PositiveInt | None = None
    """Bound; ``None``: none."""


class MemoryTier(Tier):
    """A dictionary. Evicts what was not used for longest; declines what its own batch alone overfills."""

    def __init__(self, geometry: TierGeometry, *, blocks: int | None = None, store: MemoryStore | None = None) -> None:
        """At most ``blocks`` blocks, in ``store``, by default one of its own."""
        self.store = MemoryStore() if store is None else store
        self._record_bytes = geometry.record_bytes
        self._most = blocks
        self._open = False
        self._evicted = 0
        self._declined = 0

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        """See :class:`MemoryOptions`."""
        return cls(geometry, blocks=read_options(MemoryOptions, options, "memory tier").blocks)

    async def open(self) -> None:
        """Nothing to do."""
        self._open = True

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Copies are kept."""
        self._check_open()
        batch = {(shelf, record.head.name) for record in records}
        return [self._keep(shelf, record, batch) for record in records]

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """Views of what is kept, which never changes."""
        self._check_open()
        return [self._stored((shelf, name)) for name in names]

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """As it is."""
        self._check_open()
        return [(shelf, name) in self.store.blocks for name in names]

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        """As it is; ``None`` where the store is shared, so that ``contains`` is asked as with a remote tier."""
        if self.shared:
            return None
        if not self._open:
            return 0
        return next((at for at, name in enumerate(names) if (shelf, name) not in self.store.blocks), len(names))

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """As it says."""
        self._check_open()
        return sum(self.store.blocks.pop((shelf, name), None) is not None for name in names)

    async def erase(self, tenant: bytes) -> int:
        """As it says."""
        self._check_open()
        gone = [key for key in self.store.blocks if key[0].tenant == tenant]
        for key in gone:
            del self.store.blocks[key]
        return len(gone)

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """As of the first step of the iteration."""
        self._check_open()
        items = [(key[0], kept) for key, kept in self.store.blocks.items() if shelf in (None, key[0])]
        for where, kept in sorted(items, key=lambda item: item[1].head.start):
            yield Listed(where, kept.head, kept.meta)

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        """By looking through all blocks."""
        return [listed async for listed in self.listing(shelf) if listed.head.parent == parent]

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """As it says."""
        self._check_open()
        for name, meta in metas.items():
            kept = self.store.blocks.get((shelf, name))
            if kept is not None:
                self.store.blocks[shelf, name] = kept._replace(meta=meta)

    async def spill(self, count: int) -> list[tuple[Shelf, Record]]:
        """The longest unused first."""
        self._check_open()
        spilled: list[tuple[Shelf, Record]] = []
        while self.store.blocks and len(spilled) < count:
            (shelf, _), kept = self.store.blocks.popitem(last=False)
            spilled.append((shelf, Record(kept.head, memoryview(kept.data), kept.meta)))
        return spilled

    async def flush(self) -> None:
        """Nothing to do."""
        self._check_open()

    async def close(self) -> None:
        """A store of its own goes with it, since nobody else has it."""
        self._open = False
        if not self.persistent:
            self.store = MemoryStore()

    def stats(self) -> TierStats:
        """As it is."""
        count = len(self.store.blocks)
        capacity = None if self._most is None else self._most * self._record_bytes
        return TierStats(count, count * self._record_bytes, capacity, self._evicted, self._declined)

    def _check_open(self) -> None:
        if not self._open:
            raise StorageError("the memory tier is not open")

    def _stored(self, key: tuple[Shelf, BlockName]) -> Stored | None:
        kept = self.store.blocks.get(key)
        if kept is None:
            return None
        self.store.blocks.move_to_end(key)
        return Stored(memoryview(kept.data), kept.meta)

    def _keep(self, shelf: Shelf, record: Record, batch: set[tuple[Shelf, BlockName]]) -> bool:
        key = (shelf, record.head.name)
        there = self.store.blocks.get(key)
        if there is None and not self._make_room(batch):
            self._declined += 1
            return False
        data = bytes(record.data) if there is None else there.data
        self.store.blocks[key] = _Kept(record.head, data, record.meta)
        self.store.blocks.move_to_end(key)
        return True

    def _make_room(self, batch: set[tuple[Shelf, BlockName]]) -> bool:
        blocks = self.store.blocks
        if self._most is None or len(blocks) < self._most:
            return True
        victim = next((key for key in blocks if key not in batch), None)
        if victim is None:
            return False
        del blocks[victim]
        self._evicted += 1
        return True


class SharedMemoryTier(MemoryTier):
    """A :class:`MemoryTier` that stands for a remote store: others use it too and it outlives the process. It answers
    only to ``contains``, not to ``peek``.
    """

    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True


FaultKind: TypeAlias = Literal[
    "fail", "hang", "slow", "full", "flip", "other", "short", "long", "reorder", "fewer", "more", "nonsense", "invert"
]
"""What goes wrong in a call.

* ``fail``: it raises ``Fault.error``. ``hang``: it never returns. ``slow``: it waits for ``Fault.gate``, then works.
* ``full`` (put): it declines everything and keeps nothing.
* of the answer of ``get``: ``flip``: one bit of each block is wrong; ``other``: each block is replaced by its
  neighbour's; ``short``, ``long``: each is a byte too short or too long; ``nonsense``: each is no memory at all.
* of any answer that is a list: ``reorder``: it is reversed; ``fewer``, ``more``: it has an item too few or too many;
  ``invert``: truth values are turned round.
"""

CALLS = frozenset(
    [
        "put",
        "get",
        "contains",
        "delete",
        "erase",
        "children",
        "touch",
        "note",
        "notes",
        "spill",
        "flush",
        "open",
        "close",
    ],
)
"""Calls that a fault can be set on."""


@dataclass(slots=True, eq=False)
class Fault:
    """What is to go wrong, in which call, how often."""

    call: str
    """One of ``CALLS``; ``*``: any but ``open`` and ``close``."""
    kind: FaultKind
    times: int | None = None
    """In so many calls; ``None``: in all."""
    after: int = 0
    """So many calls work first."""
    error: Callable[[], BaseException] = lambda: StorageError("injected")
    gate: anyio.Event | None = None
    """What ``slow`` waits for."""


class FaultyTier(Tier):
    """Passes every call on to ``inner`` and misbehaves as told by :meth:`inject`.

    A tier that lies, hangs, fails and fills up: for tests of whoever uses tiers.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        """How often each call was made."""
        self.running: Counter[str] = Counter()
        """Calls that have not come back, hanging ones included."""
        self._faults: list[Fault] = []

    @property
    def persistent(self) -> bool:  # type: ignore[override]  # as the inner one is
        """As the inner tier."""
        return self.inner.persistent

    @property
    def shared(self) -> bool:  # type: ignore[override]  # as the inner one is
        """As the inner tier."""
        return self.inner.shared

    @property
    def read_only(self) -> bool:  # type: ignore[override]  # as the inner one is
        """As the inner tier."""
        return self.inner.read_only

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        """Around a :class:`MemoryTier`, whose options it takes."""
        return cls(MemoryTier.create(options, geometry))

    def inject(self, *faults: Fault) -> None:
        """Let ``faults`` happen from now on; the first that fits a call applies to it."""
        self._faults += faults

    def heal(self) -> None:
        """No more faults. What hangs goes on hanging."""
        self._faults.clear()

    async def open(self) -> None:
        """Passed on, as every call below."""
        await self._through("open", self.inner.open)

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """``full`` keeps nothing."""

        async def declined() -> list[bool]:
            return [False] * len(records)

        full = self._peek("put", "full")
        work = declined if full else lambda: self.inner.put(shelf, records)
        return await self._through("put", work, _spoiled)

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """The call that can lie best."""
        return await self._through("get", lambda: self.inner.get(shelf, names), _spoiled_blocks)

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """Passed on."""
        return await self._through("contains", lambda: self.inner.contains(shelf, names), _spoiled)

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        """Never at fault."""
        return self.inner.peek(shelf, names)

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Passed on."""
        return await self._through("delete", lambda: self.inner.delete(shelf, names))

    async def erase(self, tenant: bytes) -> int:
        """Passed on."""
        return await self._through("erase", lambda: self.inner.erase(tenant))

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """Never at fault."""
        async for listed in self.inner.listing(shelf):
            yield listed

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        """Passed on."""
        return await self._through("children", lambda: self.inner.children(shelf, parent), _spoiled)

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Passed on."""
        await self._through("touch", lambda: self.inner.touch(shelf, metas))

    async def note(self, notes: bytes) -> None:
        """Passed on."""
        await self._through("note", lambda: self.inner.note(notes))

    async def notes(self) -> bytes | None:
        """Passed on."""
        return await self._through("notes", self.inner.notes)

    async def spill(self, count: int) -> list[tuple[Shelf, Record]]:
        """Passed on."""
        return await self._through("spill", lambda: self.inner.spill(count), _spoiled)

    async def flush(self) -> None:
        """Passed on."""
        await self._through("flush", self.inner.flush)

    async def close(self) -> None:
        """Passed on."""
        await self._through("close", self.inner.close)

    def stats(self) -> TierStats:
        """Never at fault."""
        return self.inner.stats()

    def _peek(self, call: str, kind: FaultKind) -> bool:
        fault = self._fitting(call)
        return fault is not None and fault.kind == kind and not fault.after

    def _fitting(self, call: str) -> Fault | None:
        kinds = (call,) if call in {"open", "close"} else (call, "*")
        return next((each for each in self._faults if each.call in kinds), None)

    def _next(self, call: str) -> Fault | None:
        """The fault of this call, which is used up by it."""
        fault = self._fitting(call)
        if fault is None:
            return None
        if fault.after:
            fault.after -= 1
            return None
        if fault.times is not None:
            fault.times -= 1
            if not fault.times:
                self._faults.remove(fault)
        return fault

    async def _through(
        self,
        call: str,
        work: Callable[[], Awaitable[_T]],
        spoil: Callable[[FaultKind, _T], _T] = lambda _, answer: answer,
    ) -> _T:
        fault = self._next(call)
        self.calls[call] += 1
        self.running[call] += 1
        try:
            await _suffer(fault)
            answer = await work()
            return answer if fault is None else spoil(fault.kind, answer)
        finally:
            self.running[call] -= 1


async def _suffer(fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.kind == "fail":
        raise fault.error()
    if fault.kind == "hang":
        await anyio.sleep_forever()
    if fault.kind == "slow" and fault.gate is not None:
        await fault.gate.wait()


def _spoiled(kind: FaultKind, answer: list[_T]) -> list[_T]:
    if kind == "reorder":
        return answer[::-1]
    if kind == "fewer":
        return answer[:-1]
    if kind == "more":
        return answer + answer[-1:]
    if kind == "invert":
        return [cast("_T", not item) if isinstance(item, bool) else item for item in answer]
    return answer


def _spoiled_blocks(kind: FaultKind, answer: list[Stored | None]) -> list[Stored | None]:
    if kind == "other":
        return answer[1:] + answer[:1]
    spoiled = [None if each is None else each._replace(data=_spoiled_data(kind, each.data)) for each in answer]
    return _spoiled(kind, spoiled)


def _spoiled_data(kind: FaultKind, data: memoryview) -> memoryview:
    if kind == "flip":
        copy = bytearray(data)
        copy[len(copy) // 2] ^= 1
        return memoryview(copy)
    if kind == "short":
        return data[:-1]
    if kind == "long":
        return memoryview(bytes(data) + b"\0")
    return cast("memoryview", 42) if kind == "nonsense" else data
