"""LFU with ageing: the least frequently used goes first, and old uses count less and less.

The weight of a use halves with every half-life, as in LRFU (D. Lee et al., "LRFU: a spectrum of policies that subsumes
the least recently used and least frequently used policies", IEEE Transactions on Computers 50(12), 2001). Time is not
measured in seconds but in evicted blocks, as the ageing of LFU-DA is (M. Arlitt et al., "Evaluating content management
techniques for Web proxy caches", Performance Evaluation Review 27(4), 2000): an idle night ages nothing, and under
pressure what was hot once is gone after a bounded number of evictions.
"""

from __future__ import annotations

import math

from .base import Entry
from .scored import ScoredPolicy


class Lfu(ScoredPolicy):
    """Ranks by frequency that halves whenever half the pool was evicted.

    With ``t`` the blocks evicted so far divided by the half-life, an entry used at ``t1, t2, ...`` has the frequency
    ``sum(2 ** (ti - t))``. What is kept and compared is ``log2(frequency) + t = log2(sum(2 ** ti))``: it changes with
    uses only, so nothing has to be aged. An entry of frequency f that is never used again falls behind one that is
    used once, now, after ``log2(f)`` half-lives: 1000 uses are worth 10 half-lives, five pools full of evictions.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._half_life = capacity / 2
        self._evicted = 0
        self._worth: dict[Entry, float] = {}

    def score(self, entry: Entry, now: float) -> float:
        """``log2(frequency)`` plus the evictions so far in half-lives."""
        if entry not in self._worth:
            self._worth[entry] = self._fresh(entry)
        return self._worth[entry]

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self._worth[entry] = self._fresh(entry)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        super().on_split(upper, lower, now)
        self._worth[upper] = self._worth.get(lower, self._fresh(lower))

    def on_hit(self, entry: Entry, now: float) -> None:
        known = self._worth.get(entry)
        self._worth[entry] = self._fresh(entry) if known is None else _log2_sum(known, self._time)
        super().on_hit(entry, now)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        self._evicted += blocks
        if entry.blocks == 0:
            self._worth.pop(entry, None)
        return super().on_evict(entry, blocks, now)

    def on_forget(self, entry: Entry) -> None:
        super().on_forget(entry)
        self._worth.pop(entry, None)

    @property
    def _time(self) -> float:
        return self._evicted / self._half_life

    def _fresh(self, entry: Entry) -> float:
        """As if all its uses were now: exact for a new entry, the best guess for one restored from a snapshot."""
        return self._time + math.log2(1 + entry.hits)


def _log2_sum(a: float, b: float) -> float:
    """``log2(2 ** a + 2 ** b)`` without overflow."""
    return max(a, b) + math.log2(1.0 + 2.0 ** -abs(a - b))
