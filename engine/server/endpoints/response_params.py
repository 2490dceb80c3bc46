"""From the form of ``/v1/responses`` to that of chat completions, which says the same in other words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from ..errors import ApiError, invalid
from ..wire.chat import ChatForm, ChatFunction, ChatTool, ChatToolChoice, ChosenFunction, ChosenTool
from ..wire.generation import JsonSchemaFormat, ResponseFormat
from ..wire.response_form import FunctionTool, NamedFunction, ResponseForm, TextFormat, TextOptions, ToolChoice
from ..wire.responses import Response

SAME_NAMES: Final = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "min_p",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "stop",
    "temperature",
    "top_k",
    "top_p",
)
FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input", "response_format": "text.format"}
)
"""Name in a chat -> name here, where they differ."""
UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "background": "responses are not made in the background here; leave it out and read the answer, or its stream",
        "conversation": "conversations are not kept here; use previous_response_id",
        "prompt": "prompt templates are not kept here; send input and instructions",
    }
)


def as_chat_form(form: ResponseForm) -> ChatForm:
    """What ``form`` wants, but for the messages.

    :raises ApiError: 400 when it asks for something that is not served, or for half of something.
    """
    for name, message in UNSERVED.items():
        if getattr(form, name) not in (None, False):
            raise invalid(message, name)
    return ChatForm(
        messages=[],
        max_tokens=form.max_output_tokens,
        response_format=_response_format(form.text),
        tools=None if form.tools is None else [_tool(tool) for tool in form.tools],
        tool_choice=_tool_choice(form.tool_choice),
        **{name: getattr(form, name) for name in SAME_NAMES},
    )


@contextmanager
def naming_own_fields() -> Iterator[None]:
    """Let refusals that name a field of chat completions name the field here."""
    try:
        yield
    except ApiError as error:
        detail = error.body.error
        detail.param = FIELDS.get(detail.param or "", detail.param)
        raise


def unwritten(form: ResponseForm, model: str, response_id: str, created: int) -> Response:
    """The response with all that is known before it is made. ``created``: seconds since the epoch."""
    text = form.text or TextOptions()
    return Response(
        id=response_id,
        created_at=created,
        model=model,
        status="in_progress",
        output=[],
        instructions=form.instructions,
        max_output_tokens=form.max_output_tokens,
        parallel_tool_calls=form.parallel_tool_calls is not False,
        previous_response_id=form.previous_response_id,
        store=form.store is not False,
        temperature=1.0 if form.temperature is None else form.temperature,
        text=TextOptions(text.format or TextFormat("text"), text.verbosity or "medium"),
        tool_choice=form.tool_choice or "auto",
        tools=form.tools or [],
        top_p=1.0 if form.top_p is None else form.top_p,
        truncation=form.truncation or "disabled",
        metadata=form.metadata or {},
        user=form.user,
    )


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    wanted = None if text is None else text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(wanted.type)
    if wanted.name is None or wanted.schema is None:
        raise invalid("a text.format of type json_schema needs a name and a schema", "text.format")
    return ResponseFormat("json_schema", JsonSchemaFormat(wanted.name, wanted.schema, wanted.strict))


def _tool(tool: FunctionTool) -> ChatTool:
    return ChatTool("function", ChatFunction(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: ToolChoice | None) -> ChatToolChoice | None:
    return ChosenTool("function", ChosenFunction(choice.name)) if isinstance(choice, NamedFunction) else choice
