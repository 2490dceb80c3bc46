from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest, TelemetryError
from octavo.telemetry import SpanLosses, Telemetry, setup
from octavo.telemetry.export.queue import ExportQueue
from octavo.telemetry.export.settings import BatchSettings
from octavo.telemetry.logging import get_logger
from octavo.tests.telemetry.export.otlp_receiver import GrpcReceiver, HttpReceiver, Receiver, dead_endpoint

PATIENCE = 30.0
"""Seconds after which a test that hangs is told so; no result depends on it."""
LONG = "3600"
LONG_SECONDS = float(LONG)


class Memory(SpanExporter):
    """Keeps spans; ``gate``: each call waits until it is open. ``result`` is what it returns, or raises."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.shutdowns = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        self.batches.append([span.name for span in spans])
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def memory() -> Iterator[Memory]:
    exporter = Memory()
    yield exporter
    exporter.gate.set()


@pytest.fixture(params=[HttpReceiver, GrpcReceiver])
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with request.param() as made:
        yield made


def setup_to(receiver: Receiver) -> Telemetry:
    return setup(endpoint=receiver.endpoint, protocol=receiver.protocol)


def make_spans(telemetry: Telemetry, count: int, first: int = 0) -> None:
    tracer = telemetry.tracer_provider.get_tracer("test")
    for index in range(first, first + count):
        tracer.start_span(f"span {index}", context.Context()).end()


def names(count: int) -> list[str]:
    return [f"span {index}" for index in range(count)]


def threads_of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("octavo-spans")]


def wait_until_no_thread_is_left() -> None:
    for thread in threads_of_ours():
        thread.join(PATIENCE)
        assert not thread.is_alive()


# to a collector and back


def test_spans_arrive_and_are_counted(receiver: Receiver) -> None:
    with setup_to(receiver) as telemetry:
        make_spans(telemetry, 3)
        assert telemetry.flush(PATIENCE)
        assert (telemetry.spans_exported, telemetry.spans_lost) == (3, 0)
    assert [span.name for span in receiver.received.spans] == names(3)
    assert threads_of_ours() == []


def test_closing_sends_what_is_left(receiver: Receiver) -> None:
    telemetry = setup_to(receiver)
    make_spans(telemetry, 2)
    assert telemetry.close(PATIENCE)
    assert len(receiver.received.spans) == 2
    assert telemetry.close(PATIENCE)


def test_the_environment_says_where_and_how(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", receiver.protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=kv")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with setup() as telemetry:
        make_spans(telemetry, 1)
    assert len(receiver.received.spans) == 1
    assert receiver.received.headers[0]["x-team"] == "kv"


def test_the_protocol_of_traces_wins_over_that_of_all_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with HttpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint + "/v1/traces")
        with setup() as telemetry:
            make_spans(telemetry, 1)
        assert len(receiver.received.spans) == 1


def test_an_endpoint_may_have_the_path_of_traces() -> None:
    with HttpReceiver() as receiver, setup(endpoint=receiver.endpoint + "/v1/traces") as telemetry:
        make_spans(telemetry, 1)
        telemetry.flush(PATIENCE)
        assert len(receiver.received.spans) == 1


# collectors that are dead, in all their ways


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_nobody_listens(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    telemetry = setup(endpoint=dead_endpoint(), protocol=protocol)
    make_spans(telemetry, 4)
    telemetry.flush(PATIENCE)
    assert telemetry.losses == SpanLosses(queue_full=0, failed=4, closing=0)
    telemetry.close(PATIENCE)


@pytest.mark.parametrize("code", [400, 401, 404, 500])
def test_a_refusal_over_http_is_not_tried_again(code: int) -> None:
    with HttpReceiver() as receiver, setup_to(receiver) as telemetry:
        receiver.fail(code)
        make_spans(telemetry, 2)
        telemetry.flush(PATIENCE)
        assert (telemetry.spans_lost, receiver.received.attempts) == (2, 1)
        receiver.recover()
        make_spans(telemetry, 3)
        telemetry.flush(PATIENCE)
        assert (telemetry.spans_lost, telemetry.spans_exported) == (2, 3)


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "UNAUTHENTICATED", "UNIMPLEMENTED"])
def test_a_refusal_over_grpc_is_not_tried_again(code: str) -> None:
    with GrpcReceiver() as receiver, setup_to(receiver) as telemetry:
        receiver.fail(code)
        make_spans(telemetry, 2)
        telemetry.flush(PATIENCE)
        assert (telemetry.spans_lost, receiver.received.attempts) == (2, 1)


def test_a_collector_that_is_down_for_a_moment_loses_nothing(receiver: Receiver) -> None:
    receiver.fail("UNAVAILABLE" if receiver.protocol == "grpc" else 503)
    with setup_to(receiver) as telemetry:
        make_spans(telemetry, 2)
        threading.Thread(target=telemetry.flush, args=(PATIENCE,)).start()
        receiver.received.wait_for(lambda got: got.attempts >= 1)
        receiver.recover()
        receiver.received.wait_for(lambda got: len(got.spans) == 2)
        assert telemetry.flush(PATIENCE)
        assert (telemetry.spans_exported, telemetry.spans_lost) == (2, 0)


def test_a_collector_that_hangs_holds_up_neither_spans_nor_the_end(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If anything here waited for the collector it would do so for an hour."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", LONG)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    receiver.hang()
    telemetry = setup_to(receiver)
    make_spans(telemetry, 4)
    receiver.received.wait_for(lambda got: got.attempts == 1)
    make_spans(telemetry, 15)
    assert telemetry.losses == SpanLosses(queue_full=5, failed=0, closing=0)
    assert not telemetry.flush(0.05)
    assert not telemetry.close(0.05)
    assert telemetry.losses == SpanLosses(queue_full=5, failed=0, closing=14)
    assert not telemetry.close(LONG_SECONDS)
    assert receiver.is_hanging
    receiver.close()
    wait_until_no_thread_is_left()
    assert (telemetry.spans_lost, telemetry.spans_exported) == (19, 0)


def test_closing_makes_an_exporter_give_up_its_next_try(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", LONG)
    receiver.fail("UNAVAILABLE" if receiver.protocol == "grpc" else 503)
    telemetry = setup_to(receiver)
    make_spans(telemetry, 3)
    assert not telemetry.flush(0.0)
    receiver.received.wait_for(lambda got: got.attempts >= 1)
    assert not telemetry.close(0.05)
    wait_until_no_thread_is_left()
    assert telemetry.spans_lost == 3


def test_a_slow_collector_loses_nothing(receiver: Receiver) -> None:
    receiver.slow(0.2)
    with setup_to(receiver) as telemetry:
        make_spans(telemetry, 5)
    assert (telemetry.spans_exported, telemetry.spans_lost) == (5, 0)


@pytest.mark.asyncio
async def test_the_event_loop_runs_while_it_closes(memory: Memory) -> None:
    """The exporter lets go only when the loop, which would wait for it, has run."""
    memory.gate.clear()
    telemetry = setup(exporter=memory)
    make_spans(telemetry, 1)
    async with asyncio.timeout(PATIENCE), telemetry:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, memory.gate.set)
    assert memory.batches == [["span 0"]]


@pytest.mark.asyncio
async def test_a_cancelled_application_still_sends_what_is_left(memory: Memory) -> None:
    async def application() -> None:
        async with setup(exporter=memory) as telemetry:
            make_spans(telemetry, 2)
            await asyncio.sleep(PATIENCE)

    running = asyncio.create_task(application())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert memory.batches == [names(2)]
    assert memory.shutdowns == 1


# the account


def queue_of(memory: Memory) -> ExportQueue:
    settings = BatchSettings(max_queue=8, max_batch=4, delay=LONG_SECONDS)
    return ExportQueue(memory, settings, get_logger("octavo.test"), close_timeout=PATIENCE)


def telemetry_of(queue: ExportQueue) -> Telemetry:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    return Telemetry(provider, queue, PATIENCE)


def test_a_full_batch_goes_at_once_and_a_smaller_one_waits(memory: Memory) -> None:
    queue = queue_of(memory)
    telemetry = telemetry_of(queue)
    make_spans(telemetry, 3)
    assert (queue.pending, memory.batches) == (3, [])
    make_spans(telemetry, 1, first=3)
    assert memory.entered.acquire(timeout=PATIENCE)
    telemetry.close()
    assert memory.batches == [names(4)]


def test_a_small_batch_goes_after_the_delay(memory: Memory) -> None:
    queue = ExportQueue(memory, BatchSettings(delay=0.01), get_logger("octavo.test"), close_timeout=PATIENCE)
    telemetry = telemetry_of(queue)
    make_spans(telemetry, 1)
    assert memory.entered.acquire(timeout=PATIENCE)
    telemetry.close()


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("quotes a span")])
def test_what_an_exporter_fails_on_is_lost_and_told_without_its_message(
    result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = telemetry_of(queue_of(Memory(result)))
    make_spans(telemetry, 6)
    telemetry.close()
    assert telemetry.losses == SpanLosses(queue_full=0, failed=6, closing=0)
    assert "spans were lost" in caplog.text
    assert "quotes a span" not in caplog.text
    assert ("RuntimeError" in caplog.text) == isinstance(result, RuntimeError)


def test_losses_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    queue = ExportQueue(
        Memory(SpanExportResult.FAILURE), BatchSettings(8, 1), get_logger("octavo.test"), close_timeout=PATIENCE
    )
    telemetry = telemetry_of(queue)
    for index in range(20):
        make_spans(telemetry, 1, first=index)
        telemetry.flush()
    telemetry.close()
    assert len([record for record in caplog.records if "spans were lost" in record.getMessage()]) == 1


def test_each_span_is_counted_once_whatever_happens(memory: Memory) -> None:
    """Ended = exported + lost + pending, at every moment, with several threads that end spans."""
    queue = queue_of(memory)
    telemetry = telemetry_of(queue)
    ended = 0
    results: list[SpanExportResult | Exception] = [*SpanExportResult, RuntimeError()]
    for result in results:
        memory.result = result
        memory.gate.clear()
        threads = [threading.Thread(target=make_spans, args=(telemetry, 5)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended += 15
        assert queue.exported + sum(queue.losses) + queue.pending == ended
        memory.gate.set()
        assert queue.flush(PATIENCE)
        assert queue.pending == 0
        assert queue.exported + sum(queue.losses) == ended
    queue.close(PATIENCE)
    make_spans(telemetry, 2)
    assert queue.exported + sum(queue.losses) == ended + 2
    assert queue.losses.closing == 2
    assert queue.exported > 0
    assert queue.losses.failed > 0


def test_what_arrives_after_all_is_not_counted_twice(memory: Memory) -> None:
    memory.gate.clear()
    queue = queue_of(memory)
    telemetry = telemetry_of(queue)
    make_spans(telemetry, 6)
    assert memory.entered.acquire(timeout=PATIENCE)
    assert not queue.close(0.0)
    assert queue.losses == SpanLosses(queue_full=0, failed=0, closing=6)
    memory.gate.set()
    wait_until_no_thread_is_left()
    assert (queue.exported, sum(queue.losses), queue.pending) == (0, 6, 0)
    assert memory.batches == [names(4)]
    assert memory.shutdowns == 1


def test_a_flush_waits_for_what_had_ended_and_no_longer(memory: Memory) -> None:
    queue = queue_of(memory)
    telemetry = telemetry_of(queue)
    assert queue.flush(0.0)
    make_spans(telemetry, 3)
    assert queue.force_flush()
    assert memory.batches == [names(3)]
    telemetry.close()
    assert queue.flush(0.0)


def test_spans_that_are_not_sampled_are_no_losses(memory: Memory) -> None:
    with setup(exporter=memory, sample=0.0) as telemetry:
        make_spans(telemetry, 3)
    assert (memory.batches, telemetry.spans_lost, telemetry.spans_exported) == ([], 0, 0)


# what is made


def provider_of(telemetry: Telemetry) -> TracerProvider:
    assert isinstance(telemetry.tracer_provider, TracerProvider)
    return telemetry.tracer_provider


def resource_of(telemetry: Telemetry) -> dict[str, object]:
    return dict(provider_of(telemetry).resource.attributes)


@pytest.mark.parametrize(
    ("environ", "given", "name", "has_version"),
    [
        ({}, None, "octavo", True),
        ({"OTEL_SERVICE_NAME": "chat"}, None, "chat", False),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat,service.version=7"}, None, "chat", True),
        ({"OTEL_SERVICE_NAME": "chat"}, "mine", "mine", False),
    ],
)
def test_the_service_is_called_as_the_application_says(
    environ: dict[str, str], given: str | None, name: str, has_version: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    with setup(exporter=Memory(), service_name=given) as telemetry:
        resource = resource_of(telemetry)
    assert resource["service.name"] == name
    assert ("service.version" in resource) == has_version


def test_attributes_of_the_environment_stay_beside_our_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=7")
    with setup(exporter=Memory()) as telemetry:
        resource = resource_of(telemetry)
    assert (resource["service.name"], resource["service.version"]) == ("octavo", "7")
    assert resource["deployment.environment.name"] == "test"


def is_sampled(telemetry: Telemetry, parent: TraceFlags | None = None) -> bool:
    above = context.Context()
    if parent is not None:
        above = trace.set_span_in_context(NonRecordingSpan(SpanContext(1, 2, is_remote=True, trace_flags=parent)))
    span = telemetry.tracer_provider.get_tracer("test").start_span("request", above)
    span.end()
    return span.is_recording() or span.get_span_context().trace_flags.sampled


@pytest.mark.parametrize(
    ("environ", "sample", "roots"),
    [
        ({}, None, True),
        ({}, 0.0, False),
        ({}, 1.0, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, None, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, None, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 1.0, True),
    ],
)
def test_requests_are_sampled_as_asked_and_a_parent_decides(
    environ: dict[str, str], sample: float | None, roots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    with setup(exporter=Memory(), sample=sample) as telemetry:
        assert is_sampled(telemetry) == roots
        assert is_sampled(telemetry, TraceFlags(TraceFlags.SAMPLED))
        assert not is_sampled(telemetry, TraceFlags(TraceFlags.DEFAULT))


def test_a_disabled_sdk_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", " True ")
    before = threading.active_count()
    with setup() as telemetry:
        assert threading.active_count() == before
        make_spans(telemetry, 1)
        assert not telemetry.tracer_provider.get_tracer("test").start_span("request").is_recording()
        assert (telemetry.flush(), telemetry.spans_lost, telemetry.spans_exported) == (True, 0, 0)


def test_no_exporter_still_makes_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ids are in log lines and exemplars."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with setup() as telemetry:
        assert is_sampled(telemetry)
        assert threads_of_ours() == []


@pytest.mark.parametrize("arguments", [{"sample": 1.5}, {"sample": float("nan")}, {"close_timeout": -1.0}])
def test_arguments_out_of_range_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        setup(**arguments)  # type: ignore[arg-type]  # each is of the right type


@pytest.mark.parametrize("arguments", [{"protocol": "http/json"}, {"endpoint": "localhost:4317", "protocol": "grpc"}])
def test_unknown_places_and_ways_are_refused(arguments: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        setup(**arguments)  # type: ignore[arg-type]
    assert threads_of_ours() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon")],
)
def test_variables_that_are_not_understood_are_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(TelemetryError, match="OTEL_"):
        setup()


def test_faulty_settings_of_the_queue_are_told_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"OTEL_BSP_MAX_QUEUE_SIZE": "many", "OTEL_BSP_SCHEDULE_DELAY": "-1", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": ""}
    assert BatchSettings.from_environment(environ, get_logger("octavo.test")) == BatchSettings()
    assert caplog.text.count("no positive number") == 2


def test_settings_of_the_queue_come_from_the_environment() -> None:
    environ = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "100",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "200",
    }
    assert BatchSettings.from_environment(environ, get_logger("octavo.test")) == BatchSettings(100, 100, 0.25)


# globals, and what is not installed


def run(code: str) -> str:
    done = subprocess.run(  # noqa: S603  # our own words
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_global_provider_is_set_only_when_asked_and_only_once() -> None:
    code = """
from opentelemetry import trace
from octavo.errors import TelemetryError
from octavo.telemetry import setup
import os, threading
os.environ["OTEL_TRACES_EXPORTER"] = "none"
setup()
assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"
first = setup(set_global=True)
assert trace.get_tracer_provider() is first.tracer_provider
os.environ["OTEL_TRACES_EXPORTER"] = "console"
try:
    setup(set_global=True)
except TelemetryError as error:
    print(error)
left = [thread for thread in threading.enumerate() if thread.name == "octavo-spans"]
for thread in left:  # it was told to end, and nobody has waited for it
    thread.join(60)
assert not any(thread.is_alive() for thread in left)
"""
    assert "already" in run(code)


def test_spans_can_go_to_the_console() -> None:
    code = """
import os
from octavo.telemetry import setup
os.environ["OTEL_TRACES_EXPORTER"] = "console"
with setup() as telemetry:
    telemetry.tracer_provider.get_tracer("test").start_span("shown").end()
"""
    assert '"name": "shown"' in run(code)


def test_spans_are_sent_when_the_application_forgets_to_close() -> None:
    with HttpReceiver() as receiver:
        run(f"""
from octavo.telemetry import setup
telemetry = setup(endpoint={receiver.endpoint!r})
telemetry.tracer_provider.get_tracer("test").start_span("last").end()
""")
        assert [span.name for span in receiver.received.spans] == ["last"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_sends_its_own_spans_and_no_others() -> None:
    code = """
import os, warnings
from octavo.tests.telemetry.export.test_setup import LONG_SECONDS, Memory, make_spans
from octavo.telemetry import setup
warnings.simplefilter("ignore", DeprecationWarning)  # newer interpreters warn of threads and fork
memory = Memory()
telemetry = setup(exporter=memory)
make_spans(telemetry, 2)
child = os.fork()
make_spans(telemetry, 1, first=7)
telemetry.close(20.0)
print("child" if child == 0 else "parent", memory.batches, telemetry.spans_exported, flush=True)
if child:
    os.waitpid(child, 0)
"""
    assert sorted(run(code).splitlines()) == ["child [['span 7']] 1", "parent [['span 0', 'span 1', 'span 7']] 3"]


def without(*names: str) -> str:
    return f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == missing or name.startswith(missing + ".") for missing in {names!r}):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from octavo.errors import TelemetryError
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        (("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "grpc"), "", "octavo[otlp]"),
        (("opentelemetry.exporter.otlp.proto.http", "grpc"), "", "octavo[otlp]"),
        (("grpc",), "protocol='grpc'", "octavo[otlp-grpc]"),
    ],
)
def test_octavo_works_without_the_extras_and_says_which_is_missing(
    missing: tuple[str, ...], arguments: str, extra: str
) -> None:
    code = f"""{without(*missing)}
import octavo, octavo.engine.cli
from octavo.telemetry import configure_logging, setup
configure_logging()
try:
    setup({arguments})
except TelemetryError as error:
    print(error)
print(any(name.startswith("grpc") for name in sys.modules))
"""
    message, has_grpc = run(code).splitlines()
    assert f"pip install '{extra}'" in message
    assert has_grpc == "False"


def test_importing_the_library_brings_no_sdk() -> None:
    code = "import sys, octavo, octavo.telemetry; print([n for n in sys.modules if n.startswith('opentelemetry.sdk')])"
    assert run(code) == "[]"
    assert logging.getLogger("octavo").handlers == []


# with an engine


class Ended(SpanProcessor):
    """Counts, beside the queue."""

    count = 0

    def on_end(self, span: ReadableSpan) -> None:
        self.count += 1


@pytest.mark.asyncio
async def test_an_engine_answers_and_closes_while_its_collector_hangs(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", LONG)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    receiver.hang()
    params = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [[k, k + 1, 3] for k in range(24)]
    async with asyncio.timeout(PATIENCE):
        answers = []
        traced = setup_to(receiver)
        ended = Ended()
        provider_of(traced).add_span_processor(ended)
        for telemetry in (None, traced):
            provider = trace.NoOpTracerProvider() if telemetry is None else telemetry.tracer_provider
            config = EngineConfig(num_blocks=64, block_size=4)
            async with AsyncEngine(runner=FakeRunner(), config=config, tracer_provider=provider) as engine:
                results = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts))
            answers.append([output.token_ids for [output] in results])
        assert not await traced.aclose(0.05)
    assert answers[0] == answers[1]
    assert receiver.is_hanging
    assert traced.losses.queue_full > 0
    assert (traced.spans_lost, traced.spans_exported) == (ended.count, 0)
    receiver.close()
    wait_until_no_thread_is_left()
