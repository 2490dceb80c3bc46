"""The access log: one line for each request, with nothing in it that a client has chosen.

Routes are shown as templates; paths, queries, headers and bodies are not shown at all. So a line has no secret in it,
and no control characters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...storage.naming import tenant_digest
from ...telemetry.logging import fault_fields
from .access import Door
from .call import Call
from .endpoint import Endpoint
from .service import Service

CLIENT_LEFT: Final = 499
"""As nginx has it: the client closed the connection before its answer was complete."""
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
NO_ROUTE: Final = "-"


class AccessLog:
    """ASGI middleware, the outermost one: also where what an app raises ends.

    Lines for what only looks, ``/health`` by a balancer or the cache by the page at ``/ui``, are on level debug;
    failures, other than refusals for want of room, are warnings.
    """

    def __init__(self, app: ASGIApp, service: Service, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.under_way = 0
        """Requests that are being answered, but for GET: those end with the engine or never."""
        self._app = app
        self._logger = service.logger
        self._clock = clock
        self._quiet = anyio.Event()

    async def wait_quiet(self) -> None:
        """Until nothing is under way."""
        while self.under_way:
            await self._quiet.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        counted, began = scope["method"] != "GET", self._clock()
        self.under_way += counted
        try:
            await self._run(scope, receive, answer)
        finally:
            self.under_way -= counted
            if not self.under_way:
                self._quiet.set()
                self._quiet = anyio.Event()
            self._note(scope, answer, self._clock() - began)

    async def _run(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer)
        except Exception as error:  # noqa: BLE001  # the server closes an answer that is not complete
            answer.failed = True
            self._logger.error("answer_broken", route=route_of(scope), **fault_fields(error))

    def _note(self, scope: Scope, answer: _Answer, seconds: float) -> None:
        status, method = answer.outcome, str(scope["method"])
        fields = {
            "method": method if method in METHODS else "OTHER",
            "route": route_of(scope),
            "status": int(status),  # a name of it would be shown otherwise
            "seconds": round(seconds, 4),
            **_of_call(scope),
        }
        if answer.failed or (status >= 500 and status != HTTPStatus.SERVICE_UNAVAILABLE):
            self._logger.warning("request", **fields)
        elif _is_probe(scope):
            self._logger.debug("request", **fields)
        else:
            self._logger.info("request", **fields)


def route_of(scope: Scope) -> str:
    """The template of the route that a request took, such as ``/v1/models/{model}``."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else NO_ROUTE


class _Answer:
    """``send`` that remembers how far the answer is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status: int | None = None
        self._is_complete = False
        self.failed = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)

    @property
    def outcome(self) -> int:
        if self._status is None:
            return HTTPStatus.INTERNAL_SERVER_ERROR if self.failed else CLIENT_LEFT
        return self._status if self._is_complete or self.failed else CLIENT_LEFT


def _of_call(scope: Scope) -> dict[str, object]:
    """What is known of a request that got as far as its handler."""
    call = scope.get("octavo.call")
    if not isinstance(call, Call):
        return {}
    fields: dict[str, object] = {"request_id": call.id}
    if call.caller.tenant is not None:
        fields["tenant"] = tenant_digest(call.caller.tenant).hex()[:8]
    if call.tokens is not None:
        fields |= call.tokens._asdict()
    return fields


def _is_probe(scope: Scope) -> bool:
    endpoint = scope.get("endpoint")
    return isinstance(endpoint, Endpoint) and endpoint.door is not Door.CLIENT and scope["method"] == "GET"
