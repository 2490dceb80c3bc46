"""``/metrics``: the engine's and those of HTTP in one answer, and nothing in it that a client made up."""

from __future__ import annotations

import threading

import anyio
import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric as Family

from octavo import AsyncEngine
from octavo.engine.server.app import app_of, create_app
from octavo.engine.server.measuring import CLIENT_GONE
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.telemetry.metrics.catalogue import CATALOGUE
from octavo.telemetry.metrics.http import HTTP_CATALOGUE, Answered, HttpMeasures
from octavo.tests.engine.server.http_rig import PATIENCE, Exchange, ServerOf
from octavo.tests.telemetry.metrics.prometheus_rig import promtool
from octavo.tests.telemetry.metrics.scraping import parse_openmetrics, parse_text

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


async def scraped(client: httpx.AsyncClient) -> dict[str, Family]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return {family.name: family for family in parse_text(answer.text)}


def counted(families: dict[str, Family]) -> dict[tuple[str, str, str], float]:
    """By route, method and status."""
    return {
        (sample.labels["route"], sample.labels["method"], sample.labels["status"]): sample.value
        for sample in families["octavo_http_requests"].samples
    }


def value(families: dict[str, Family], name: str) -> float:
    (sample,) = families[name].samples
    return float(sample.value)


@pytest.mark.asyncio
async def test_engine_and_http_are_in_one_answer(server_of: ServerOf) -> None:
    every = {metric.name.removesuffix("_total") for metric in (*CATALOGUE, *HTTP_CATALOGUE)}
    async with server_of() as server:
        await server.post("/v1/completions", model="fake", prompt="0123", max_tokens=2)
        plain = await server.client.get("/metrics")
        assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = {family.name: family for family in parse_text(plain.text)}
        assert {name.removesuffix("_info") for name in found} == every
        assert value(found, "octavo_requests_submitted") == 1
        opened = await server.client.get("/metrics", headers=OPENMETRICS)
        assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert {family.name for family in parse_openmetrics(opened.text)} == every


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "accept",
    ["*/*", "", "application/openmetrics-text; version=abc", "application/json", "text/plain; version=9.9", ";"],
)
async def test_whoever_accepts_whatever_gets_an_answer(accept: str, server_of: ServerOf) -> None:
    async with server_of() as server:
        answer = await server.client.get("/metrics", headers={"Accept": accept})
        assert answer.status_code == 200
        assert "octavo_http_requests_in_flight 1.0" in answer.text


@pytest.mark.asyncio
async def test_before_the_engine_is_there_the_server_counts_already() -> None:
    service = Service(ServerSettings())
    transport = httpx.ASGITransport(app=app_of(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        await client.get("/v1/models")
        found = await scraped(client)
        assert set(found) == {metric.name.removesuffix("_total") for metric in HTTP_CATALOGUE}
        assert counted(found) == {("/v1/models", "GET", "503"): 1}


@pytest.mark.asyncio
async def test_a_registry_of_the_host_is_shown_whole() -> None:
    registry = CollectorRegistry()
    Counter("own_things", "The host's.", registry=registry).inc(3)
    async with AsyncEngine(runner=FakeRunner(), registry=registry) as engine:
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            found = await scraped(client)
            assert [sample.value for sample in found["own_things"].samples if sample.name == "own_things_total"] == [3]
            assert "octavo_steps" in found


@pytest.mark.asyncio
async def test_requests_are_counted_by_template_and_outcome(server_of: ServerOf) -> None:
    async with server_of() as server:
        body = b'{"model": "fake", "prompt": "0123", "max_tokens": 2}'
        answer = await server.client.post("/v1/completions", content=body)
        await server.refused("/v1/completions", 404, model="other", prompt="0")
        await server.client.get("/v1/models/one")
        await server.client.get("/v1/models/two")
        found = await scraped(server.client)
        expected: dict[tuple[str, str, str], float] = {
            ("/v1/completions", "POST", "200"): 1,
            ("/v1/completions", "POST", "404"): 1,
            ("/v1/models/{model:path}", "GET", "404"): 2,
        }
        assert counted(found) == expected
        assert value(found, "octavo_http_requests_in_flight") == 1
        assert value(found, "octavo_http_received_bytes") > len(body)
        assert value(found, "octavo_http_sent_bytes") > len(answer.content)
        times = {
            sample.labels["route"]: sample.value
            for sample in found["octavo_http_request_seconds"].samples
            if sample.name.endswith("_count")
        }
        assert times == {"/v1/completions": 2, "/v1/models/{model:path}": 2}


@pytest.mark.asyncio
async def test_what_clients_make_up_makes_no_series(server_of: ServerOf) -> None:
    """METRICS-03: bad routes, methods, models and ids."""
    async with server_of() as server:

        async def nonsense(first: int) -> None:
            for number in range(first, first + 20):
                await server.client.get(f"/nowhere/{number}")
                await server.client.request(f"VERB{number}", "/health")
                await server.client.request(f"VERB{number}", "/nowhere")
                await server.client.get(f"/v1/models/{number}")
                await server.client.post("/v1/completions", json={"model": f"m{number}", "prompt": "0"})

        await nonsense(0)
        before = {
            (s.name, *sorted(s.labels.items())) for f in (await scraped(server.client)).values() for s in f.samples
        }
        await nonsense(1000)
        after = {
            (s.name, *sorted(s.labels.items())) for f in (await scraped(server.client)).values() for s in f.samples
        }
        new = {series for series in after - before if ("route", "/metrics") not in series}
        assert new == set()
        assert ("octavo_http_requests_total", ("method", "other"), ("route", "other"), ("status", "404")) in after


@pytest.mark.asyncio
async def test_who_leaves_before_an_answer_is_counted_as_gone(server_of: ServerOf) -> None:
    async with server_of() as server:
        async with Exchange(
            server.app, "/v1/completions", {"model": "fake", "prompt": "0", "max_tokens": 60}
        ) as exchange:
            exchange.leave()
        found = await scraped(server.client)
        assert counted(found) == {("/v1/completions", "POST", str(CLIENT_GONE)): 1}
        assert value(found, "octavo_http_requests_in_flight") == 1


@pytest.mark.asyncio
async def test_promtool_is_content(server_of: ServerOf) -> None:
    async with server_of() as server:
        await server.client.get("/v1/models")
        await server.client.get("/nowhere")
        answer = await server.client.get("/metrics")
    assert promtool("check", "metrics", text=answer.text) == ""


def test_a_request_without_a_route_has_none_of_its_own() -> None:
    measures = HttpMeasures()
    measures.note(Answered(None, "BREW", 404, 0.5, 1, 2))
    measures.note(Answered("/a", "GET", 200, 0.25, 3, 4))
    readings = measures.readings()
    requests, seconds, _, received, sent = HTTP_CATALOGUE
    assert readings.numbers[requests] == {("other", "other", "404"): 1, ("/a", "GET", "200"): 1}
    assert readings.numbers[received] == {(): 4}
    assert readings.numbers[sent] == {(): 6}
    assert {labels: state.sum for labels, state in readings.histograms[seconds].items()} == {
        ("other",): 0.5,
        ("/a",): 0.25,
    }


class Slow:
    """A collector of the host that takes its time."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> list[Family]:
        assert self.go_on.wait(PATIENCE)
        return []


@pytest.mark.asyncio
async def test_scrapes_leave_threads_for_prompts(server_of: ServerOf) -> None:
    slow = Slow()
    async with server_of() as server, anyio.create_task_group() as tasks:
        server.engine.registry.register(slow)
        for _ in range(100):
            tasks.start_soon(server.client.get, "/metrics")
        await anyio.wait_all_tasks_blocked()
        try:
            with anyio.fail_after(PATIENCE):
                await server.post("/tokenize", prompt="0" * 3000)
        finally:
            slow.go_on.set()
