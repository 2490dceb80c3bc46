"""Llama 4, ToolACE and others: calls as Python writes them, ``[f(a=1), g(b="x")]``.

Source: https://github.com/meta-llama/llama-models/blob/main/models/llama4/prompt_format.md
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import ClassVar, Final

from ....errors import InvalidRequest
from ...output_format import OutputFormat
from .base import Cursor, Invocation, Reading, SpecialTokenId, Tool, ToolFormat, no_special_tokens
from .grammar import Parameter, call_grammar, json_of, literal, parameters_of, wanted, within_bounds
from .json_calls import all_or_none, invocation

OPEN, CLOSE, TAG = "<|python_start|>", "<|python_end|>", "<|python_tag|>"
NAME: Final = re.compile(r"[\w.-]")
QUOTES: Final = "\"'"
JSON_WORDS: Final = {"true": True, "false": False, "null": None}
"""Models that saw much JSON write these in Python, too; and grammars force JSON values."""


class Pythonic(ToolFormat):
    """A list of calls at the start of the answer, or behind a mark. Nothing is evaluated: values are literals.

    An answer may well begin with a bracket and be no call. So all names have to be those of tools that are on offer.
    """

    openings: ClassVar[tuple[str, ...]] = (OPEN, TAG)
    openings_in_front: ClassVar[tuple[str, ...]] = ("[",)

    def matches(self, chat_template: str) -> bool:
        return "[func_name1(" in chat_template

    def read(self, cursor: Cursor, tools: Sequence[Tool]) -> Reading[Sequence[Invocation] | None]:
        mark = yield from cursor.literal(OPEN, TAG)
        yield from cursor.space()
        found: list[Invocation | None] = []
        separator = yield from cursor.literal("[")
        while separator in {"[", ","}:
            found.append((yield from _call(cursor, {tool.name for tool in tools})))
            yield from cursor.space()
            separator = None if found[-1] is None else (yield from cursor.literal(",", "]"))
        if mark == OPEN and separator:
            yield from cursor.closing(CLOSE)
        return all_or_none(found) if separator else None

    def output_format(
        self,
        tools: Sequence[Tool],
        choice: str | None = None,
        *,
        parallel: bool = True,
        special_token_id: SpecialTokenId = no_special_tokens,
    ) -> OutputFormat:
        calls = (f'{literal(tool.name + "(")} {_arguments(tool)} ")"' for tool in wanted(tools, choice))
        return call_grammar(calls, is_many=parallel and choice is None, around=('"["', '"]"'), between=literal(", "))


def _call(cursor: Cursor, names: set[str]) -> Reading[Invocation | None]:
    yield from cursor.space()
    name = yield from cursor.word(NAME)
    if name not in names or not (yield from cursor.literal("(")):
        return None
    values: dict[str, object] = {}
    yield from cursor.space()
    while not (yield from cursor.literal(")")):
        key = yield from cursor.word(NAME)
        yield from cursor.space()
        value = (yield from cursor.value(QUOTES, ",)")) if key and (yield from cursor.literal("=")) else None
        if value is None:
            return None
        try:
            values[key] = _literal(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        yield from cursor.literal(",")
        yield from cursor.space()
    return invocation(name, values)


def _literal(text: str) -> object:
    """The value of a literal.

    :raises ValueError: when it is something else, that could do something.
    :raises SyntaxError: when it is no Python; :raises RecursionError, MemoryError: when it is too deep.
    """
    with warnings.catch_warnings(action="ignore"):  # the model's string escapes are not ours to complain about
        tree = ast.parse(text.strip(), mode="eval")
    return ast.literal_eval(_JsonWords().visit(tree))


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's words by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:  # the name is Python's
        return ast.copy_location(ast.Constant(JSON_WORDS[node.id]), node) if node.id in JSON_WORDS else node


def _arguments(tool: Tool) -> str:
    """Terms for the arguments: those that are required in their order, then any of the others in theirs."""
    parameters = sorted(parameters_of(tool), key=lambda parameter: not parameter.is_required)
    if not all(re.fullmatch(r"[\w-]+", parameter.name) for parameter in parameters):
        raise InvalidRequest(f"a parameter of tool {tool.name!r:.80} has a name that this model's calls cannot have")
    terms = within_bounds(_argument(parameter, strict=tool.strict) for parameter in parameters)
    required = sum(parameter.is_required for parameter in parameters)
    if required:
        return ' ", " '.join(terms[:required]) + _following(terms[required:])
    starts = within_bounds(term + _following(terms[i + 1 :]) for i, term in enumerate(terms))
    return f"({' | '.join(starts)})?" if starts else ""


def _argument(parameter: Parameter, *, strict: bool) -> str:
    return f"{literal(parameter.name + '=')} {json_of(parameter.schema, strict=strict)}"


def _following(terms: Sequence[str]) -> str:
    return "".join(f' (", " {term})?' for term in terms)
