"""The events of a streamed response, each named by its ``type``.

Reference: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .responses import OutputItem, OutputText, Response


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """What all have."""

    sequence_number: int = 0
    """Counts the events of a stream, from 0."""


class ResponseEvent(Event, kw_only=True):
    """The response as it stands."""

    response: Response


class Created(ResponseEvent, tag="response.created", kw_only=True):
    """It was accepted."""


class InProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    """It is being made."""


class Completed(ResponseEvent, tag="response.completed", kw_only=True):
    """It is whole. The last event."""


class Incomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    """It was cut off. The last event."""


class Failed(ResponseEvent, tag="response.failed", kw_only=True):
    """It could not be finished. The last event."""


class ItemEvent(Event, kw_only=True):
    """About an item of the output."""

    output_index: int
    item: OutputItem


class ItemAdded(ItemEvent, tag="response.output_item.added", kw_only=True):
    """A new item, still empty."""


class ItemDone(ItemEvent, tag="response.output_item.done", kw_only=True):
    """A whole item."""


class ItemPart(Event, kw_only=True):
    """About a part of an item."""

    item_id: str
    output_index: int


class ContentPart(ItemPart, kw_only=True):
    """About a part of a message."""

    content_index: int = 0


class PartAdded(ContentPart, tag="response.content_part.added", kw_only=True):
    """A new part, still empty."""

    part: OutputText


class PartDone(ContentPart, tag="response.content_part.done", kw_only=True):
    """A whole part."""

    part: OutputText


class TextDelta(ContentPart, tag="response.output_text.delta", kw_only=True):
    """More text."""

    delta: str
    logprobs: list[object] = []


class TextDone(ContentPart, tag="response.output_text.done", kw_only=True):
    """The whole text."""

    text: str
    logprobs: list[object] = []


class ArgumentsDelta(ItemPart, tag="response.function_call_arguments.delta", kw_only=True):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemPart, tag="response.function_call_arguments.done", kw_only=True):
    """A call's whole arguments."""

    name: str
    arguments: str


StreamEvent: TypeAlias = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
)
