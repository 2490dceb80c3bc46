"""ScoredPolicy: an eviction policy that is one formula."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

from ...errors import ContractBroken
from .base import Entry, EvictionPolicy
from .candidates import CandidateQueue


class ScoredPolicy(EvictionPolicy):
    """Evicts the lowest :meth:`score` first, equal scores by last use. Subclasses write the formula, and nothing else.

    **When the score is asked.** Once when the entry becomes a candidate, and once after each use while it is one. It
    then stands until the next use, however much time passes: a score must not depend on being asked again. Decay has
    to be written as ``log2(weight) + clock / half_life``. Two weights that both halve every ``half_life`` keep their
    order for ever, so instead of lowering all the old ones at each tick it is enough to start the new ones higher.
    ``weight * 2 ** (-age / half_life)`` means the same order, but only if all were asked again at the same time.

    A score that raises or is NaN surfaces as an error from the event or from :meth:`victims`, and the entry goes first:
    it is never lost. A subclass that overrides an event calls the method of this class too.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue = CandidateQueue()
        self._used: dict[Entry, float] = {}

    @abstractmethod
    def score(self, entry: Entry, now: float) -> float:
        """How much ``entry`` is worth keeping, any real number or infinity. ``now`` is the time of its last event."""

    def on_hit(self, entry: Entry, now: float) -> None:
        """Have the score asked again; later, for the engine updates the entry after this event."""
        if entry in self._queue:
            self._used[entry] = now

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._rank(entry, now)

    def on_held(self, entry: Entry) -> None:
        self._forget(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if entry.blocks == 0:
            self._forget(entry)
        return None

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while self._used:
            entry = next(iter(self._used))
            self._rank(entry, self._used.pop(entry))
        return self._queue.drain()

    def _rank(self, entry: Entry, now: float) -> None:
        try:
            score = self._checked_score(entry, now)
        except Exception:
            self._queue.push(entry, -math.inf)
            raise
        self._queue.push(entry, score)

    def _checked_score(self, entry: Entry, now: float) -> float:
        score = self.score(entry, now)
        if math.isnan(score):
            raise ContractBroken(f"{type(self).__qualname__}.score returned NaN; it must return a number")
        return score

    def _forget(self, entry: Entry) -> None:
        self._queue.discard(entry)
        self._used.pop(entry, None)
