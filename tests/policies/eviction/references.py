"""Eviction policies once more, slow and obvious: plain lists of runs, the oldest first, searched from the start."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from octavo.policies.eviction import Entry


class Gone:
    """A memory."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks


class Reference(ABC):
    """All entries of ``lists``; an entry is in one of them."""

    def __init__(self, capacity: int, lists: int) -> None:
        self.capacity = capacity
        self.lists: list[list[Entry]] = [[] for _ in range(lists)]

    def home(self, entry: Entry) -> list[Entry]:
        [home] = [entries for entries in self.lists if entry in entries]
        return home

    def move(self, entry: Entry, target: list[Entry]) -> None:
        self.home(entry).remove(entry)
        target.append(entry)

    def first(self, *lists: list[Entry]) -> Entry:
        return next(entry for entries in lists for entry in entries if entry.candidate)

    def insert(self, entry: Entry, now: float) -> None:
        self.lists[0].append(entry)

    def extend(self, entry: Entry, blocks: int) -> None:  # noqa: B027  # not every reference cares
        """It grew by ``blocks``."""

    def split(self, upper: Entry, lower: Entry) -> None:
        home = self.home(lower)
        home.insert(home.index(lower) + 1, upper)

    def hit(self, entry: Entry, now: float) -> None:  # noqa: B027
        """It was used."""

    def evict(self, entry: Entry, blocks: int) -> object:
        if not entry.blocks:
            self.home(entry).remove(entry)
        return None

    def back(self, entry: Entry, memory: object) -> None:  # noqa: B027
        """What was evicted is back."""

    def make_room(self) -> None:  # noqa: B027
        """Blocks are short: ``pick`` and ``evict`` follow."""

    @abstractmethod
    def pick(self, now: float) -> Entry:
        """The candidate that goes first."""


def size(entries: list[Entry]) -> int:
    return sum(entry.blocks for entry in entries)


def ghosts_size(ghosts: list[Gone]) -> int:
    return sum(ghost.blocks for ghost in ghosts)


def forget_oldest_block(ghosts: list[Gone]) -> None:
    ghosts[0].blocks -= 1
    if not ghosts[0].blocks:
        del ghosts[0]


class FifoReference(Reference):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 1)

    def pick(self, now: float) -> Entry:
        return self.first(*self.lists)


class LruKReference(Reference):
    """Figure 2.1 of the paper, with K = 2."""

    def __init__(self, capacity: int, correlated: float = 0.0) -> None:
        super().__init__(capacity, 1)
        self.correlated = correlated
        self.hist: dict[Entry, tuple[float, float]] = {}

    def insert(self, entry: Entry, now: float) -> None:
        super().insert(entry, now)
        self.hist[entry] = (now, -math.inf)

    def split(self, upper: Entry, lower: Entry) -> None:
        super().split(upper, lower)
        self.hist[upper] = self.hist[lower]

    def hit(self, entry: Entry, now: float) -> None:
        if now - entry.last_use > self.correlated:
            first, _ = self.hist[entry]
            period = entry.last_use - first
            self.hist[entry] = (now, first + period)

    def evict(self, entry: Entry, blocks: int) -> object:
        super().evict(entry, blocks)
        return self.hist[entry]

    def back(self, entry: Entry, memory: object) -> None:
        assert isinstance(memory, tuple)
        first, second = self.hist[entry]
        self.hist[entry] = (first, max(second, memory[0]))

    def pick(self, now: float) -> Entry:
        candidates = [entry for entry in self.lists[0] if entry.candidate]
        old = [entry for entry in candidates if now - entry.last_use > self.correlated]
        if old:
            return min(old, key=lambda entry: (self.hist[entry][1], entry.last_use))
        return min(candidates, key=lambda entry: entry.last_use)


class SlruReference(Reference):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 2)
        self.probation, self.protected = self.lists
        self.most = int(0.8 * capacity)

    def extend(self, entry: Entry, blocks: int) -> None:
        if entry in self.protected and entry.blocks > self.most:
            self.move(entry, self.probation)
        self.demote()

    def hit(self, entry: Entry, now: float) -> None:
        self.move(entry, self.probation if entry.blocks > self.most else self.protected)
        self.demote()

    def demote(self) -> None:
        while size(self.protected) > self.most:
            self.move(self.protected[0], self.probation)

    def pick(self, now: float) -> Entry:
        return self.first(self.probation, self.protected)


class TwoQReference(Reference):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 2)
        self.a1_in, self.am = self.lists
        self.a1_out: list[Gone] = []
        self.kin, self.kout = max(capacity // 4, 1), max(capacity // 2, 1)

    def hit(self, entry: Entry, now: float) -> None:
        if entry in self.am:
            self.move(entry, self.am)

    def evict(self, entry: Entry, blocks: int) -> object:
        from_a1_in = entry in self.a1_in
        super().evict(entry, blocks)
        if not from_a1_in:
            return None
        self.a1_out.append(Gone(blocks))
        return self.a1_out[-1]

    def make_room(self) -> None:
        while ghosts_size(self.a1_out) > self.kout:
            forget_oldest_block(self.a1_out)

    def back(self, entry: Entry, memory: object) -> None:
        if memory in self.a1_out:
            self.make_room()
            self.a1_out = [ghost for ghost in self.a1_out if ghost is not memory]
            self.move(entry, self.am)

    def pick(self, now: float) -> Entry:
        if size(self.a1_in) > self.kin:
            return self.first(self.a1_in, self.am)
        return self.first(self.am, self.a1_in)


class ArcReference(Reference):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 2)
        self.t1, self.t2 = self.lists
        self.b1: list[Gone] = []
        self.b2: list[Gone] = []
        self.p = 0.0

    def insert(self, entry: Entry, now: float) -> None:
        self.trim()
        super().insert(entry, now)

    def extend(self, entry: Entry, blocks: int) -> None:
        entry.blocks -= blocks  # room is made before the growth
        self.trim()
        entry.blocks += blocks

    def hit(self, entry: Entry, now: float) -> None:
        self.trim()
        self.move(entry, self.t2)

    def evict(self, entry: Entry, blocks: int) -> object:
        ghosts = self.b1 if entry in self.t1 else self.b2
        super().evict(entry, blocks)
        ghosts.append(Gone(blocks))
        return ghosts[-1]

    def back(self, entry: Entry, memory: object) -> None:
        b1, b2 = ghosts_size(self.b1), ghosts_size(self.b2)
        for ghost in [ghost for ghost in self.b1 if ghost is memory]:
            self.b1.remove(ghost)
            self.p = min(self.capacity, self.p + max(1.0, b2 / b1) * min(ghost.blocks, entry.blocks))
            self.move(entry, self.t2)
        for ghost in [ghost for ghost in self.b2 if ghost is memory]:
            self.b2.remove(ghost)
            self.p = max(0, self.p - max(1.0, b1 / b2) * min(ghost.blocks, entry.blocks))
            self.move(entry, self.t2)

    def pick(self, now: float) -> Entry:
        if size(self.t1) > self.p:
            return self.first(self.t1, self.t2)
        return self.first(self.t2, self.t1)

    def trim(self) -> None:
        while self.b1 and size(self.t1) + ghosts_size(self.b1) > self.capacity:
            forget_oldest_block(self.b1)
        while self.b2 and size(self.t1 + self.t2) + ghosts_size(self.b1 + self.b2) > 2 * self.capacity:
            forget_oldest_block(self.b2)
