"""GDSF, Greedy-Dual-Size-Frequency: frequency times cost, over a clock that rises with what is evicted.

L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Laboratories
report HPL-98-69, 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from .base import Entry, Json
from .scored import ScoredPolicy
from .state import counts, floats, integers

_MEMORY = 256
"""Measurements after which the running mean forgets: long enough to be calm, short enough to follow a changed load."""


class _Use(NamedTuple):
    """What was known of an entry when it was used last."""

    frequency: int
    cost: float
    clock: float


class Gdsf(ScoredPolicy):
    """Ranks by ``clock + frequency * cost / size``. The size of a run is its blocks, its cost the seconds to compute
    all of them again, so that cost by size is :attr:`Entry.recompute_seconds`, here divided by the running mean of all.
    What was not measured counts as the mean, 1. The clock of an entry is the one at its last use; that of the policy is
    set to the priority of each victim, so new entries start where the last victim was.

    That is the only ageing: what was used ``f`` times falls behind what is used once, now, when the clock has risen by
    ``f - 1``, which takes about as many pools full of evictions, fewer where victims were used more than once. So it
    is bounded, but long. :mod:`~octavo.policies.eviction.cost_aware`, which is the same formula in logarithms, forgets
    much faster: there ``f`` uses are worth ``log2(f)`` halves of a pool. It also knows what a tier has a copy of.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0.0
        self._last: dict[Entry, _Use] = {}
        self._measured = 0
        self._mean = 0.0
        self._named: Entry | None = None

    @property
    def clock(self) -> float:
        """Priority of the dearest victim so far; ``L`` in the paper."""
        return self._clock

    def score(self, entry: Entry, now: float) -> float:
        """As of its last use."""
        last = self._last[entry]
        return last.clock + last.frequency * last.cost

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self._measure(entry)
        self._last[entry] = _Use(1 + entry.hits, self._cost(entry), self._clock)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        super().on_extend(entry, blocks, now)
        self._measure(entry)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        super().on_split(upper, lower, now)
        self._last[upper] = self._last[lower]

    def on_hit(self, entry: Entry, now: float) -> None:
        super().on_hit(entry, now)
        self._last[entry] = _Use(self._last[entry].frequency + 1, self._cost(entry), self._clock)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if entry is self._named:  # and not one that is dropped because its contents are bad
            self._clock = max(self._clock, self.score(entry, now))
        if entry.blocks == 0:
            self._last.pop(entry, None)
        return super().on_evict(entry, blocks, now)

    def on_forget(self, entry: Entry) -> None:
        super().on_forget(entry)
        self._last.pop(entry, None)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        try:
            for entry in super().victims(count, now):
                self._named = entry
                yield entry
        finally:
            self._named = None

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """Clocks as how far they are behind, for the next policy begins with its own."""
        return {
            "keys": [key(entry) for entry in self._last],
            "frequencies": [last.frequency for last in self._last.values()],
            "behind": [self._clock - last.clock for last in self._last.values()],
        }

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        frequencies, behind = list(counts(state, "keys", "frequencies", entry)), floats(state, "behind")
        if len(behind) != len(integers(state, "keys")):
            raise ValueError("the state must say of each entry how far it is behind the clock")
        for index, known, frequency in frequencies:
            if known in self._last:
                self._last[known] = _Use(frequency, self._last[known].cost, self._clock - behind[index])
                super().on_hit(known, 0.0)  # ranks it anew

    def _measure(self, entry: Entry) -> None:
        if entry.recompute_seconds > 0.0:
            self._measured = min(self._measured + 1, _MEMORY)
            self._mean += (entry.recompute_seconds - self._mean) / self._measured

    def _cost(self, entry: Entry) -> float:
        """Of a block, the mean being 1."""
        return entry.recompute_seconds / self._mean if entry.recompute_seconds > 0.0 and self._mean else 1.0
