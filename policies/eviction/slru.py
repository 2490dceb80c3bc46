"""SLRU, segmented LRU: what was used again is protected from what was used once.

R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system performance", IEEE Computer 27(3),
1994.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .base import Entry, Json
from .queues import EntryList, ListPolicy


class Slru(ListPolicy):
    """Two lists in order of use. New entries are on probation; a use moves them, from either list, to the young end of
    the protected one, which holds at most 80 % of the pool: what is too much goes, oldest first, to the young end of
    probation. Victims come from probation. A scan therefore passes through a fifth of the pool and no more.

    A run larger than the protected list would push out all others and then itself: a use only makes it the youngest on
    probation, and so does growing that large.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._most_protected = capacity * 4 // 5
        self._probation = self.add_list("probation")
        self._protected = self.add_list("protected")

    def order(self) -> Sequence[EntryList]:
        return self._probation, self._protected

    def on_insert(self, entry: Entry, now: float) -> None:
        self.place(entry, self._probation)
        if entry.hits:
            self.on_hit(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        super().on_extend(entry, blocks, now)
        if entry.blocks > self._most_protected and self.home(entry) is self._protected:
            self.move(entry, self._probation)
        self._demote()

    def on_hit(self, entry: Entry, now: float) -> None:
        self.move(entry, self._protected if entry.blocks <= self._most_protected else self._probation)
        self._demote()

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        super().load(state, entry)
        self._demote()

    def _demote(self) -> None:
        while self._protected.blocks > self._most_protected and (oldest := self._protected.oldest) is not None:
            self.move(oldest, self._probation)
