"""A model that says what it is told to, in plain ASCII."""

from __future__ import annotations

import torch

from octavo.engine.model.runner import Row
from octavo.engine.testing import FakeCodec, FakeRunner

ASCII = 128


class AsciiCodec(FakeCodec):
    """Id i is ``chr(i)``; 0 is a special token that ends the text."""

    def __init__(self) -> None:
        super().__init__(ASCII, special=frozenset({0}))

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii"))

    def _piece(self, token: int, skip: bool) -> str:
        return super()._piece(token, skip) if token == 0 else chr(token)


class Scripted(FakeRunner):
    """Says ``script``, whatever the prompt, and ends; in the tokens of :class:`AsciiCodec`."""

    def __init__(self, script: str, prompt_tokens: int) -> None:
        super().__init__(vocab_size=ASCII, eos_token_ids=frozenset({0}))
        self._script = [*script.encode("ascii"), 0]
        self._prompt_tokens = prompt_tokens

    def _logits(self, row: Row, length: int) -> torch.Tensor:
        logits = super()._logits(row, length)
        place = length - self._prompt_tokens
        if 0 <= place < len(self._script):
            logits[self._script[place]] = 1000.0
        return logits
