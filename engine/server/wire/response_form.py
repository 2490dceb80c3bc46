"""What goes in at ``POST /v1/responses``: a conversation, and how to go on with it.

Reference: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]


class TextPart(msgspec.Struct):
    """A part of a message. There are no other kinds than text here."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """One step of a conversation: a message, a function call of the model, or what the function gave."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    id: str | None = None
    status: str | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """What the answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, object] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """About the text of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(msgspec.Struct):
    """A function that the model may ask to be called."""

    name: Name
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct):
    """The function that has to be called."""

    name: Name
    type: Literal["function"] = "function"


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction


class ResponseForm(msgspec.Struct):
    """A request for a response."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    """What the model is told first. It is not carried over by ``previous_response_id``."""
    previous_response_id: str | None = None
    """A response that is still stored: the conversation goes on from there."""
    store: bool | None = None
    """Whether the response is kept for later; by default it is."""
    stream: bool | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """``auto``: the oldest turns are left out when the conversation is too long; otherwise it is refused."""
    metadata: Metadata | None = None
    user: str | None = None

    # of vLLM and its kin
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    cache_salt: str | None = None

    # known, and without effect here
    include: list[str] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, object] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: dict[str, object] | None = None

    # known, and refused unless null or false
    background: bool | None = None
    conversation: object = None
    prompt: object = None
