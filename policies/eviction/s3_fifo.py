"""S3-FIFO: three queues, of which the small first one lets go quickly of what is used once.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .base import Entry, Json, Returned
from .queues import EntryList, GhostList, ListPolicy
from .state import counts

_MOST_USES = 3


class S3Fifo(ListPolicy):
    """New entries go into the small queue, or into the main one if a ghost of theirs is remembered. A use is counted,
    up to 3, and moves nothing. While the small queue has a tenth of the pool or more, victims come from it: its oldest
    entry moves to the main queue, with a count of 0, if it was used twice or more, and is evicted otherwise. Otherwise
    they come from the main queue, where an entry that was used goes to the young end once for each counted use.

    Ghosts are of what was evicted from the small queue, worth as many blocks as the main queue may have, 90 % of the
    pool. What was hot once is gone from the main queue after four turns of it at the latest. It turns only while the
    small queue is below its tenth: a scan alone, of entries that nobody uses again, leaves the main queue as it is.

    Entries that cannot go keep their places and are passed over, as if they were not there. Moving what was used is
    part of looking for a victim; so an iterator that is read on without anything being evicted moves entries too.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_blocks = max(capacity // 10, 1)
        self._small, self._main = self.add_list("small"), self.add_list("main")
        self._ghosts = GhostList()
        self._uses: dict[Entry, int] = {}  # of those that were used at all

    def order(self) -> Sequence[EntryList]:
        """Moves what was used out of the way: amortised O(log n), for each move takes up a counted use."""
        while self._small.blocks >= self._small_blocks and (oldest := self._small.candidate) is not None:
            if self._uses.get(oldest, 0) < 2:
                return self._small, self._main
            self._uses.pop(oldest, None)
            self.move(oldest, self._main)
        while (oldest := self._main.candidate) is not None and (uses := self._uses.pop(oldest, 0)):
            self._count(oldest, uses - 1)
            self.move(oldest, self._main)
        return self._main, self._small

    def on_insert(self, entry: Entry, now: float) -> None:
        self.place(entry, self._small)
        self._count(entry, min(entry.hits, _MOST_USES))

    def on_hit(self, entry: Entry, now: float) -> None:
        self._count(entry, min(self._uses.get(entry, 0) + 1, _MOST_USES))

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        super().on_split(upper, lower, now)
        self._count(upper, self._uses.get(lower, 0))

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        if self._ghosts.take(returned.memory) is not None and self.home(entry) is self._small:
            self._uses.pop(entry, None)
            self.move(entry, self._main)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        home = self.home(entry)
        super().on_evict(entry, blocks, now)
        if home is self._main:
            return None
        ghost = self._ghosts.add(blocks)
        self._ghosts.trim(self.capacity - self._small_blocks)
        return ghost

    def on_forget(self, entry: Entry) -> None:
        super().on_forget(entry)
        self._uses.pop(entry, None)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """Ghosts are not saved."""
        used = [key(entry) for entry in self._uses]
        return {**super().dump(key), "used": used, "uses": list(self._uses.values())}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        used = list(counts(state, "used", "uses", entry))
        super().load(state, entry)
        for _, known, uses in used:
            self._count(known, min(uses, _MOST_USES))

    def _count(self, entry: Entry, uses: int) -> None:
        if uses:
            self._uses[entry] = uses
