"""Ghosts: what was evicted, so that it shows when it is wanted again."""

from __future__ import annotations

from collections import OrderedDict

from .namespace import Namespace


class Ghosts:
    """Remembers what was evicted, so that it shows when it is wanted again. Bounded; the oldest is forgotten first.

    A ghost is known by namespace, depth and the tokens of its first evicted block, not by its whole prefix: good enough
    for statistics, and small.
    """

    def __init__(self, bound: int) -> None:
        self.hits = 0
        self.gap_seconds = 0.0
        """Sum over the hits of the time between eviction and the new wish."""
        self._bound = bound
        self._evicted: OrderedDict[tuple[Namespace, int, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evicted)

    def remember(self, namespace: Namespace, depth: int, block: bytes, now: float) -> None:
        """``block``, which began at ``depth`` tokens, was evicted."""
        self._evicted[namespace, depth, block] = now
        if len(self._evicted) > self._bound:
            self._evicted.popitem(last=False)

    def recall(self, namespace: Namespace, depth: int, block: bytes, now: float) -> float | None:
        """Seconds since ``block`` was evicted, if it was; it is no ghost afterwards."""
        since = self._evicted.pop((namespace, depth, block), None)
        if since is None:
            return None
        self.hits += 1
        self.gap_seconds += now - since
        return now - since
