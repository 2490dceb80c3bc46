from __future__ import annotations

import gzip
import socket
from http.client import HTTPConnection, HTTPResponse

import pytest
from prometheus_client import CollectorRegistry

from octavo.errors import TelemetryError
from octavo.telemetry.metrics import catalogue
from octavo.telemetry.metrics.endpoint import MetricsServer, serve_metrics
from octavo.telemetry.metrics.exposition import Collector, Readings
from octavo.telemetry.metrics.histogram import Exemplar, Histogram
from octavo.tests.telemetry.metrics.scraping import parse_openmetrics, parse_text

TRACE_ID = "0123456789abcdef" * 2
OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.fixture
def registry() -> CollectorRegistry:
    histogram = Histogram(catalogue.STEP_SECONDS.bounds)
    histogram.observe_traced(Exemplar(0.3, TRACE_ID, 1.0))
    reading = Readings({catalogue.STEPS: {(): 3.0}}, {catalogue.STEP_SECONDS: {(): histogram.state()}})
    registry = CollectorRegistry()
    registry.register(Collector(lambda: reading))
    return registry


def get(server: MetricsServer, **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", "/metrics", headers={name.replace("_", "-"): each for name, each in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_who_asks_for_openmetrics_gets_it_with_exemplars(registry: CollectorRegistry) -> None:
    with serve_metrics(registry, port=0) as server:
        plain, text = get(server)
        response, body = get(server, Accept=OPEN_METRICS, Accept_Encoding="gzip")
    assert (plain.status, response.status) == (200, 200)
    assert plain.headers["Content-Type"].startswith("text/plain")
    assert response.headers["Content-Type"].startswith("application/openmetrics-text")
    assert {f.name for f in parse_text(text.decode())} >= {"octavo_steps", "octavo_step_seconds"}
    families = {f.name: f for f in parse_openmetrics(gzip.decompress(body).decode())}
    (exemplar,) = [s.exemplar for s in families["octavo_step_seconds"].samples if s.exemplar is not None]
    assert exemplar.labels == {"trace_id": TRACE_ID}
    assert TRACE_ID.encode() not in text


def test_the_port_is_free_after_stopping_and_stopping_twice_is_harmless(registry: CollectorRegistry) -> None:
    server = serve_metrics(registry, port=0)
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    server.stop()
    server.stop()
    with serve_metrics(registry, port=server.port) as again:
        assert again.port == server.port
        assert get(again)[0].status == 200
    with pytest.raises(ConnectionRefusedError):
        get(again)


def test_an_address_in_use_is_told_with_what_to_do(registry: CollectorRegistry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TelemetryError, match=rf"127\.0\.0\.1:{port}.*another port"):
            serve_metrics(registry, port=port)


def test_clients_that_say_nothing_keep_nobody_out(registry: CollectorRegistry) -> None:
    with serve_metrics(registry, port=0) as server, socket.create_connection(("127.0.0.1", server.port)):
        assert get(server)[0].status == 200
