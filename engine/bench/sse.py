"""A strict reader of server-sent events: what a lenient one drops in silence is an error here.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import re
from typing import NamedTuple

LINE_END = re.compile(rb"\r\n|\n|\r")
FIELDS = frozenset({"data", "event", "id", "retry"})


class MalformedStream(Exception):
    """The bytes are no stream of events."""


class Event(NamedTuple):
    """One event."""

    name: str
    """Empty: not named."""
    data: str


class SseReader:
    """Bytes in, as they come; whole events out."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that ``chunk`` completes.

        :raises MalformedStream: on a line that is no field, or no UTF-8.
        """
        text = self._rest + chunk
        held = b"\r" if text.endswith(b"\r") else b""  # the first half of a line end, maybe
        *lines, rest = LINE_END.split(text[: len(text) - len(held)])
        self._rest = rest + held
        return [event for line in lines if (event := self._line(line)) is not None]

    def close(self) -> None:
        """:raises MalformedStream: when the stream ended inside an event."""
        if self._rest.strip(b"\r") or self._data:
            raise MalformedStream("the stream ended inside an event")

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        if line.startswith(b":"):
            return None
        try:
            name, _, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise MalformedStream("a line is no UTF-8") from error
        if name not in FIELDS:
            raise MalformedStream("a line is none of data, event, id, retry and comment")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._name, "\n".join(self._data)) if self._data else None
        self._name, self._data = "", []
        return event
