"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
from starlette.types import ASGIApp

from ...output_format import OutputFormat
from ...request import Chat, ChatMessage, Prompt, SamplingParams
from ..call import Call
from ..errors import invalid
from ..params import chat_params, check_stream, naming_fields, output_format, refuse, tenant_of
from ..prompt_reader import PromptReader
from ..wire.chat import ChatForm, ChatFormMessage
from ..wire.generation import StreamOptions
from .answering import Head, respond
from .chat_answer import ChatAnswer
from .side_by_side import start_all
from .token_texts import TokenTexts
from .tool_use import ToolUse, tool_use

UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "audio": "the model writes text only",
        "functions": "send tools",
        "function_call": "send tool_choice",
    }
)


async def chat_completions(call: Call) -> ASGIApp:
    """The next message of a conversation.

    One JSON object, or, with `stream`, a stream of chunks that ends with `[DONE]`. What is refused is refused with a
    status before the stream; an error within it is an event with `error`, and its end.
    """
    form = checked(call.read(ChatForm))
    head = Head.of(call, "chatcmpl", call.check_model(form.model))
    tools = tool_use(call, form)
    params = params_of(form, tools)
    tenant = tenant_of(call.caller, form.cache_salt)
    with naming_fields(form, "messages"):
        chat = conversation(form, () if tools is None else tools.told)
        prompt, ids = await prompt_of(call.engine, form, chat)
        generation = call.generate(prompt, params, priority=form.priority, tenant=tenant)
        await start_all([generation])
    texts = TokenTexts(call.engine.codec, as_ids=form.return_tokens_as_token_ids is True)
    answer = ChatAnswer(head, form, texts, tools, ids if form.return_token_ids else None)
    return await respond(call, [generation], answer, (form.stream_options or StreamOptions()) if form.stream else None)


def params_of(form: ChatForm, tools: ToolUse | None) -> SamplingParams:
    """How to go on, with all that ``form`` and its tools ask of the answer."""
    wanted = _format(form, tools)
    return chat_params(form, wanted, shows_special_tokens=tools is not None and tools.needs_special_tokens)


def template_message(message: ChatFormMessage) -> ChatMessage:
    """A message as chat templates have it."""
    told: dict[str, object] = msgspec.to_builtins(message)
    return {"role": message.role, "content": told.pop("content", None), **told}


def checked(form: ChatForm) -> ChatForm:
    """Itself, when it asks for nothing that is not served.

    :raises ApiError: 400 otherwise.
    """
    refuse(UNSERVED, form)
    check_stream(form)
    if form.modalities is not None and form.modalities != ["text"]:
        raise invalid('modalities can only be ["text"]: the model writes text only', "modalities")
    if form.continue_final_message and form.add_generation_prompt:
        raise invalid("a final message that goes on leaves no room for add_generation_prompt", "continue_final_message")
    return form


def _format(form: ChatForm, tools: ToolUse | None) -> OutputFormat | None:
    wanted = output_format(form)
    if tools is None or tools.forced is None:
        return wanted
    if wanted is not None:
        raise invalid("a tool call that is required leaves no room for another format of the answer", "tool_choice")
    return tools.forced


def conversation(form: ChatForm, told: Sequence[Mapping[str, object]]) -> Chat:
    """What the chat template is given. ``told``: the tools that the model is to hear of."""
    continues = form.continue_final_message is True
    return Chat(
        [template_message(message) for message in form.messages],
        told,
        form.chat_template_kwargs or {},
        continues_last=continues,
        opens_turn=not continues and form.add_generation_prompt is not False,
    )


async def prompt_of(reader: PromptReader, form: ChatForm, chat: Chat) -> tuple[Prompt, list[int] | None]:
    """What the engine is given, and its tokens if somebody needs to know them."""
    most = form.truncate_prompt_tokens
    if most is None and not form.return_token_ids:
        return chat, None
    ids = await reader.tokenize(chat)
    return (chat, ids) if most is None or len(ids) <= most else (ids[-most:], ids[-most:])
