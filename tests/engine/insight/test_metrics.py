from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import format_trace_id
from prometheus_client import CollectorRegistry

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.insight.lag import watch_lag
from octavo.engine.model.runner import StepInput
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, TelemetryError
from octavo.storage.testing.contract import MemoryStore
from octavo.telemetry.metrics import catalogue as c
from octavo.telemetry.metrics.catalogue import CATALOGUE
from octavo.telemetry.metrics.genai import DURATION, DURATION_BOUNDS, TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN
from octavo.telemetry.metrics.histogram import Histogram
from octavo.tests.engine.conftest import DEFAULTS, FakeClock
from octavo.tests.engine.tier_rig import EngineOf, ask, cool, lasting, memory, prompt, settled
from octavo.tests.telemetry.metrics.scraping import openmetrics, parse_openmetrics, parse_text, text

ONE = SamplingParams(max_tokens=1, temperature=0.0)
FIVE = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
Preempt = Callable[[AsyncEngine, Callable[[Sample], bool]], None]
Series = frozenset[tuple[str, tuple[tuple[str, str], ...]]]


def value(engine: AsyncEngine | CollectorRegistry, name: str, /, **labels: str) -> float | None:
    registry = engine.registry if isinstance(engine, AsyncEngine) else engine
    return registry.get_sample_value(name, labels)


def series(registry: CollectorRegistry) -> Series:
    families = parse_text(text(registry))
    return frozenset((s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples)


def plain(**config: object) -> EngineConfig:
    return EngineConfig(**DEFAULTS | config)  # type: ignore[arg-type]  # names and values come from the tests


# what is counted


@pytest.mark.asyncio
async def test_the_hit_rate_is_exact_and_no_later_request_can_spoil_it(engine_of: EngineOf) -> None:
    shared = [7] * 36
    async with engine_of(max_batch_tokens=64) as engine:
        await ask(engine, shared, ONE)  # cold
        for number in range(10):
            await ask(engine, [*shared, number, 1, 2, 3], ONE)
        await ask(engine, [60, 61, 62], ONE)  # a probe without a hit
        assert value(engine, "octavo_prefix_query_tokens_total") == 36 + 10 * 40 + 3
        assert value(engine, "octavo_prefix_hit_tokens_total", tier="device") == 10 * 36
        assert value(engine, "octavo_prefix_hits_total") == 10


@pytest.mark.asyncio
async def test_hits_from_tiers_are_told_by_tier(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"near": memory(64), "far": memory(64)}) as engine:
        await ask(engine, prompt(1), FIVE)
        await cool(engine)
        before = value(engine, "octavo_prefix_hit_tokens_total", tier="device")
        output = await ask(engine, prompt(1), FIVE)
        assert output.cached_tokens == 16
        assert value(engine, "octavo_prefix_hit_tokens_total", tier="near") == 16
        assert value(engine, "octavo_prefix_hit_tokens_total", tier="far") == 0
        assert value(engine, "octavo_prefix_hit_tokens_total", tier="device") == before
        assert value(engine, "octavo_tier_read_blocks_total", tier="near") == 4
        assert value(engine, "octavo_tier_read_seconds_count", tier="near") == engine.stats().tiers[0].gets > 0
        assert value(engine, "octavo_tier_write_seconds_count", tier="near") == engine.stats().tiers[0].puts > 0
        await settled(engine)


@pytest.mark.asyncio
async def test_several_samples_are_one_request(engine_of: EngineOf, preempt_when: Preempt) -> None:
    clock, outputs = FakeClock(), 4

    async def a_second(step: int) -> None:
        clock.now += 1.0

    preempted: list[Sample] = []

    def the_third_once(sample: Sample) -> bool:
        if preempted or sample.index != 2 or len(sample.token_ids) < 2:
            return False
        preempted.append(sample)
        return True

    params = SamplingParams(max_tokens=5, temperature=1.0, n=outputs, seed=1, ignore_eos=True)
    async with engine_of(clock=clock, on_step=a_second) as engine:
        preempt_when(engine, the_third_once)
        found = await engine.complete([1, 2, 3, 4, 5, 6], params)
        steps = engine.stats().steps
        times = found[0].metrics
        assert value(engine, "octavo_requests_finished_total", reason="length") == 1
        assert value(engine, "octavo_prompt_tokens_total") == 6
        assert value(engine, "octavo_generated_tokens_total") == 5 * outputs
        assert value(engine, "octavo_preemptions_total", kind="recompute") == 1
        assert value(engine, "octavo_request_prompt_tokens_sum") == 6
        assert value(engine, "octavo_request_generated_tokens_sum") == 5 * outputs
        for name, seconds in (
            ("queue", 0.0),
            ("time_to_first_token", 1.0),  # the earliest of all samples
            ("prefill", 1.0),
            ("request", float(steps)),
            ("decode", float(steps - 1)),
            ("time_per_output_token", (steps - 1) / 4),
        ):
            assert value(engine, f"octavo_{name}_seconds_count") == 1, name
            assert value(engine, f"octavo_{name}_seconds_sum") == pytest.approx(seconds), name
        assert times.first_token == times.arrival + 1


@pytest.mark.asyncio
async def test_what_a_preempted_request_finds_again_is_no_hit(engine_of: EngineOf, preempt_when: Preempt) -> None:
    times = 0

    def three_times(sample: Sample) -> bool:
        nonlocal times
        if times < 3 and len(sample.token_ids) == times + 1:
            times += 1
            return True
        return False

    async with engine_of() as engine:
        preempt_when(engine, three_times)
        output = await ask(engine, [*range(20)], FIVE)
        assert times == 3
        assert output.cached_tokens == 0
        assert value(engine, "octavo_prefix_hit_tokens_total", tier="device") == 0
        assert value(engine, "octavo_prefix_hits_total") == 0
        assert value(engine, "octavo_prefix_query_tokens_total") == 20
        assert value(engine, "octavo_resume_hit_tokens_total") == 3 * 20
        assert value(engine, "octavo_preemptions_total", kind="recompute") == 3
        assert value(engine, "octavo_block_reuse_gap_seconds_count") == 0
        assert value(engine, "octavo_time_to_first_token_seconds_count") == 1


@pytest.mark.asyncio
async def test_preemptions_with_a_tier_are_swaps(engine_of: EngineOf, preempt_when: Preempt) -> None:
    done: list[Sample] = []

    def once(sample: Sample) -> bool:
        return not done and len(sample.token_ids) == 2 and not done.append(sample)  # type: ignore[func-returns-value]

    async with engine_of(mounts={"near": memory()}) as engine:
        preempt_when(engine, once)
        await ask(engine, prompt(1), FIVE)
        assert value(engine, "octavo_preemptions_total", kind="swap") == 1
        assert value(engine, "octavo_preemptions_total", kind="recompute") == 0
        assert engine.stats().preemptions == 1
        await settled(engine)


@pytest.mark.asyncio
async def test_aborted_requests_are_counted_but_not_timed_to_the_end(engine_of: EngineOf) -> None:
    async def abort(step: int) -> None:
        if step == 4:
            engine.abort("gone")

    async with engine_of(on_step=abort) as engine:
        await engine.complete([1] * 6, LONG, request_id="gone")
        await engine.complete([2] * 6, FIVE)
        assert value(engine, "octavo_requests_finished_total", reason="abort") == 1
        assert value(engine, "octavo_requests_finished_total", reason="length") == 1
        assert value(engine, "octavo_time_to_first_token_seconds_count") == 2
        assert value(engine, "octavo_queue_seconds_count") == 2
        for name in ("request_seconds", "decode_seconds", "time_per_output_token_seconds"):
            assert value(engine, f"octavo_{name}_count") == 1, name
        assert value(engine, "octavo_request_generated_tokens_sum") == engine.stats().generated_tokens
        assert value(engine, "octavo_prompt_tokens_total") == 12


@pytest.mark.asyncio
async def test_a_request_aborted_before_its_first_token_has_waited_all_the_same(engine_of: EngineOf) -> None:
    async def abort(step: int) -> None:
        engine.abort("gone")

    async with engine_of(on_step=abort) as engine:
        await engine.complete([1] * 6, LONG, request_id="gone")
        assert value(engine, "octavo_queue_seconds_count") == 1
        assert value(engine, "octavo_time_to_first_token_seconds_count") == 0


@pytest.mark.asyncio
async def test_a_fork_counts_its_own_tokens_only(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        generation = await engine.generate([1] * 6, FIVE, request_id="first").start()
        while engine.stats().generated_tokens < 2:
            await anyio.lowlevel.checkpoint()
        fork = await engine.fork("first")
        for stream in (generation, fork):
            async for _ in stream:
                pass
        generated = engine.stats().generated_tokens
        assert 5 <= generated < 10
        assert value(engine, "octavo_request_generated_tokens_sum") == generated
        assert value(engine, "octavo_time_to_first_token_seconds_count") == 1
        assert value(engine, "octavo_request_seconds_count") == 2


@pytest.mark.asyncio
async def test_histograms_of_steps_agree_with_the_counters(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        for number in range(6):
            await engine.complete(prompt(number), FIVE)
        stats = engine.stats()
        assert value(engine, "octavo_step_seconds_count") == stats.steps == value(engine, "octavo_steps_total")
        assert value(engine, "octavo_step_tokens_sum") == stats.batch_tokens
        assert value(engine, "octavo_block_pool_utilization_count") == stats.steps
        assert value(engine, "octavo_request_prompt_tokens_sum") == 6 * 18


@pytest.mark.asyncio
async def test_evictions_are_told_by_reason_policy_and_tier(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=16, mounts={"near": memory(4)}) as engine:
        for number in range(8):
            await ask(engine, prompt(number), ONE)
        await cool(engine)
        stats = engine.stats()
        for reason, blocks in stats.cache.evictions.items():
            labels = {"reason": reason, "policy": "Lru", "tier": "device"}
            assert value(engine, "octavo_evictions_total", **labels) == blocks
        evicted = value(engine, "octavo_evictions_total", reason="capacity", policy="", tier="near")
        assert evicted == stats.tiers[0].tier.evicted > 0
        blocks = sum(stats.cache.evictions.values())
        assert value(engine, "octavo_block_lifetime_seconds_count") == blocks
        assert value(engine, "octavo_tier_blocks", tier="near") == 4


# what stands in a scrape


@pytest.mark.asyncio
async def test_every_family_of_the_catalogue_has_samples_and_there_is_no_other(
    engine_of: EngineOf, tmp_path: Path
) -> None:
    mounts = {"near": memory(8), "below": lasting(MemoryStore(), 64)}
    shadows = ("octavo.policies.eviction.lfu:Lfu",)
    async with engine_of(num_blocks=16, mounts=mounts, shadow_policies=shadows) as engine:
        for number in (*range(6), 0):
            await ask(engine, prompt(number), FIVE)
        report = await engine.snapshot(tmp_path / "snapshot")
        await settled(engine)
        families = {f.name: f for f in parse_openmetrics(openmetrics(engine.registry))}
        assert [*families] == [metric.name.removesuffix("_total") for metric in CATALOGUE]
        assert [name for name, family in families.items() if not family.samples] == []
        assert report.blocks > 0
        assert value(engine, "octavo_snapshot_age_seconds") == 0  # the clock stands still
        assert (value(engine, "octavo_snapshot_bytes") or 0) > report.blocks * 4 * 8
        labels = {"version": "0.1.0", "model": "fake", "dtype": "float32", "block_size": "4", "eviction_policy": "Lru"}
        assert value(engine, "octavo_engine_info", **labels) == 1


@pytest.mark.asyncio
async def test_snapshot_age_counts_from_the_newest(engine_of: EngineOf, clock: FakeClock, tmp_path: Path) -> None:
    async with engine_of(clock=clock) as engine:
        assert value(engine, "octavo_snapshot_age_seconds") is None
        await engine.snapshot(tmp_path / "a")
        clock.now += 30
        assert value(engine, "octavo_snapshot_age_seconds") == 30
        await engine.snapshot(tmp_path / "b")
        clock.now += 2
        assert value(engine, "octavo_snapshot_age_seconds") == 2


@pytest.mark.asyncio
async def test_no_series_comes_from_what_clients_send(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec(), check_every_step=False, mounts={"near": memory(16)}) as engine:
        before = series(engine.registry)

        async def send(number: int) -> None:
            tenant, request_id = f"tenant {number}", f"request {number}"
            params = SamplingParams(max_tokens=1, stop=f"stop {number}", seed=number)
            await engine.complete(
                prompt(number % 50, 5 + number % 3), params, tenant=tenant, request_id=request_id, priority=number
            )

        for start in range(0, 2000, 100):
            async with anyio.create_task_group() as clients:
                for number in range(start, start + 100):
                    clients.start_soon(send, number)
        with pytest.raises(InvalidRequest):
            await engine.complete([10_000], ONE, tenant="refused")
        assert engine.stats().submitted == 2000
        assert series(engine.registry) == before
        assert value(engine, "octavo_requests_rejected_total") == 1
        assert "tenant" not in text(engine.registry)
        await settled(engine)


@pytest.mark.asyncio
async def test_gauges_are_right_without_another_step(engine_of: EngineOf) -> None:
    seen: list[float | None] = []

    async def cancel_all(step: int) -> None:
        if step == 5:
            seen.append(value(engine, "octavo_requests_running"))
            seen.append(value(engine, "octavo_requests_waiting"))
            for group in list(engine._loop.groups.values()):
                engine.abort(group.request_id)

    async with engine_of(num_blocks=256, on_step=cancel_all, max_running=30) as engine:
        async with anyio.create_task_group() as clients:
            for number in range(35):
                clients.start_soon(engine.complete, prompt(number, 6), LONG)
        assert seen == [30, 5]
        for name in ("running", "waiting", "loading"):
            assert value(engine, f"octavo_requests_{name}") == 0, name
        for reason in ("blocks", "slots", "prefix", "lookup"):
            assert value(engine, "octavo_requests_waiting_by_reason", reason=reason) == 0
        assert value(engine, "octavo_pool_blocks", state="used") == 0
        assert value(engine, "octavo_block_pool_usage_ratio") == 0
        await engine.complete([1] * 6, FIVE)  # and after an ordinary end, at once
        assert value(engine, "octavo_requests_running") == 0
        assert value(engine, "octavo_pool_blocks", state="used") == 0


@pytest.mark.asyncio
async def test_why_requests_wait_is_shown_while_they_do(engine_of: EngineOf) -> None:
    seen: list[float | None] = []

    async def look(step: int) -> None:
        if step == 3:
            seen.append(value(engine, "octavo_requests_waiting_by_reason", reason="slots"))

    async with engine_of(on_step=look, max_running=1) as engine, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(engine.complete, prompt(number, 6), FIVE)
    assert seen == [1]


# threads


@pytest.mark.asyncio
async def test_scrapes_from_other_threads_are_consistent_under_load(engine_of: EngineOf) -> None:
    texts: list[str] = []
    over = threading.Event()

    def scrape() -> None:
        while not over.is_set():
            texts.append(text(engine.registry))

    async with engine_of(num_blocks=64, check_every_step=False) as engine, anyio.create_task_group() as scrapers:
        for _ in range(3):
            scrapers.start_soon(anyio.to_thread.run_sync, scrape)
        while len(texts) < 6:
            await engine.complete(prompt(len(texts)), FIVE)
        over.set()
    steps = []
    for shown in texts:
        found = {s.name: s.value for f in parse_text(shown) for s in f.samples if not set(s.labels) - {"state"}}
        pool = [s.value for f in parse_text(shown) if f.name == "octavo_pool_blocks" for s in f.samples]
        assert sum(pool) == 64
        assert found["octavo_steps_total"] == found["octavo_step_seconds_count"]
        assert found["octavo_generated_tokens_total"] >= found["octavo_request_generated_tokens_sum"]
        steps.append(found["octavo_steps_total"])
    assert max(steps) > 0


@pytest.mark.asyncio
async def test_a_hung_event_loop_does_not_hang_the_scrape(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        engine._metrics._patience = 0.05
        await engine.complete([1] * 6, FIVE)
        assert value(engine, "octavo_requests_submitted_total") == 1
        await engine.complete([2] * 6, FIVE)
        with ThreadPoolExecutor(2) as pool:  # which blocks the event loop until both are done
            scrapes = [pool.submit(value, engine, "octavo_requests_submitted_total") for _ in range(4)]
            assert [scrape.result(timeout=10) for scrape in scrapes] == [1] * 4
        engine._metrics._patience = 10
        fresh = await anyio.to_thread.run_sync(value, engine, "octavo_requests_submitted_total")
        assert fresh == 2


@pytest.mark.asyncio
async def test_a_scrape_from_another_event_loop_is_answered(engine_of: EngineOf) -> None:
    async def elsewhere() -> float | None:
        return value(engine, "octavo_requests_submitted_total")

    async with engine_of() as engine:
        await engine.complete([1] * 6, FIVE)
        assert await anyio.to_thread.run_sync(asyncio.run, elsewhere()) == 1


@pytest.mark.asyncio
async def test_the_last_values_stay_after_closing_and_keep_nothing_alive() -> None:
    engine = AsyncEngine(runner=FakeRunner(), config=plain())
    registry = engine.registry
    assert series(registry) == frozenset()  # not open yet
    async with engine:
        await engine.complete([1] * 6, FIVE)
        running = asyncio.create_task(engine.complete([2] * 6, LONG))
        while engine.stats().running == 0:
            await anyio.lowlevel.checkpoint()
        assert value(registry, "octavo_requests_running") == 1
    await running
    loop = weakref.ref(engine._loop)
    assert value(registry, "octavo_requests_running") == 0
    assert value(registry, "octavo_requests_finished_total", reason="length") == 1
    assert value(registry, "octavo_requests_finished_total", reason="abort") == 1
    assert value(registry, "octavo_generated_tokens_total") == engine._loop.stats().generated_tokens
    assert value(registry, "octavo_ready") == 0
    assert await anyio.to_thread.run_sync(value, registry, "octavo_steps_total")
    del engine, running
    gc.collect()
    assert loop() is None
    assert value(registry, "octavo_requests_submitted_total") == 2


def test_a_scrape_after_the_event_loop_was_closed_shows_the_last_values() -> None:
    engine = AsyncEngine(runner=FakeRunner(), config=plain())

    async def abandon() -> None:
        await engine.__aenter__()
        await engine.complete([1] * 6, FIVE)

    with asyncio.Runner() as runner:
        runner.run(abandon())
    assert value(engine, "octavo_requests_submitted_total") == 1
    assert value(engine, "octavo_requests_running") == 0


@pytest.mark.asyncio
async def test_engines_share_a_registry_while_they_are_open() -> None:
    registry = CollectorRegistry()
    async with AsyncExitStack() as engines:
        for name in ("a", "b"):
            engine = AsyncEngine(runner=FakeRunner(), config=plain(metric_labels={"engine": name}), registry=registry)
            assert engine.registry is registry
            assert value(registry, "octavo_requests_submitted_total", engine=name) is None
            await engines.enter_async_context(engine)
            await engine.complete([1] * 6, ONE)
        assert value(registry, "octavo_requests_submitted_total", engine="a") == 1
        assert value(registry, "octavo_requests_submitted_total", engine="b") == 1
        twin = AsyncEngine(runner=FakeRunner(), config=plain(metric_labels={"engine": "b"}), registry=registry)
        with pytest.raises(TelemetryError, match="same metric_labels"):
            await twin.__aenter__()
        await engine.close()
        assert value(registry, "octavo_requests_submitted_total", engine="b") is None
        assert value(registry, "octavo_requests_submitted_total", engine="a") == 1
    assert list(registry.collect()) == []


@pytest.mark.asyncio
async def test_an_engine_that_does_not_open_leaves_no_metrics() -> None:
    def fail() -> tuple[FakeRunner, None]:
        raise RuntimeError("no such model")

    registry = CollectorRegistry()
    with pytest.raises(RuntimeError, match="no such model"):
        await AsyncEngine(load=fail, config=plain(), registry=registry).__aenter__()
    assert list(registry.collect()) == []


@pytest.mark.parametrize("labels", [{"tier": "x"}, {"9": "x"}, {"a": 1}, "engine=a", None])
def test_labels_that_cannot_be_are_refused_with_the_configuration(labels: object) -> None:
    with pytest.raises(InvalidRequest, match="metric_labels"):
        plain(metric_labels=labels)


# traces and the second sink


@pytest.mark.asyncio
async def test_exemplars_lead_to_the_traces_of_sampled_requests() -> None:
    provider = TracerProvider()
    engine = AsyncEngine(runner=FakeRunner(), config=plain(), tracer_provider=provider)
    async with engine:
        with provider.get_tracer("test").start_as_current_span("caller") as span:
            await engine.complete([1] * 6, FIVE)
        shown = openmetrics(engine.registry)
    provider.shutdown()
    families = {family.name: family for family in parse_openmetrics(shown)}
    trace_id = format_trace_id(span.get_span_context().trace_id)
    for metric in (c.TIME_TO_FIRST_TOKEN, c.QUEUE_SECONDS, c.END_TO_END, c.TIME_PER_TOKEN, c.REQUEST_GENERATED):
        exemplars = [s.exemplar for s in families[metric.name].samples if s.exemplar is not None]
        assert [each.labels for each in exemplars] == [{"trace_id": trace_id}], metric.name
    assert [s for s in families[c.STEP_SECONDS.name].samples if s.exemplar is not None] == []


@pytest.mark.asyncio
async def test_traces_that_nobody_keeps_are_no_exemplars() -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    async with AsyncEngine(runner=FakeRunner(), config=plain(), tracer_provider=provider) as engine:
        with provider.get_tracer("test").start_as_current_span("caller") as span:
            assert span.get_span_context().is_valid
            await engine.complete([1] * 6, FIVE)
        assert "trace_id" not in openmetrics(engine.registry)
    provider.shutdown()


@pytest.mark.asyncio
async def test_without_traces_there_are_no_exemplars(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await engine.complete([1] * 6, FIVE)
        assert "trace_id" not in openmetrics(engine.registry)


def points(reader: InMemoryMetricReader) -> dict[str, list[HistogramDataPoint]]:
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, list[HistogramDataPoint]] = {}
    for metric in (m for r in data.resource_metrics for scope in r.scope_metrics for m in scope.metrics):
        assert metric.unit == "s"
        found[metric.name] = [point for point in metric.data.data_points if isinstance(point, HistogramDataPoint)]
    return found


def fails_on_nines(step: StepInput) -> None:
    if 9 in step.tokens:
        raise RuntimeError("the model failed")


@pytest.mark.asyncio
async def test_the_histograms_of_the_convention_go_to_the_meter_provider() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    runner = FakeRunner(before_step=fails_on_nines)
    async with AsyncEngine(runner=runner, config=plain(), meter_provider=provider) as engine:
        await engine.complete([1] * 6, FIVE)
        with pytest.raises(Exception, match="the model failed"):
            await engine.complete([9] * 6, FIVE)
        found = points(reader)
    provider.shutdown()
    common = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
    }
    good, bad = sorted(found[DURATION], key=lambda point: len(point.attributes or {}))
    assert (good.attributes, good.count) == (common, 1)
    assert (bad.attributes, bad.count) == ({**common, "error.type": "ModelError"}, 1)
    assert tuple(good.explicit_bounds) == DURATION_BOUNDS
    assert [point.count for point in found[TIME_TO_FIRST_TOKEN]] == [1]
    assert [(point.count, point.attributes) for point in found[TIME_PER_OUTPUT_TOKEN]] == [(1, common)]


class Broken:
    """A histogram of a faulty SDK."""

    def record(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("the meter is broken")


@pytest.mark.asyncio
async def test_a_sink_that_fails_costs_no_request_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = MeterProvider()
    async with AsyncEngine(runner=FakeRunner(), config=plain(), meter_provider=provider) as engine:
        monkeypatch.setattr(engine._life.parts.measures._sink, "_duration", Broken())
        monkeypatch.setattr(engine._life.parts.measures._sink, "_first", Broken())
        (output,) = await engine.complete([1] * 6, FIVE)
        assert len(output.token_ids) == 5
        assert value(engine, "octavo_request_seconds_count") == 1
    provider.shutdown()


# lag


@pytest.mark.asyncio
async def test_lag_is_what_a_task_was_woken_too_late() -> None:
    class Over(Exception):
        pass

    def times() -> Iterator[float]:
        yield from (0.0, 0.0, 10.0, 10.25, 20.0, 19.0)  # on time, late, and a clock that a test holds back
        raise Over

    lag = Histogram(c.LOOP_LAG.bounds)
    clock = times()
    with pytest.raises(Over):
        await watch_lag(lag, lambda: next(clock), period=0.0)
    expected = Histogram(c.LOOP_LAG.bounds)
    for late in (0.0, 0.25, 0.0):
        expected.observe(late)
    assert lag.state() == expected.state()


@pytest.mark.asyncio
async def test_an_engine_watches_its_event_loop(engine_of: EngineOf) -> None:
    async with engine_of():
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert any("watch_lag" in name for name in names)
    assert not any("watch_lag" in task.get_name() for task in asyncio.all_tasks())
