"""Grammars that force calls, in llguidance's dialect of Lark.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from ....errors import InvalidRequest
from ...output_format import MAX_DEFINITION, OutputFormat
from .pieces import Tool

SpecialTokenId: TypeAlias = Callable[[str], int | None]
"""The id of a text that is one special token of the tokenizer, as ``TextCodec.special_token_id`` gives it."""

SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it. Were any space allowed, small models would go on with spaces for ever."""
ELSEWHERE: Final = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "dependentSchemas")
"""Keys of a schema by which it may have more properties than ``properties`` lists."""
DEFINITIONS: Final = ("$defs", "definitions")
MAX_PARAMETERS: Final = 512
"""Of one tool, in notations that write each by itself; more would be beyond what a grammar may have."""


def no_special_tokens(text: str) -> None:
    """A tokenizer without any."""


def call_grammar(
    calls: Iterable[str], *, is_many: bool, around: tuple[str, str] = ("", ""), between: str = "", more: str = ""
) -> OutputFormat:
    """One of ``calls``, or several if ``is_many``; each is the right side of a rule. ``around``, ``between``: terms
    before and after all calls, and between two. ``more``: rules that the calls refer to.

    :raises InvalidRequest: when it gets too long; the calls are not looked at any further then.
    """
    before, after = around
    calls = within_bounds(calls)
    rest = f"({between} call)*" if is_many else ""
    rules = [f"start: {before} call {rest} {after}", "call: " + " | ".join(f"call_{i}" for i in range(len(calls)))]
    rules += [f"call_{i}: {call}" for i, call in enumerate(calls)]
    return OutputFormat.grammar("\n".join([*rules, more]))


def within_bounds(terms: Iterable[str]) -> list[str]:
    """All of them.

    :raises InvalidRequest: as soon as they are longer together than a grammar may be.
    """
    found: list[str] = []
    size = 0
    for term in terms:
        found.append(term)
        size += len(term)
        if size > MAX_DEFINITION:
            raise InvalidRequest(f"the grammar of a tool call has more than {MAX_DEFINITION} characters; offer less")
    return found


def wanted(tools: Sequence[Tool], choice: str | None) -> list[Tool]:
    """The tools that may be called.

    :raises InvalidRequest: when there is none.
    """
    found = [tool for tool in tools if choice is None or tool.name == choice]
    if not found:
        what = "a call is required" if choice is None else f"a call of {choice!r:.80} is required"
        raise InvalidRequest(f"{what}, but the request offers no such tool")
    return found


def literal(text: str) -> str:
    """A term that is this text."""
    return json.dumps(text)


def mark(text: str, special_token_id: SpecialTokenId) -> str:
    """A term that is this text: the special token, where the tokenizer has one for it."""
    token = special_token_id(text)
    return literal(text) if token is None else f"<[{token}]>"


def json_call(tool: Tool, key: str = "arguments") -> str:
    """A call as a JSON object: terms that are its name and, below ``key``, its arguments."""
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f'{literal(head)} {arguments_of(tool)} "}}"'


def arguments_of(tool: Tool) -> str:
    """A term that is a JSON object of the tool's arguments."""
    return json_of(arguments_schema(tool), strict=tool.strict)


def json_of(schema: Mapping[str, object], *, strict: bool) -> str:
    """A term that is JSON of this schema. Unless ``strict``, what cannot be enforced of it is left out.

    :raises InvalidRequest: when the schema is no JSON.
    """
    guidance = {**SPACING, "lenient": not strict}
    return "%json " + OutputFormat.json_schema({**schema, "x-guidance": guidance}).definition


def arguments_schema(tool: Tool) -> dict[str, object]:
    """The schema of the arguments, as narrow as it can be read: an object, with nothing that the schema does not know.
    A model that has to call has no way out but to ramble.
    """
    schema = {"properties": {}} if tool.parameters is None else tool.parameters
    is_closed = "properties" in schema and not any(key in schema for key in ELSEWHERE)
    return {"type": "object", **({"additionalProperties": False} if is_closed else {}), **schema}


class Parameter(NamedTuple):
    """One parameter of a function, for notations that write each by itself."""

    name: str
    schema: Mapping[str, object]
    """Stands for itself."""
    is_required: bool


def parameters_of(tool: Tool) -> list[Parameter]:
    """Those that ``properties`` lists, in that order.

    :raises InvalidRequest: when the schema is malformed.
    """
    schema = arguments_schema(tool)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise InvalidRequest(f"the parameters of tool {tool.name!r:.80} are no JSON schema of an object")
    if len(properties) > MAX_PARAMETERS:
        raise InvalidRequest(f"a tool that is to be called may have at most {MAX_PARAMETERS} parameters here")
    shared: dict[str, object] = {key: schema[key] for key in DEFINITIONS if key in schema}
    needed = frozenset(name for name in required if isinstance(name, str))
    return [
        Parameter(name, {**shared, **(value if isinstance(value, Mapping) else {})}, name in needed)
        for name, value in properties.items()
    ]
