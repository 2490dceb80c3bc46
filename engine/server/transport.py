"""The socket's side of the server: uvicorn's HTTP/1.1 protocol, with a bound on all that a client can make it hold.

uvicorn itself waits for ever for the head of a request and for a client that reads nothing, accepts any number of
connections and treats a client that has shut down its sending side as gone. Here every wait has an end:

* a head must be complete within ``header_timeout``, however slowly it trickles, and not longer than
  ``max_header_bytes`` (431),
* a client that takes nothing of what waits for it is cut off after ``stall_timeout``,
* of connections above ``max_connections`` one that is idle, or whose head is late, is closed instead, or else the new
  one is answered with 503,
* what is no HTTP is answered with 400 in OpenAI's form, and not logged: strangers must not fill the log.

A client that shuts down its sending side and one that is gone look the same. A GET costs nothing, so it is answered all
the same; a POST ends like after any disconnect, because generating for nobody costs everybody.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import time
from http import HTTPStatus
from typing import Final

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ...telemetry.logging import RateLimited
from .early_answers import LINGER_BYTES, LINGER_SECONDS, HeadLimit
from .errors import INVALID, SERVER, ApiError
from .service import Service

WRITE_HIGH: Final = 64 * 1024
"""Bytes of answers that wait for one client; more are made only when it has read some."""
WRITE_LOW: Final = 48 * 1024
ACCEPTED_AT_ONCE: Final = 64
"""Connections that are accepted before anything else is done, be it to refuse them."""
LINGERING: Final = 128
"""Connections beyond the bound that are read for a while after their last answer."""
LATE: Final = 0.2
"""Of ``header_timeout``: after so long a head gives up its place to others, if there is no other place."""
NOTE_INTERVAL: Final = 10.0
"""Seconds between two lines about connections that were refused."""
SILENT: Final = logging.Logger("octavo.server.protocol", level=logging.CRITICAL + 1)  # noqa: LOG001  # one that nobody else has
"""For uvicorn's own lines: they show paths and tracebacks. What matters is in the access log."""


class GuardedConfig(uvicorn.Config):
    """uvicorn's configuration, which hands the service's bounds to each connection."""

    def __init__(self, app: ASGIApp, service: Service, *, root_path: str = "") -> None:
        settings = service.settings
        super().__init__(
            HeadLimit(app, settings.max_header_bytes),
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            root_path=root_path,
            backlog=ACCEPTED_AT_ONCE,  # which is what asyncio takes it for, too
            timeout_keep_alive=math.ceil(settings.keep_alive_timeout),
            h11_max_incomplete_event_size=settings.max_header_bytes,
        )
        self.settings = settings
        self.logger = service.logger
        self.limited = RateLimited(NOTE_INTERVAL, time.monotonic)


class GuardedProtocol(H11Protocol):
    """One connection. ``check`` must be called now and then."""

    def __init__(
        self,
        config: GuardedConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = SILENT
        self.access_log = False
        self._guard = config
        self._head_since: float | None = None
        """Since when a head is awaited; ``None``: between requests, or while one is answered."""
        self._moving_at = 0.0
        """When the client was last seen to take something, or had nothing to take."""
        self._unsent = 0
        self._hung_up_at: float | None = None
        """Since when what comes in is thrown away."""
        self._thrown_away = 0

    @property
    def is_answering(self) -> bool:
        """Whether a request has come whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether nothing has come since the last answer."""
        return self.timeout_keep_alive_task is not None and not self.transport.is_closing()

    @property
    def is_late(self) -> bool:
        """Whether its head takes longer than heads do."""
        if self._head_since is None or self._hung_up_at is not None or self.transport.is_closing():
            return False
        return self.loop.time() - self._head_since > self._guard.settings.header_timeout * LATE

    # calls of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base has it
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH, low=WRITE_LOW)
        self._head_since = self._moving_at = self.loop.time()
        if len(self.connections) > self._guard.settings.max_connections and not self._make_room():
            self._guard.limited.log(self._guard.logger.warning, "connections_refused", open=len(self.connections))
            self._hang_up(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; come again")

    def data_received(self, data: bytes) -> None:
        if self._hung_up_at is not None:
            self._throw_away(data)
            return
        if self._head_since is None and not self.is_answering:
            self._head_since = self.loop.time()
        super().data_received(data)
        if self.is_answering:
            self._head_since = None

    def eof_received(self) -> bool:  # type: ignore[override]  # the base says it returns None, asyncio takes a bool
        """True: the connection stays open for the answer."""
        if self._hung_up_at is not None or not self.is_answering or self.cycle.scope["method"] not in {"GET", "HEAD"}:
            return False
        self.cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The base forgets its timer when the client resets the connection, and all of the last request hangs on it."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    # calls of the base

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_answering and self.conn.trailing_data[0]:  # the beginning of the next request
            self._head_since = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or too much of it: say so if an answer can still be understood, and hang up."""
        can_answer = self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}
        if self.is_answering:  # its body is at fault; the app must not answer, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not can_answer:
            self.transport.close()
        elif len(self.conn.trailing_data[0]) > self._guard.settings.max_header_bytes:
            self._hang_up(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long")
        else:
            self._hang_up(HTTPStatus.BAD_REQUEST, "this is not valid HTTP/1.1")

    def shutdown(self) -> None:
        """The server ends: close now, or with the end of the answer."""
        if self.is_answering:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # there is nothing to upgrade to: the request is answered as it is

    # the bounds

    def check(self, now: float) -> None:
        """Close the connection if its client holds it up. ``now``: seconds of the event loop."""
        settings = self._guard.settings
        if self._stands_still_for(now) > settings.stall_timeout:
            self._guard.limited.log(self._guard.logger.info, "client_stalled", seconds=settings.stall_timeout)
            self._reset()
        elif self._hung_up_at is not None:
            if now - self._hung_up_at > LINGER_SECONDS:
                self.transport.abort()
        elif self._head_since is not None and now - self._head_since > settings.header_timeout:
            self.transport.close()

    def _stands_still_for(self, now: float) -> float:
        """Seconds for which the client has taken nothing of what waits for it."""
        unsent = self.transport.get_write_buffer_size()
        waits = unsent > 0 and (self.flow.write_paused or self.transport.is_closing())
        if not waits or unsent < self._unsent:
            self._moving_at = now
        self._unsent = unsent
        return now - self._moving_at

    def _make_room(self) -> bool:
        """Close another connection on which nothing happens.

        Or on which a head should have come by now: who opens many and says nothing does not keep out those who say at
        once what they want.
        """
        others = [each for each in self.connections if isinstance(each, GuardedProtocol) and each is not self]
        found = next((each for each in others if each.is_idle or each.is_late), None)
        if found is not None:
            found.transport.close()
        return found is not None

    def _hang_up(self, status: HTTPStatus, message: str) -> None:
        """A last answer, past the state machine, which may not allow for one. What still comes is read, see
        :mod:`.early_answers`, unless there are too many that it comes from.
        """
        self.transport.write(_closing_answer(status, message))
        if len(self.connections) > self._guard.settings.max_connections + LINGERING:
            self.transport.close()
            return
        self._hung_up_at = self.loop.time()
        self.transport.write_eof()

    def _reset(self) -> None:
        """Close so that nothing which was not taken stays in the system's buffers."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _throw_away(self, data: bytes) -> None:
        self._thrown_away += len(data)
        if self._thrown_away > LINGER_BYTES:
            self.transport.abort()


def _closing_answer(status: HTTPStatus, message: str) -> bytes:
    kind = SERVER if status >= 500 else INVALID
    body = msgspec.json.encode(ApiError(status, message, kind=kind).body)
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(["Retry-After: 1"] if status == HTTPStatus.SERVICE_UNAVAILABLE else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
