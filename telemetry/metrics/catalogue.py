"""The metrics that an engine shows: every name, label and bucket, once.

Base units, ``octavo_`` in front, no colon. Every label has a bounded set of values: what clients send is in none.
The collector, the terminal view, the dashboard and the rules are checked against this list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "info"]

SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
CALL_SECONDS: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
AGES: Final = (0.01, 0.1, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
RATIOS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


class Metric(NamedTuple):
    """One family."""

    name: str
    """As it appears in queries; of an info without its ``_info``."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"octavo_{name}_total", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"octavo_{name}", "gauge", text, labels)


def _histogram(name: str, bounds: Sequence[float], text: str, *labels: str) -> Metric:
    return Metric(f"octavo_{name}", "histogram", text, labels, bounds)


# the cache

ALLOCATIONS = _counter("allocations", "Blocks taken from the pool.")
EVICTIONS = _counter("evictions", "Blocks that left the cache or a tier.", "reason", "policy", "tier")
PREFIX_HITS = _counter("prefix_hits", "First admissions that reused something.")
PREFIX_HIT_TOKENS = _counter("prefix_hit_tokens", "Tokens of first admissions that were not computed.", "tier")
PREFIX_QUERY_TOKENS = _counter("prefix_query_tokens", "Tokens of first admissions: hits / queries is the hit rate.")
RESUME_HIT_TOKENS = _counter("resume_hit_tokens", "Tokens found again by who had them before; in no hit counter.")
COW_FORKS = _counter("cow_forks", "Blocks copied because two sequences would have written into them.")
PARTIAL_COPIES = _counter("partial_copies", "Blocks copied to reuse a part of them.")
DUPLICATES_FREED = _counter("duplicate_blocks_freed", "Blocks that were computed twice.")
EVICTED_THEN_WANTED = _counter("evicted_then_wanted", "Admissions that wanted a prefix which had left the device.")
POLICY_FAULTS = _counter("policy_faults", "Breaches of contract by plug-in policies.", "policy")
SHADOW_QUERIES = _counter("shadow_query_blocks", "Blocks of prompts that a shadow policy could have had.", "policy")
SHADOW_HITS = _counter("shadow_hit_blocks", "Those of them that it would have had.", "policy")
SHADOW_LIVE_HITS = _counter("shadow_live_hit_blocks", "Those of them that the engine's cache had.", "policy")
POOL_BLOCKS = _gauge("pool_blocks", "Blocks of the pool by state: used, idle (cached, may go) and free.", "state")
POOL_CAPACITY = _gauge("pool_capacity_blocks", "Blocks in the pool.")
PINNED_BLOCKS = _gauge("pinned_blocks", "Blocks held by pinned prefixes; among the used.")
USAGE = _gauge("block_pool_usage_ratio", "Share of the pool that is referenced now.")
UTILIZATION = _histogram("block_pool_utilization", RATIOS, "Share of the pool that was referenced, after each step.")
BLOCK_LIFETIME = _histogram("block_lifetime_seconds", AGES, "From entering the cache to eviction, by block.")
BLOCK_IDLE = _histogram("block_idle_before_evict_seconds", AGES, "From the last use to eviction, by block.")
REUSE_GAP = _histogram("block_reuse_gap_seconds", AGES, "Between two uses of a cached prefix, by edge of the tree.")
WANTED_GAP = _histogram("evicted_then_wanted_seconds", AGES, "From eviction until the prefix was wanted again.")

# requests

SUBMITTED = _counter("requests_submitted", "Requests that were accepted.")
REJECTED = _counter("requests_rejected", "Requests that were refused at the door.")
FINISHED = _counter("requests_finished", "Requests that are over.", "reason")
PREEMPTIONS = _counter("preemptions", "Requests sent back to the queue; kind: recompute, or swap to a tier.", "kind")
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of finished requests, each prompt once.")
GENERATED_TOKENS = _counter("generated_tokens", "Tokens generated, over all samples.")
PREFILL_TOKENS = _counter("prefill_tokens", "Tokens computed as part of a prompt or of a recomputation.")
RUNNING = _gauge("requests_running", "Sequences that hold blocks and are computed.")
WAITING = _gauge("requests_waiting", "Sequences without blocks.")
WAITING_TOKENS = _gauge("waiting_tokens", "Prompt tokens still to be computed, of what runs, loads and waits.")
LOADING = _gauge("requests_loading", "Sequences whose prefix is on its way from a tier.")
WAITING_BY_REASON = _gauge("requests_waiting_by_reason", "Why those at the head of the queue wait.", "reason")
QUEUE_SECONDS = _histogram("queue_seconds", SECONDS, "From arrival until a request was first admitted.")
TIME_TO_FIRST_TOKEN = _histogram("time_to_first_token_seconds", SECONDS, "From arrival to the first token.")
TIME_PER_TOKEN = _histogram(
    "time_per_output_token_seconds", TOKEN_SECONDS, "(End - first token) / (tokens - 1) of the longest sample."
)
END_TO_END = _histogram("request_seconds", SECONDS, "From arrival to the end, of requests that were not aborted.")
PREFILL_SECONDS = _histogram("prefill_seconds", SECONDS, "From first admission to the first token.")
DECODE_SECONDS = _histogram("decode_seconds", SECONDS, "From the first token to the end.")
REQUEST_PROMPT = _histogram("request_prompt_tokens", COUNTS, "Prompt tokens by request.")
REQUEST_GENERATED = _histogram("request_generated_tokens", COUNTS, "Generated tokens by request, over all samples.")

# the loop

STEPS = _counter("steps", "Steps of the loop.")
FAILED_ROWS = _counter("failed_rows", "Rows that the model failed on.")
STEP_SECONDS = _histogram("step_seconds", SECONDS, "Duration of the model's part of a step.")
STEP_TOKENS = _histogram("step_tokens", COUNTS, "Tokens computed in one step.")
STUCK = _gauge("stuck_seconds", "How long the current step has been running beyond step_timeout.")
LOOP_LAG = _histogram("event_loop_lag_seconds", CALL_SECONDS, "How late the event loop wakes a task.")
SPANS_DROPPED = _counter("spans_dropped", "Spans, or links of steps, that Octavo did not make.", "reason")
EVENTS_PUBLISHED = _counter("kv_events", "Cache events published to subscribers.", "event")

# the tiers

TIER_BLOCKS = _gauge("tier_blocks", "Blocks in a tier.", "tier")
TIER_BYTES = _gauge("tier_bytes", "Bytes used by a tier, with its overhead.", "tier")
TIER_CAPACITY = _gauge("tier_capacity_bytes", "Bound of a tier, where it has one.", "tier")
TIER_HEALTHY = _gauge("tier_healthy", "1 while a tier can be read and takes writes.", "tier")
TIER_BREAKER = _gauge("tier_breaker_open", "1 while a tier is left alone after failures.", "tier", "direction")
TIER_QUEUED = _gauge("tier_queued_bytes", "Bytes that wait to be written.", "tier")
TIER_READ_BYTES = _counter("tier_read_bytes", "Bytes that came out of a tier right.", "tier")
TIER_READ_BLOCKS = _counter("tier_read_blocks", "Blocks that came out of a tier right.", "tier")
TIER_WRITTEN_BYTES = _counter("tier_written_bytes", "Bytes that a tier took.", "tier")
TIER_WRITTEN_BLOCKS = _counter("tier_written_blocks", "Blocks that a tier took.", "tier")
TIER_CORRUPT = _counter("tier_corrupt_blocks", "Blocks with wrong bytes: each was dropped and became a miss.", "tier")
TIER_DROPPED = _counter("tier_dropped_blocks", "Blocks meant for a tier that went nowhere.", "tier")
TIER_ERRORS = _counter("tier_errors", "Calls of a tier that failed; kind: timeout or failure.", "tier", "kind")
TIER_READ_SECONDS = _histogram("tier_read_seconds", CALL_SECONDS, "Reading one batch from a tier.", "tier")
TIER_WRITE_SECONDS = _histogram("tier_write_seconds", CALL_SECONDS, "Writing one batch into a tier.", "tier")
LOADS = _counter("loads", "Loads from tiers by how they ended.", "outcome")
EXPORTED_BLOCKS = _counter("exported_blocks", "Blocks copied off the device.")
FAILED_EXPORTS = _counter("failed_exports", "Blocks lost because they could not be copied off the device.")
CHECKPOINTS = _counter("checkpoints", "Checkpoints made.")
RESTORED_TOKENS = _counter("restored_tokens", "Tokens not computed because an earlier run, or another engine, had.")
SNAPSHOT_AGE = _gauge("snapshot_age_seconds", "Since the newest snapshot or checkpoint; absent before the first.")
SNAPSHOT_BYTES = _gauge("snapshot_bytes", "Size of the newest snapshot; absent before the first.")
READY = _gauge("ready", "1 once stored blocks have been warmed.")
PINS = _gauge("pins", "Prefixes that are pinned.")
INFO = Metric("octavo_engine", "info", "What runs.", ("version", "model", "dtype", "block_size", "eviction_policy"))

CATALOGUE: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""
