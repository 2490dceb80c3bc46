"""Where a request's span belongs, and that it ends however its stream is left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator, Mapping

import anyio
import anyio.to_thread
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo import AsyncEngine, SamplingParams
from octavo.engine.generation import Generation
from octavo.telemetry import names
from octavo.telemetry.record import NO_TRACE
from octavo.telemetry.tracing import Tracing
from octavo.tests.engine.insight.trace_rig import (
    GREEDY,
    NOTES,
    Recorder,
    check,
    complaints,
    recording,
    traced,
    tracer_of,
    whole_life,
)
from octavo.tests.engine.test_growth import octavo_objects
from octavo.tests.engine.tier_rig import memory, prompt

pytestmark = pytest.mark.asyncio
ENDLESS = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_logged_by_opentelemetry(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert complaints(caplog) == []


# the ways to leave a stream (TRACE-01)


async def read_all(engine: AsyncEngine) -> None:
    async for _ in engine.generate(prompt(1), GREEDY):
        pass


async def break_off(engine: AsyncEngine) -> None:
    async with engine.generate(prompt(1), ENDLESS) as outputs:
        async for output in outputs:
            if len(output.token_ids) == 2:
                break


async def cancel(engine: AsyncEngine) -> None:
    async def read() -> None:
        async for _ in engine.generate(prompt(1), ENDLESS):
            came.set()

    came = asyncio.Event()
    task = asyncio.create_task(read())
    await came.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def let_go(engine: AsyncEngine) -> None:
    outputs: Generation | None = engine.generate(prompt(1), ENDLESS)
    assert outputs is not None
    await anext(outputs)
    outputs = None
    gc.collect()


async def close_elsewhere(engine: AsyncEngine) -> None:
    outputs = engine.generate(prompt(1), ENDLESS)
    await anext(outputs)
    await asyncio.create_task(outputs.aclose())


@pytest.mark.parametrize(
    ("leave", "status"),
    [(read_all, "UNSET"), (break_off, "ERROR"), (cancel, "ERROR"), (let_go, "ERROR"), (close_elsewhere, "ERROR")],
)
async def test_however_a_stream_is_left_its_span_ends(
    leave: Callable[[AsyncEngine], Awaitable[None]], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider) as engine:
        with tracer_of(provider).start_as_current_span("caller") as caller:
            await leave(engine)
            assert trace.get_current_span() is caller
        assert not trace.get_current_span().get_span_context().is_valid
        await engine._loop.wait_idle()
    spans = check(recorder)
    (request,) = spans.requests
    assert request.status == status
    assert request.attributes.get(names.ERROR_TYPE) == (None if status == "UNSET" else "aborted")
    assert spans.by_id[request.parent_id or ""].name == "caller"


@pytest.mark.parametrize("settings", [{}, {"trace_decode_steps": 1}])
async def test_a_trace_is_no_longer_for_more_tokens(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRACE-04: 200 tokens, each of them fetched by another task, make no more spans than 10."""
    provider, recorder = recording()
    async with traced(monkeypatch, provider, settings=settings) as engine:
        for count in (10, 200):
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            with tracer_of(provider).start_as_current_span("chat"):
                outputs = await engine.generate(prompt(count), params, request_id=str(count)).start()
            while await asyncio.create_task(anext(outputs, None)) is not None:
                assert not trace.get_current_span().get_span_context().is_valid
    spans = check(recorder)
    few, many = (spans.request(each) for each in ("10", "200"))
    assert [span.name for span in spans.within(few)] == [span.name for span in spans.within(many)]
    assert len(few.events) == len(many.events) == 1


# below whom (TRACE-06)


async def test_a_request_is_below_the_servers_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an instrumented ASGI application has it: its span is below the caller's, the engine's below its own."""
    provider, recorder = recording()
    caller = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

    async def serve(engine: AsyncEngine, headers: Mapping[str, str], *, hands_on: bool) -> None:
        lowered = {name.lower(): value for name, value in headers.items()}
        above = TraceContextTextMapPropagator().extract(lowered)
        with tracer_of(provider).start_as_current_span("POST /chat", above, trace.SpanKind.SERVER):
            await engine.complete(prompt(1), GREEDY, trace_headers=headers if hands_on else None)

    async with traced(monkeypatch, provider) as engine:
        await serve(engine, {"TraceParent": caller, "Accept": "*/*"}, hands_on=False)
        await serve(engine, {"TraceParent": caller, "Accept": "*/*"}, hands_on=True)
        await serve(engine, {"Accept": "*/*"}, hands_on=False)
        await serve(engine, {"Accept": "*/*"}, hands_on=True)
    spans = recorder.spans
    assert [spans.by_id[each.parent_id or ""].name for each in spans.requests] == ["POST /chat"] * 4
    assert [each.trace_id == "a" * 32 for each in spans.requests] == [True, True, False, False]
    assert [each.parent_id == "b" * 16 for each in spans.named("POST /chat")] == [True, True, False, False]


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
async def test_a_caller_that_is_known_by_its_headers_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    headers = {name: "00-" + "a" * 32 + "-" + "b" * 16 + "-01", name[:5] + "state": "x=1"}
    async with traced(monkeypatch, provider) as engine:
        with tracer_of(provider).start_as_current_span("a server that runs for ever"):
            await engine.complete(prompt(1), GREEDY, trace_headers=headers)
    (request,) = recorder.spans.requests
    assert (request.trace_id, request.parent_id) == ("a" * 32, "b" * 16)


async def test_what_the_caller_does_not_sample_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider) as engine:
        headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-00"}
        outputs = engine.generate(prompt(1), GREEDY, trace_headers=headers)
        await outputs.start()
        (group,) = engine._loop.groups.values()
        assert group.trace.trace_id == "a" * 32  # what is logged of it can be found
        async for _ in outputs:
            pass
    assert recorder.spans.all == []


async def test_a_sampler_that_wants_none_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False), Recorder()
    provider.add_span_processor(recorder)
    await whole_life(monkeypatch, provider)
    assert recorder.started == []


async def test_the_parent_is_the_span_of_the_thread_that_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()

    def work(engine: AsyncEngine) -> None:
        with tracer_of(provider).start_as_current_span("thread"), engine.blocking() as blocking:
            blocking.complete(prompt(1), GREEDY)
            for _ in blocking.generate(prompt(2), GREEDY):
                pass
            headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
            blocking.complete(prompt(3), GREEDY, trace_headers=headers)

    async with traced(monkeypatch, provider) as engine:
        await anyio.to_thread.run_sync(work, engine)
    (thread,) = recorder.spans.named("thread")
    assert [each.parent_id for each in recorder.spans.requests] == [thread.span_id, thread.span_id, "b" * 16]


async def test_the_parent_is_the_span_of_the_call_not_of_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    tracer = tracer_of(provider)
    async with traced(monkeypatch, provider) as engine:
        with tracer.start_as_current_span("call"):
            outputs = engine.generate(prompt(1), GREEDY)
        with tracer.start_as_current_span("iteration") as iteration:
            async for _ in outputs:
                assert trace.get_current_span() is iteration
    (call,) = recorder.spans.named("call")
    (request,) = recorder.spans.requests
    assert (request.trace_id, request.parent_id) == (call.trace_id, call.span_id)


async def test_a_global_provider_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, None) as engine:
        await engine.complete(prompt(1), GREEDY, request_id="early")
        monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
        await engine.complete(prompt(2), GREEDY, request_id="late")
    spans = check(recorder)
    assert [each.attributes[names.REQUEST_ID] for each in spans.requests] == ["late"]


async def test_without_a_provider_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nobody wants a span")

    monkeypatch.setattr(Tracing, "begin", never)
    monkeypatch.setattr(Tracing, "_later", never)
    seen: list[object] = []

    async def on_step(number: int) -> None:
        seen.extend(group.trace for group in engine._loop.groups.values())
        seen.extend(node.owner for node in engine._loop.cache.tree.candidates if node.owner is not None)

    async with traced(monkeypatch, None, mounts={"m": memory()}, num_blocks=16, on_step=on_step) as engine:
        for number in range(8):
            await engine.complete(prompt(number), SamplingParams(max_tokens=4, n=2))
        assert set(seen) == {NO_TRACE}
        assert not NOTES & set(octavo_objects())
