"""From what an engine counts to the families of the catalogue: one function for each group of them.

Every label value that can come is there from the start, with 0, so that a rate over the first one is right and the
number of series does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from ...storage.manager.tier_manager import TierReport
from ...telemetry.metrics import catalogue as c
from ...telemetry.metrics.catalogue import Metric
from ...telemetry.metrics.exposition import LabelValues, Readings
from ...telemetry.metrics.histogram import HistogramState
from ..counters import EngineStats
from ..kv.residency import Residency
from ..request import FinishReason
from ..warming import Readiness
from .shadows import ShadowReport

DEVICE: Final = "device"
DEVICE_REASONS: Final = ("allocate", "watermark", "call", "forget", "distrust")
CAPACITY: Final = "capacity"
"""Why a tier evicts."""
WAITING_REASONS: Final = ("blocks", "slots", "prefix", "lookup")
PREEMPTION_KINDS: Final = ("recompute", "swap")
LOAD_OUTCOMES: Final = ("complete", "missing", "corrupt", "failed", "deadline", "given up")
DROP_REASONS: Final = ("queue", "bound", "error", "link")
EVENTS: Final = ("stored", "removed", "cleared")

Samples: TypeAlias = dict[LabelValues, float]
Numbers: TypeAlias = dict[Metric, Samples]
Histograms: TypeAlias = dict[Metric, dict[LabelValues, HistogramState]]


class Observed(NamedTuple):
    """What one engine knows of itself at one moment."""

    stats: EngineStats
    measured: Mapping[Metric, HistogramState]
    residency: Residency
    spans_dropped: Mapping[str, int]
    """By reason."""
    events: Mapping[str, int]
    """Cache events by kind."""
    shadows: tuple[ShadowReport, ...]
    info: LabelValues
    """As ``catalogue.INFO`` has its labels."""


def readings(observed: Observed) -> Readings:
    """All families of the catalogue."""
    stats = observed.stats
    numbers: Numbers = {}
    for group in (_cache, _pool, _requests, _queue, _loop, _stored):
        numbers.update(group(stats))
    numbers.update(_tiers(stats.tiers))
    numbers[c.EVICTIONS] = _evictions(stats)
    numbers[c.SPANS_DROPPED] = _by(observed.spans_dropped, DROP_REASONS)
    numbers[c.EVENTS_PUBLISHED] = _by(observed.events, EVENTS)
    numbers.update(_shadows(observed.shadows))
    measured: Histograms = {metric: {(): state} for metric, state in observed.measured.items()}
    return Readings(
        numbers,
        {**measured, **_residency(observed.residency), **_tier_times(stats.tiers)},
        {c.INFO: observed.info},
    )


def at_rest(last: Readings) -> Readings:
    """The last readings of an engine that is closed: what counted stays, and nothing runs or waits any more."""
    over = (c.RUNNING, c.WAITING, c.WAITING_TOKENS, c.LOADING, c.WAITING_BY_REASON, c.STUCK, c.READY)
    still = {metric: dict.fromkeys(last.numbers.get(metric, {}), 0.0) for metric in over}
    return Readings({**last.numbers, **still}, last.histograms, last.infos)


def _cache(stats: EngineStats) -> Numbers:
    cache = stats.cache
    on_device = {DEVICE: cache.prefix_hit_tokens - cache.tier_hit_tokens}
    faults = {cache.policy: 0, **cache.faults_by_policy}
    faults[stats.scheduling_policy] = faults.get(stats.scheduling_policy, 0) + stats.policy_faults
    return {
        c.ALLOCATIONS: _one(cache.allocations),
        c.PREFIX_HITS: _one(cache.prefix_hits),
        c.PREFIX_HIT_TOKENS: _by({**on_device, **cache.hit_tokens_by_tier}, (DEVICE, *_names(stats.tiers))),
        c.PREFIX_QUERY_TOKENS: _one(cache.prefix_query_tokens),
        c.RESUME_HIT_TOKENS: _one(cache.resume_hit_tokens),
        c.COW_FORKS: _one(cache.cow_forks),
        c.PARTIAL_COPIES: _one(cache.partial_copies),
        c.DUPLICATES_FREED: _one(cache.duplicates_freed),
        c.EVICTED_THEN_WANTED: _one(cache.evicted_then_wanted),
        c.POLICY_FAULTS: _by(faults),
    }


def _pool(stats: EngineStats) -> Numbers:
    cache = stats.cache
    used = cache.total - cache.idle - cache.free
    return {
        c.POOL_BLOCKS: _by({"used": used, "idle": cache.idle, "free": cache.free}),
        c.POOL_CAPACITY: _one(cache.total),
        c.PINNED_BLOCKS: _one(cache.pinned),
        c.USAGE: _one(cache.utilization),
        c.PINS: _one(stats.pins),
    }


def _evictions(stats: EngineStats) -> Samples:
    cache = stats.cache
    found: Samples = {(reason, cache.policy, DEVICE): 0.0 for reason in DEVICE_REASONS}
    found.update({(*by, DEVICE): float(blocks) for by, blocks in cache.evictions_by_policy.items()})
    found.update({(CAPACITY, "", report.name): float(report.tier.evicted) for report in stats.tiers})
    return found


def _requests(stats: EngineStats) -> Numbers:
    return {
        c.SUBMITTED: _one(stats.submitted),
        c.REJECTED: _one(stats.rejected),
        c.FINISHED: _by(stats.finished, FinishReason),
        c.PREEMPTIONS: _by(stats.preemptions_by_kind, PREEMPTION_KINDS),
        c.PROMPT_TOKENS: _one(stats.prompt_tokens),
        c.GENERATED_TOKENS: _one(stats.generated_tokens),
        c.PREFILL_TOKENS: _one(stats.prefill_tokens),
    }


def _queue(stats: EngineStats) -> Numbers:
    reasons = stats.waiting_reasons if stats.waiting else {}  # those of the last plan may have gone since
    return {
        c.RUNNING: _one(stats.running),
        c.WAITING: _one(stats.waiting),
        c.WAITING_TOKENS: _one(stats.waiting_tokens),
        c.LOADING: _one(stats.loading),
        c.WAITING_BY_REASON: _by(reasons, WAITING_REASONS),
    }


def _loop(stats: EngineStats) -> Numbers:
    return {
        c.STEPS: _one(stats.steps),
        c.FAILED_ROWS: _one(stats.failed_rows),
        c.STUCK: _one(stats.stuck_seconds),
    }


def _stored(stats: EngineStats) -> Numbers:
    transfers, saved = stats.transfers, stats.saved
    loads = _by(transfers.loads, LOAD_OUTCOMES)
    return {
        c.LOADS: {(outcome.replace(" ", "_"),): count for (outcome,), count in loads.items()},
        c.EXPORTED_BLOCKS: _one(transfers.exported_blocks),
        c.FAILED_EXPORTS: _one(transfers.failed_exports),
        c.CHECKPOINTS: _one(transfers.checkpoints),
        c.RESTORED_TOKENS: _one(stats.restore.saved_tokens),
        c.SNAPSHOT_AGE: _one(saved.age),
        c.SNAPSHOT_BYTES: _one(saved.snapshot_bytes),
        c.READY: _one(stats.restore.readiness == Readiness.READY),
    }


def _tiers(reports: Iterable[TierReport]) -> Numbers:
    reports = tuple(reports)
    breakers: Samples = {
        (report.name, direction): float(state != "closed")
        for report in reports
        for direction, state in (("read", report.breaker), ("write", report.write_breaker))
    }
    errors: Samples = {
        (report.name, kind): float(count)
        for report in reports
        for kind, count in (("timeout", report.timeouts), ("failure", report.failures - report.timeouts))
    }
    bounded: Samples = {(r.name,): float(r.tier.capacity) for r in reports if r.tier.capacity is not None}
    simple: Numbers = {metric: {(r.name,): float(of(r)) for r in reports} for metric, of in _OF_TIER.items()}
    return {**simple, c.TIER_CAPACITY: bounded, c.TIER_BREAKER: breakers, c.TIER_ERRORS: errors}


_OF_TIER: Final[Mapping[Metric, Callable[[TierReport], float]]] = {
    c.TIER_BLOCKS: lambda report: report.tier.blocks,
    c.TIER_BYTES: lambda report: report.tier.bytes,
    c.TIER_HEALTHY: lambda report: report.opened and report.tier.healthy,
    c.TIER_QUEUED: lambda report: report.queued_bytes,
    c.TIER_READ_BYTES: lambda report: report.loaded_bytes,
    c.TIER_READ_BLOCKS: lambda report: report.loaded_blocks,
    c.TIER_WRITTEN_BYTES: lambda report: report.put_bytes,
    c.TIER_WRITTEN_BLOCKS: lambda report: report.put_blocks,
    c.TIER_CORRUPT: lambda report: report.corrupt + report.tier.corrupt,
    c.TIER_DROPPED: lambda report: report.dropped,
}


def _shadows(reports: Iterable[ShadowReport]) -> Numbers:
    reports = tuple(reports)
    return {
        c.SHADOW_QUERIES: {(report.policy,): float(report.uses) for report in reports},
        c.SHADOW_HITS: {(report.policy,): float(report.hits) for report in reports},
        c.SHADOW_LIVE_HITS: {(report.policy,): float(report.live_hits) for report in reports},
    }


def _tier_times(reports: Iterable[TierReport]) -> Histograms:
    reports = tuple(reports)
    return {
        c.TIER_READ_SECONDS: {(report.name,): report.read_seconds for report in reports},
        c.TIER_WRITE_SECONDS: {(report.name,): report.write_seconds for report in reports},
    }


def _residency(residency: Residency) -> Histograms:
    return {
        c.BLOCK_LIFETIME: {(): residency.lifetime.state()},
        c.BLOCK_IDLE: {(): residency.idle.state()},
        c.REUSE_GAP: {(): residency.reuse_gap.state()},
        c.WANTED_GAP: {(): residency.wanted_gap.state()},
    }


def _names(reports: Iterable[TierReport]) -> list[str]:
    return [report.name for report in reports]


def _one(value: float | None) -> Samples:
    """The only sample of a family, if there is one now."""
    return {} if value is None else {(): float(value)}


def _by(values: Mapping[str, int], known: Iterable[str] = ()) -> Samples:
    """A sample for each of ``values``, and 0 for those of the ``known`` that are not among them."""
    return {(str(key),): float(values.get(key, 0)) for key in dict.fromkeys((*known, *values))}
