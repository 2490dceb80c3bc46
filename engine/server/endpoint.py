"""Endpoint: the way of every HTTP request. Who is it, what does it say, answer it, stop when the client is gone."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final, NamedTuple, TypeAlias

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...telemetry.logging import fault_fields
from .access import Door, admit
from .call import Call, ClientGone, read_body
from .errors import ApiError, api_error
from .service import Service

Handler: TypeAlias = Callable[[Call], Awaitable[ASGIApp]]
REQUEST_ID_HEADER: Final = b"x-request-id"
REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class Forms(NamedTuple):
    """What goes in at a route and what comes out, for its documentation."""

    takes: type[msgspec.Struct] | None = None
    """Its body."""
    gives: type[msgspec.Struct] | str = "application/json"
    """Its answer: JSON of this struct, or any content of this media type."""
    streams: object = None
    """What it answers with instead when asked to stream. A struct: the data of events without names, of which the last
    is ``[DONE]`` or an error. A union of tagged structs: the data of events that are named by their tags."""
    status: int = 200
    """Of the answer when all is well."""
    queries: type[msgspec.Struct] | None = None
    """Its query parameters, by name."""


class Endpoint:
    """A route's ASGI app: admits the caller, reads the body, runs ``handler`` and sends what it returns.

    Whatever the handler raises becomes an error answer, once. When the client disconnects, at any moment, the handler
    is cancelled, which aborts its request in the engine at the next step edge.
    """

    def __init__(
        self, service: Service, handler: Handler, door: Door = Door.CLIENT, forms: Forms | None = None
    ) -> None:
        self.handler = handler
        self.door = door
        self.forms = forms or Forms()
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outgoing = _Outgoing(send, self._service.settings.stall_timeout, request_id_of(scope))
        try:
            call = await self._call(scope, receive)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001  # every failure has an answer
            await self._refuse(scope, receive, outgoing, error)
            return
        outgoing.request_id = outgoing.request_id or call.id
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                await self._answer(call, scope, receive, outgoing)
                tasks.cancel_scope.cancel()
        finally:
            call.end()

    async def _call(self, scope: Scope, receive: Receive) -> Call:
        settings = self._service.settings
        caller = admit(self.door, Headers(scope=scope).get("authorization"), settings.keys, settings.admin_token)
        if self.door is Door.OPEN:  # nothing is kept or awaited for strangers
            return Call(self._service, scope, caller, b"")
        body = await read_body(scope, receive, limit=settings.max_body_bytes, timeout=settings.body_timeout)
        return Call(self._service, scope, caller, body)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, outgoing: _Outgoing) -> None:
        try:
            response = await self.handler(call)
            await response(scope, receive, outgoing)
        except ConnectionError:
            return
        except Exception as error:  # noqa: BLE001  # every failure has an answer
            await self._refuse(scope, receive, outgoing, error)

    async def _refuse(self, scope: Scope, receive: Receive, outgoing: _Outgoing, error: Exception) -> None:
        if outgoing.has_started:  # too late for a status: a broken answer must look broken
            raise error
        told = api_error(error, retry_after=self._service.retry_after())
        if told.status == HTTPStatus.INTERNAL_SERVER_ERROR:  # foreign errors may quote the prompt: without messages
            self._service.logger.error("request_failed", **fault_fields(error))
        with suppress(ConnectionError):  # it does not read its refusal either
            await error_response(told)(scope, receive, outgoing)


class _Outgoing:
    """``send`` with a deadline: a client that stops reading must not keep its request, and its blocks, for ever."""

    def __init__(self, send: Send, timeout: float, request_id: str | None) -> None:
        """``request_id``: goes back to the client with the answer."""
        self._send = send
        self._timeout = timeout
        self.request_id = request_id
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        self.has_started = True
        if message["type"] == "http.response.start" and self.request_id is not None:
            headers = message.get("headers", ())
            if not any(name == REQUEST_ID_HEADER for name, _ in headers):  # who answered may have named it already
                told = (REQUEST_ID_HEADER, self.request_id.encode("ascii"))
                message = {**message, "headers": [*headers, told]}
        try:
            with anyio.fail_after(self._timeout):
                await self._send(message)
        except TimeoutError as error:
            raise ConnectionAbortedError(f"the client has read nothing for {self._timeout:g} s") from error


def request_id_of(scope: Scope) -> str | None:
    """The client's own name for its request, if it can be sent back as it is."""
    sent = Headers(scope=scope).get("x-request-id", "")
    return sent if REQUEST_ID.fullmatch(sent) else None


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``body``, a struct or plain values, as JSON."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's form."""
    return json_response(error.body, error.status, error.headers)
