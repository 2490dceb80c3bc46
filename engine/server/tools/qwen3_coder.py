"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>``, on lines.

Source: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from ....errors import InvalidRequest
from ...output_format import OutputFormat
from .base import Cursor, Invocation, Reading, SpecialTokenId, Tool, ToolFormat, no_special_tokens
from .grammar import Parameter, call_grammar, json_of, literal, mark, parameters_of, wanted, within_bounds
from .hermes import CLOSE, OPEN
from .json_calls import invocation, parsed

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME: Final = re.compile(r"[^<>\s]")
PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
"""The template writes values as Python does, and so does the model."""
FUNCTION_END: Final = literal(f"{END_FUNCTION}\n")
VALUE_END: Final = literal(f"\n{END_PARAMETER}\n")
TEXT_RULE: Final = f'text[suffix="{END_PARAMETER}"]: /(.|\\n)*/'
CONSTRAINTS: Final = frozenset(("pattern", "format", "minLength", "maxLength"))


class Qwen3Coder(ToolFormat):
    """Tags for each argument. Text stands there as it is, so the schema says what is text; all else is JSON.

    The outer opening tag is often left out by the models; the call is read all the same.
    """

    openings: ClassVar[tuple[str, ...]] = (OPEN, FUNCTION)

    def matches(self, chat_template: str) -> bool:
        return FUNCTION in chat_template and PARAMETER in chat_template

    def read(self, cursor: Cursor, tools: Sequence[Tool]) -> Reading[Sequence[Invocation] | None]:
        is_wrapped = yield from cursor.literal(OPEN)
        yield from cursor.space()
        if not (yield from cursor.literal(FUNCTION)):
            return None
        name = yield from cursor.word(NAME)
        texts = (yield from _parameters(cursor)) if (yield from cursor.literal(">")) else None
        if texts is None or (not (yield from cursor.closing(CLOSE)) and is_wrapped):
            return None
        schemas = _schemas(next((tool for tool in tools if tool.name == name), Tool(name)))
        found = invocation(name, {key: _value(text, schemas.get(key)) for key, text in texts.items()})
        return None if found is None else [found]

    def output_format(
        self,
        tools: Sequence[Tool],
        choice: str | None = None,
        *,
        parallel: bool = True,
        special_token_id: SpecialTokenId = no_special_tokens,
    ) -> OutputFormat:
        opening, closing = mark(OPEN, special_token_id), mark(CLOSE, special_token_id)
        calls = (
            f"{opening} {_head(tool)} {_arguments(tool)} {FUNCTION_END} {closing}" for tool in wanted(tools, choice)
        )
        return call_grammar(calls, is_many=parallel and choice is None, between=literal("\n"), more=TEXT_RULE)


def _parameters(cursor: Cursor) -> Reading[dict[str, str] | None]:
    """The arguments as they are written, up to the end of the function."""
    found: dict[str, str] = {}
    while True:
        yield from cursor.space()
        tag = yield from cursor.literal(PARAMETER, END_FUNCTION)
        if tag != PARAMETER:
            return None if tag is None else found
        key = yield from cursor.word(NAME)
        text = (yield from cursor.until(END_PARAMETER)) if (yield from cursor.literal(">")) else None
        if text is None:
            return None
        found[key] = text.removeprefix("\n").removesuffix("\n")


def _schemas(tool: Tool) -> Mapping[str, object]:
    properties = (tool.parameters or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> object:
    """What an argument means. Of a parameter that the schema does not know nothing is: it is text."""
    kinds = frozenset(("string",)) if schema is None else _kinds(schema)
    word = text.strip()
    if "null" in kinds and word in {"null", "None"}:
        return None
    if "string" in kinds:
        return text
    try:
        return PYTHON_WORDS[word] if word in PYTHON_WORDS else parsed(word)
    except (ValueError, RecursionError):
        return text


def _kinds(schema: object) -> frozenset[object]:
    """The types that values may have, as far as the schema says so."""
    if not isinstance(schema, Mapping):
        return frozenset()
    found: set[object] = set()
    kind = schema.get("type")
    found.update([kind] if isinstance(kind, str) else _items(kind))
    for key in ("anyOf", "oneOf"):
        found.update(*(_kinds(option) for option in _items(schema.get(key))))
    found.update("string" for value in _items(schema.get("enum")) if isinstance(value, str))
    return frozenset(found)


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _head(tool: Tool) -> str:
    return literal(f"\n{FUNCTION}{tool.name}>\n")


def _arguments(tool: Tool) -> str:
    """Terms for the arguments in their order."""
    terms = ((_argument(tool, parameter), parameter.is_required) for parameter in parameters_of(tool))
    return " ".join(within_bounds(term if is_required else f"({term})?" for term, is_required in terms))


def _argument(tool: Tool, parameter: Parameter) -> str:
    if not parameter.name or not all(map(NAME.match, parameter.name)):
        raise InvalidRequest(f"a parameter of tool {tool.name!r:.80} has a name that this model's calls cannot have")
    head = literal(f"{PARAMETER}{parameter.name}>\n")
    choices = [value for value in _items(parameter.schema.get("enum")) if isinstance(value, str)]
    if choices:
        return f"{head} ({' | '.join(map(literal, choices))}) {VALUE_END}"
    if "string" not in _kinds(parameter.schema):
        return f"{head} {json_of(parameter.schema, strict=tool.strict)} {VALUE_END}"
    if tool.strict and parameter.schema.keys() & CONSTRAINTS:
        raise InvalidRequest(
            f"parameter {parameter.name!r:.80} of tool {tool.name!r:.80}: this model writes text as it is, which "
            "cannot be held to a pattern, format or length; leave those out or set strict to false"
        )
    return f'{head} text "\\n"'
