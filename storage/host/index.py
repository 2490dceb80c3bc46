"""The index of the host tier: which blocks are in which slot, and in which order they go. Plain Python, no memory.

Least valuable first means: the lowest priority, then the longest unused; but a block never before those that follow
it, since they are of no use without it. What is being read or written keeps its slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..base import Head, Listed, Meta
from ..naming import BlockName, Shelf


@dataclass(slots=True, eq=False)
class HostEntry:
    """One block in a slot."""

    shelf: Shelf
    head: Head
    slot: int
    meta: Meta
    last_use: float
    """Seconds of the index's clock."""
    expires: float | None
    """When its priority falls to 0, on the same clock; ``None``: never."""
    readers: int = 0
    """Copies under way out of the slot."""
    present: bool = False
    """Whether the index still has it; a slot with readers outlives that."""
    rank: _Rank | None = None
    """Its valid place in the queue; ``None``: it has none."""


class _Rank(NamedTuple):
    priority: int
    last_use: float
    order: int
    """Of entry into the queue: no two are equal."""


@dataclass(slots=True)
class _ShelfIndex:
    entries: dict[BlockName, HostEntry] = field(default_factory=dict)
    followers: dict[BlockName, dict[BlockName, HostEntry]] = field(default_factory=dict)
    """By the name of the block before them, whether that one is here or not."""


class HostIndex:
    """Blocks by shelf and name, and a queue of those that may go: the ones that nothing here follows."""

    def __init__(self) -> None:
        self._shelves: dict[Shelf, _ShelfIndex] = {}
        self._queue: list[tuple[_Rank, HostEntry]] = []
        self._expiries: list[tuple[float, int, HostEntry]] = []
        self._order = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, shelf: Shelf, name: BlockName) -> HostEntry | None:
        """The block, if it is here."""
        index = self._shelves.get(shelf)
        return None if index is None else index.entries.get(name)

    def names(self, shelf: Shelf) -> Mapping[BlockName, HostEntry]:
        """All blocks of a shelf; a live view that must not be kept."""
        index = self._shelves.get(shelf)
        return {} if index is None else index.entries

    def followers(self, shelf: Shelf, parent: BlockName) -> list[HostEntry]:
        """The blocks here that come right after ``parent``."""
        index = self._shelves.get(shelf)
        return [] if index is None else list(index.followers.get(parent, {}).values())

    def of_tenant(self, tenant: bytes) -> list[HostEntry]:
        """All blocks of a tenant on every shelf."""
        shelves = [index for shelf, index in self._shelves.items() if shelf.tenant == tenant]
        return [entry for index in shelves for entry in index.entries.values()]

    def listed(self, shelf: Shelf | None) -> list[Listed]:
        """Every block (of one shelf), parents before children."""
        shelves = list(self._shelves) if shelf is None else [shelf]
        entries = [entry for each in shelves for entry in self.names(each).values()]
        entries.sort(key=lambda entry: entry.head.start)
        return [Listed(entry.shelf, entry.head, entry.meta) for entry in entries]

    def add(self, entry: HostEntry) -> None:
        """Take in a block that is not here."""
        index = self._shelves.setdefault(entry.shelf, _ShelfIndex())
        index.entries[entry.head.name] = entry
        index.followers.setdefault(entry.head.parent, {})[entry.head.name] = entry
        entry.present = True
        self._count += 1
        self._enqueue(entry)
        self._watch(entry)
        above = index.entries.get(entry.head.parent)
        if above is not None:
            above.rank = None

    def remove(self, entry: HostEntry) -> None:
        """Take out a block that is here; the one before it may go next."""
        index = self._shelves[entry.shelf]
        del index.entries[entry.head.name]
        siblings = index.followers[entry.head.parent]
        del siblings[entry.head.name]
        if not siblings:
            del index.followers[entry.head.parent]
            above = index.entries.get(entry.head.parent)
            if above is not None:
                self._enqueue(above)
        if not index.entries:
            del self._shelves[entry.shelf]
        entry.present = False
        entry.rank = None
        self._count -= 1

    def use(self, entry: HostEntry, now: float) -> None:
        """Note that a block was read."""
        entry.last_use = max(entry.last_use, now)
        self._enqueue(entry)

    def note(self, entry: HostEntry, meta: Meta, last_use: float, expires: float | None) -> None:
        """Note what policies know by now."""
        entry.meta = meta
        entry.last_use = max(entry.last_use, last_use)
        entry.expires = expires
        self._enqueue(entry)
        self._watch(entry)

    def leaving(self, now: float) -> Generator[HostEntry, None, None]:
        """Blocks that may go, the least valuable first, as long as the caller removes each or breaks off. One that is
        neither removed nor the last of the iteration is passed over and stays.
        """
        self._expire(now)
        passed: list[HostEntry] = []
        try:
            while self._queue:
                rank, entry = heapq.heappop(self._queue)
                if entry.rank is not rank:
                    continue
                entry.rank = None
                passed.append(entry)
                if not entry.readers:
                    yield entry
        finally:
            for entry in passed:
                self._enqueue(entry)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            expires, _, entry = heapq.heappop(self._expiries)
            if entry.present and entry.expires == expires:
                entry.expires = None
                entry.meta = entry.meta._replace(priority=0, ttl=None)
                self._enqueue(entry)

    def _watch(self, entry: HostEntry) -> None:
        if entry.expires is None or not entry.meta.priority:
            return
        self._order += 1
        heapq.heappush(self._expiries, (entry.expires, self._order, entry))
        if len(self._expiries) > 2 * self._count + 64:
            valid = {id(item[2]): item for item in self._expiries if item[2].present and item[2].expires == item[0]}
            self._expiries = list(valid.values())
            heapq.heapify(self._expiries)

    def _enqueue(self, entry: HostEntry) -> None:
        """Give an entry its place in the queue, if it may have one; an earlier place becomes void."""
        index = self._shelves.get(entry.shelf)
        if not entry.present or index is None or entry.head.name in index.followers:
            return
        self._order += 1
        entry.rank = _Rank(entry.meta.priority, entry.last_use, self._order)
        heapq.heappush(self._queue, (entry.rank, entry))
        if len(self._queue) > 2 * self._count + 64:
            self._queue = [(rank, each) for rank, each in self._queue if each.rank is rank]
            heapq.heapify(self._queue)
