"""LRU: the least recently used goes first.

R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage hierarchies", IBM Systems
Journal 9(2), 1970.
"""

from __future__ import annotations

from collections.abc import Iterator

from .base import Entry, EvictionPolicy
from .candidates import CandidateQueue


class Lru(EvictionPolicy):
    """Ranks by last use, not by release: a long request that lets go of its prefix late does not make it young.

    O(1) per event while entries are released in the order of their last use; one that is released later than younger
    ones, or a parent that its last child left behind, costs O(log n).
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue = CandidateQueue()

    def on_hit(self, entry: Entry, now: float) -> None:
        if entry in self._queue:
            self._queue.push(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._queue.push(entry, entry.last_use)

    def on_held(self, entry: Entry) -> None:
        self._queue.discard(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if entry.blocks == 0:
            self._queue.discard(entry)
        return None

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return self._queue.drain()
