"""CacheStats: what the cache has done and where it stands, for people and telemetry."""

from __future__ import annotations

from typing import NamedTuple


class CacheStats(NamedTuple):
    """Counters since the start, and what is true now."""

    allocations: int
    evictions: dict[str, int]
    """Blocks by reason."""
    prefix_hits: int
    """First admissions that reused something."""
    prefix_hit_tokens: int
    prefix_query_tokens: int
    """Tokens of all first admissions: hits / queries is the hit rate of any span of time."""
    resume_hit_tokens: int
    """Tokens that a preempted sequence found again; not in the three above."""
    cow_forks: int
    """Blocks copied because two sequences would have written into them."""
    partial_copies: int
    """Blocks copied to reuse a part of them."""
    duplicates_freed: int
    """Blocks that were computed twice and freed when the tree had them already."""
    evicted_then_wanted: int
    evicted_then_wanted_seconds: float
    """Sum of the gaps."""
    policy_faults: int
    hook_faults: int
    """Errors of the eviction hook."""
    free: int
    idle: int
    total: int

    @property
    def utilization(self) -> float:
        """Share of the pool that is referenced, in [0, 1]."""
        return 1 - (self.free + self.idle) / self.total
