"""The metrics of an HTTP server around an engine. A registry of their own: an engine may be without a server."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from .catalogue import SECONDS, Metric
from .exposition import Readings
from .histogram import Histogram

REQUESTS: Final = Metric(
    "octavo_http_requests_total",
    "counter",
    "Requests that were answered, by the template of their route; status 499: the client left before an answer.",
    ("route", "method", "status"),
)
REQUEST_SECONDS: Final = Metric(
    "octavo_http_request_seconds",
    "histogram",
    "From a request's headers to the end of its answer.",
    ("route",),
    SECONDS,
)
IN_FLIGHT: Final = Metric("octavo_http_requests_in_flight", "gauge", "Requests that are being answered.")
RECEIVED_BYTES: Final = Metric("octavo_http_received_bytes_total", "counter", "Bytes of the bodies of requests.")
SENT_BYTES: Final = Metric("octavo_http_sent_bytes_total", "counter", "Bytes of the bodies of answers.")

HTTP_CATALOGUE: Final[tuple[Metric, ...]] = (REQUESTS, REQUEST_SECONDS, IN_FLIGHT, RECEIVED_BYTES, SENT_BYTES)

OTHER: Final = "other"
"""Instead of a route or a method that is not served: what clients make up must not become a label."""
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class Answered(NamedTuple):
    """One request that is over."""

    route: str | None
    """The template of its route; ``None``: there is no such route."""
    method: str
    status: int
    seconds: float
    received: int
    """Bytes of its body that were read."""
    sent: int
    """Bytes of the answer's body."""


class HttpMeasures:
    """Counts the requests of one server. All calls from its event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._received = 0
        self._sent = 0

    def note(self, answered: Answered) -> None:
        """A request is over."""
        route = OTHER if answered.route is None else answered.route
        method = answered.method if answered.method in METHODS else OTHER
        self._requests[route, method, str(answered.status)] += 1
        if route not in self._seconds:
            self._seconds[route] = Histogram(REQUEST_SECONDS.bounds)
        self._seconds[route].observe(answered.seconds)
        self._received += answered.received
        self._sent += answered.sent

    def readings(self) -> Readings:
        """All of them, as they are now."""
        return Readings(
            {
                REQUESTS: {labels: float(count) for labels, count in self._requests.items()},
                IN_FLIGHT: {(): float(self.in_flight)},
                RECEIVED_BYTES: {(): float(self._received)},
                SENT_BYTES: {(): float(self._sent)},
            },
            {REQUEST_SECONDS: {(route,): histogram.state() for route, histogram in self._seconds.items()}},
        )
