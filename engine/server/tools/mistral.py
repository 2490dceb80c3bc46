"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, since 2025 ``[TOOL_CALLS]name[ARGS]{...}``.

Source: https://docs.mistral.ai/cookbooks/concept-deep-dive-tokenization-tool_calling
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from ...output_format import OutputFormat
from .base import Cursor, Invocation, Reading, SpecialTokenId, Tool, ToolFormat, no_special_tokens
from .grammar import arguments_of, call_grammar, json_call, literal, mark, wanted
from .json_calls import all_or_none, calls_in, invocation

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[\w.:/-]")


class Mistral(ToolFormat):
    """A list of calls behind one mark, or a mark, a name and arguments for each call; both without an end."""

    openings: ClassVar[tuple[str, ...]] = (OPEN,)

    def matches(self, chat_template: str) -> bool:
        return OPEN in chat_template

    def call_id(self, number: str) -> str:
        """Nine letters or digits: the templates of Mistral refuse all others when the call comes back."""
        return number[:9]

    def read(self, cursor: Cursor, tools: Sequence[Tool]) -> Reading[Sequence[Invocation] | None]:
        yield from cursor.literal(OPEN)
        yield from cursor.space()
        name = yield from cursor.word(NAME)
        if name and (yield from cursor.literal(CALL_ID, ARGS)) == CALL_ID:
            yield from cursor.word(NAME)
            yield from cursor.literal(ARGS)
        yield from cursor.space()
        text = yield from cursor.json()
        if text is None:
            return None
        return all_or_none([invocation(name, text)]) if name else calls_in(text)

    def output_format(
        self,
        tools: Sequence[Tool],
        choice: str | None = None,
        *,
        parallel: bool = True,
        special_token_id: SpecialTokenId = no_special_tokens,
    ) -> OutputFormat:
        """In the newer notation where the tokenizer has a mark for it."""
        found, is_many = wanted(tools, choice), parallel and choice is None
        opening, arguments = mark(OPEN, special_token_id), mark(ARGS, special_token_id)
        if special_token_id(ARGS) is not None:
            calls = (f"{opening} {literal(tool.name)} {arguments} {arguments_of(tool)}" for tool in found)
            return call_grammar(calls, is_many=is_many)
        calls = (json_call(tool) for tool in found)
        return call_grammar(calls, is_many=is_many, around=(f'{opening} "["', '"]"'), between=literal(", "))
