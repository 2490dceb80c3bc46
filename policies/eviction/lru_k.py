"""LRU-K with K = 2: what was used least recently *the time before last* goes first.

E. J. O'Neil, P. E. O'Neil, G. Weikum, "The LRU-K page replacement algorithm for database disk buffering", SIGMOD 1993.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .base import Entry, EvictionPolicy, Json, Returned
from .candidates import CandidateQueue


class _History(NamedTuple):
    """HIST(p, 1) and HIST(p, 2) of the paper, seconds on the engine's clock; LAST(p) is ``Entry.last_use``."""

    first: float
    """The last use that was correlated with none before it."""
    second: float
    """The one before that; minus infinity: there was none, or it was forgotten."""


class LruK(EvictionPolicy):
    """Ranks by the use before the last, so a prefix used twice outlives any number that were used once. Those with one
    use go first, by LRU among themselves.

    Uses that follow one another within ``correlated`` seconds are one use, and an entry goes after all others until
    that time has passed. That a run grows is part of the use that brought it. What was evicted keeps its history as
    long as the engine remembers it, four times as many runs as the pool has blocks: the Retained Information Period of
    the paper.

    Amortised O(log n) per event.
    """

    def __init__(self, capacity: int, *, correlated: float = 0.0) -> None:
        """``correlated``: seconds, the Correlated Reference Period of the paper."""
        super().__init__(capacity)
        self._correlated = correlated
        self._history: dict[Entry, _History] = {}
        self._queue = CandidateQueue()
        self._young = CandidateQueue()
        """Candidates whose last use may be that recent. In ``_queue`` they stand at that use; all others stand at a use
        before the last, and even their last is longer ago, so these go after them."""

    def on_insert(self, entry: Entry, now: float) -> None:
        """One that was restored with uses, of which nothing is known but the last, had one when it was inserted."""
        self._history[entry] = _History(entry.last_use, entry.insert_time if entry.hits else -math.inf)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._history[upper] = self._history[lower]

    def on_hit(self, entry: Entry, now: float) -> None:
        last = entry.last_use
        if now - last > self._correlated:
            # The paper moves HIST(p, 1) up by the length of the correlated uses, LAST(p) - HIST(p, 1): that is LAST(p).
            self._history[entry] = _History(now, last)
        if entry in self._queue:
            self._push_young(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        if now - entry.last_use > self._correlated:
            self._queue.push(entry, self._history[entry].second)
        else:
            self._push_young(entry, entry.last_use)

    def on_held(self, entry: Entry) -> None:
        self._queue.discard(entry)
        self._young.discard(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        history = self._history[entry]
        if entry.blocks == 0:
            self.on_forget(entry)
        return history

    def on_forget(self, entry: Entry) -> None:
        self.on_held(entry)
        del self._history[entry]

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        """An entry that only grew by what is back has a history of its own, and keeps it if it is the younger one."""
        if isinstance(returned.memory, _History):
            own = self._history[entry]
            self._history[entry] = own._replace(second=max(own.second, returned.memory.first))

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while (entry := self._young.first()) is not None and now - entry.last_use > self._correlated:
            self._young.discard(entry)
            self._queue.push(entry, self._history[entry].second)
        return self._queue.drain()

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """Times as seconds before the last use, for the clock of the next process is another."""
        uses = {
            str(key(entry)): [entry.last_use - history.first, entry.last_use - history.second]
            for entry, history in self._history.items()
            if history.second > -math.inf
        }
        return {"uses": uses}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        uses = state.get("uses", {})
        if not isinstance(uses, Mapping):
            raise TypeError(f"'uses' must be a mapping from keys to ages, not {type(uses).__name__}")
        for key, ages in uses.items():
            known = entry(int(key))
            if known is not None and known in self._history:
                self._restore(known, *_two_ages(ages))

    def _restore(self, entry: Entry, first: float, second: float) -> None:
        self._history[entry] = _History(entry.last_use - first, entry.last_use - second)
        if entry in self._queue and entry not in self._young:
            self._queue.push(entry, entry.last_use - second)

    def _push_young(self, entry: Entry, last: float) -> None:
        self._queue.push(entry, last)
        self._young.push(entry, last)


def _two_ages(ages: Json) -> tuple[float, float]:
    if isinstance(ages, str) or not isinstance(ages, Sequence):
        raise TypeError(f"ages must be a list of two numbers, not {type(ages).__name__}")
    first, second = ages
    if not isinstance(first, int | float) or not isinstance(second, int | float) or not 0 <= first <= second:
        raise ValueError(f"ages must be two numbers from 0 up, the second no less than the first, not {ages}")
    return first, second
