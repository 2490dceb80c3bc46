"""Llama 3.1 and later with JSON: ``{"name": ..., "parameters": {...}}``, with ``<|python_tag|>`` before it or not.

Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ...output_format import OutputFormat
from .base import Cursor, Invocation, Reading, SpecialTokenId, Tool, ToolFormat, no_special_tokens
from .grammar import call_grammar, json_call, literal, wanted
from .json_calls import ARGUMENTS, calls_in

TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """An object at the start of the answer, or behind the tag; several are parted by semicolons.

    An answer may well be JSON and no call. So it has to have the name of a tool that is on offer, and arguments.
    """

    openings: ClassVar[tuple[str, ...]] = (TAG,)
    openings_in_front: ClassVar[tuple[str, ...]] = ("{",)
    padding: ClassVar[str] = " \t\r\n;"

    def matches(self, chat_template: str) -> bool:
        return '"parameters": dictionary of argument name' in chat_template or (
            TAG in chat_template and '"parameters": ' in chat_template
        )

    def read(self, cursor: Cursor, tools: Sequence[Tool]) -> Reading[Sequence[Invocation] | None]:
        yield from cursor.literal(TAG)
        yield from cursor.space()
        text = yield from cursor.json()
        found = None if text is None or not any(f'"{key}"' in text for key in ARGUMENTS) else calls_in(text)
        names = {tool.name for tool in tools}
        return found if found and all(call.name in names for call in found) else None

    def output_format(
        self,
        tools: Sequence[Tool],
        choice: str | None = None,
        *,
        parallel: bool = True,
        special_token_id: SpecialTokenId = no_special_tokens,
    ) -> OutputFormat:
        calls = (json_call(tool, "parameters") for tool in wanted(tools, choice))
        return call_grammar(calls, is_many=parallel and choice is None, between=literal("; "))
