"""Prompts of every kind, taken apart: whether one is a conversation, whether it is long, whether ids are ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from ..errors import InvalidRequest
from .request import Chat, ChatMessage, Prompt


def as_chat(prompt: Prompt) -> Chat | None:
    """The conversation that ``prompt`` is: a :class:`Chat`, or a list of messages. ``None`` for text and ids."""
    if isinstance(prompt, Chat):
        return prompt
    return Chat(prompt) if _are_messages(prompt) else None


def is_longer(chat: Chat, limit: int) -> bool:
    """Whether ``chat`` has more than ``limit`` characters, names and values; found in about ``limit`` steps."""
    left: list[object] = [chat.messages, chat.tools, chat.template_options]
    size = 0
    while left and size <= limit:
        value = left.pop()
        if isinstance(value, str | Mapping | list | tuple):
            size += len(value)
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, list | tuple):
            left.extend(value)
    return size > limit


def checked_ids(prompt: Prompt) -> list[int]:
    """A prompt that is neither text nor a conversation: it has to be token ids.

    :raises InvalidRequest: when it is anything else.
    """
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise InvalidRequest(f"the prompt must be text, token ids or chat messages, not {type(prompt).__name__}")
    kinds = set(map(type, prompt))
    if not kinds <= {int}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {int}))
        raise InvalidRequest(f"prompt token ids must all be integers; found {names}")
    return [token for token in prompt if isinstance(token, int)]


def _are_messages(prompt: Prompt) -> TypeGuard[Sequence[ChatMessage]]:
    return (
        not isinstance(prompt, str)
        and isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(item, Mapping) for item in prompt)
    )
