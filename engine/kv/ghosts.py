"""Ghosts: what was evicted, so that it shows when it is wanted again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ...policies.eviction.base import Returned
from ...storage.naming import Namespace


class Ghost(NamedTuple):
    """How a run of blocks left the cache."""

    when: float
    """On the engine's monotonic clock."""
    reason: str
    """``allocate``, ``watermark`` or ``call``."""
    policy: str
    """Class of the eviction policy."""
    memory: object = None
    """What that policy remembers of it."""


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
        self._evicted: OrderedDict[tuple[Namespace, int, bytes], Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evicted)

    def remember(self, namespace: Namespace, depth: int, block: bytes, ghost: Ghost) -> None:
        """``block``, which began at ``depth`` tokens, was evicted."""
        self._evicted[namespace, depth, block] = ghost
        if len(self._evicted) > self._bound:
            self._evicted.popitem(last=False)

    def recall(self, namespace: Namespace, depth: int, block: bytes, now: float) -> Returned | None:
        """What is known of ``block`` if it was evicted; it is no ghost afterwards."""
        ghost = self._evicted.pop((namespace, depth, block), None)
        if ghost is None:
            return None
        self.hits += 1
        self.gap_seconds += now - ghost.when
        return Returned(ghost.memory, depth, now - ghost.when)

    def peek(self, namespace: Namespace, depth: int, block: bytes) -> Ghost | None:
        """How ``block`` was evicted, if it was. Nothing is counted and it stays a ghost."""
        return self._evicted.get((namespace, depth, block))

    def forget_memories(self) -> None:
        """The policy whose memories these are is no longer in use. O(bound)."""
        for key, ghost in self._evicted.items():
            self._evicted[key] = ghost._replace(memory=None)

    def forget(self, salt: str | None) -> None:
        """Keep no token of a tenant. O(bound)."""
        for key in [key for key in self._evicted if key[0].salt == salt]:
            del self._evicted[key]
