"""What operators ask and are told. Names are those of the engine's own results, with the same meaning.

The cache view (``GET /admin/cache?nodes=200&text=true``) is what the page at ``/ui`` draws. Its pool map is run-length
text: letters are states of blocks, in the order of the blocks' ids, and the number behind one says how many follow in a
row, 1 where none is given: ``i12hf3`` are twelve idle blocks, one held and three free.

=======  ===========================================================================
letter   state of a block
=======  ===========================================================================
``f``    free
``i``    idle: cached, used by nobody, may be evicted
``h``    held by requests that run
``p``    pinned by an operator (some request may use it as well)
``t``    in transfer: out of use, but a copy still reads it
=======  ===========================================================================
"""

from __future__ import annotations

from typing import Annotated

import msgspec

# the cache, live


class CacheQuery(msgspec.Struct):
    """How much to show."""

    nodes: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 200
    """Edges of the prefix tree."""
    text: bool = False
    """Whether to show how each of them begins."""


class PoolMap(msgspec.Struct):
    """All blocks of the pool."""

    map: str
    """Run-length text, see above."""
    free: int
    idle: int
    held: int
    pinned: int
    in_transfer: int
    total: int
    """The sum of the five."""


class TreeNode(msgspec.Struct):
    """An edge of the prefix tree: a run of cached blocks that requests with the same beginning share."""

    id: int
    """Its first block, which is in no other edge. Stays while the edge stays."""
    parent: int | None
    """Id of the edge above; null: the prompt begins here."""
    depth: int
    """Tokens from the start of the prompt to the end of this edge."""
    tokens: int
    """Tokens of this edge."""
    blocks: int
    first_blocks: list[int]
    """Ids of the first 16 of them, at most."""
    children: int
    """Edges below; those that are not among ``nodes`` are not shown."""
    hits: int
    """Admissions that found it."""
    locks: int
    """Requests and pins that hold it; 0: it may be evicted, from its end on."""
    idle_seconds: float
    """Since its last use."""
    tenant: str | None
    priority: int
    """Of its retention: lower ones are evicted first. 0 unless somebody asked for something else."""
    text: str | None
    """How it begins, about 40 characters; null unless asked for, and for engines without a tokenizer."""


class TierState(msgspec.Struct):
    """A storage tier; the fastest comes first."""

    name: str
    blocks: int
    bytes: int
    capacity: int | None
    """Bytes; null: not bounded."""
    hits: int
    """Blocks asked for that were there, since the start."""
    evicted: int
    queued_bytes: int
    """What waits to be written."""
    healthy: bool
    problem: str
    """Why it is not healthy."""


class EvictedRun(msgspec.Struct):
    """Blocks that left the cache at about the same time for the same reason."""

    seconds_ago: float
    blocks: int
    reason: str
    """``allocate``, ``watermark``, ``call``, ``forget`` or ``distrust``."""
    policy: str


class CacheCounters(msgspec.Struct):
    """Since the start; the difference between two answers gives the rate of the time between them."""

    prefix_hit_tokens: int
    """Of ``prefix_query_tokens``: hit tokens / query tokens is the hit rate."""
    prefix_query_tokens: int
    prefix_hits: int
    """Requests that reused something."""
    tier_hit_tokens: int
    """Those of ``prefix_hit_tokens`` that came from a tier."""
    evicted_blocks: int
    evicted_then_wanted: int
    computed_tokens: int
    generated_tokens: int


class RequestCounts(msgspec.Struct):
    """Samples of requests, now."""

    running: int
    waiting: int
    loading: int
    preemptions: int
    """Since the start."""


class CacheView(msgspec.Struct):
    """The cache at one moment."""

    time: float
    """Seconds since the epoch."""
    block_size: int
    """Tokens per block."""
    eviction_policy: str
    pool: PoolMap
    tree_blocks: int
    """Blocks in the prefix tree, shown or not."""
    nodes: list[TreeNode]
    """Parents before children; of more than were asked for, those that were used last."""
    tiers: list[TierState]
    evictions: list[EvictedRun]
    """The last ones, the newest first."""
    counters: CacheCounters
    requests: RequestCounts
    takes_snapshots: bool
    """Whether the server has a folder for them."""


# all counters


class CacheStats(msgspec.Struct):
    """The cache; counters since the start, and what is true now."""

    free: int
    idle: int
    pinned: int
    total: int
    allocations: int
    evictions: dict[str, int]
    """Blocks by reason."""
    prefix_hits: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    tier_hit_tokens: int
    hit_tokens_by_tier: dict[str, int]
    resume_hit_tokens: int
    loaded_blocks: int
    loaded_tokens: int
    cow_forks: int
    partial_copies: int
    duplicates_freed: int
    evicted_then_wanted: int
    evicted_then_wanted_seconds: float
    policy: str
    policy_set_aside: str | None
    policy_faults: int
    hook_faults: int


class StoredStats(msgspec.Struct):
    """A tier, as it says itself."""

    blocks: int
    bytes: int
    capacity: int | None
    evicted: int
    declined: int
    corrupt: int
    healthy: bool
    problem: str
    policy: str
    policy_faults: int


class TierStats(msgspec.Struct):
    """A tier, as its manager sees it."""

    name: str
    tier: StoredStats
    opened: bool
    shared: bool
    breaker: str
    write_breaker: str
    gets: int
    hits: int
    loaded_blocks: int
    loaded_bytes: int
    foreign_blocks: int
    corrupt: int
    put_blocks: int
    put_bytes: int
    spilled: int
    queued_blocks: int
    queued_bytes: int
    dropped: int
    timeouts: int
    failures: int
    seconds_per_block: float | None


class TransferStats(msgspec.Struct):
    """What went between the device and the tiers."""

    exported_blocks: int
    failed_exports: int
    loads: dict[str, int]
    loaded_tokens: dict[str, int]
    checkpoints: int


class RestoreStats(msgspec.Struct):
    """What the start has kept."""

    readiness: str
    stored_blocks: int
    planned_blocks: int
    warmed_blocks: int
    saved_tokens: int
    refused: str | None
    learned: bool


class SaveStats(msgspec.Struct):
    """What a restart would find."""

    age: float | None
    snapshot_bytes: int | None


class Stats(msgspec.Struct):
    """The engine; counters since the start, and what is true now."""

    running: int
    waiting: int
    loading: int
    waiting_tokens: int
    waiting_reasons: dict[str, int]
    preemptions: int
    preemptions_by_kind: dict[str, int]
    submitted: int
    rejected: int
    finished: dict[str, int]
    steps: int
    failed_rows: int
    failed_in_a_row: int
    step_seconds: float
    batch_tokens: int
    prefill_tokens: int
    generated_tokens: int
    prompt_tokens: int
    scheduling_policy: str
    policy_faults: int
    stuck_seconds: float
    cache: CacheStats
    tiers: list[TierStats]
    transfers: TransferStats
    restore: RestoreStats
    saved: SaveStats
    pins: int
    tenant_blocks: dict[str, int]
