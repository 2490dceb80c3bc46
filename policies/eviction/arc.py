"""ARC, adaptive replacement cache: how much of the pool is for recency and how much for frequency is learned.

N. Megiddo, D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .base import Entry, Json, Returned
from .queues import EntryList, Ghost, GhostList, ListPolicy


class Arc(ListPolicy):
    """T1 holds what was used once lately, T2 what was used twice or more; what is evicted from them leaves a ghost in
    B1 or B2. ``target`` blocks (``p`` in the paper) are meant for T1. Who comes back while his ghost is in B1 says
    that T1 is too small, one in B2 says the same of T2; both join T2.

    Two things differ from the paper, because runs take the place of pages. A return counts as many times as blocks
    came back. And the engine makes room for a request before the policy hears that its run is one that returns: the
    replacement is done with the target from before, and does not know whether the run comes from B2, which in the
    paper decides when T1 is exactly on target; here T2 gives then.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1, self._t2 = self.add_list("t1"), self.add_list("t2")
        self._b1, self._b2 = GhostList(), GhostList()
        self._target = 0.0

    @property
    def target(self) -> float:
        """Blocks that T1 is meant to have, from 0 to the capacity."""
        return self._target

    def order(self) -> Sequence[EntryList]:
        return (self._t1, self._t2) if self._t1.blocks > self._target else (self._t2, self._t1)

    def on_insert(self, entry: Entry, now: float) -> None:
        self._trim()
        self.place(entry, self._t2 if entry.hits else self._t1)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._trim()
        super().on_extend(entry, blocks, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        self._trim()
        self.move(entry, self._t2)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        ghosts = self._b1 if self.home(entry) is self._t1 else self._b2
        super().on_evict(entry, blocks, now)
        return ghosts.add(blocks)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        in_b1, in_b2 = self._b1.blocks, self._b2.blocks
        if (ghost := self._b1.take(returned.memory)) is not None:
            self._retarget(max(in_b2 / in_b1, 1.0) * _came_back(entry, ghost))
        elif (ghost := self._b2.take(returned.memory)) is not None:
            self._retarget(-max(in_b1 / in_b2, 1.0) * _came_back(entry, ghost))
        if ghost is not None:
            self.move(entry, self._t2)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """With the target as a share of the pool: the next one may have another size."""
        return {**super().dump(key), "target": self._target / self.capacity}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        share = state.get("target", 0.0)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"the target must be a share of the pool from 0 to 1, not {share}")
        super().load(state, entry)
        self._target = share * self.capacity

    def _retarget(self, change: float) -> None:
        self._target = min(max(self._target + change, 0.0), float(self.capacity))

    def _trim(self) -> None:
        """Before a list grows or gives something away: T1 and B1 have at most the capacity together, and all four at
        most twice that.

        The paper does it on each miss. Right after a new run came it would be too early: the ghost of that very run
        might go before ``on_ghost_hit`` asks for it.
        """
        self._b1.trim(self.capacity - self._t1.blocks)
        self._b2.trim(2 * self.capacity - self._t1.blocks - self._t2.blocks - self._b1.blocks)


def _came_back(entry: Entry, ghost: Ghost) -> int:
    """Blocks of the ghost that are back, at most: a request may agree with the beginning of the run only."""
    return min(entry.blocks, ghost.blocks)
