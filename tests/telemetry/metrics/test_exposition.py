from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge

from octavo.errors import TelemetryError
from octavo.telemetry.metrics import catalogue
from octavo.telemetry.metrics.catalogue import CATALOGUE, Metric
from octavo.telemetry.metrics.exposition import Collector, LabelValues, Readings, collector_in, label_problem
from octavo.telemetry.metrics.histogram import Exemplar, Histogram, HistogramState
from octavo.tests.telemetry.metrics.scraping import openmetrics, parse_openmetrics, parse_text, text


class Recorder:
    """A logger that remembers its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def bind(self, **fields: object) -> Recorder:
        return self

    def debug(self, event: str, **fields: object) -> None:
        self.events.append(event)

    info = warning = error = exception = debug


def full(count: int = 3, trace_id: str = "") -> Readings:
    """A value for every family, each label with values of its own."""
    numbers: dict[Metric, Mapping[LabelValues, float]] = {}
    histograms: dict[Metric, Mapping[LabelValues, HistogramState]] = {}
    infos: dict[Metric, LabelValues] = {}
    for metric in CATALOGUE:
        labels = tuple(f"a {label}" for label in metric.labels)
        if metric.kind == "info":
            infos[metric] = labels
        elif metric.kind == "histogram":
            histogram = Histogram(metric.bounds)
            histogram.observe(metric.bounds[0], count)
            histogram.observe(metric.bounds[-1] * 2)
            if trace_id:
                histogram.observe_traced(Exemplar(metric.bounds[1], trace_id, 12.5))
            histograms[metric] = {labels: histogram.state()}
        else:
            numbers[metric] = {labels: float(count)}
    return Readings(numbers, histograms, infos)


def registered(*collectors: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def value(registry: CollectorRegistry, name: str, /, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_both_formats_parse_and_hold_the_catalogue_and_nothing_else() -> None:
    registry = registered(Collector(full))
    plain = {family.name: family for family in parse_text(text(registry))}
    open_metrics = {family.name: family for family in parse_openmetrics(openmetrics(registry))}
    bare = {metric.name.removesuffix("_total"): metric for metric in CATALOGUE}
    assert set(open_metrics) == set(bare)
    assert {name.removesuffix("_info") for name in plain} == set(bare)
    for name, metric in bare.items():
        assert open_metrics[name].type == metric.kind
        assert open_metrics[name].documentation == metric.help
        assert {frozenset(s.labels) - {"le"} for s in open_metrics[name].samples} == {frozenset(metric.labels)}


def test_numbers_histograms_and_infos_are_shown_as_they_are() -> None:
    registry = registered(Collector(lambda: full(7)))
    assert value(registry, "octavo_allocations_total") == 7
    assert value(registry, "octavo_pool_blocks", state="a state") == 7
    name, bounds = catalogue.TIER_READ_SECONDS.name, catalogue.TIER_READ_SECONDS.bounds
    buckets = [value(registry, f"{name}_bucket", tier="a tier", le=le) for le in (str(bounds[0]), "5.0", "+Inf")]
    assert buckets == [7, 7, 8]  # cumulative
    assert value(registry, f"{name}_count", tier="a tier") == 8
    assert value(registry, f"{name}_sum", tier="a tier") == pytest.approx(7 * bounds[0] + 2 * bounds[-1])
    labels = {label: f"a {label}" for label in catalogue.INFO.labels}
    assert value(registry, "octavo_engine_info", **labels) == 1


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=30))
def test_buckets_are_cumulative_and_end_with_all(seen: list[float]) -> None:
    metric = catalogue.STEP_SECONDS
    histogram = Histogram(metric.bounds)
    for each in seen:
        histogram.observe(each)
    registry = registered(Collector(lambda: Readings(histograms={metric: {(): histogram.state()}})))
    (family,) = [f for f in parse_openmetrics(openmetrics(registry)) if f.name == metric.name]
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            assert sample.value == sum(each <= float(sample.labels["le"]) for each in seen)
    assert value(registry, f"{metric.name}_count") == len(seen)


def test_exemplars_are_in_openmetrics_only() -> None:
    trace_id = "0123456789abcdef" * 2
    registry = registered(Collector(lambda: full(trace_id=trace_id)))
    families = {family.name: family for family in parse_openmetrics(openmetrics(registry))}
    metric = catalogue.TIME_TO_FIRST_TOKEN
    shown = [s.exemplar for s in families[metric.name].samples if s.exemplar is not None]
    assert [(each.labels, each.value, float(each.timestamp or 0)) for each in shown] == [
        ({"trace_id": trace_id}, metric.bounds[1], 12.5)
    ]
    assert trace_id not in text(registry)


def test_a_read_that_fails_costs_no_other_collector_anything() -> None:
    logger, calls = Recorder(), 0

    def read() -> Readings:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("a tier cannot tell")
        return full(5)

    registry = registered(Collector(read, clock=lambda: 0.0, logger=logger))
    Gauge("of_the_host", "Its own.", registry=registry).set(4)
    assert value(registry, "octavo_allocations_total") == 5
    assert value(registry, "octavo_allocations_total") == 5  # the last ones
    assert value(registry, "of_the_host") == 4
    assert calls >= 3
    assert len(logger.events) == 1  # although each scrape failed


def test_before_the_first_reading_families_have_no_samples() -> None:
    def read() -> Readings:
        raise RuntimeError("not yet")

    registry = registered(Collector(read, logger=Recorder()))
    assert [f for f in parse_text(text(registry)) if f.samples] == []


def test_describing_reads_nothing_and_finds_clashes() -> None:
    def read() -> Readings:
        raise AssertionError("read")

    registry = registered(Collector(read, logger=Recorder()))
    with pytest.raises(ValueError, match="octavo_allocations"):
        Gauge("octavo_allocations", "Somebody else's.", registry=registry)


def test_restricted_scrapes_find_the_families() -> None:
    registry = registered(Collector(full))
    wanted = registry.restricted_registry(["octavo_allocations_total", "octavo_queue_seconds_count"])
    assert {s.name for family in wanted.collect() for s in family.samples} == {
        "octavo_allocations_total",
        "octavo_queue_seconds_count",
    }


def test_engines_of_one_registry_are_told_apart_by_their_labels() -> None:
    registry = CollectorRegistry()
    first = collector_in(registry)
    leave = first.add(lambda: full(1), {"engine": "a"})
    assert collector_in(registry) is first
    first.add(lambda: full(2), {"engine": "b"})
    families = [family.name for family in parse_openmetrics(openmetrics(registry))]
    assert len(families) == len(set(families))  # each is there once, with the samples of both
    assert value(registry, "octavo_pool_blocks", state="a state", engine="a") == 1
    assert value(registry, "octavo_pool_blocks", state="a state", engine="b") == 2
    with pytest.raises(TelemetryError, match="same metric_labels"):
        first.add(full, {"engine": "b"})
    leave()
    assert value(registry, "octavo_pool_blocks", state="a state", engine="a") is None
    assert len(first) == 1


def test_a_registry_with_metrics_of_these_names_is_refused() -> None:
    registry = CollectorRegistry()
    Gauge("octavo_pins", "Somebody else's.", registry=registry)
    with pytest.raises(TelemetryError, match="octavo_pins"):
        collector_in(registry)


@pytest.mark.parametrize(
    "labels",
    [{"le": "1"}, {"tier": "x"}, {"__name": "x"}, {"a-b": "x"}, {"": "x"}, {"a": 1}, {1: "x"}, {"trace_id": "x"}],
)
def test_labels_that_cannot_be_are_refused(labels: dict[Any, Any]) -> None:
    assert label_problem(labels) is not None
    with pytest.raises(TelemetryError, match="metric_labels"):
        Collector(full, labels)


def test_constant_labels_with_any_value_survive_the_formats() -> None:
    strange = 'quote " backslash \\ line\nbreak é'
    assert label_problem({"engine": strange}) is None
    registry = registered(Collector(full, {"engine": strange}))
    for families in (
        parse_text(text(registry)),
        parse_openmetrics(openmetrics(registry)),
    ):
        assert {s.labels["engine"] for family in families for s in family.samples} == {strange}


def test_label_values_must_fit_the_family() -> None:
    wrong = Readings({catalogue.POOL_BLOCKS: {("used", "too many"): 1.0}})
    with pytest.raises(ValueError, match="zip"):
        list(Collector(lambda: wrong).collect())


def test_bounds_are_ascending_and_finite() -> None:
    for metric in CATALOGUE:
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert all(0 < bound < math.inf for bound in metric.bounds)
        assert bool(metric.bounds) is (metric.kind == "histogram")
