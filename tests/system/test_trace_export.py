"""Traces of an engine as they come over the wire, by HTTP and by gRPC, and collectors that are of no use."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.telemetry import Telemetry, names, setup
from octavo.tests.engine.insight.trace_rig import Spans, assert_nothing_left, check_rules, check_whole_life, whole_life
from octavo.tests.telemetry.export.otlp_receiver import GrpcReceiver, HttpReceiver, Receiver, dead_endpoint

pytestmark = [pytest.mark.system, pytest.mark.asyncio]
PATIENCE = 30.0
"""Seconds after which a test that hangs is told so; no result depends on it."""
ANY_TIME = 10**12
"""Nanoseconds: between two phases the machine may have done anything else."""
LONG = "3600"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=[HttpReceiver, GrpcReceiver])
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with request.param() as made:
        yield made


def setup_to(receiver: Receiver) -> Telemetry:
    return setup(endpoint=receiver.endpoint, protocol=receiver.protocol, service_name="chat")


class Ended(SpanProcessor):
    """Counts the spans that began and those that ended."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.began = self.count = 0
        provider = telemetry.tracer_provider
        assert isinstance(provider, TracerProvider)
        provider.add_span_processor(self)

    def on_start(self, span: object, parent_context: object = None) -> None:
        self.began += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.count += 1


async def test_the_whole_life_of_a_request_arrives_as_one_trace(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with setup_to(receiver) as telemetry:
        ended = Ended(telemetry)
        scene = await whole_life(monkeypatch, telemetry.tracer_provider)
    spans = Spans(receiver.received.spans)
    assert (len(spans.all), telemetry.spans_exported, telemetry.spans_lost) == (ended.count, ended.began, 0)
    check_rules(spans)
    check_whole_life(spans, scene)
    assert {span.resource["service.name"] for span in spans.all} == {"chat"}
    assert {(span.dropped_attributes, span.dropped_events, span.dropped_links) for span in spans.all} == {(0, 0, 0)}


async def test_two_hundred_requests_at_a_time_some_of_them_cancelled(receiver: Receiver) -> None:
    """With threads and clocks as in life: each has one trace, and is below its caller."""

    async def one(engine: AsyncEngine, number: int) -> None:
        with tracer.start_as_current_span(f"caller {number}"), anyio.CancelScope() as scope:
            params = SamplingParams(max_tokens=3 + number % 5, n=1 + (number % 6 == 0), seed=number, ignore_eos=True)
            outputs = engine.generate([number % 7] * 6 + [number % 64, 1], params, request_id=f"r{number}")
            async for _ in outputs:
                if number % 4 == 1:
                    scope.cancel()
                if number % 9 == 2:
                    engine.abort(f"r{number}")

    async with setup_to(receiver) as telemetry:
        tracer = telemetry.tracer_provider.get_tracer("app")
        config = EngineConfig(
            num_blocks=48, block_size=4, max_running=16, max_batch_tokens=64, tiers=("host",), host_bytes=10**6
        )
        provider = telemetry.tracer_provider
        async with AsyncEngine(runner=FakeRunner(), config=config, tracer_provider=provider) as engine:
            async with asyncio.timeout(PATIENCE * 2), anyio.create_task_group() as work:
                for number in range(200):
                    work.start_soon(one, engine, number)
            await engine._loop.wait_idle()
        assert_nothing_left(engine._tracing)
        assert not +engine._tracing.dropped
    assert telemetry.spans_lost == 0
    spans = Spans(receiver.received.spans)
    check_rules(spans, ANY_TIME)
    assert len(spans.requests) == len({span.trace_id for span in spans.requests}) == 200
    for span in spans.requests:
        index = int(str(span.attributes[names.REQUEST_ID])[1:])
        caller = spans.by_id[span.parent_id or ""]
        assert caller.name == f"caller {index}"
        assert abs(span.start - caller.start) < PATIENCE * 1e9  # the same time of day
        if not (index % 4 == 1 or index % 9 == 2):
            assert span.status == "UNSET"
    assert len([span for span in spans.requests if span.status == "ERROR"]) > 20


PROMPTS = [[number, number + 1, 3] for number in range(24)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)


async def answers(telemetry: Telemetry | None) -> list[tuple[int, ...]]:
    provider = None if telemetry is None else telemetry.tracer_provider
    config = EngineConfig(num_blocks=64, block_size=4)
    async with (
        asyncio.timeout(PATIENCE),
        AsyncEngine(runner=FakeRunner(), config=config, tracer_provider=provider) as engine,
    ):
        results: list[list[RequestOutput]] = await asyncio.gather(
            *(engine.complete(prompt, PARAMS) for prompt in PROMPTS)
        )
    assert_nothing_left(engine._tracing)
    return [output.token_ids for [output] in results]


@pytest.mark.parametrize("fault", ["dead", "refuses", "fails", "fails for good"])
async def test_a_dead_collector_loses_spans_and_nothing_else(
    fault: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is as without it, and every span that ended is counted as lost."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    is_grpc = receiver.protocol == "grpc"
    if fault == "refuses":
        receiver.refuse()
    elif fault == "fails":
        receiver.fail("UNAVAILABLE" if is_grpc else 503)
    elif fault == "fails for good":
        receiver.fail("INTERNAL" if is_grpc else 500)
    endpoint = dead_endpoint() if fault == "dead" else receiver.endpoint
    telemetry = setup(endpoint=endpoint, protocol=receiver.protocol)
    ended = Ended(telemetry)
    assert await answers(telemetry) == await answers(None)
    await telemetry.aclose(PATIENCE)
    assert ended.count == ended.began >= len(PROMPTS) * 4
    assert (telemetry.spans_lost, telemetry.spans_exported) == (ended.count, 0)
    assert receiver.received.spans == []


async def test_requests_come_and_go_while_the_collector_holds_a_call(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a call when they come and still in the same one when all are done."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", LONG)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    receiver.hang()
    telemetry = setup_to(receiver)
    ended = Ended(telemetry)
    telemetry.tracer_provider.get_tracer("app").start_span("first").end()
    await anyio.to_thread.run_sync(receiver.received.wait_for, lambda got: got.attempts == 1)
    assert await answers(telemetry) == await answers(None)
    assert receiver.is_hanging
    assert receiver.received.attempts == 1
    assert not await telemetry.aclose(0.0)
    assert (telemetry.spans_lost, telemetry.spans_exported) == (ended.count, 0)
    receiver.close()
    for thread in threading.enumerate():
        if thread.name.startswith("octavo-spans"):
            thread.join(PATIENCE)


class Where(SpanExporter):
    """Notes which threads export."""

    def __init__(self) -> None:
        self.threads = set[int]()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.threads.add(threading.get_ident())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...


async def test_nothing_is_exported_in_the_event_loops_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    exporter = Where()
    async with setup(exporter=exporter) as telemetry:
        await answers(telemetry)
    assert exporter.threads
    assert threading.get_ident() not in exporter.threads
