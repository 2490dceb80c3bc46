"""Hermes, Qwen2.5, Qwen3, SmolLM3 and many others: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ...output_format import OutputFormat
from .base import Cursor, Invocation, Reading, SpecialTokenId, Tool, ToolFormat, no_special_tokens
from .grammar import call_grammar, json_call, literal, mark, wanted
from .json_calls import calls_in

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """An object in tags, one pair of tags for each call. A list in the tags is read, too."""

    openings: ClassVar[tuple[str, ...]] = (OPEN,)

    def matches(self, chat_template: str) -> bool:
        return OPEN in chat_template and "<function=" not in chat_template and OPEN + "[" not in chat_template

    def read(self, cursor: Cursor, tools: Sequence[Tool]) -> Reading[Sequence[Invocation] | None]:
        yield from cursor.literal(OPEN)
        yield from cursor.space()
        text = yield from cursor.json()
        if text is None or not (yield from cursor.closing(CLOSE)):
            return None
        return calls_in(text)

    def output_format(
        self,
        tools: Sequence[Tool],
        choice: str | None = None,
        *,
        parallel: bool = True,
        special_token_id: SpecialTokenId = no_special_tokens,
    ) -> OutputFormat:
        opening, closing = mark(OPEN, special_token_id), mark(CLOSE, special_token_id)
        line = literal("\n")
        calls = (f"{opening} {line} {json_call(tool)} {line} {closing}" for tool in wanted(tools, choice))
        return call_grammar(calls, is_many=parallel and choice is None, between=line)
