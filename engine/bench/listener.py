"""Listener: follows one streamed answer, notes when what came, and insists on a proper end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec

from .rows import ERROR_EVENT, MALFORMED, TRUNCATED
from .sse import Event

DONE = "[DONE]"
MAX_MESSAGE = 200


class Failed(Exception):
    """The request failed. ``outcome``: as in :class:`~.rows.Row`."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message[:MAX_MESSAGE])
        self.outcome = outcome


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class Listener:
    """Of one answer."""

    def __init__(self, on_content: Callable[[], None]) -> None:
        """``on_content``: called with each event that has content."""
        self.moments: list[float] = []
        """Of events with content."""
        self.usage = Usage()
        self.finish_reason: str | None = None
        self.is_done = False
        self._texts: list[str] = []
        self._on_content = on_content
        self._decoder = msgspec.json.Decoder(_Chunk)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.moments))

    def hear(self, event: Event, now: float) -> None:
        """:raises Failed: when the event says so, or has no place here."""
        if self.is_done:
            raise Failed(MALFORMED, "there is more after [DONE]")
        if event.data == DONE:
            self._end()
            return
        try:
            chunk = self._decoder.decode(event.data)
        except msgspec.DecodeError as error:
            raise Failed(MALFORMED, f"an event is no chunk: {error}") from error
        if event.name == "error" or bytes(chunk.error) != b"null":
            raise Failed(ERROR_EVENT, event.data)
        self.usage = chunk.usage or self.usage
        self._take(chunk.choices or [], now)

    def close(self) -> None:
        """The stream has ended. :raises Failed: too early."""
        if not self.is_done:
            raise Failed(TRUNCATED, "the stream ended without [DONE]")

    def _end(self) -> None:
        if self.finish_reason is None:
            raise Failed(TRUNCATED, "[DONE] came before any finish_reason")
        self.is_done = True

    def _take(self, choices: list[_Choice], now: float) -> None:
        has_content = False
        for choice in choices:
            has_content |= self._keep(choice)
            self.finish_reason = choice.finish_reason or self.finish_reason
        if has_content:
            self.moments.append(now)
            self._on_content()

    def _keep(self, choice: _Choice) -> bool:
        """Whether there is any content. What is text of the answer is kept."""
        delta = choice.delta or _Delta()
        text = choice.text or delta.content
        if text:
            self._texts.append(text)
        return bool(text or delta.reasoning_content or delta.reasoning or delta.tool_calls)
