"""What comes out of ``/v1/responses``: the response, as an object."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .response_form import FunctionTool, TextOptions, ToolChoice

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct):
    """The text of a message."""

    text: str = ""
    type: Literal["output_text"] = "output_text"
    annotations: list[object] = []
    logprobs: list[object] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    content: list[OutputText]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that the model wants to be called."""

    id: str
    call_id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    status: ItemStatus


OutputItem: TypeAlias = OutputMessage | FunctionCall


class IncompleteDetails(msgspec.Struct):
    """Why the answer ends early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    """Why there is no answer."""

    message: str
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"


class InputDetails(msgspec.Struct):
    """What the prefix cache did for it."""

    cached_tokens: int
    """Tokens that were not computed, because they were cached."""
    cache_write_tokens: int
    """Tokens that were computed and are cached now."""


class OutputDetails(msgspec.Struct):
    """Of what kind the tokens are."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Reasoning(msgspec.Struct, frozen=True):
    """There is none apart from the text."""

    effort: None = None
    summary: None = None


class Response(msgspec.Struct):
    """A response, finished or on its way, with the settings that it was made with."""

    id: str
    created_at: int
    """Seconds since the epoch."""
    model: str
    status: Status
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_p: float
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    user: str | None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    max_tool_calls: int | None = None
    reasoning: Reasoning = Reasoning()
    service_tier: Literal["default"] = "default"
    top_logprobs: Literal[0] = 0
    usage: ResponseUsage | None = None


class DeletedResponse(msgspec.Struct):
    """It is forgotten."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True
