"""Histogram: counts by bucket, plain enough to be kept on the path of every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Exemplar(NamedTuple):
    """A value that was observed within a sampled trace."""

    value: float
    trace_id: str
    """Hex, as in W3C trace context."""
    when: float
    """Seconds since the epoch."""


class HistogramState(NamedTuple):
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """By bucket, not cumulative; one more than ``bounds``, for what lies above them all."""
    sum: float
    exemplars: dict[int, Exemplar]
    """The latest of each bucket, by its index."""

    @property
    def observations(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts values by bucket; a bucket holds what is at most its bound, and above the one before."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: ascending upper bounds; the last bucket, without a bound, comes by itself."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, weight: int = 1) -> None:
        """Count ``value``, ``weight`` times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def observe_traced(self, exemplar: Exemplar) -> None:
        """Count a value and remember the trace in which it was seen."""
        self.observe(exemplar.value)
        self._exemplars[bisect_left(self._bounds, exemplar.value)] = exemplar

    def state(self) -> HistogramState:
        """As it is now."""
        return HistogramState(self._bounds, tuple(self._counts), self._sum, dict(self._exemplars))
