"""What the disk tier knows in memory: which blocks are there, where, and which is worth least."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from ..base import Head, Listed, Meta
from ..files.segment import Location
from ..naming import BlockName, Shelf

HIT_SECONDS = 3600.0
"""Each doubling of a block's hits keeps it as much longer as if it had been used that much later."""
_MOST_SECONDS = 1e12


class Entry:
    """One block. Owned by :class:`Entries`; others read it."""

    __slots__ = ("head", "location", "meta", "row", "shelf", "stamp")

    def __init__(self, shelf: Shelf, head: Head, location: Location, row: int, meta: Meta) -> None:
        self.shelf = shelf
        self.head = head
        self.location = location
        self.row = row
        """Its number in the database."""
        self.meta = meta
        """With ``written`` on the monotonic clock."""
        self.stamp = 0
        """Number of the heap item that speaks for it; others of it are out of date."""


class _Ranked(NamedTuple):
    priority: int
    recency: float
    stamp: int
    entry: Entry


class _Expiring(NamedTuple):
    at: float
    stamp: int
    entry: Entry


class Entries:
    """All blocks by shelf and name, their children, and their order of eviction: by priority for as long as it holds,
    then by last use and hits; a block only after its children. Safe in any thread. ``get`` takes no lock.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._mutex = threading.Lock()
        self._shelves: dict[Shelf, dict[BlockName, Entry]] = {}
        self._children: dict[Shelf, dict[BlockName, dict[BlockName, None]]] = {}
        self._size = 0
        self._stamps = count(1)
        self._heap: list[_Ranked] | None = None  # made when something is to be evicted for the first time
        self._expiring: list[_Expiring] = []

    def __len__(self) -> int:
        return self._size

    def get(self, shelf: Shelf, name: BlockName) -> Entry | None:
        """The block, if it is there."""
        found = self._shelves.get(shelf)
        return None if found is None else found.get(name)

    def knows(self, entry: Entry) -> bool:
        """Whether ``entry`` has not been removed."""
        return self.get(entry.shelf, entry.head.name) is entry

    def all(self, shelf: Shelf | None = None) -> list[Entry]:
        """A copy, of one shelf or of all, parents before children."""
        with self._mutex:
            shelves = list(self._shelves.values()) if shelf is None else [self._shelves.get(shelf, {})]
            found = [entry for each in shelves for entry in each.values()]
        return sorted(found, key=_start)

    def in_segment(self, number: int) -> list[Entry]:
        """Those that lie in one segment, as they lie there."""
        with self._mutex:
            shelves = [list(each.values()) for each in self._shelves.values()]
        found = [entry for each in shelves for entry in each if entry.location.segment == number]
        return sorted(found, key=_location)

    def shelves(self) -> list[Shelf]:
        """Those that have blocks."""
        return list(self._shelves)

    def children(self, shelf: Shelf, parent: BlockName) -> list[Entry]:
        """The blocks right after ``parent``."""
        with self._mutex:
            names = list(self._children.get(shelf, {}).get(parent, ()))
        return [entry for name in names if (entry := self.get(shelf, name)) is not None]

    def add(self, entries: Iterable[Entry]) -> None:
        """Blocks that are not there yet. A name that is there is replaced."""
        with self._mutex:
            for entry in entries:
                self._add(entry)

    def remove(self, entry: Entry) -> bool:
        """Forget a block; whether it was there."""
        with self._mutex:
            return self._remove(entry)

    def note(self, entry: Entry, meta: Meta) -> None:
        """Take ``meta``, which is as of now, for ``entry``."""
        with self._mutex:
            entry.meta = meta
            if self.knows(entry):
                self._rank(entry)

    def used(self, entry: Entry) -> None:
        """It was read just now."""
        now = self._clock()
        self.note(entry, entry.meta.aged(now)._replace(idle=0.0))

    def coldest(self, keep: frozenset[BlockName]) -> Entry | None:
        """Take out the block that is worth least and has no children here; none of ``keep``."""
        with self._mutex:
            kept: list[_Ranked] = []
            found = self._pop()
            while found is not None and found.entry.head.name in keep:
                kept.append(found)
                found = self._pop()
            for each in kept:
                heapq.heappush(self._heap_now(), each)
            if found is not None:
                self._remove(found.entry)
            return None if found is None else found.entry

    def meta_inside(self, meta: Meta) -> Meta:
        """``meta`` as policies write it, in the form of ``Entry.meta``. Odd numbers become plain ones, and what was
        never noted (``written`` 0) or noted in the future is as of now.
        """
        written, idle, hits, priority, ttl, recompute_seconds = meta
        noted = _seconds(written)
        age = max(self._wall() - noted, 0.0) if noted else 0.0
        left = None if ttl is None else max(_seconds(ttl) - age, 0.0)
        return Meta(self._clock(), _seconds(idle) + age, hits, priority, left, _seconds(recompute_seconds))

    def meta_outside(self, entry: Entry) -> Meta:
        """The inverse, as of now."""
        return entry.meta.aged(self._clock())._replace(written=self._wall())

    def listed(self, entry: Entry) -> Listed:
        """One line of a listing."""
        return Listed(entry.shelf, entry.head, self.meta_outside(entry))

    def _add(self, entry: Entry) -> None:
        name, parent = entry.head.name, entry.head.parent
        shelf = self._shelves.setdefault(entry.shelf, {})
        self._size += name not in shelf
        shelf[name] = entry
        self._children.setdefault(entry.shelf, {}).setdefault(parent, {})[name] = None
        self._rank(entry)

    def _remove(self, entry: Entry) -> bool:
        shelf = self._shelves.get(entry.shelf, {})
        if shelf.get(entry.head.name) is not entry:
            return False
        del shelf[entry.head.name]
        self._size -= 1
        children = self._children[entry.shelf]
        siblings = children[entry.head.parent]
        del siblings[entry.head.name]
        if not siblings:
            del children[entry.head.parent]
            if (parent := shelf.get(entry.head.parent)) is not None:
                self._rank(parent)
        if not shelf:
            del self._shelves[entry.shelf], self._children[entry.shelf]
        return True

    def _is_leaf(self, entry: Entry) -> bool:
        return entry.head.name not in self._children[entry.shelf]

    def _rank(self, entry: Entry) -> None:
        """Put ``entry`` where it belongs in the order; what the heap said of it before is out of date."""
        if self._heap is None:
            return
        if len(self._heap) + len(self._expiring) > 4 * self._size + 64:
            self._heap = None  # mostly items that are out of date
            return
        entry.stamp = next(self._stamps)
        if self._is_leaf(entry):
            self._push(self._heap, entry)

    def _push(self, heap: list[_Ranked], entry: Entry) -> None:
        meta = entry.meta
        now = self._clock()
        left = math.inf if meta.ttl is None else meta.ttl - max(now - meta.written, 0.0)
        priority = meta.priority if left > 0 else 0
        recency = meta.written - meta.idle + HIT_SECONDS * math.log2(1 + max(meta.hits, 0))
        heapq.heappush(heap, _Ranked(priority, recency, entry.stamp, entry))
        if priority and left < math.inf:
            heapq.heappush(self._expiring, _Expiring(now + left, entry.stamp, entry))

    def _heap_now(self) -> list[_Ranked]:
        if self._heap is None:
            self._heap, self._expiring = [], []
            for shelf in self._shelves.values():
                for entry in shelf.values():
                    entry.stamp = next(self._stamps)
                    if self._is_leaf(entry):
                        self._push(self._heap, entry)
        return self._heap

    def _pop(self) -> _Ranked | None:
        heap = self._heap_now()
        self._expire(heap)
        while heap:
            found = heapq.heappop(heap)
            if found.stamp == found.entry.stamp and self.knows(found.entry) and self._is_leaf(found.entry):
                return found
        return None

    def _expire(self, heap: list[_Ranked]) -> None:
        """Rank again whose priority has come to its end: otherwise it would be passed over for ever."""
        now = self._clock()
        while self._expiring and self._expiring[0].at <= now:
            _, stamp, entry = heapq.heappop(self._expiring)
            if stamp == entry.stamp and self.knows(entry) and self._is_leaf(entry):
                entry.stamp = next(self._stamps)
                self._push(heap, entry)


def _start(entry: Entry) -> int:
    return entry.head.start


def _seconds(value: float) -> float:
    """A number that can be compared and is of this world."""
    return value if 0.0 <= value <= _MOST_SECONDS else _MOST_SECONDS if value > _MOST_SECONDS else 0.0


def _location(entry: Entry) -> Location:
    return entry.location
