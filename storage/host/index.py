"""The index of the host tier: which blocks are in which slot, and which of them may go. Plain Python, no memory.

A block may go while nothing here follows it and nobody reads its slot; who of those goes first, the ranking says.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from ..base import Head, Listed, Meta
from ..naming import BlockName, Shelf
from ..ranking import Ranking


@dataclass(slots=True, eq=False)
class HostEntry:
    """One block in a slot."""

    shelf: Shelf
    head: Head
    slot: int
    meta: Meta
    last_use: float
    """Seconds of the tier's clock."""
    expires: float | None
    """When its priority falls to 0, on the same clock; ``None``: never."""
    readers: int = 0
    """Copies under way out of the slot."""
    present: bool = False
    """Whether the index still has it; a slot with readers outlives that."""
    offered: bool = False
    """Whether the ranking may name it."""


@dataclass(slots=True)
class _ShelfIndex:
    entries: dict[BlockName, HostEntry] = field(default_factory=dict)
    followers: dict[BlockName, dict[BlockName, HostEntry]] = field(default_factory=dict)
    """By the name of the block before them, whether that one is here or not."""


class HostIndex:
    """Blocks by shelf and name. ``now`` is the time on the tier's clock."""

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self._shelves: dict[Shelf, _ShelfIndex] = {}
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

    def add(self, entry: HostEntry, now: float) -> None:
        """Take in a block that is not here."""
        index = self._shelves.setdefault(entry.shelf, _ShelfIndex())
        index.entries[entry.head.name] = entry
        index.followers.setdefault(entry.head.parent, {})[entry.head.name] = entry
        entry.present = True
        self._count += 1
        above = index.entries.get(entry.head.parent)
        if above is not None:
            self._withdraw(above)
        self.ranking.added(entry, now)
        self._offer(entry, now)

    def remove(self, entry: HostEntry, now: float, *, evicted: bool = False) -> None:
        """Take out a block that is here; the one before it may go next."""
        index = self._shelves[entry.shelf]
        del index.entries[entry.head.name]
        siblings = index.followers[entry.head.parent]
        del siblings[entry.head.name]
        entry.present = entry.offered = False
        self._count -= 1
        self.ranking.removed(entry, now, evicted=evicted)
        if not siblings:
            del index.followers[entry.head.parent]
            above = index.entries.get(entry.head.parent)
            if above is not None:
                self._offer(above, now)
        if not index.entries:
            del self._shelves[entry.shelf]

    def use(self, entry: HostEntry, now: float) -> None:
        """Note that a block was read."""
        entry.last_use = max(entry.last_use, now)
        self.ranking.used(entry, now)

    def note(self, entry: HostEntry, meta: Meta, last_use: float, expires: float | None, now: float) -> None:
        """Note what policies know by now."""
        entry.meta = meta
        entry.last_use = max(entry.last_use, last_use)
        entry.expires = expires
        self.ranking.changed(entry, now)

    def hold(self, entry: HostEntry) -> None:
        """Somebody reads the slot of a block, which is here or not any more."""
        entry.readers += 1
        self._withdraw(entry)

    def release(self, entry: HostEntry, now: float) -> None:
        """He has done so."""
        entry.readers -= 1
        if entry.present:
            self._offer(entry, now)

    def leaving(self, count: int, now: float) -> Generator[HostEntry, None, None]:
        """Blocks that may go, the least valuable first, as long as the caller removes each or breaks off. One that is
        neither removed nor the last of the iteration is passed over and stays. ``count``: how many are wanted.
        """
        with closing(self.ranking.leaving(count, now)) as blocks:
            for block in blocks:
                entry = self.find(block.shelf, block.head.name)
                if entry is not None:
                    yield entry

    def _offer(self, entry: HostEntry, now: float) -> None:
        if entry.offered or entry.readers or entry.head.name in self._shelves[entry.shelf].followers:
            return
        entry.offered = True
        self.ranking.offered(entry, now)

    def _withdraw(self, entry: HostEntry) -> None:
        if entry.offered:
            entry.offered = False
            self.ranking.withdrawn(entry)
