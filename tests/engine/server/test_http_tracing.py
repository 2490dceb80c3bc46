"""A caller's trace goes through HTTP to the engine, whoever makes the span of the request (TRACE-04, TRACE-06)."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo import AsyncEngine, EngineConfig
from octavo.engine.server.app import app_of
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.server.tracing import traced
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import TelemetryError
from octavo.tests.engine.conftest import DEFAULTS
from octavo.tests.engine.server.http_rig import Exchange

TRACE, PARENT = "a" * 32, "b" * 16
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
BODY = {"model": "fake", "prompt": "0123", "max_tokens": 20, "temperature": 0}


class Traced(NamedTuple):
    """A server whose spans are kept."""

    app: ASGIApp
    engine: AsyncEngine
    provider: TracerProvider
    exporter: InMemorySpanExporter

    async def post(self, body: Mapping[str, object], headers: Mapping[str, str], path: str = "/v1/completions") -> int:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            return (await client.post(path, json=dict(body), headers=dict(headers))).status_code

    async def spans(self) -> list[ReadableSpan]:
        """All that ended; closes the engine, which writes those that wait."""
        await self.engine.close()
        return list(self.exporter.get_finished_spans())


@asynccontextmanager
async def server(*, spans_of_http: bool) -> AsyncIterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = EngineConfig(**DEFAULTS)  # type: ignore[arg-type]  # names and values are the rig's
    engine = AsyncEngine(runner=FakeRunner(), codec=FakeCodec(), config=config, tracer_provider=provider)
    async with engine:
        service = Service(ServerSettings(), engine)
        service.tracer_provider = provider if spans_of_http else None
        yield Traced(app_of(service), engine, provider, exporter)


def request_span(spans: list[ReadableSpan]) -> ReadableSpan:
    """The engine's own span of the only request."""
    (found,) = [span for span in spans if span.name == "text_completion fake"]
    return found


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else trace.format_span_id(span.parent.span_id)


def id_of(span: ReadableSpan) -> str:
    return trace.format_span_id(span.context.span_id)


def trace_of(span: ReadableSpan) -> str:
    return trace.format_trace_id(span.context.trace_id)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_span_is_a_child_of_the_callers(stream: bool) -> None:
    async with server(spans_of_http=False) as found:
        assert await found.post({**BODY, "stream": stream}, {**CALLER, "tracestate": "x=1"}) == 200
        spans = await found.spans()
    span = request_span(spans)
    assert (trace_of(span), parent_of(span)) == (TRACE, PARENT)
    assert span.context.trace_state.get("x") == "1"
    assert not [span for span in spans if span.kind is SpanKind.SERVER]


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [CALLER, {}])
async def test_with_a_span_of_http_it_lies_between(stream: bool, headers: Mapping[str, str]) -> None:
    async with server(spans_of_http=True) as found:
        assert await found.post({**BODY, "stream": stream}, headers, "/v1/completions?q=secret") == 200
        spans = await found.spans()
    (http,) = [span for span in spans if span.kind is SpanKind.SERVER]
    assert (http.name, (http.attributes or {})["http.route"]) == ("POST /v1/completions", "/v1/completions")
    assert parent_of(http) == (PARENT if headers else None)
    engine = request_span(spans)
    assert parent_of(engine) == id_of(http)
    assert trace_of(engine) == trace_of(http)


@pytest.mark.asyncio
async def test_a_stream_has_no_span_for_each_event() -> None:
    counts = []
    for tokens in (2, 40):
        async with server(spans_of_http=True) as found:
            await found.post({**BODY, "stream": True, "max_tokens": tokens}, CALLER)
            counts.append(len([span for span in await found.spans() if trace_of(span) == TRACE]))
    assert counts[0] == counts[1]


@pytest.mark.asyncio
@pytest.mark.parametrize("spans_of_http", [False, True])
async def test_what_is_not_sampled_stays_so(spans_of_http: bool) -> None:
    async with server(spans_of_http=spans_of_http) as found:
        assert await found.post(BODY, UNSAMPLED) == 200
        assert await found.spans() == []


@pytest.mark.asyncio
@pytest.mark.parametrize("traceparent", ["", "00-xyz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é", "ff" * 500])
@pytest.mark.parametrize("spans_of_http", [False, True])
async def test_a_parent_that_is_none_does_no_harm(traceparent: str, spans_of_http: bool) -> None:
    async with server(spans_of_http=spans_of_http) as found:
        async with Exchange(found.app, "/v1/completions", BODY, headers={"traceparent": traceparent}) as exchange:
            await exchange.whole()
            assert exchange.status == 200
        span = request_span(await found.spans())
        assert trace_of(span) != "0" * 32


class Instrumented:
    """What a host may have put around the app: a span of its own, of whatever trace it likes."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._provider = provider

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._provider.get_tracer("host").start_as_current_span("host"):
            await self._app(scope, receive, send)


@pytest.mark.asyncio
async def test_a_span_of_the_host_comes_before_the_header() -> None:
    """The host has decided where its trace begins; the header of whoever called is not for its parts."""
    async with server(spans_of_http=False) as found:
        assert await found._replace(app=Instrumented(found.app, found.provider)).post(BODY, CALLER) == 200
        spans = await found.spans()
    (host,) = [span for span in spans if span.name == "host"]
    assert trace_of(host) != TRACE
    assert parent_of(request_span(spans)) == id_of(host)


@pytest.mark.asyncio
async def test_spans_are_named_by_route_and_never_by_what_was_asked() -> None:
    async with server(spans_of_http=True) as found:
        transport = httpx.ASGITransport(app=found.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            for method, path in (
                ("GET", "/v1/models/x"),
                ("GET", "/nowhere"),
                ("BREW", "/nowhere"),
                ("GET", "/health"),
            ):
                await client.request(method, path)
        spans = await found.spans()
    assert [span.name for span in spans] == ["GET /v1/models/{model:path}", "GET", "HTTP"]


@pytest.mark.asyncio
async def test_who_leaves_ends_both_spans() -> None:
    async with server(spans_of_http=True) as found:
        body = {**BODY, "max_tokens": 200, "stream": True}
        async with Exchange(found.app, "/v1/completions", body, headers=CALLER) as exchange:
            while not exchange.body:
                await exchange.read()
            exchange.leave()
        spans = await found.spans()
    assert request_span(spans).status.status_code is StatusCode.ERROR
    assert len([span for span in spans if span.kind is SpanKind.SERVER]) == 1


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.asgi", None)
    with pytest.raises(TelemetryError, match=r"octavo\[otlp\]"):
        traced(app_of(Service(ServerSettings())), TracerProvider())
