"""UsageMeter: counts the tokens of a request while its outputs come in."""

from __future__ import annotations

from ..call import Tokens
from ..wire.generation import CompletionTokensDetails, PromptTokensDetails, Usage
from .side_by_side import Heard


class UsageMeter:
    """Of all prompts and all samples of one HTTP request."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._generated: dict[tuple[int, int], int] = {}

    def note(self, heard: Heard) -> None:
        """An output has come."""
        number, output = heard
        self._prompts[number] = output.prompt_tokens, output.cached_tokens
        self._generated[number, output.index] = len(output.token_ids)

    def tokens(self) -> Tokens:
        """What there was so far."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(tokens for _, tokens in self._prompts.values())
        return Tokens(prompt, cached, sum(self._generated.values()))

    def usage(self) -> Usage:
        """The same for the client."""
        prompt, cached, generated = self.tokens()
        total = prompt + generated
        return Usage(prompt, generated, total, PromptTokensDetails(cached), CompletionTokensDetails())
