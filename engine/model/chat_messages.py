"""From a conversation as clients send it to plain JSON values in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ...errors import InvalidRequest
from ..request import Chat

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Message: TypeAlias = "dict[str, Json]"

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Those of the OpenAI API."""
MAX_DEPTH = 64
"""Levels of lists and objects in a message or a tool: templates and JSON writers are recursive."""


class PlainChat(NamedTuple):
    """A conversation that was checked. Nothing of it is shared with what the caller handed in."""

    messages: list[Message]
    tools: list[Json]
    options: dict[str, Json]
    continues_last: bool = False
    opens_turn: bool = True


def plain_chat(chat: Chat, known_roles: Collection[str] = (), *, as_parts: bool = False) -> PlainChat:
    """Check a conversation, and write it as templates want it.

    What is null counts as absent; a content of parts becomes one text, with line breaks between them; the arguments of
    tool calls become objects, since templates write the JSON themselves.

    :param known_roles: roles that the template knows beside the usual ones. ``developer`` is one of them or becomes
        ``system``.
    :param as_parts: the template takes contents as lists of parts only.
    :raises InvalidRequest: when something is malformed; the message says where.
    """
    messages = [_message(each, i, known_roles, as_parts) for i, each in enumerate(_sequence(chat.messages, "messages"))]
    if not messages:
        raise InvalidRequest("a conversation needs at least one message")
    if chat.continues_last and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
        raise InvalidRequest("the last message cannot go on: it must be the assistant's, with a text")
    tools = [_tool(each, i) for i, each in enumerate(_sequence(chat.tools, "tools"))]
    options = _object(plain(chat.template_options, "template_options"), "template_options")
    return PlainChat(messages, tools, options, bool(chat.continues_last), bool(chat.opens_turn))


def plain(value: object, where: str, depth: int = MAX_DEPTH) -> Json:
    """A copy of ``value`` in dicts, lists and scalars, as JSON has them.

    :raises InvalidRequest: for anything else, for lone surrogates and for too many levels.
    """
    if isinstance(value, str):
        return encodable(value, where)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth == 0:
        raise InvalidRequest(f"{where} is nested in more than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {_name(name, where): plain(item, where, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, depth - 1) for item in value]
    raise InvalidRequest(f"{where} holds a {type(value).__name__}, which is no JSON")


def encodable(text: str, where: str) -> str:
    """``text`` itself.

    :raises InvalidRequest: when it cannot be written as UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{where} holds a lone surrogate at character {error.start}; send valid Unicode"
        raise InvalidRequest(message) from error
    return text


def _message(message: object, index: int, known_roles: Collection[str], as_parts: bool) -> Message:
    where = f"message {index}"
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidRequest(f"{where} must be an object with role and content")
    role = _role(message["role"], where, known_roles)
    given = {name: value for name, value in message.items() if value is not None}
    if role != "assistant" and "content" not in given:
        raise InvalidRequest(f"{where} must be an object with role and content")
    others = {
        _name(name, where): plain(value, f"{name:.40} of {where}")
        for name, value in given.items()
        if name not in ("role", "content", "tool_calls")
    }
    texts = _texts(given.get("content", ""), f"content of {where}")
    content: Json = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    written: Message = {"role": role, "content": content, **others}
    if calls := _sequence(given.get("tool_calls", ()), f"tool_calls of {where}"):
        written["tool_calls"] = [_tool_call(call, f"tool call {i} of {where}") for i, call in enumerate(calls)]
    return written


def _role(role: object, where: str, known_roles: Collection[str]) -> str:
    if not isinstance(role, str):
        raise InvalidRequest(f"role of {where} must be a string, not {type(role).__name__}")
    if role == "developer" and role not in known_roles:
        return "system"
    if role not in ROLES and role not in known_roles:
        raise InvalidRequest(
            f"role of {where} must be one of {', '.join(sorted(ROLES))}, or one of the chat template's"
        )
    return role


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [encodable(content, where)]
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where} must be a string or a list of text parts, not {type(content).__name__}")
    return [encodable(_part_text(part, where), where) for part in content]


def _part_text(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f'{where} may have only text parts, {{"type": "text", "text": "..."}}: this model reads text'
        )
    return text


def _tool_call(call: object, where: str) -> Json:
    written = _object(plain(_without_nulls(call), where), where)
    function = _object(written.get("function"), f"function of {where}")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must have a function with a name")
    return {**written, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: Json, where: str) -> Json:
    """As an object. Models write JSON that is broken, too, and clients send it back: that stays the text it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return plain(parsed, f"arguments of {where}") if isinstance(parsed, dict) else arguments


def _tool(tool: object, index: int) -> Json:
    where = f"tool {index}"
    written = _object(plain(_without_nulls(tool), where), where)
    function = _object(written.get("function"), f"function of {where}")
    if written.get("type") != "function" or not isinstance(function.get("name"), str):
        raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{"name": "...", ...}}}}')
    return written


def _without_nulls(value: object) -> object:
    """Without the nulls of an object and of the function in it; those further in may be part of a schema."""
    if not isinstance(value, Mapping):
        return value
    kept = {name: item for name, item in value.items() if item is not None}
    if isinstance(function := kept.get("function"), Mapping):
        kept["function"] = {name: item for name, item in function.items() if item is not None}
    return kept


def _object(value: Json, where: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object")
    return value


def _sequence(value: object, where: str) -> Sequence[object]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{where} must be a list, not {type(value).__name__}")
    return value


def _name(name: object, where: str) -> str:
    if not isinstance(name, str):
        raise InvalidRequest(f"{where} has a name that is no string")
    return encodable(name, f"a name in {where}")
