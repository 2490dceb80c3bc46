"""How much each replica has to do: a row of numbers for each slot.

Times are those of one monotonic clock. Work is counted in tokens.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_MOST_HALVINGS = 32.0


class LoadBooks:
    """Work in flight, work done lately, and what others have sent there.

    What was done counts half as much every ``half_life`` seconds. It is kept as it was at one moment for all, and new
    work is counted up from that moment instead: so no row has to be touched when time passes.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._moment = 0.0
        self._work: Floats = np.zeros(8)
        """In flight, of our own."""
        self._recent: Floats = np.zeros(8)
        self._foreign: Floats = np.zeros(8)
        self._requests: Ints = np.zeros(8, np.int64)
        self._foreign_requests: Ints = np.zeros(8, np.int64)
        self._most: list[tuple[float, int]] = [(0.0, 0)] * 8
        """Most work and requests of our own in flight since the last report."""

    def __len__(self) -> int:
        """Slots there are rows for."""
        return len(self._work)

    def open(self, slot: int, others: int) -> None:
        """Begin a row, as if its share of the work of late had been done there; ``others`` rows are open."""
        while slot >= len(self):
            self._grow()
        self._recent[slot] = self._recent.sum() / others if others else 0.0

    def close(self, slot: int) -> None:
        for column in (self._work, self._recent, self._foreign, self._requests, self._foreign_requests):
            column[slot] = 0
        self._most[slot] = (0.0, 0)

    def begin(self, slot: int, work: int) -> None:
        self._work[slot] += work
        self._requests[slot] += 1
        most, requests = self._most[slot]
        self._most[slot] = (max(most, float(self._work[slot])), max(requests, int(self._requests[slot])))

    def end(self, slot: int, work: int, now: float) -> None:
        scale = self._scale(now)
        self._work[slot] -= work
        self._requests[slot] -= 1
        self._recent[slot] += work * scale

    def report(self, slot: int, waiting_tokens: int, requests: int, now: float) -> None:
        """What the replica says it has to do. What goes beyond the most that we had there since its last report was
        sent by others; a report is older than what we know, so the most, not what is there now.
        """
        most, own = self._most[slot]
        self._foreign[slot] = max(waiting_tokens - most, 0.0) * self._scale(now)
        self._foreign_requests[slot] = max(requests - own, 0)
        self._most[slot] = (float(self._work[slot]), int(self._requests[slot]))

    def loads(self, now: float) -> Floats:
        """By slot, in tokens."""
        scale = self._scale(now)
        return self._work + (self._recent + self._foreign) / scale

    def requests(self) -> Ints:
        """In flight, by slot, those of others as of the last report."""
        return self._requests + self._foreign_requests

    def _scale(self, now: float) -> float:
        """Of what is counted now; it may change what was counted before."""
        halvings = (now - self._moment) / self._half_life
        if halvings > _MOST_HALVINGS:
            self._moment = now
            self._recent *= 2.0**-halvings
            self._foreign *= 2.0**-halvings
            return 1.0
        scale: float = 2.0**halvings
        return scale

    def _grow(self) -> None:
        more = len(self)
        self._work, self._recent, self._foreign = (
            np.pad(column, (0, more)) for column in (self._work, self._recent, self._foreign)
        )
        self._requests, self._foreign_requests = (
            np.pad(column, (0, more)) for column in (self._requests, self._foreign_requests)
        )
        self._most += [(0.0, 0)] * more
