"""From the items of a conversation, as ``/v1/responses`` has them, to chat messages as templates have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....errors import ContextExceeded
from ...request import Chat, ChatMessage
from ..errors import ApiError, invalid
from ..prompt_reader import PromptReader
from ..wire.response_form import InputItem, TextPart
from ..wire.responses import OutputItem, OutputMessage

HEAD_ROLES = frozenset({"system", "developer"})


def input_messages(given: str | Sequence[InputItem]) -> list[ChatMessage]:
    """One message for each item.

    :raises ApiError: 400 when an item lacks something.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_input_message(item, f"input[{index}]") for index, item in enumerate(given)]


def output_messages(items: Iterable[OutputItem]) -> list[ChatMessage]:
    """What the model said, as one message for each item."""
    return [
        {"role": "assistant", "content": "".join(part.text for part in item.content)}
        if isinstance(item, OutputMessage)
        else _call_message(item.call_id, item.name, item.arguments)
        for item in items
    ]


def joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Calls that follow on each other, or on what the assistant says, are one message of it: so templates have them."""
    result: list[ChatMessage] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and result and result[-1]["role"] == "assistant":
            before = result[-1].get("tool_calls")
            result[-1] = {**result[-1], "tool_calls": [*(before if isinstance(before, list) else ()), *calls]}
        else:
            result.append(message)
    return result


async def without_oldest(reader: PromptReader, chat: Chat, room: int) -> Chat:
    """``chat`` with as few of its oldest turns left out as it takes to keep to ``room`` tokens.

    What stands in front of the first turn, and the last turn, stay: with these alone it may still be too long.
    """
    if await _fits(reader, chat, room):
        return chat
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "user"]
    head = next((i for i, message in enumerate(chat.messages) if message["role"] not in HEAD_ROLES), 0)

    def shortened(start: int) -> Chat:
        messages = [*chat.messages[:head], *chat.messages[start:]]
        return Chat(messages, chat.tools, chat.template_options)

    low, high = 0, len(turns) - 1  # turns[high] is taken if nothing fits
    while low < high:
        middle = (low + high) // 2
        if await _fits(reader, shortened(turns[middle]), room):
            high = middle
        else:
            low = middle + 1
    return shortened(turns[low]) if turns else chat


async def _fits(reader: PromptReader, chat: Chat, room: int) -> bool:
    try:
        return len(await reader.tokenize(chat)) <= room
    except ContextExceeded:  # plainly not
        return False


def _input_message(item: InputItem, path: str) -> ChatMessage:
    if item.type == "function_call":
        if item.call_id is None or item.name is None or item.arguments is None:
            raise _lacking(path, "call_id, name and arguments")
        return _call_message(item.call_id, item.name, item.arguments)
    if item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise _lacking(path, "call_id and output")
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if item.role is None or item.content is None:
        raise _lacking(path, "role and content")
    return {"role": item.role, "content": _content(item.content)}


def _call_message(call_id: str, name: str, arguments: str) -> ChatMessage:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _content(given: str | Sequence[TextPart]) -> object:
    if isinstance(given, str):
        return given
    return [{"type": "text", "text": (part.refusal if part.type == "refusal" else part.text) or ""} for part in given]


def _lacking(path: str, what: str) -> ApiError:
    return invalid(f"{path} needs {what}", path)
