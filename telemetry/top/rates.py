"""Sums over series, and what grew between two scrapes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from ..metrics.catalogue import CATALOGUE, Metric
from .reading import Labels, Scrape, Series, Values, sample_names

GROWING: Final = frozenset(
    name for metric in CATALOGUE if metric.kind in {"counter", "histogram"} for name in sample_names(metric)
)


class Increase(NamedTuple):
    """What grew, and in what time."""

    seconds: float
    values: Values
    restarts: int
    """Engines that began anew meanwhile."""


class Estimate(NamedTuple):
    """A quantile, as well as buckets tell."""

    value: float
    beyond: bool
    """It is above ``value``, the last bound; nobody knows how far."""


def total(values: Values, metric: Metric, fold: Callable[[Iterable[float]], float] = sum) -> float | None:
    """All series of ``metric``, folded; ``None`` where there is none."""
    found = values.get(metric.name)
    return fold(found.values()) if found else None


def by(
    values: Values, metric: Metric, *names: str, fold: Callable[[Iterable[float]], float] = sum
) -> dict[tuple[str, ...], float]:
    """The series of ``metric``, folded by the values of the labels called ``names``; sorted by them."""
    groups: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for series, value in values.get(metric.name, {}).items():
        labels = dict(series.labels)
        groups[tuple(labels.get(name, "") for name in names)].append(value)
    return {key: fold(groups[key]) for key in sorted(groups)}


def mean(values: Values, metric: Metric, chosen: Labels = frozenset()) -> float | None:
    """Sum by count of a histogram; ``None`` where nothing was observed."""
    count = _part(values, f"{metric.name}_count", chosen)
    return _part(values, f"{metric.name}_sum", chosen) / count if count else None


def quantile(values: Values, metric: Metric, share: float) -> Estimate | None:
    """The value that ``share`` of the observations do not exceed, linear within its bucket, as PromQL estimates it.

    ``None`` where nothing was observed.
    """
    buckets = _cumulative(values, metric)
    if not buckets or not buckets[-1][1]:
        return None
    rank = share * buckets[-1][1]
    below, seen = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > seen:
            if math.isinf(bound):
                return Estimate(below, beyond=True)
            return Estimate(below + (bound - below) * (rank - seen) / (count - seen), beyond=False)
        below, seen = bound, count
    return None


def increase(before: Scrape, after: Scrape) -> Increase:
    """What grew from ``before`` to ``after``.

    An engine of which a counter fell has begun anew: all of its counters then grew from 0, also those that have passed
    their old value since. So nothing ever grows by less than 0. A series that was not there before grew from 0 as well.
    """
    restarted = _restarted(before.values, after.values)
    grown: dict[str, dict[Series, float]] = {}
    for name in GROWING & after.values.keys():
        old = before.values.get(name, {})
        grown[name] = {
            series: value if series.engine in restarted else max(0.0, value - old.get(series, 0.0))
            for series, value in after.values[name].items()
        }
    return Increase(after.when - before.when, grown, len(restarted))


def together(increases: Sequence[Increase]) -> Increase:
    """One after the other, as one."""
    grown: defaultdict[str, defaultdict[Series, float]] = defaultdict(lambda: defaultdict(float))
    for one in increases:
        for name, series in one.values.items():
            for key, value in series.items():
                grown[name][key] += value
    return Increase(sum(one.seconds for one in increases), grown, sum(one.restarts for one in increases))


def _restarted(before: Values, after: Values) -> frozenset[Labels]:
    return frozenset(
        series.engine
        for name in GROWING & before.keys() & after.keys()
        for series, value in after[name].items()
        if value < before[name].get(series, 0.0)
    )


def _part(values: Values, name: str, chosen: Labels) -> float:
    return sum(value for series, value in values.get(name, {}).items() if chosen <= series.labels)


def _cumulative(values: Values, metric: Metric) -> list[tuple[float, float]]:
    sums: defaultdict[float, float] = defaultdict(float)
    for series, value in values.get(f"{metric.name}_bucket", {}).items():
        sums[float(dict(series.labels).get("le", "inf"))] += value
    buckets: list[tuple[float, float]] = []
    for bound in sorted(sums):  # engines of two versions may differ in bounds: the sum must still never fall
        buckets.append((bound, max(sums[bound], buckets[-1][1] if buckets else 0.0)))
    return buckets
