"""A span for every HTTP request, around the spans of the engine. For who runs the app himself: a host that has
instrumented its own app has one already, and the engine's spans are below that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import TracerProvider
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import TelemetryError
from ...telemetry.metrics.http import METHODS
from .measuring import route_of

UNTRACED: Final = "/health$,/ready$,/metrics$,/load$"
"""What is asked all the time and never slow. Regular expressions over URLs."""
ROUTE: Final = "http.route"


def traced(app: ASGIApp, provider: TracerProvider) -> ASGIApp:
    """``app`` with a span of the kind SERVER around each request, a child of the caller's ``traceparent``.

    One span and not one for each message, whatever is streamed. Its name is the route's template.

    :raises TelemetryError: without the extra ``otlp``.
    """
    try:
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware  # noqa: PLC0415  # of an extra
    except ImportError as error:
        raise TelemetryError("spans of HTTP requests need the extra otlp: pip install octavo[otlp]") from error
    middleware: ASGIApp = OpenTelemetryMiddleware(
        _Named(app),
        excluded_urls=UNTRACED,
        default_span_details=_method,
        tracer_provider=provider,
        meter_provider=NoOpMeterProvider(),  # the server has metrics of its own
        exclude_spans=["receive", "send"],
    )
    return middleware


class _Named:
    """Names the span of a request by its route, as soon as that is known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = trace.get_current_span()

        async def named(message: Message) -> None:
            route = route_of(scope) if message["type"] == "http.response.start" else None
            if route is not None:
                span.update_name(f"{_method(scope)[0]} {route}")
                span.set_attribute(ROUTE, route)
            await send(message)

        await self._app(scope, receive, named)


def _method(scope: Scope) -> tuple[str, Mapping[str, str]]:
    """The name of a span before the route is known: never what a client made up."""
    method = scope.get("method", "")
    return (method if method in METHODS else "HTTP"), {}
