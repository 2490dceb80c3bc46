"""Rates: what reading a block costs, measured, and how much of a prefix is worth reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_KEEP = 0.8
"""Weight of all earlier batches against the latest one."""
STALE = 60.0
"""Seconds after which a measurement no longer speaks against a tier: one slow moment must not end its use for good."""


class Rate:
    """Seconds per block, a mean in which older batches count less and less."""

    def __init__(self, clock: Callable[[], float], *, stale: float = STALE) -> None:
        self._clock = clock
        self._stale = stale
        self._seconds = 0.0
        self._blocks = 0.0
        self._last = 0.0

    def note(self, blocks: int, seconds: float) -> None:
        """One batch of ``blocks`` took ``seconds``."""
        if blocks > 0:
            self._seconds = self._seconds * _KEEP + max(seconds, 0.0)
            self._blocks = self._blocks * _KEEP + blocks
            self._last = self._clock()

    def seconds(self) -> float | None:
        """Per block; ``None``: never measured."""
        return self._seconds / self._blocks if self._blocks else None

    def fresh(self) -> float | None:
        """The same, ``None`` also when it was last measured more than ``stale`` seconds ago."""
        return self.seconds() if self._clock() - self._last <= self._stale else None


def best_prefix(reload: Sequence[float | None], compute: Sequence[float]) -> int:
    """How many leading blocks to load so that most time is saved: the prefix with the largest sum of
    ``compute[i] - reload[i]``, the longest of equal ones.

    :param reload: seconds to load each block; ``None``: not known.
    :param compute: seconds to compute each block; 0.0, or nothing at that index: not known.

    A block of which one of the two is not known neither speaks for loading nor against it, so it is loaded unless the
    known ones around it say otherwise.
    """
    best, length, saved = 0.0, 0, 0.0
    for at, seconds in enumerate(reload):
        computing = compute[at] if at < len(compute) else 0.0
        if seconds is not None and computing > 0:
            saved += computing - seconds
        if saved >= best:
            best, length = saved, at + 1
    return length
