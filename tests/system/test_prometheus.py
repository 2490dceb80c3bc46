"""A real Prometheus scrapes a real engine: what it stores is what happened, and every query has an answer."""

from __future__ import annotations

import http.client
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from anyio.from_thread import start_blocking_portal
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.telemetry.metrics.catalogue import COUNTS, SECONDS
from octavo.telemetry.metrics.endpoint import serve_metrics
from octavo.tests.system.tier_steps import push_out, written
from octavo.tests.telemetry.metrics.prometheus_rig import (
    RECORDING,
    Prometheus,
    Sample,
    expressions,
    program,
    promtool,
    rules_of,
    running_prometheus,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

BLOCK = 4
LENGTH = 32
"""Tokens of a prompt."""
DOCUMENTS = 12
AGAIN = 5
TENANTS = 40
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
SLOW_STEP = 0.03
HOST_BYTES = 12 * 2**10
"""So few that most of what is evicted lies on disk alone."""
MIB = 2**20
WINDOW = "5m"
"""Longer than the test, so that a rate is over all that has happened."""


class Known(NamedTuple):
    """What the engine's answers say that happened."""

    outputs: list[RequestOutput]
    """Of all requests, in order."""
    trace_id: str
    """Of the last request, which was the slowest."""

    @property
    def queried(self) -> int:
        return sum(output.prompt_tokens for output in self.outputs)

    @property
    def hits(self) -> int:
        return sum(output.cached_tokens for output in self.outputs)

    @property
    def first_token_seconds(self) -> list[float]:
        """Ascending."""
        times = [output.metrics for output in self.outputs]
        return sorted(each.first_token - each.arrival for each in times if each.first_token is not None)


class Scene(NamedTuple):
    """The end of the run: the engine idle, Prometheus with all of it."""

    prometheus: Prometheus
    known: Known
    text: str
    """A scrape in the text format."""
    series_before: float
    """In Prometheus, before the first request."""


def document(number: int, length: int = LENGTH) -> list[int]:
    """A prompt that shares no block with those of other numbers."""
    return [number, *((number * 7 + at * at) % 64 for at in range(1, length))]


async def ask(engine: AsyncEngine, ids: list[int], tenant: str | None = None) -> RequestOutput:
    (output,) = await engine.complete(ids, GREEDY, tenant=tenant)
    return output


async def run_load(engine: AsyncEngine) -> list[RequestOutput]:
    """One request after the other: the same hits in every run."""
    outputs = [await ask(engine, document(number)) for number in range(DOCUMENTS)]
    outputs += [await ask(engine, document(DOCUMENTS - 1)) for _ in range(AGAIN)]
    await push_out(engine)
    outputs += [await ask(engine, document(number)) for number in (0, DOCUMENTS - 1)]  # out of the tiers
    outputs += [await ask(engine, document(63, length=3), tenant=f"tenant {number}") for number in range(TENANTS)]
    await written(engine)
    return outputs


async def run_slow(engine: AsyncEngine, runner: FakeRunner, provider: TracerProvider) -> Known:
    """One request within a trace of the caller."""
    runner.step_seconds = SLOW_STEP
    with provider.get_tracer("client").start_as_current_span("client") as span:
        output = await ask(engine, document(40))
    return Known([output], trace.format_trace_id(span.get_span_context().trace_id))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The engine runs in a thread of its own; the tests only ask Prometheus."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    runner, provider = FakeRunner(), TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    config = EngineConfig(
        num_blocks=64,
        block_size=BLOCK,
        tiers=("host", "disk"),
        host_bytes=HOST_BYTES,
        disk_path=folder / "tier",
        disk_bytes=64 * MIB,
        demotion="write_through",
        checkpoint_interval=0.0,
        shadow_policies=("lru",),
    )
    engine = AsyncEngine(runner=runner, config=config, tracer_provider=provider)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(engine),
        serve_metrics(engine.registry, port=0) as endpoint,
        running_prometheus(folder, f"127.0.0.1:{endpoint.port}") as prometheus,
    ):
        portal.call(engine.snapshot, folder / "snapshot")
        prometheus.wait_for("octavo_snapshot_bytes")
        before = prometheus.value('count({__name__=~"octavo_.+"})')
        outputs = portal.call(run_load, engine)
        slow = portal.call(run_slow, engine, runner, provider)
        known = Known(outputs + slow.outputs, slow.trace_id)
        _wait_for_all(prometheus, known)
        yield Scene(prometheus, known, _scrape(endpoint.port), before)
    provider.shutdown()


def _wait_for_all(prometheus: Prometheus, known: Known) -> None:
    count = len(known.outputs)
    prometheus.wait_for(f"sum(octavo_requests_finished_total) == {count}")
    prometheus.wait_for(f"sum(vllm:request_success_total) == {count}")
    for last in ("vllm:cache_config_info", "vllm:kv_block_reuse_gap_seconds_count"):  # of the other groups
        prometheus.wait_for(last)


def _scrape(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def within_bucket(value: float, bounds: Sequence[float], seen: float) -> bool:
    """Whether ``value`` lies where a histogram shows ``seen``."""
    index = bisect_left(bounds, seen)
    below = bounds[index - 1] if index else 0.0
    return below <= value <= bounds[min(index, len(bounds) - 1)]


def numbers(samples: list[Sample], label: str) -> dict[str, float]:
    return {sample.metric[label]: sample.number for sample in samples}


def test_the_engine_is_up(scene: Scene) -> None:
    assert scene.prometheus.value('up{job="octavo"}') == 1.0


def test_the_hit_rate_is_exactly_what_happened(scene: Scene) -> None:
    prometheus, known = scene.prometheus, scene.known
    assert known.queried == (DOCUMENTS + AGAIN + 2 + 1) * LENGTH + 3 * TENANTS
    assert [output.cached_tokens for output in known.outputs[:DOCUMENTS]] == [0] * DOCUMENTS
    assert [output.cached_tokens for output in known.outputs[DOCUMENTS : DOCUMENTS + AGAIN]] == [LENGTH - 1] * AGAIN
    totals = "sum(octavo_prefix_hit_tokens_total) / sum(octavo_prefix_query_tokens_total)"
    assert prometheus.value(totals) == known.hits / known.queried
    shown = expressions(WINDOW)["Prefix hit rate A"]
    assert prometheus.value(shown) == pytest.approx(known.hits / known.queried, rel=1e-9)


def test_hits_are_counted_where_they_were_found(scene: Scene) -> None:
    found = numbers(scene.prometheus.query("octavo_prefix_hit_tokens_total"), "tier")
    assert found["device"] == AGAIN * (LENGTH - 1)
    assert found["host"] + found["disk"] == sum(each.cached_tokens for each in scene.known.outputs[DOCUMENTS + AGAIN :])
    assert found["host"] > 0
    assert found["disk"] > 0
    assert len(found) == 3


def test_tokens_and_requests_are_those_of_the_answers(scene: Scene) -> None:
    prometheus, known = scene.prometheus, scene.known
    assert prometheus.value("octavo_requests_submitted_total") == len(known.outputs)
    assert prometheus.value("octavo_prompt_tokens_total") == known.queried
    generated = sum(len(output.token_ids) for output in known.outputs)
    assert prometheus.value("octavo_generated_tokens_total") == generated
    assert prometheus.value("octavo_request_generated_tokens_sum") == generated
    assert prometheus.value("sum(octavo_pool_blocks)") == prometheus.value("octavo_pool_capacity_blocks") == 64


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.95, 1.0])
def test_quantiles_lie_in_the_bucket_of_what_was_measured(scene: Scene, quantile: float) -> None:
    times = scene.known.first_token_seconds
    seen = times[max(math.ceil(quantile * len(times)) - 1, 0)]
    buckets = f"sum by (le) (rate(octavo_time_to_first_token_seconds_bucket[{WINDOW}]))"
    value = scene.prometheus.value(f"histogram_quantile({quantile}, {buckets})")
    assert within_bucket(value, SECONDS, seen)


def test_a_quantile_of_known_sizes_is_known(scene: Scene) -> None:
    """20 prompts of 32 tokens and 40 of 3."""
    median = f"histogram_quantile(0.5, rate(octavo_request_prompt_tokens_bucket[{WINDOW}]))"
    assert within_bucket(scene.prometheus.value(median), COUNTS, 3)
    upper = f"histogram_quantile(0.9, rate(octavo_request_prompt_tokens_bucket[{WINDOW}]))"
    assert within_bucket(scene.prometheus.value(upper), COUNTS, LENGTH)


def test_an_exemplar_leads_to_the_trace_of_the_request(scene: Scene) -> None:
    """It was the last request, so it is the latest in its bucket."""
    times = scene.known.outputs[-1].metrics
    seconds = (times.first_token or 0.0) - times.arrival
    traced = scene.prometheus.exemplars("octavo_time_to_first_token_seconds_bucket")
    found = [
        (float(each.value), series.seriesLabels["le"])
        for series in traced
        for each in series.exemplars
        if each.labels == {"trace_id": scene.known.trace_id}
    ]
    assert [value for value, _ in found] == [pytest.approx(seconds)]
    assert within_bucket(float(found[0][1]), SECONDS, seconds)


@pytest.mark.parametrize(
    "family", ["time_to_first_token_seconds", "time_per_output_token_seconds", "request_seconds", "queue_seconds"]
)
def test_each_time_of_a_request_has_exemplars(scene: Scene, family: str) -> None:
    traced = scene.prometheus.exemplars(f"octavo_{family}_bucket")
    ids = {each.labels["trace_id"] for series in traced for each in series.exemplars}
    assert scene.known.trace_id in ids
    assert all(len(trace_id) == 32 and int(trace_id, 16) for trace_id in ids)


def test_what_clients_send_makes_no_series(scene: Scene) -> None:
    """Tenants, request ids and prompts: as many series as before the first request."""
    assert scene.prometheus.value('count({__name__=~"octavo_.+"})') == scene.series_before
    assert scene.series_before < 700


@pytest.mark.parametrize("name", expressions())
def test_every_panel_has_data(scene: Scene, name: str) -> None:
    samples = scene.prometheus.query(expressions(WINDOW)[name])
    assert samples
    assert all(math.isfinite(sample.number) for sample in samples)


@pytest.mark.parametrize("name", sorted({rule.record or "" for rule in rules_of(RECORDING)}))
def test_every_recorded_name_has_data(scene: Scene, name: str) -> None:
    samples = scene.prometheus.query(name)
    assert samples
    assert name == "vllm:cache_config_info" or all(sample.metric["model_name"] == "fake" for sample in samples)


def test_vllms_hit_rate_is_the_same(scene: Scene) -> None:
    prometheus, known = scene.prometheus, scene.known
    inside = prometheus.value("vllm:prefix_cache_hits_total")
    outside = prometheus.value("vllm:external_prefix_cache_hits_total")
    assert (inside + outside) / prometheus.value("vllm:prefix_cache_queries_total") == known.hits / known.queried
    sources = numbers(prometheus.query("vllm:prompt_tokens_by_source_total"), "source")
    assert sources == {
        "local_compute": known.queried - known.hits,
        "local_cache_hit": inside,
        "external_kv_transfer": outside,
    }


def test_no_alert_of_a_healthy_engine_is_on_its_way(scene: Scene) -> None:
    loaded = "OctavoEventLoopLag"  # speaks of the machine that runs the tests
    assert scene.prometheus.query(f'ALERTS{{alertname!="{loaded}"}}') == []


def test_promtool_has_nothing_to_say_about_the_exposition(scene: Scene) -> None:
    assert promtool("check", "metrics", text=scene.text).strip() == ""
