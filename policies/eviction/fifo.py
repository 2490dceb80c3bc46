"""FIFO: what has been in the cache longest goes first, used or not.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from .base import Entry
from .scored import ScoredPolicy


class Fifo(ScoredPolicy):
    """Ranks by the time of insertion. A run that grew is as old as its first block, and so are the parts of a run that
    was cut. Holds no state of its own: what is restored from a snapshot has its times.

    O(log n) per event, O(1) while entries become candidates in the order of their insertion.
    """

    def score(self, entry: Entry, now: float) -> float:
        """Seconds on the engine's clock."""
        return entry.insert_time
