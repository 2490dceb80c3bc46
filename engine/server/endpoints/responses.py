"""``/v1/responses``: chats whose history the server keeps, for the clients that prefer them to chat completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import msgspec
from starlette.types import ASGIApp

from ...generation import Generation
from ...request import Chat, ChatMessage
from ..call import Call
from ..endpoint import json_response
from ..errors import NOT_FOUND, ApiError, invalid
from ..event_stream import EventStream
from ..params import naming_fields, tenant_of
from ..prompt_reader import PromptReader
from ..response_store import StoredResponse
from ..wire.response_events import StreamEvent
from ..wire.response_form import ResponseForm
from ..wire.responses import DeletedResponse
from .answering import told
from .chat import params_of
from .response_input import input_messages, joined, output_messages, without_oldest
from .response_maker import EventWriter, ResponseMaker
from .response_params import as_chat_form, naming_own_fields, unwritten
from .side_by_side import outputs_of, start_all
from .tool_use import ToolUse, tool_use
from .usage import UsageMeter

MESSAGE_BYTES = 200
"""What a stored message takes beside its text, about."""


async def create_response(call: Call) -> ASGIApp:
    """Go on with a conversation.

    The response is one JSON object, or, with `stream`, a stream of named events that ends with `response.completed`,
    `response.incomplete` or `response.failed`.
    """
    form = call.read(ResponseForm)
    chat_form = as_chat_form(form)
    with naming_own_fields():
        tools = tool_use(call, chat_form)
        params = params_of(chat_form, tools)
        tenant = tenant_of(call.caller, form.cache_salt)
    draft = _draft(call, form, tenant)
    maker = _maker(call, draft, tools)
    with naming_own_fields(), naming_fields(chat_form, "messages"):
        told_tools = () if tools is None else tools.told
        chat = await conversation(call.engine, form, draft.conversation, told_tools)
        generation = call.generate(chat, params, priority=form.priority, tenant=tenant)
        await start_all([generation])  # what is refused is refused with a status, not in a stream
    if form.stream:
        return _stream(call, generation, maker, draft)
    async for _ in _told(call, generation, maker):
        pass
    maker.end()
    _keep(call, draft)
    return json_response(draft.response)


async def get_response(call: Call) -> ASGIApp:
    """A response that is stored."""
    return json_response(_stored(call, call.path_params["response_id"], "response_id").response)


async def delete_response(call: Call) -> ASGIApp:
    """Forget a response. Those that went on from it keep what was said."""
    response_id = call.path_params["response_id"]
    if not call.service.responses.delete(call.caller.tenant, response_id):
        raise _no_such(response_id, "response_id")
    return json_response(DeletedResponse(response_id))


def _stream(call: Call, generation: Generation, maker: ResponseMaker, draft: StoredResponse) -> EventStream:
    writer = EventWriter()

    async def events() -> AsyncGenerator[bytes, None]:
        for event in maker.begin():
            yield writer(event)
        async with aclosing(_told(call, generation, maker)) as parts:
            async for part in parts:
                for event in part:
                    yield writer(event)
        last = maker.end()
        _keep(call, draft)  # before the client knows of the end, and may go on from there
        for event in last:
            yield writer(event)

    return EventStream(events(), on_error=lambda error: writer(maker.fail(told(call, error))), end=b"")


async def _told(call: Call, generation: Generation, maker: ResponseMaker) -> AsyncGenerator[list[StreamEvent], None]:
    """What is to be told of each output."""
    meter = UsageMeter()
    async with aclosing(outputs_of([generation])) as outputs:
        async for heard in outputs:
            meter.note(heard)
            call.tokens = meter.tokens()
            yield maker.push(heard.output)


def _draft(call: Call, form: ResponseForm, tenant: str | None) -> StoredResponse:
    """The response, unwritten, with what was said before it."""
    own = call.caller.tenant
    owner = call.service.responses.owner(tenant if own is None else own)
    said = tuple(input_messages(form.input))
    before, size = tuple[ChatMessage, ...](), len(call.body) + MESSAGE_BYTES * (len(said) + 1)
    if form.previous_response_id is not None:
        stored = _stored(call, form.previous_response_id, "previous_response_id")
        if stored.owner.tenant != owner.tenant:  # erasing one tenant must not leave what it said with another
            raise invalid("that response was made with another cache_salt: send the same", "cache_salt")
        before, size = stored.conversation, stored.size + size
    response = unwritten(form, call.check_model(form.model), f"resp_{call.id}", int(call.service.wall()))
    return StoredResponse(response, (*before, *said), size, owner)


def _maker(call: Call, draft: StoredResponse, tools: ToolUse | None) -> ResponseMaker:
    config = call.engine.config
    return ResponseMaker(
        draft.response,
        None if tools is None else tools.reader(),
        block_size=config.block_size if config.enable_prefix_caching else None,
        new_number=lambda: uuid.uuid4().hex,
        wall=call.service.wall,
    )


async def conversation(
    reader: PromptReader,
    form: ResponseForm,
    messages: Sequence[ChatMessage],
    told_tools: Sequence[Mapping[str, object]],
) -> Chat:
    """What the chat template is given. ``messages``: all that was said, but for the instructions of ``form``.
    ``told_tools``: those that the model is to hear of.
    """
    head: list[ChatMessage] = [] if form.instructions is None else [{"role": "system", "content": form.instructions}]
    chat = Chat(joined([*head, *messages]), told_tools, form.chat_template_kwargs or {})
    if form.truncation != "auto":
        return chat
    most = min(reader.model.max_context, reader.config.num_blocks * reader.config.block_size)
    return await without_oldest(reader, chat, most - (form.max_output_tokens or 1))


def _keep(call: Call, draft: StoredResponse) -> None:
    """Store the response, now that it is whole, if it is to be stored."""
    response = draft.response
    if response.store:
        conversation = (*draft.conversation, *output_messages(response.output))
        size = draft.size + len(msgspec.json.encode(response.output))
        call.service.responses.put(call.caller.tenant, StoredResponse(response, conversation, size, draft.owner))


def _stored(call: Call, response_id: str, param: str) -> StoredResponse:
    stored = call.service.responses.get(call.caller.tenant, response_id)
    if stored is None:
        raise _no_such(response_id, param)
    return stored


def _no_such(response_id: str, param: str) -> ApiError:
    message = f"there is no response {response_id!r:.100} here: never, or no longer, or of somebody else"
    return ApiError(404, message, kind=NOT_FOUND, param=param, code="response_not_found")
