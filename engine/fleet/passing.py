"""Passing on: a replica's answer on its way to the client, and what the client gets when the replica is lost midway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from ...errors import ReplicaLost
from ..server.errors import unavailable
from ..server.event_stream import event
from ..server.wire.response_events import Created, Failed, StreamEvent
from ..server.wire.responses import ResponseError
from .base import AnswerHead, RawHeaders
from .naming import RESPONSES

REPLICA_HEADER: Final = b"x-octavo-replica"
END_OF_EVENT: Final = b"\n\n"
OF_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"date"}
)
"""Headers that are about one connection; the next one has its own."""
LAST_WORDS: Final = "the replica was lost in the middle of this answer; try again"

OnLoss = Callable[[ReplicaLost], None]


class Passing:
    """An ASGI response: what comes out of ``pieces``, as it comes, under the status and headers of ``head``.

    Of a stream of events only whole ones are passed on. When the replica is lost it ends with one more, an error in the
    server's own form. Any other answer breaks off, which the client sees by its length.
    """

    def __init__(
        self,
        head: AnswerHead,
        pieces: AsyncGenerator[AnswerHead | bytes, None],
        path: str,
        *,
        on_loss: OnLoss,
        on_piece: Callable[[bytes], None] | None = None,
    ) -> None:
        """``path``: of the request. ``on_loss`` is told when the replica is lost, ``on_piece`` of every piece."""
        self._head = head
        self._pieces = pieces
        self._path = path
        self._on_loss = on_loss
        self._on_piece = on_piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:  # at once when the client leaves, not when it is collected
            replica = (REPLICA_HEADER, self._head.replica.encode("latin-1", "replace"))
            headers = [*passed_on(self._head.headers), replica]
            await send({"type": "http.response.start", "status": self._head.status, "headers": headers})
            if _is_event_stream(self._head.headers):
                await self._send_events(pieces, send)
            else:
                await self._send_plain(pieces, send)

    async def _send_plain(self, pieces: AsyncGenerator[AnswerHead | bytes, None], send: Send) -> None:
        try:
            async for piece in pieces:
                await self._send_piece(piece, send)
        except ReplicaLost as error:
            self._on_loss(error)
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, pieces: AsyncGenerator[AnswerHead | bytes, None], send: Send) -> None:
        last_words = _LAST_WORDS.get(self._path, ErrorEvent)()
        rest = last = b""
        try:
            async for piece in pieces:
                if isinstance(piece, bytes):
                    whole, end, rest = (rest + piece).rpartition(END_OF_EVENT)
                    last_words.note(whole + end)
                    await self._send_piece(whole + end, send)
            last = rest
        except ReplicaLost as error:
            self._on_loss(error)
            last = last_words.written()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_piece(self, piece: AnswerHead | bytes, send: Send) -> None:
        if isinstance(piece, bytes) and piece:
            if self._on_piece is not None:
                self._on_piece(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})


class ErrorEvent:
    """The last event of a stream of chunks: an error, as the server itself would end it."""

    def note(self, events: bytes) -> None:
        """Events that have come."""

    def written(self) -> bytes:
        """The error."""
        return event(msgspec.json.encode(unavailable(LAST_WORDS, "replica_lost").body))


class FailedEvent:
    """The last event of a stream of ``/v1/responses``: ``response.failed``, with the response as it was begun."""

    def __init__(self) -> None:
        self._count = 0
        self._first: bytes | None = None

    def note(self, events: bytes) -> None:
        """Events that have come: the first one tells of the response, and all are numbered."""
        self._count += events.count(END_OF_EVENT)
        if self._first is None and events:
            self._first = events.partition(END_OF_EVENT)[0].partition(b"data: ")[2]

    def written(self) -> bytes:
        """The error."""
        begun = self._begun()
        if begun is None:
            return ErrorEvent().written()
        failed = msgspec.structs.replace(
            begun.response, status="failed", error=ResponseError(f"replica_lost: {LAST_WORDS}", "server_error")
        )
        last = Failed(response=failed, sequence_number=self._count)
        return event(msgspec.json.encode(last), str(last.__struct_config__.tag))

    def _begun(self) -> Created | None:
        try:
            first = None if self._first is None else msgspec.json.decode(self._first, type=StreamEvent)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return first if isinstance(first, Created) else None


_LAST_WORDS: Final[Mapping[str, type[ErrorEvent | FailedEvent]]] = MappingProxyType({RESPONSES: FailedEvent})


def passed_on(headers: RawHeaders) -> RawHeaders:
    """Those that are not about one connection, be it because ``connection`` names them, nor about who answers."""
    said = [value for name, value in headers if name.lower() == b"connection"]
    named = {each.strip().lower() for value in said for each in value.split(b",")}
    dropped = OF_CONNECTION | named | {REPLICA_HEADER}
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _is_event_stream(headers: RawHeaders) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
