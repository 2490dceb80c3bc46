"""What the tests of ``octavo top`` share: expositions that are made from the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from octavo.telemetry.metrics import catalogue as c
from octavo.telemetry.metrics.catalogue import Metric
from octavo.telemetry.top.reading import Labels, Scrape, parsed

Told: TypeAlias = Iterable[tuple[Metric, float, Mapping[str, str]]]
INFO = {"version": "1.2.3", "model": "tiny", "dtype": "float32", "block_size": "16", "eviction_policy": "lru"}


def written(name: str, value: float, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value}\n"


def exposition(told: Told, **engine: str) -> str:
    """The text of plain values; those of a histogram are observed once, each."""
    lines: list[str] = []
    for metric, value, labels in told:
        everything = {**labels, **engine}
        if metric.kind == "histogram":
            bounds = [*((f"{bound:g}", bound) for bound in metric.bounds), ("+Inf", float("inf"))]
            for text, bound in bounds:
                lines.append(written(f"{metric.name}_bucket", int(value <= bound), {**everything, "le": text}))
            lines.append(written(f"{metric.name}_count", 1, everything))
            lines.append(written(f"{metric.name}_sum", value, everything))
        else:
            lines.append(written(metric.name + "_info" * (metric.kind == "info"), value, everything))
    return "".join(lines)


def scrape(text: str, when: float, chosen: Labels = frozenset()) -> Scrape:
    return parsed(text, "text/plain; version=0.0.4", chosen, when)


def busy(step: int) -> list[tuple[Metric, float, Mapping[str, str]]]:
    """An engine with something in every corner of the picture; counters grow with ``step``."""
    return [
        (c.INFO, 1, INFO),
        (c.POOL_BLOCKS, 60, {"state": "used"}),
        (c.POOL_BLOCKS, 25, {"state": "idle"}),
        (c.POOL_BLOCKS, 15, {"state": "free"}),
        (c.PINNED_BLOCKS, 7, {}),
        (c.PREFIX_HIT_TOKENS, 300 * step, {"tier": "device"}),
        (c.PREFIX_HIT_TOKENS, 150 * step, {"tier": "host"}),
        (c.PREFIX_QUERY_TOKENS, 500 + 600 * step, {}),
        (c.EVICTIONS, 40 * step, {"reason": "allocate", "policy": "lru", "tier": "device"}),
        (c.EVICTIONS, 0, {"reason": "forget", "policy": "lru", "tier": "device"}),
        (c.EVICTIONS, 3, {"reason": "capacity", "policy": "", "tier": "disk"}),
        (c.COW_FORKS, 11, {}),
        (c.PARTIAL_COPIES, 0, {}),
        (c.EVICTED_THEN_WANTED, 9, {}),
        (c.RUNNING, 12, {}),
        (c.LOADING, 2, {}),
        (c.WAITING, 34, {}),
        (c.WAITING_BY_REASON, 30, {"reason": "blocks"}),
        (c.WAITING_BY_REASON, 0, {"reason": "slots"}),
        (c.PREEMPTIONS, 5, {"kind": "recompute"}),
        (c.PREEMPTIONS, 4, {"kind": "swap"}),
        (c.FINISHED, 20 * step, {"reason": "stop"}),
        (c.REJECTED, 1, {}),
        (c.PREFILL_TOKENS, 8000 * step, {}),
        (c.GENERATED_TOKENS, 2000 * step, {}),
        (c.TIER_BLOCKS, 200, {"tier": "host"}),
        (c.TIER_BLOCKS, 900, {"tier": "disk"}),
        (c.TIER_BYTES, 3 * 2**30, {"tier": "host"}),
        (c.TIER_CAPACITY, 8 * 2**30, {"tier": "host"}),
        (c.TIER_BYTES, 2**20, {"tier": "disk"}),
        (c.TIER_HEALTHY, 1, {"tier": "host"}),
        (c.TIER_HEALTHY, 1, {"tier": "disk"}),
        (c.TIER_BREAKER, 0, {"tier": "host", "direction": "read"}),
        (c.TIER_BREAKER, 1, {"tier": "disk", "direction": "write"}),
        (c.TIER_READ_BYTES, 4 * 2**20 * step, {"tier": "host"}),
        (c.TIER_WRITTEN_BYTES, 2 * 2**20 * step, {"tier": "host"}),
        (c.TIER_QUEUED, 5 * 2**10, {"tier": "disk"}),
        (c.TIER_ERRORS, 2, {"tier": "disk", "kind": "timeout"}),
        (c.TIER_ERRORS, 4, {"tier": "disk", "kind": "failure"}),
        (c.TIER_CORRUPT, 1, {"tier": "disk"}),
        (c.READY, 1, {}),
        (c.SNAPSHOT_AGE, 125, {}),
        (c.SNAPSHOT_BYTES, 3 * 2**20, {}),
        (c.RESTORED_TOKENS, 4096, {}),
        (c.CHECKPOINTS, 6, {}),
        (c.LOADS, 13, {"outcome": "complete"}),
        (c.SPANS_DROPPED, 8, {"reason": "queue"}),
        (c.POLICY_FAULTS, 0, {"policy": "eviction"}),
        (c.FAILED_ROWS, 0, {}),
        (c.STUCK, 0, {}),
    ]


def latencies(ttft: float) -> str:
    """One request within a window: what was observed since the scrape before."""
    return exposition([(c.TIME_TO_FIRST_TOKEN, ttft, {}), (c.LOOP_LAG, 0.00015, {})])
