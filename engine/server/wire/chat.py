"""``POST /v1/chat/completions``: what goes in, and what comes out, whole or as a stream.

Reference: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from .generation import Alternatives, Finish, GenerationForm, PromptLogprobs, Tokens, Usage

MAX_MESSAGES = 2**14
FunctionName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ContentPart(msgspec.Struct, omit_defaults=True):
    """A part of a message. There are no other kinds than text here."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    """What the model wants called. ``arguments``: the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, omit_defaults=True):
    """A call that the model has made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class ChatFormMessage(msgspec.Struct, omit_defaults=True):
    """A message of the conversation so far."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatFunction(msgspec.Struct, omit_defaults=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    """JSON schema of its arguments, an object."""
    strict: bool | None = None


class ChatTool(msgspec.Struct):
    """A tool; there are no other kinds than functions."""

    type: Literal["function"]
    function: ChatFunction


class ChosenFunction(msgspec.Struct):
    """By its name."""

    name: FunctionName


class ChosenTool(msgspec.Struct):
    """The function that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


ChatToolChoice: TypeAlias = Literal["none", "auto", "required"] | ChosenTool


class ChatForm(GenerationForm, kw_only=True):
    """A request for the next message of a conversation."""

    messages: Annotated[list[ChatFormMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    """The newer name of ``max_tokens``. Without either the answer may take what is left of the context."""
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[ChatTool] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    """Whether the assistant's turn begins after the messages; by default it does."""
    continue_final_message: bool | None = None
    """Whether the last message, the assistant's, goes on."""
    chat_template_kwargs: dict[str, object] | None = None
    """More variables for the chat template."""

    # known, and without effect here
    reasoning_effort: str | None = None
    verbosity: str | None = None

    # known, and refused unless null
    audio: dict[str, object] | None = None
    modalities: list[str] | None = None
    functions: list[dict[str, object]] | None = None
    function_call: str | dict[str, object] | None = None


class TopLogprob(msgspec.Struct):
    """A token that might have been, with its log-probability (-9999 for what is impossible)."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    """A token with its log-probability and the likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Of its text in UTF-8; a token may be part of a character."""
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per generated token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatToolCall(msgspec.Struct):
    """A function that the model wants called."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One sample."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None
    """The stop string or stop token id that ended it."""
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class DeltaToolCall(msgspec.Struct):
    """A call, whole: the one with this number among those of the message."""

    index: int
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Delta(msgspec.Struct, kw_only=True):
    """What is new in a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """What is new in one sample. Only the last one of a sample has a ``finish_reason``."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
