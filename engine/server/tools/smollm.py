"""SmolLM2: ``<tool_call>[{"name": ..., "arguments": {...}}, ...]</tool_call>``; an empty list says that nothing fits.

Source: https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct (function calling)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ...output_format import OutputFormat
from .base import SpecialTokenId, Tool, no_special_tokens
from .grammar import call_grammar, json_call, literal, wanted
from .hermes import CLOSE, OPEN, Hermes


class SmolLM(Hermes):
    """All calls in one list in one pair of tags."""

    has_special_tokens: ClassVar[bool] = False

    def matches(self, chat_template: str) -> bool:
        return OPEN + "[" in chat_template

    def output_format(
        self,
        tools: Sequence[Tool],
        choice: str | None = None,
        *,
        parallel: bool = True,
        special_token_id: SpecialTokenId = no_special_tokens,
    ) -> OutputFormat:
        calls = (json_call(tool) for tool in wanted(tools, choice))
        around = (literal(OPEN + "["), literal("]" + CLOSE))
        return call_grammar(calls, is_many=parallel and choice is None, around=around, between=literal(", "))
