"""Residency: how long blocks stay in the cache, how long they lie unused there, and after what time they are wanted
again. Answers whether the pool is too small, or full of what nobody uses.
"""

from __future__ import annotations

from ...telemetry.metrics.catalogue import BLOCK_IDLE, BLOCK_LIFETIME, REUSE_GAP, WANTED_GAP
from ...telemetry.metrics.histogram import Histogram


class Residency:
    """Histograms in seconds of the cache's clock.

    What is approximated: blocks of one edge of the tree have their times in common. An edge that grew has the age of
    its first block, so the lifetime of those behind it is told too long, by the time that their sequence ran at most;
    an edge that was split keeps its age in both halves; a run that was brought to a known edge takes over its age.
    The last use is that of the whole edge. What is dropped because it is bad or to be forgotten is not counted: nobody
    evicted it for room.
    """

    __slots__ = ("idle", "lifetime", "reuse_gap", "wanted_gap")

    def __init__(self) -> None:
        self.lifetime = Histogram(BLOCK_LIFETIME.bounds)
        """From entering the cache to eviction; each block counts."""
        self.idle = Histogram(BLOCK_IDLE.bounds)
        """From the last use to eviction; each block counts."""
        self.reuse_gap = Histogram(REUSE_GAP.bounds)
        """From one use to the next; each edge on the path of an admission counts once."""
        self.wanted_gap = Histogram(WANTED_GAP.bounds)
        """From eviction until an admission lacked the block, as far as evicted blocks are remembered."""

    def evicted(self, blocks: int, inserted: float, used: float, now: float) -> None:
        """``blocks`` of an edge that was ``inserted`` and last ``used`` then leave for want of room."""
        try:
            lived = now - inserted if now > inserted else 0.0  # a NaN is not earlier
        except TypeError:  # policies can write nonsense to what is shown to them
            lived = 0.0
        self.lifetime.observe(lived, blocks)
        self.idle.observe(now - used if now > used else 0.0, blocks)

    def reused(self, used: float, now: float) -> None:
        """An edge that was last ``used`` then is used again."""
        self.reuse_gap.observe(now - used if now > used else 0.0)
