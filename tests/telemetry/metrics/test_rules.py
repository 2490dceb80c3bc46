"""The dashboard, the recording rules and the alerts speak of metrics that exist, and say what they are meant to say."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest

from octavo.telemetry.metrics.catalogue import CATALOGUE, Metric
from octavo.tests.telemetry.metrics.prometheus_rig import (
    ALERTS,
    CONFIG,
    DASHBOARD,
    RECORDING,
    TARGET_LABELS,
    Place,
    Reading,
    Rule,
    Selector,
    dashboard,
    expressions,
    known_series,
    promtool,
    read,
    rules_of,
    series_of,
    write_rules,
)

KNOWN = known_series()
MODEL_NAME = "octavo:engine:model_name"
WINDOWED = {"rate", "increase", "irate", "delta"}
VLLM = {  # from its source: the name and, of those that are not plain counters and gauges, what they are
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "prompt_tokens_cached": "counter",
    "prompt_tokens_by_source": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "external_prefix_cache_queries": "counter",
    "external_prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "request_success": "counter",
    "admission_rejections": "counter",
    "kv_offload_tiering_read_bytes": "counter",
    "kv_offload_tiering_write_bytes": "counter",
    "kv_offload_tiering_read_time": "counter",
    "kv_offload_tiering_write_time": "counter",
    "time_to_first_token_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "kv_block_lifetime_seconds": "histogram",
    "kv_block_idle_before_evict_seconds": "histogram",
    "kv_block_reuse_gap_seconds": "histogram",
}
ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}

DASHBOARD_EXPRESSIONS = expressions()
ALERT_RULES = {rule.alert or "": rule for rule in rules_of(ALERTS)}
RECORDING_RULES = rules_of(RECORDING)
ALL_EXPRESSIONS = {
    **{f"panel {name}": expr for name, expr in DASHBOARD_EXPRESSIONS.items()},
    **{f"alert {name}": rule.expr for name, rule in ALERT_RULES.items()},
    **{f"rule {number} {rule.record}": rule.expr for number, rule in enumerate(RECORDING_RULES)},
}
LIVE = [name for name in ALL_EXPRESSIONS if not name.startswith("rule ")]


def faults(expr: str, *, recording: bool = False) -> list[str]:
    """What is wrong with an expression, as far as the catalogue can tell."""
    reading = read(expr)
    labels = set(TARGET_LABELS) | {"model_name"} | _made(reading)
    found = []
    for selector in reading.selectors:
        if selector.name not in KNOWN:
            found += [] if selector.name in {"up", MODEL_NAME} else [f"no such series: {selector.name}"]
            continue
        own = KNOWN[selector.name].labels
        labels |= own
        found += [
            f"{selector.name} has no label {label}" for label in selector.matchers if label not in own | TARGET_LABELS
        ]
        found += [] if recording else _wrong_use(selector)
    found += [f"grouped by {label}, which is a label of nothing here" for label in sorted(reading.grouping - labels)]
    if "histogram_quantile" in reading.functions and "le" not in reading.grouping:
        found.append("histogram_quantile needs le")
    return found


def _made(reading: Reading) -> set[str]:
    """Labels that functions make."""
    if "count_values" in reading.functions:
        return set(reading.strings[:1])
    return set(reading.strings[0::4]) if "label_replace" in reading.functions else set()


def _wrong_use(selector: Selector) -> list[str]:
    """A counter by itself says little, and the rate of a gauge nothing."""
    counts = KNOWN[selector.name].kind == "counter"
    if counts and selector.window is None:
        return [f"{selector.name} only grows: take its rate or its increase"]
    return [f"{selector.name} is no counter: it has no rate"] if not counts and selector.window is not None else []


# the reader itself


def test_an_expression_is_taken_apart() -> None:
    expr = (
        'sum by (le, tier) (rate(a_bucket{tier=~"x|y", le!="1"}[5m])) / on (job) group_left (b) c:d{} offset 5m'
        ' and bool e or label_replace(f, "g", "$1", "h", "(.+)") > 0.5 unless 1e3 < j'
    )
    reading = read(expr)
    assert [tuple(selector) for selector in reading.selectors] == [
        ("a_bucket", {"tier": "x|y", "le": "1"}, "5m"),
        ("c:d", {}, None),
        ("e", {}, None),
        ("f", {}, None),
        ("j", {}, None),
    ]
    assert reading.grouping == {"le", "tier", "job", "b"}
    assert reading.functions == {"sum", "rate", "label_replace"}
    assert reading.strings == ["g", "$1", "h", "(.+)"]


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("rate(octavo_allocation_total[5m])", "no such series"),
        ("rate(octavo_allocations[5m])", "no such series"),
        ("octavo_engine", "no such series"),
        ("rate(octavo_step_seconds[5m])", "no such series"),
        ('rate(octavo_allocations_total{tier="disk"}[5m])', "has no label tier"),
        ("sum by (tenant) (rate(octavo_allocations_total[5m]))", "grouped by tenant"),
        ("octavo_allocations_total", "only grows"),
        ("octavo_step_seconds_count", "only grows"),
        ("rate(octavo_requests_running[5m])", "has no rate"),
        ("histogram_quantile(0.5, sum(rate(octavo_step_seconds_bucket[5m])))", "needs le"),
        ("histogram_quantile(0.5, sum by (le) (rate(octavo_step_seconds_sum[5m])))", "grouped by le"),
    ],
)
def test_a_wrong_expression_is_found(expr: str, fault: str) -> None:
    assert any(fault in each for each in faults(expr)), faults(expr)


# all expressions


@pytest.mark.parametrize("name", ALL_EXPRESSIONS)
def test_an_expression_mentions_only_what_is_in_the_catalogue(name: str) -> None:
    assert faults(ALL_EXPRESSIONS[name], recording=name.startswith("rule ")) == []


@pytest.mark.parametrize("name", LIVE)
def test_ranges_are_taken_by_functions_that_want_them(name: str) -> None:
    reading = read(ALL_EXPRESSIONS[name])
    ranged = any(selector.window is not None for selector in reading.selectors)
    assert ranged == bool(reading.functions & WINDOWED)


def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = write_rules(tmp_path / "rules.yaml", DASHBOARD_EXPRESSIONS.values())
    assert f"{len(DASHBOARD_EXPRESSIONS)} rules found" in promtool("check", "rules", rules)


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    shown = promtool("check", "rules", RECORDING, ALERTS)
    assert f"{len(RECORDING_RULES)} rules found" in shown
    assert f"{len(ALERT_RULES)} rules found" in shown
    shown = promtool("check", "config", CONFIG)
    assert "2 rule files found" in shown


def test_the_configuration_keeps_exemplars() -> None:
    assert "max_exemplars" in CONFIG.read_text()
    assert "--enable-feature=exemplar-storage" in CONFIG.read_text()


# the dashboard


def test_every_family_is_on_the_dashboard() -> None:
    shown = {selector.name for expr in DASHBOARD_EXPRESSIONS.values() for selector in read(expr).selectors}
    missing = [metric.name for metric in CATALOGUE if not shown & series_of(metric).keys()]
    assert missing == []


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = dashboard()
    assert board.schemaVersion >= 39
    assert board.title == "Octavo"
    assert board.uid
    ids = [panel.id for panel in board.panels]
    assert len(set(ids)) == len(ids)
    kinds = {panel.type for panel in board.panels}
    assert kinds <= {"row", "timeseries", "stat", "state-timeline"}
    titles = [panel.title for panel in board.panels if panel.type != "row"]
    assert len(set(titles)) == len(titles)


def test_the_rows_come_in_the_order_in_which_one_looks() -> None:
    rows = [panel.title for panel in dashboard().panels if panel.type == "row"]
    assert rows == ["Overview", "Pool and eviction", "Tiers", "Restart", "Residency", "Loop"]


def test_each_panel_says_what_it_shows_in_which_unit() -> None:
    for panel in dashboard().panels:
        if panel.type == "row":
            continue
        defaults = msgspec.convert(panel.fieldConfig["defaults"], dict[str, object])
        assert defaults["unit"], panel.title
        assert len(panel.description) > 10, panel.title
        letters = [target.refId for target in panel.targets]
        assert letters, panel.title
        assert len(set(letters)) == len(letters), panel.title
        assert all(target.legendFormat for target in panel.targets), panel.title


def test_ratios_are_shown_as_shares_and_seconds_as_times() -> None:
    """By the unit of the catalogue's names."""
    for panel in dashboard().panels:
        names = {selector.name for target in panel.targets for selector in read(target.expr).selectors}
        if not names or not all(name.startswith("octavo_") for name in names):
            continue
        unit = msgspec.convert(panel.fieldConfig["defaults"], dict[str, object])["unit"]
        if all(re.search(r"_seconds(_bucket)?$", name) for name in names):
            assert unit == "s", panel.title
        if all(name.endswith("_bytes") for name in names):
            assert unit == "bytes", panel.title
        if unit == "percentunit":
            parts = [target.expr for target in panel.targets]
            assert all(" / " in expr or "_ratio" in expr or "_utilization" in expr for expr in parts), panel.title


def test_nothing_names_a_data_source_of_its_own() -> None:
    board = dashboard()
    assert [(variable.name, variable.type) for variable in board.templating.variables] == [
        ("datasource", "datasource"),
        ("instance", "query"),
    ]
    named_anywhere = set(re.findall(r'"uid": "([^"]*)"', DASHBOARD.read_text()))
    assert named_anywhere == {"${datasource}", "-- Grafana --", board.uid}
    for panel in board.panels:
        assert all(target.datasource["uid"] == "${datasource}" for target in panel.targets), panel.title
        assert panel.type == "row" or panel.datasource["uid"] == "${datasource}", panel.title


def test_every_query_is_for_the_chosen_instances() -> None:
    for panel in dashboard().panels:
        for target in panel.targets:
            chosen = [selector.matchers.get("instance") for selector in read(target.expr).selectors]
            assert set(chosen) == {"$instance"}, panel.title


def test_panels_lie_side_by_side_on_the_grid() -> None:
    places = [panel.gridPos for panel in dashboard().panels]
    assert all(place.x >= 0 and place.x + place.w <= 24 and place.w > 0 and place.h > 0 for place in places)
    assert not any(_overlap(one, other) for one, other in combinations(places, 2))
    assert all(before.y <= after.y for before, after in pairwise(places))


def _overlap(one: Place, other: Place) -> bool:
    across = one.x < other.x + other.w and other.x < one.x + one.w
    return across and one.y < other.y + other.h and other.y < one.y + one.h


# vLLM's names


def test_the_recorded_names_are_those_of_vllm() -> None:
    expected = {f"vllm:{name}{ending}" for name, kind in VLLM.items() for ending in ENDINGS[kind]}
    assert {rule.record for rule in RECORDING_RULES} == expected | {MODEL_NAME}


def test_a_recorded_name_is_made_of_a_metric_of_its_kind() -> None:
    kinds = {f"vllm:{name}{ending}": kind for name, kind in VLLM.items() for ending in ENDINGS[kind]}
    for rule in RECORDING_RULES[1:]:
        sources = {KNOWN[each.name].kind for each in read(rule.expr).selectors if each.name in KNOWN}
        kind = kinds[rule.record or ""]
        wanted = {"counter"} if kind in {"counter", "histogram"} else {"gauge", "info"}
        assert sources <= wanted, rule.record


def test_the_parts_of_a_histogram_come_from_the_parts_of_one() -> None:
    for name, kind in VLLM.items():
        if kind != "histogram":
            continue
        parts = {}
        for ending in ENDINGS[kind]:
            (rule,) = [each for each in RECORDING_RULES if each.record == f"vllm:{name}{ending}"]
            (source,) = {each.name for each in read(rule.expr).selectors} - {MODEL_NAME}
            parts[ending] = source.removesuffix(ending)
        assert len(set(parts.values())) == 1, name


WHERE = {"job": "octavo", "instance": "a:9464"}
Value = dict[str, str]
"""A series of a unit test: its name with labels, and its values."""


def named(name: str, /, **labels: str) -> str:
    """A series as PromQL writes it."""
    return f"{name}{{{', '.join(f'{key}={value!r}' for key, value in labels.items())}}}".replace("'", '"')


def given(name: str, values: str, /, **labels: str) -> Value:
    return {"series": named(name, **WHERE, **labels), "values": values}


def expect(expr: str, at: str, *samples: tuple[str, float]) -> dict[str, object]:
    shown = [{"labels": labels, "value": value} for labels, value in samples]
    return {"expr": expr, "eval_time": at, "exp_samples": shown}


def check(tmp_path: Path, rules: Path, *tests: dict[str, object]) -> None:
    """Run unit tests of rules."""
    file = tmp_path / "tests.yaml"
    file.write_bytes(msgspec.json.encode({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


INFO = given(
    "octavo_engine_info", "1x3", version="1", model="smol", dtype="float32", block_size="16", eviction_policy="lru"
)
SCRAPED = (
    INFO,
    given("octavo_requests_running", "3x3"),
    given("octavo_requests_waiting", "7x3"),
    given("octavo_requests_loading", "2x3"),
    given("octavo_requests_waiting_by_reason", "4x3", reason="blocks"),
    given("octavo_requests_waiting_by_reason", "0x3", reason="slots"),
    given("octavo_requests_waiting_by_reason", "1x3", reason="prefix"),
    given("octavo_requests_waiting_by_reason", "1x3", reason="lookup"),
    given("octavo_block_pool_usage_ratio", "0.25x3"),
    given("octavo_pool_capacity_blocks", "1024x3"),
    given("octavo_prefix_query_tokens_total", "1000x3"),
    given("octavo_prefix_hit_tokens_total", "600x3", tier="device"),
    given("octavo_prefix_hit_tokens_total", "90x3", tier="host"),
    given("octavo_prefix_hit_tokens_total", "10x3", tier="disk"),
    given("octavo_preemptions_total", "5x3", kind="swap"),
    given("octavo_preemptions_total", "6x3", kind="recompute"),
    given("octavo_requests_finished_total", "8x3", reason="stop"),
    given("octavo_requests_finished_total", "2x3", reason="abort"),
    given("octavo_tier_read_seconds_sum", "1.5x3", tier="disk"),
    given("octavo_step_tokens_bucket", "20x3", le="16"),
    given("octavo_step_tokens_bucket", "30x3", le="+Inf"),
    given("octavo_step_tokens_sum", "640x3"),
)
RECORDED: dict[str, dict[tuple[tuple[str, str], ...], float]] = {
    "vllm:num_requests_running": {(): 3},
    "vllm:num_requests_waiting": {(): 9},
    "vllm:num_requests_waiting_by_reason": {(("reason", "capacity"),): 5, (("reason", "deferred"),): 4},
    "vllm:kv_cache_usage_perc": {(): 0.25},
    "vllm:prefix_cache_queries_total": {(): 1000},
    "vllm:prefix_cache_hits_total": {(): 600},
    "vllm:external_prefix_cache_queries_total": {(): 400},
    "vllm:external_prefix_cache_hits_total": {(): 100},
    "vllm:prompt_tokens_cached_total": {(): 700},
    "vllm:prompt_tokens_by_source_total": {
        (("source", "local_compute"),): 300,
        (("source", "local_cache_hit"),): 600,
        (("source", "external_kv_transfer"),): 100,
    },
    "vllm:num_preemptions_total": {(): 11},
    "vllm:request_success_total": {(("finished_reason", "stop"),): 8, (("finished_reason", "abort"),): 2},
    "vllm:kv_offload_tiering_read_time_total": {(("tier", "disk"),): 1.5},
    "vllm:iteration_tokens_total_bucket": {(("le", "16"),): 20, (("le", "+Inf"),): 30},
    "vllm:iteration_tokens_total_sum": {(): 640},
}


def recorded(engine: dict[str, str]) -> list[dict[str, object]]:
    """What must be there for one engine."""
    tests: list[dict[str, object]] = []
    for name, values in RECORDED.items():
        samples = [
            (named(name, **WHERE, **engine, model_name="smol", **dict(key)), value) for key, value in values.items()
        ]
        tests.append(expect(named(name, **engine) if engine else name, "2m", *samples))
    config = named("vllm:cache_config_info", **WHERE, **engine, block_size="16", num_gpu_blocks="1024")
    tests.append(expect(named("vllm:cache_config_info", **engine), "2m", (config, 1)))
    return tests


def test_vllms_names_have_the_values_that_vllm_would_show(tmp_path: Path) -> None:
    check(tmp_path, RECORDING, {"interval": "1m", "input_series": SCRAPED, "promql_expr_test": recorded({})})


def test_engines_that_share_an_endpoint_are_told_apart(tmp_path: Path) -> None:
    """By their label ``engine``; each has its own model name."""
    series = [
        {**each, "series": each["series"].replace("{", f'{{engine="{engine}", ', 1)}
        for engine in "01"
        for each in SCRAPED
    ]
    expected = recorded({"engine": "0"}) + recorded({"engine": "1"})
    check(tmp_path, RECORDING, {"interval": "1m", "input_series": series, "promql_expr_test": expected})


def test_an_engine_without_tiers_has_no_external_hits(tmp_path: Path) -> None:
    """They are 0, not absent."""
    series = [each for each in SCRAPED if "host" not in each["series"] and "disk" not in each["series"]]
    where = named("vllm:external_prefix_cache_hits_total", **WHERE, model_name="smol")
    expected = [expect("vllm:external_prefix_cache_hits_total", "2m", (where, 0))]
    check(tmp_path, RECORDING, {"interval": "1m", "input_series": series, "promql_expr_test": expected})


# alerts


def histogram(metric: Metric, slow: float, count: int) -> list[Value]:
    """``count`` values each minute, all in the bucket below ``slow``."""
    buckets = [
        given(f"{metric.name}_bucket", f"0+{count if bound >= slow else 0}x500", le=f"{bound:g}")
        for bound in metric.bounds
    ]
    return [*buckets, given(f"{metric.name}_bucket", f"0+{count}x500", le="+Inf")]


LAG = next(metric for metric in CATALOGUE if metric.name == "octavo_event_loop_lag_seconds")
HITS, QUERIES = "octavo_prefix_hit_tokens_total", "octavo_prefix_query_tokens_total"
FIRING: dict[str, tuple[list[Value], str, str]] = {
    # alert: series, the time at which it does not fire yet, the time at which it does
    "OctavoHitRateCollapsed": (
        [given(HITS, "0+800x400 320000+10x60", tier="device"), given(QUERIES, "0+1000x460")],
        "402m",
        "435m",
    ),
    "OctavoEvictedThenWanted": (
        [given("octavo_evicted_then_wanted_total", "0+30x60"), given("octavo_requests_submitted_total", "0+100x60")],
        "10m",
        "20m",
    ),
    "OctavoPoolSaturated": (
        [given("octavo_block_pool_usage_ratio", "0.5x5 0.97x60"), given("octavo_requests_waiting", "1x66")],
        "14m",
        "17m",
    ),
    "OctavoPreemptionStorm": (
        [
            given("octavo_preemptions_total", "0+40x60", kind="swap"),
            given("octavo_preemptions_total", "0+20x60", kind="recompute"),
            given("octavo_requests_finished_total", "0+60x60", reason="stop"),
            given("octavo_requests_finished_total", "0+40x60", reason="length"),
        ],
        "5m",
        "8m",
    ),
    "OctavoTierCorruptBlocks": ([given("octavo_tier_corrupt_blocks_total", "0x10 1x10", tier="disk")], "11m", "13m"),
    "OctavoTierBreakerOpen": (
        [given("octavo_tier_breaker_open", "0x4 1x20", tier="redis", direction="read")],
        "9m",
        "11m",
    ),
    "OctavoSnapshotTooOld": ([given("octavo_snapshot_age_seconds", "3000+60x60")], "20m", "22m"),
    "OctavoDown": ([given("up", "1x4 0x10")], "6m", "8m"),
    "OctavoLoopStuck": ([given("octavo_stuck_seconds", "0x4 5+60x10")], "5m", "7m"),
    "OctavoEventLoopLag": (histogram(LAG, 0.5, 60), "10m", "13m"),
    "OctavoSpansDropped": ([given("octavo_spans_dropped_total", "0+10x60", reason="queue_full")], "10m", "13m"),
}
QUIET: dict[str, list[Value]] = {
    # just short of it, for as long as one likes
    "OctavoHitRateCollapsed": [given(HITS, "0+800x400 320000+500x60", tier="device"), given(QUERIES, "0+1000x460")],
    "OctavoEvictedThenWanted": [
        given("octavo_evicted_then_wanted_total", "0+19x460"),
        given("octavo_requests_submitted_total", "0+100x460"),
    ],
    "OctavoPoolSaturated": [
        given("octavo_block_pool_usage_ratio", "0.97x460"),
        given("octavo_requests_waiting", "0x460"),
    ],
    "OctavoPreemptionStorm": [
        given("octavo_preemptions_total", "0+49x460", kind="swap"),
        given("octavo_requests_finished_total", "0+100x460", reason="stop"),
    ],
    "OctavoTierCorruptBlocks": [given("octavo_tier_corrupt_blocks_total", "3x460", tier="disk")],
    "OctavoTierBreakerOpen": [
        given("octavo_tier_breaker_open", "1 1 1 0" + " 1 1 1 1 0" * 90, tier="redis", direction="read")
    ],
    "OctavoSnapshotTooOld": [given("octavo_snapshot_age_seconds", "3600x460")],
    "OctavoDown": [{"series": 'up{job="other", instance="a:9464"}', "values": "0x460"}, given("up", "1x460")],
    "OctavoLoopStuck": [
        given("octavo_stuck_seconds", "0x460"),
        given("octavo_requests_running", "1x460"),
        given("octavo_steps_total", "0+1x460"),
    ],
    "OctavoEventLoopLag": histogram(LAG, 0.2, 60),
    "OctavoSpansDropped": [given("octavo_spans_dropped_total", "7x460", reason="queue_full")],
}


def firing(alert: str, at: str, count: int) -> dict[str, object]:
    """How many series of an alert fire."""
    samples = [("{}", float(count))] if count else []
    return expect(f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})', at, *samples)


def test_every_alert_is_tried() -> None:
    assert FIRING.keys() == QUIET.keys() == ALERT_RULES.keys()


@pytest.mark.parametrize("alert", FIRING)
def test_an_alert_fires_when_it_should_and_not_before(tmp_path: Path, alert: str) -> None:
    series, before, after = FIRING[alert]
    expected = [firing(alert, before, 0), firing(alert, after, 1)]
    check(tmp_path, ALERTS, {"interval": "1m", "input_series": series, "promql_expr_test": expected})


@pytest.mark.parametrize("alert", QUIET)
def test_an_alert_stays_quiet_just_short_of_it(tmp_path: Path, alert: str) -> None:
    expected = [expect(f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[8h])', "460m")]
    check(tmp_path, ALERTS, {"interval": "1m", "input_series": QUIET[alert], "promql_expr_test": expected})


def test_a_blocked_event_loop_is_seen_though_its_gauges_stand_still(tmp_path: Path) -> None:
    """The scrape serves the last reading then: requests run and no step comes."""
    series = [
        given("octavo_stuck_seconds", "0x30"),
        given("octavo_requests_running", "4x30"),
        given("octavo_steps_total", "0+100x10 1000x20"),
    ]
    expected = [firing("OctavoLoopStuck", "11m", 0), firing("OctavoLoopStuck", "15m", 1)]
    check(tmp_path, ALERTS, {"interval": "1m", "input_series": series, "promql_expr_test": expected})


def test_an_idle_engine_raises_nothing(tmp_path: Path) -> None:
    """Whatever divides by the traffic divides by 0."""
    labels = {
        "kind": "swap",
        "policy": "Lru",
        "tier": "disk",
        "reason": "stop",
        "direction": "read",
        "outcome": "complete",
        "event": "stored",
        "state": "free",
    }
    series = [
        given(
            name,
            "0x460",
            **{label: labels.get(label, "1") for label in found.labels if label != "le"},
            **({"le": "+Inf"} if "le" in found.labels else {}),
        )
        for name, found in KNOWN.items()
    ]
    expected = [expect("count_over_time(ALERTS[8h])", "460m")]
    check(
        tmp_path,
        ALERTS,
        {"interval": "1m", "input_series": [*series, given("up", "1x460")], "promql_expr_test": expected},
    )


def test_an_alert_reads_well(tmp_path: Path) -> None:
    """The templates are filled: with the name of the tier, the instance and the value."""
    rule = ALERT_RULES["OctavoTierCorruptBlocks"]
    series = [given("octavo_tier_corrupt_blocks_total", "0x10 30x10", tier="disk")]
    summary = "The disk tier of a:9464 returned wrong bytes"
    description = rule.annotations["description"].replace('{{ $value | printf "%.0f" }}', "31")
    assert "About 31 blocks" in description  # increase() extrapolates
    alert = {
        "exp_labels": {**WHERE, "tier": "disk", "severity": "warning"},
        "exp_annotations": {"summary": summary, "description": description},
    }
    tests = [{"eval_time": "24m", "alertname": rule.alert, "exp_alerts": [alert]}]
    check(tmp_path, ALERTS, {"interval": "1m", "input_series": series, "alert_rule_test": tests})


@pytest.mark.parametrize("rule", ALERT_RULES.values(), ids=ALERT_RULES)
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: Rule) -> None:
    assert rule.duration
    assert rule.labels["severity"] in {"info", "warning", "critical"}
    assert rule.annotations.keys() == {"summary", "description"}
    assert "{{ $labels.instance }}" in rule.annotations["summary"]
    assert len(rule.annotations["description"]) > 100
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule.annotations.values())))
    assert used <= _labels_of(rule), "an empty word in the text"


def _labels_of(rule: Rule) -> set[str]:
    """Those that an alert can have."""
    reading = read(rule.expr)
    series = [KNOWN[selector.name].labels for selector in reading.selectors if selector.name in KNOWN]
    kept = set().union(*series) if not reading.grouping else reading.grouping
    return kept | {"instance", "job"}
