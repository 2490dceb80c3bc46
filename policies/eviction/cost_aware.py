"""Cost-aware: what is cheap to get back and rarely used goes first.

Greedy-Dual-Size-Frequency (L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
policy", HP Laboratories report HPL-98-69, 1998) ranks by ``clock + frequency * cost / size``. Here all three parts are
in logarithms, ``clock + log2(frequency) + log2(cost per block)``, so that one unit means a factor of two everywhere and
ageing is the one of :mod:`~octavo.policies.eviction.lfu`.
"""

from __future__ import annotations

import math

from .base import Entry
from .lfu import Lfu

_MEMORY = 256
"""Measurements after which the running mean forgets: long enough to be calm, short enough to follow a changed load."""

_SHORTEST = 1e-9
"""Seconds, for a reload that a coarse clock measured as nothing."""


class CostAware(Lfu):
    """Ranks by decayed frequency times the seconds it would take to get one block of the entry back.

    That is the measured time to compute it again, or to reload it from the tier that holds it if that is quicker. An
    entry without a measurement is taken for as dear as it is deep, for attention makes later blocks dearer. To let both
    kinds stand in one order, seconds are divided by the geometric mean of seconds per token of depth measured so far.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._measured = 0
        self._log2_scale = 0.0

    def score(self, entry: Entry, now: float) -> float:
        """``log2`` of frequency times cost, plus the evictions so far in half-lives."""
        return super().score(entry, now) + self._log2_cost(entry)

    def _log2_cost(self, entry: Entry) -> float:
        """In tokens of depth."""
        log2_depth = math.log2(max(entry.depth, 1))
        if entry.recompute_seconds <= 0.0:
            return log2_depth
        self._learn(math.log2(entry.recompute_seconds) - log2_depth)
        seconds = entry.recompute_seconds
        if entry.reload_seconds is not None:
            seconds = max(min(seconds, entry.reload_seconds), _SHORTEST)
        return math.log2(seconds) - self._log2_scale

    def _learn(self, log2_ratio: float) -> None:
        self._measured = min(self._measured + 1, _MEMORY)
        self._log2_scale += (log2_ratio - self._log2_scale) / self._measured
