"""One trace from the client through gateway and replica to what the cache does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from octavo import AsyncEngine, EngineConfig
from octavo.engine.fleet.gateway import Gateway
from octavo.engine.fleet.local import LocalFleet
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.telemetry import names
from octavo.tests.engine.conftest import DEFAULTS
from octavo.tests.engine.fleet.gateway_rig import COMPLETIONS, FORM, Ordered
from octavo.tests.engine.server.http_rig import Exchange

TRACE, PARENT = "a" * 32, "b" * 16
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "x=1"}


class Traced(NamedTuple):
    """A fleet whose spans are kept."""

    gateway: Gateway
    fleet: LocalFleet
    engines: list[AsyncEngine]
    services: list[Service]
    exporter: InMemorySpanExporter

    async def ask(self, headers: dict[str, str], **form: object) -> int:
        async with Exchange(self.gateway.app, COMPLETIONS, {**FORM, **form}, headers=headers) as exchange:
            await exchange.whole()
            return exchange.status

    async def spans(self) -> list[ReadableSpan]:
        """All that ended; closes the engines, which write those that wait."""
        for engine in self.engines:
            await engine.close()
        return list(self.exporter.get_finished_spans())


@asynccontextmanager
async def traced_fleet(*, gateway: bool = True, replicas: bool = True, num_blocks: int = 64) -> AsyncIterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = EngineConfig(**{**DEFAULTS, "num_blocks": num_blocks})  # type: ignore[arg-type]  # the rig's

    def engine() -> AsyncEngine:
        return AsyncEngine(runner=FakeRunner(), codec=FakeCodec(), config=config, tracer_provider=provider)

    async with engine() as one, engine() as two:
        services = [Service(ServerSettings(), each) for each in (one, two)]
        for service in services:
            service.tracer_provider = provider if replicas else None
        async with LocalFleet(dict(zip(("r0", "r1"), services, strict=True)), Ordered()) as fleet:
            door = Gateway(fleet, fleet.reader(), tracer_provider=provider if gateway else None)
            yield Traced(door, fleet, [one, two], services, exporter)


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else trace.format_span_id(span.parent.span_id)


def id_of(span: ReadableSpan) -> str:
    return trace.format_span_id(span.context.span_id)


def one(spans: list[ReadableSpan], name: str, below: str | None) -> ReadableSpan:
    (found,) = [span for span in spans if span.name == name and parent_of(span) == below]
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", [CALLER, {}])
async def test_one_trace_goes_from_the_client_to_the_cache(headers: dict[str, str]) -> None:
    async with traced_fleet() as found:
        assert await found.ask(headers) == 200
        assert await found.ask(headers) == 200
        spans = await found.spans()
    door, *_ = [
        span for span in spans if span.kind is SpanKind.SERVER and parent_of(span) == (PARENT if headers else None)
    ]
    assert door.name == f"POST {COMPLETIONS}"
    trace_id = door.context.trace_id
    spans = [span for span in spans if span.context.trace_id == trace_id]
    route = one(spans, names.ROUTE, id_of(door))
    replica = one(spans, f"POST {COMPLETIONS}", id_of(route))
    assert replica.kind is SpanKind.SERVER
    request = one(spans, "text_completion fake", id_of(replica))
    for phase in (names.QUEUE, names.PREFILL, names.DECODE):
        one(spans, phase, id_of(request))
    if headers:
        assert trace.format_trace_id(trace_id) == TRACE
        assert request.context.trace_state.get("x") == "1"


@pytest.mark.asyncio
async def test_what_the_cache_does_is_in_the_clients_trace() -> None:
    """A prompt for which others have to go: their eviction is below the request, and so below the client's span."""
    async with traced_fleet(num_blocks=12) as found:
        assert await found.ask({}) == 200
        assert await found.ask(CALLER, prompt="o" * 25) == 200
        spans = {id_of(span): span for span in await found.spans()}
    evict, *_ = [
        span
        for span in spans.values()
        if span.name == names.EVICT and trace.format_trace_id(span.context.trace_id) == TRACE
    ]
    above = []
    place: str | None = parent_of(evict)
    while place in spans:
        above.append(spans[place].name)
        place = parent_of(spans[place])
    server = f"POST {COMPLETIONS}"
    assert above[-4:] == ["text_completion fake", server, names.ROUTE, server]
    assert place == PARENT


@pytest.mark.asyncio
async def test_the_route_says_where_and_why() -> None:
    async with traced_fleet() as found:
        await found.ask({})
        await found.ask({})
        spans = [span for span in await found.spans() if span.name == names.ROUTE]
    first, second = (dict(span.attributes or {}) for span in spans)
    assert first[names.FLEET_REPLICA] == "r0"
    assert first[names.FLEET_REASON] == "turn"
    assert (first[names.FLEET_MATCHED], second[names.FLEET_MATCHED]) == (0, 24)
    assert (first[names.FLEET_TRIES], first[names.FLEET_LOAD]) == (1, 0.0)


@pytest.mark.asyncio
async def test_a_retry_is_an_event_of_the_same_route() -> None:
    async with traced_fleet() as found:
        found.services[0].is_draining = True
        assert await found.ask(CALLER) == 200
        found.services[0].is_draining = False
        spans = await found.spans()
    (route,) = [span for span in spans if span.name == names.ROUTE]
    assert [(event.name, (event.attributes or {})[names.FLEET_REPLICA]) for event in route.events] == [("retry", "r0")]
    assert (route.attributes or {})[names.FLEET_TRIES] == 2
    below = [span for span in spans if parent_of(span) == id_of(route)]
    assert len(below) == 2  # both replicas were asked, and both are in the trace


@pytest.mark.asyncio
async def test_a_route_that_ends_nowhere_says_so() -> None:
    async with traced_fleet() as found:
        for replica in ("r0", "r1"):
            found.fleet.lose(replica)
        assert await found.ask(CALLER) == 503
        (route,) = [span for span in await found.spans() if span.name == names.ROUTE]
    assert route.status.status_code is StatusCode.ERROR


@pytest.mark.asyncio
async def test_without_spans_of_the_gateway_the_trace_goes_through() -> None:
    async with traced_fleet(gateway=False, replicas=False) as found:
        assert await found.ask(CALLER) == 200
        spans = await found.spans()
    request = one(spans, "text_completion fake", PARENT)
    assert trace.format_trace_id(request.context.trace_id) == TRACE
    assert not [span for span in spans if span.kind is SpanKind.SERVER]


@pytest.mark.asyncio
async def test_what_is_not_sampled_stays_so() -> None:
    async with traced_fleet() as found:
        assert await found.ask({"traceparent": f"00-{TRACE}-{PARENT}-00"}) == 200
        assert await found.spans() == []


@pytest.mark.asyncio
@pytest.mark.parametrize("traceparent", ["", "00-xyz", "é", "ff" * 500])
async def test_a_parent_that_is_none_does_no_harm(traceparent: str) -> None:
    async with traced_fleet() as found:
        assert await found.ask({"traceparent": traceparent}) == 200
        spans = await found.spans()
    (route,) = [span for span in spans if span.name == names.ROUTE]
    assert {span.context.trace_id for span in spans if span.kind is SpanKind.SERVER} == {route.context.trace_id}
