"""2Q, the full version: what is used once passes through a queue; what comes back after it had left is kept.

T. Johnson, D. Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB 1994.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import Entry, Returned
from .queues import EntryList, GhostList, ListPolicy


class TwoQ(ListPolicy):
    """New entries go into the queue A1in, where uses change nothing: soon after the first they say little. While A1in
    has more than a quarter of the pool (Kin), victims come from its old end and leave ghosts in A1out, worth half a
    pool (Kout). Who comes back while his ghost is there joins Am, an LRU list, and victims from Am leave no ghosts.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kin = max(capacity // 4, 1)
        self._kout = max(capacity // 2, 1)
        self._a1_in = self.add_list("a1in")
        self._a1_out = GhostList()
        self._am = self.add_list("am")

    def order(self) -> Sequence[EntryList]:
        if self._a1_in.blocks > self._kin:
            return self._a1_in, self._am
        return self._am, self._a1_in

    def on_insert(self, entry: Entry, now: float) -> None:
        self.place(entry, self._am if entry.hits else self._a1_in)

    def on_hit(self, entry: Entry, now: float) -> None:
        if self.home(entry) is self._am:
            self.move(entry, self._am)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        if returned.memory in self._a1_out:
            self._a1_out.trim(self._kout)
            self._a1_out.take(returned.memory)
            self.move(entry, self._am)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        home = self.home(entry)
        super().on_evict(entry, blocks, now)
        self._a1_out.trim(self._kout + self.capacity)  # what is dropped rather than evicted never comes to victims()
        return None if home is self._am else self._a1_out.add(blocks)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        """What is too much in A1out goes now. When the last run was evicted it was too early: it may have made room for
        the very run whose ghost would have gone, and the paper looks for that one before it makes room."""
        self._a1_out.trim(self._kout)
        return super().victims(count, now)
