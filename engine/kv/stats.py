"""CacheStats: what the cache has done and where it stands, for people and telemetry."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class CacheCounts:
    """The counters of a cache manager. The same names mean the same in :class:`CacheStats`, summed up there."""

    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    tier_hit_tokens: Counter[str] = field(default_factory=Counter)
    """By tier."""
    resume_hit_tokens: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    cow_forks: int = 0
    partial_copies: int = 0
    duplicates_freed: int = 0


class CacheStats(NamedTuple):
    """Counters since the start, and what is true now."""

    allocations: int
    evictions: dict[str, int]
    """Blocks by reason."""
    evictions_by_policy: dict[tuple[str, str], int]
    """The same by reason and policy in charge."""
    prefix_hits: int
    """First admissions that reused something, from the device or from a tier."""
    prefix_hit_tokens: int
    """Tokens that first admissions did not have to compute: found on the device, or loaded from a tier."""
    prefix_query_tokens: int
    """Tokens of all first admissions: hits / queries is the hit rate of any span of time."""
    tier_hit_tokens: int
    """The part of ``prefix_hit_tokens`` that was loaded; the rest was on the device."""
    hit_tokens_by_tier: dict[str, int]
    """The same by tier."""
    resume_hit_tokens: int
    """Tokens that preempted sequences found again, on the device or in a tier, and that forks found which had tokens
    and had to queue; not in the four above.
    """
    loaded_blocks: int
    """Blocks that came from tiers, whoever wanted them."""
    loaded_tokens: int
    cow_forks: int
    """Blocks copied because two sequences would have written into them."""
    partial_copies: int
    """Blocks copied to reuse a part of them."""
    duplicates_freed: int
    """Blocks that were computed twice and freed when the tree had them already."""
    evicted_then_wanted: int
    evicted_then_wanted_seconds: float
    """Sum of the gaps."""
    policy: str
    """Name of the eviction policy in charge; that of the stand-in while the chosen one is set aside."""
    policy_set_aside: str | None
    """Name of the chosen policy, when it broke its contract so often that it is asked no more."""
    policy_faults: int
    """Breaches of contract by eviction policies."""
    faults_by_policy: dict[str, int]
    hook_faults: int
    """Errors of the eviction hook."""
    free: int
    idle: int
    pinned: int
    """Blocks held by leases on prefixes."""
    total: int

    @property
    def utilization(self) -> float:
        """Share of the pool that is referenced, in [0, 1]."""
        return 1 - (self.free + self.idle) / self.total
