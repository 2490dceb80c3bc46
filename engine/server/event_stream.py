"""EventStream: a response that streams server-sent events, and ends with exactly one end.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect what they pass on would undo the stream
)


class EventStream:
    """An ASGI response. ``events`` yields the bytes of whole events (see :func:`event`).

    When ``events`` raises, what ``on_error`` makes of it is the last event, and ``end`` is not sent: an error and a
    success never come together. The iteration ends with the response, also when the client leaves.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_error: Callable[[Exception], bytes],
        end: bytes = DONE,
    ) -> None:
        self._events = events
        self._on_error = on_error
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        last = self._end
        try:
            async with aclosing(self._events) as events:  # at once when the client leaves, not when it is collected
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except ConnectionError:  # of the client: nobody is left to be told
            raise
        except Exception as error:  # noqa: BLE001  # the status is sent: the stream itself has to tell
            last = self._on_error(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def event(data: bytes, name: str | None = None) -> bytes:
    """One event. ``data``: JSON, hence without line breaks."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"
