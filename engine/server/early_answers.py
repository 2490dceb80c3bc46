"""Answers that come before their request has been read, and close the connection: 413, 408, 431.

A socket that is closed while bytes are still coming in tells the client's system to reset the connection, and the
answer may be lost with it: most clients send first and read then. So what still comes is read for a while, and thrown
away. (RFC 9112, section 9.6, "lingering close".)
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .endpoint import error_response
from .errors import ApiError

LINGER_SECONDS: Final = 2.0
LINGER_BYTES: Final = 64 * 2**20


class HeadLimit:
    """ASGI: refuses heads that came in one piece and are too long; the protocol sees only those that come slowly."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        early = EarlyAnswers(receive, send)
        if sum(len(name) + len(value) + 4 for name, value in scope.get("headers", ())) <= self._limit:
            await self._app(scope, early.receive, early.send)
            return
        status, message = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long"
        refusal = ApiError(status, message, headers={"Connection": "close"})
        await error_response(refusal)(scope, early.receive, early.send)


class EarlyAnswers:
    """The two ends of one request. The last message of an early answer waits until the rest of the body was read."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_read = False
        self._closes = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._closes = (b"connection", b"close") in message.get("headers", ())
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (is_last and self._closes and not self._is_read):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._read_on()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read_on(self) -> None:
        left = LINGER_BYTES
        with anyio.move_on_after(LINGER_SECONDS):
            while left > 0 and not self._is_read:
                left -= len((await self.receive()).get("body", b""))
