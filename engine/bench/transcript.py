"""Transcripts: what a request repeats of its conversation, in the form of either endpoint."""

from __future__ import annotations

from typing import Protocol

from .settings import Endpoint, Target
from .vocabulary import Piece
from .workload import Conversation, Turn

BETWEEN = "\n\n"
"""Parts of a prompt. An answer follows its question without it, as the server has cached it."""


class Transcript(Protocol):
    """Of one conversation."""

    def ask(self, turn: Turn) -> dict[str, object]:
        """The fields of the request that hold the prompt."""

    def answered(self, text: str) -> None:
        """The next question comes after this answer."""


class ChatTranscript:
    """Messages."""

    def __init__(self, system: Piece) -> None:
        self._messages: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []

    def ask(self, turn: Turn) -> dict[str, object]:
        if turn.user is None:
            return {}
        self._messages.append({"role": "user", "content": turn.user})
        return {"messages": list(self._messages)}

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


class TextTranscript:
    """One text, or ids, that grows."""

    def __init__(self, system: Piece) -> None:
        self._prompt = system

    def ask(self, turn: Turn) -> dict[str, object]:
        if turn.user is None:
            return {}
        self._prompt = _joined(self._prompt, turn.user)
        return {"prompt": self._prompt}

    def answered(self, text: str) -> None:
        if isinstance(self._prompt, str):
            self._prompt += text


def transcript_of(conversation: Conversation, endpoint: Endpoint) -> Transcript:
    """One at its beginning."""
    kind = ChatTranscript if endpoint is Endpoint.CHAT else TextTranscript
    return kind(conversation.system)


def request_body(target: Target, model: str, turn: Turn, prompt: dict[str, object]) -> dict[str, object]:
    """All fields of one request. Later ones win: those of the workload over ours, those of the target over all."""
    fields = {
        "model": model,
        **prompt,
        "max_tokens": turn.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **turn.fields,
        **target.fields,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _joined(before: Piece, after: Piece) -> Piece:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return before + after
    return f"{before}{BETWEEN}{after}" if before else after
