"""Measuring: every HTTP request is counted and timed, however it ends. Pure ASGI."""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...telemetry.metrics.http import Answered, HttpMeasures

CLIENT_GONE = 499
"""The status of who left before there was one, as nginx counts it."""
FAILED = 500


class Measuring:
    """Middleware around the routes."""

    def __init__(self, app: ASGIApp, measures: HttpMeasures, clock: Callable[[], float]) -> None:
        """``clock``: seconds, monotonic."""
        self._app = app
        self._measures = measures
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, traffic, status = self._clock(), _Traffic(receive, send), CLIENT_GONE
        self._measures.in_flight += 1
        try:
            await self._app(scope, traffic.receive, traffic.send)
        except Exception:
            status = FAILED
            raise
        finally:
            self._measures.in_flight -= 1
            seconds = self._clock() - began
            self._measures.note(
                Answered(
                    route_of(scope),
                    scope["method"],
                    traffic.status or status,
                    seconds,
                    traffic.received_bytes,
                    traffic.sent_bytes,
                )
            )


class _Traffic:
    """What goes in and out of one request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.status: int | None = None
        self.received_bytes = 0
        self.sent_bytes = 0
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        message = await self._receive()
        self.received_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.sent_bytes += len(message.get("body", b""))
        await self._send(message)


def route_of(scope: Scope) -> str | None:
    """The template of the route that took a request; ``None``: none did. Never what the client wrote."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else None
