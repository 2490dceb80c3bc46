"""Summaries of a run: percentiles, rates, goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from .rows import METRICS, Row

PERCENTILES = (50, 90, 95, 99)


class Spread(msgspec.Struct, frozen=True):
    """How values lie. Percentiles are interpolated between the nearest two values (type 7 of Hyndman and Fan)."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float


class Rates(msgspec.Struct, frozen=True):
    """Of the requests that succeeded, over the seconds from the first request to the end of the last answer."""

    requests: float = 0.0
    output_tokens: float = 0.0
    total_tokens: float = 0.0
    """Prompts included, cached or not."""


class Tokens(msgspec.Struct, frozen=True):
    """Of the requests that succeeded."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    uncounted: int = 0
    """Requests whose output the server did not count: events with content stand for tokens."""
    cache_hit_share: float | None = None
    """Of the prompt tokens of requests where the server tells; ``None``: it never does."""


class Goodput(msgspec.Struct, frozen=True):
    """Requests that succeeded and kept every objective."""

    requests: int
    share: float
    """Of all requests."""
    rate: float
    """A second."""


def spread(values: Sequence[float]) -> Spread | None:
    """``None`` for no values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(array, PERCENTILES))
    return Spread(len(values), float(array.mean()), p50, p90, p95, p99, float(array.max()))


def latencies(rows: Sequence[Row]) -> dict[str, Spread | None]:
    """By the name of the metric, over the requests that succeeded; for ``itl``, over all gaps of all of them."""
    good = [row for row in rows if row.is_ok]
    found = {name: spread([v for row in good if (v := metric.of(row)) is not None]) for name, metric in METRICS.items()}
    return found | {"itl": spread(list(chain.from_iterable(row.gaps for row in good)))}


def window(rows: Sequence[Row]) -> float:
    """Seconds from the first request to the end of the last answer."""
    if not rows:
        return 0.0
    return max(row.ended for row in rows) - min(row.sent for row in rows)


def tokens(rows: Sequence[Row]) -> Tokens:
    """Sums over the requests that succeeded."""
    good = [row for row in rows if row.is_ok]
    telling = [row for row in good if row.cached_tokens is not None and row.prompt_tokens]
    cached = sum(row.cached_tokens or 0 for row in telling)
    told = sum(row.prompt_tokens or 0 for row in telling)
    return Tokens(
        prompt=sum(row.prompt_tokens or 0 for row in good),
        cached=cached,
        output=sum(row.output_tokens or 0 for row in good),
        uncounted=sum(row.counted for row in good),
        cache_hit_share=cached / told if told else None,
    )


def rates(rows: Sequence[Row]) -> Rates:
    """All 0 for a run without length."""
    seconds = window(rows)
    if not seconds:
        return Rates()
    sums = tokens(rows)
    good = sum(row.is_ok for row in rows)
    return Rates(good / seconds, sums.output / seconds, (sums.prompt + sums.output) / seconds)


def goodput(rows: Sequence[Row], slo: Mapping[str, float]) -> Goodput | None:
    """``slo``: seconds by the name of a metric. A metric that a request does not have is no breach."""
    if not slo or not rows:
        return None
    good = sum(row.is_ok and _keeps(row, slo) for row in rows)
    seconds = window(rows)
    return Goodput(good, good / len(rows), good / seconds if seconds else 0.0)


def _keeps(row: Row, slo: Mapping[str, float]) -> bool:
    values = ((METRICS[name].of(row), limit) for name, limit in slo.items())
    return all(value is None or value <= limit for value, limit in values)
