"""Candidates in order of a key: the structure under the policies that rank by one number."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple, TypeAlias

from .base import Entry

_SLACK = 64
"""Stale heap items that are tolerated whatever the number of live ones; below it compaction is not worth its walk."""

_Place: TypeAlias = tuple[float, float]
"""Key, last use."""


class _Late(NamedTuple):
    """A heap item. ``number`` is unique, so entries themselves are never compared."""

    place: _Place
    number: int
    entry: Entry


class CandidateQueue:
    """Entries by key, lowest first; equal keys by last use, and then in an order that the calls alone determine.

    Keys mostly arrive in ascending order (times, clocks), so those are appended to an ordered dictionary: O(1) for
    push, discard and first. The ones that arrive late go to a binary heap with lazy deletion: amortised O(log n).
    Memory stays O(live entries): the heap is rebuilt when more than half of it is stale.
    """

    def __init__(self) -> None:
        self._ordered: OrderedDict[Entry, _Place] = OrderedDict()
        self._heap: list[_Late] = []
        self._late: dict[Entry, _Late] = {}
        self._numbers = count()
        self._last: _Place = (-math.inf, -math.inf)  # of what was appended last

    def __len__(self) -> int:
        return len(self._ordered) + len(self._late)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._ordered or entry in self._late

    def push(self, entry: Entry, key: float) -> None:
        """Put ``entry`` at ``key``, whether it was there or not. ``key`` is not NaN."""
        ordered = self._ordered
        if entry in ordered or entry in self._late:
            self.discard(entry)
        place = (key, entry.last_use)
        if not ordered or place >= self._last:
            ordered[entry] = self._last = place
            return
        late = _Late(place, next(self._numbers), entry)
        self._late[entry] = late
        heapq.heappush(self._heap, late)

    def discard(self, entry: Entry) -> None:
        """Take ``entry`` out; nothing happens when it is not in."""
        if self._ordered.pop(entry, None) is None and self._late.pop(entry, None) is not None:
            self._compact()

    def first(self) -> Entry | None:
        """The entry that comes first, which stays in; ``None`` when empty."""
        late, ordered = self._first_late() if self._heap else None, self._ordered
        if late is None:
            return next(iter(ordered), None)
        return late.entry if not ordered or late.place < next(iter(ordered.values())) else next(iter(ordered))

    def drain(self) -> Iterator[Entry]:
        """Yield entries, lowest first, while the caller discards and pushes between two yields.

        An entry that lost no blocks after its turn is not yielded again, so this ends even when the caller takes
        nothing; at the end such entries are back in their places.
        """
        passed: list[tuple[Entry, float]] = []
        try:
            while (entry := self.first()) is not None:
                blocks = entry.blocks
                yield entry
                if entry.blocks == blocks and (place := self._place_of(entry)) is not None:
                    self.discard(entry)
                    passed.append((entry, place[0]))
        finally:
            for entry, key in passed:
                if entry.candidate and entry not in self:
                    self.push(entry, key)

    def _place_of(self, entry: Entry) -> _Place | None:
        late = self._late.get(entry)
        return self._ordered.get(entry) if late is None else late.place

    def _first_late(self) -> _Late | None:
        while self._heap:
            late = self._heap[0]
            if self._late.get(late.entry) is late:
                return late
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._late) + (_SLACK if self._late else 0):
            self._heap = list(self._late.values())
            heapq.heapify(self._heap)
