"""What the disk tier knows in memory: which blocks are there, where, and which is worth least."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import closing

from ..base import Head, Listed, Meta
from ..files.segment import Location
from ..naming import BlockName, Shelf
from ..ranking import Ranking

_MOST_SECONDS = 1e12


class Entry:
    """One block. Owned by :class:`Entries`; others read it."""

    __slots__ = ("head", "location", "meta", "row", "shelf")

    def __init__(self, shelf: Shelf, head: Head, location: Location, row: int, meta: Meta) -> None:
        self.shelf = shelf
        self.head = head
        self.location = location
        self.row = row
        """Its number in the database."""
        self.meta = meta
        """With ``written`` on the monotonic clock."""

    @property
    def last_use(self) -> float:
        """On the monotonic clock."""
        return self.meta.written - self.meta.idle

    @property
    def expires(self) -> float | None:
        """When its priority falls to 0, on the monotonic clock; ``None``: never."""
        return None if self.meta.ttl is None else self.meta.written + self.meta.ttl


class Entries:
    """All blocks by shelf and name, their children, and their order of eviction, which ``ranking`` knows; a block only
    after its children. Safe in any thread. ``get`` takes no lock; the ranking is called with the lock held.

    The ranking hears of nothing before :meth:`wake`: so what an engine finds when it opens costs nothing until it has
    to know which of it goes first.
    """

    def __init__(self, ranking: Ranking, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.ranking = ranking
        self._awake = False
        self._clock = clock
        self._wall = wall
        self._mutex = threading.Lock()
        self._shelves: dict[Shelf, dict[BlockName, Entry]] = {}
        self._children: dict[Shelf, dict[BlockName, dict[BlockName, None]]] = {}
        self._size = 0

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
            now = self._clock()
            for entry in entries:
                self._add(entry, now)

    def remove(self, entry: Entry) -> bool:
        """Forget a block; whether it was there."""
        with self._mutex:
            return self._remove(entry, self._clock())

    def note(self, entry: Entry, meta: Meta) -> None:
        """Take ``meta``, which is as of now, for ``entry``."""
        with self._mutex:
            entry.meta = meta
            if self._awake and self.knows(entry):
                self.ranking.changed(entry, self._clock())

    def used(self, entry: Entry) -> None:
        """It was read just now."""
        with self._mutex:
            now = self._clock()
            entry.meta = entry.meta.aged(now)._replace(idle=0.0)
            if self._awake and self.knows(entry):
                self.ranking.used(entry, now)

    def wake(self) -> None:
        """Tell the ranking of all blocks, and from now on of everything that happens. O(n log n) the first time."""
        with self._mutex:
            self._wake()

    def coldest(self, keep: frozenset[BlockName]) -> Entry | None:
        """Take out the block that is worth least and has no children here; none of ``keep``."""
        with self._mutex:
            self._wake()
            now = self._clock()
            with closing(self.ranking.leaving(1, now)) as leaving:
                for block in leaving:
                    entry = self.get(block.shelf, block.head.name)
                    if entry is not None and entry.head.name not in keep:
                        self._remove(entry, now, evicted=True)
                        return entry
        return None

    def forget_tenant(self, tenant: bytes) -> None:
        """All blocks of a tenant were removed: the ranking must not remember them either."""
        with self._mutex:
            self.ranking.forgotten(tenant)

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

    def _add(self, entry: Entry, now: float) -> None:
        name, parent = entry.head.name, entry.head.parent
        there = self.get(entry.shelf, name)
        if there is not None:
            self._remove(there, now)
        shelf = self._shelves.setdefault(entry.shelf, {})
        siblings = self._children.setdefault(entry.shelf, {}).setdefault(parent, {})
        above = None if siblings else shelf.get(parent)
        shelf[name] = entry
        siblings[name] = None
        self._size += 1
        if self._awake:
            if above is not None:
                self.ranking.withdrawn(above)
            self.ranking.added(entry, now)
            self._offer(entry, now)

    def _remove(self, entry: Entry, now: float, *, evicted: bool = False) -> bool:
        shelf = self._shelves.get(entry.shelf, {})
        if shelf.get(entry.head.name) is not entry:
            return False
        del shelf[entry.head.name]
        self._size -= 1
        if self._awake:
            self.ranking.removed(entry, now, evicted=evicted)
        children = self._children[entry.shelf]
        siblings = children[entry.head.parent]
        del siblings[entry.head.name]
        if not siblings:
            del children[entry.head.parent]
            above = shelf.get(entry.head.parent)
            if above is not None and self._awake:
                self._offer(above, now)
        if not shelf:
            del self._shelves[entry.shelf], self._children[entry.shelf]
        return True

    def _offer(self, entry: Entry, now: float) -> None:
        """Let the ranking name ``entry`` if it is a leaf."""
        if entry.head.name not in self._children[entry.shelf]:
            self.ranking.offered(entry, now)

    def _wake(self) -> None:
        if self._awake:
            return
        self._awake = True
        now = self._clock()
        entries = [entry for shelf in self._shelves.values() for entry in shelf.values()]
        if self.ranking.follows:
            entries = _oldest_first(entries)
        for entry in entries:
            self.ranking.added(entry, now)
        for entry in entries:
            self._offer(entry, now)


def _oldest_first(entries: Iterable[Entry]) -> list[Entry]:
    """Parents before children, and apart from that those that are unused for longest first. So that a beginning that
    many prompts share does not make its ends look young, a parent counts as unused for as long as the one after it that
    is unused for longest.
    """
    backwards = sorted(entries, key=_start, reverse=True)
    oldest: dict[tuple[Shelf, BlockName], float] = {}
    for entry in backwards:
        since = min(entry.last_use, oldest.get((entry.shelf, entry.head.name), entry.last_use))
        oldest[entry.shelf, entry.head.name] = since
        above = (entry.shelf, entry.head.parent)
        oldest[above] = min(since, oldest.get(above, since))
    return sorted(backwards, key=lambda entry: (oldest[entry.shelf, entry.head.name], entry.head.start))


def _start(entry: Entry) -> int:
    return entry.head.start


def _seconds(value: float) -> float:
    """A number that can be compared and is of this world."""
    return value if 0.0 <= value <= _MOST_SECONDS else _MOST_SECONDS if value > _MOST_SECONDS else 0.0


def _location(entry: Entry) -> Location:
    return entry.location
