"""Endpoint: ``/metrics`` over HTTP, for Prometheus and whoever reads its formats."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from ...errors import TelemetryError, describe

PORT = 9464
"""The port that OpenTelemetry's conventions give to Prometheus endpoints."""
SILENCE_SECONDS = 10.0
"""A connection that says nothing for so long is given up, with its thread."""


class MetricsServer:
    """An endpoint that serves until ``stop``; a context manager that stops it."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self._host, self.port = server.server_address[0], server.server_port

    @property
    def url(self) -> str:
        """Where it is read."""
        host = self._host.decode() if isinstance(self._host, bytes | bytearray) else str(self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def stop(self) -> None:
        """Serve no more and free the port. A second call does nothing. Blocks for up to half a second: call it from a
        thread where an event loop runs.
        """
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve_metrics(registry: CollectorRegistry, host: str = "127.0.0.1", port: int = PORT) -> MetricsServer:
    """Serve ``registry`` (``engine.registry``) in a thread of its own, which ends with the process.

    The text format, or OpenMetrics, with exemplars, for those who accept it, as Prometheus does. ``port`` 0: any free
    one. Only this machine can read it unless ``host`` says otherwise: there is no authentication.

    :raises TelemetryError: when the address cannot be had.
    """
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: no such port, no such name
        raise TelemetryError(
            f"metrics cannot be served at {host}:{port} ({describe(error)}); give another port, or 0 for any"
        ) from error
    silent = server.RequestHandlerClass
    server.RequestHandlerClass = type("Handler", (silent,), {"timeout": SILENCE_SECONDS})  # type: ignore[arg-type]  # a class
    return MetricsServer(server, thread)
