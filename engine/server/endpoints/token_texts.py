"""TokenTexts: how single tokens are written in log-probabilities. A token may be a part of a character only."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from ...model.text import TextCodec
from ...request import TokenLogprob
from ..wire.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from ..wire.completions import CompletionLogprobs
from ..wire.generation import PromptLogprob, PromptLogprobs

IMPOSSIBLE: Final = -9999.0
"""OpenAI's log-probability of what cannot be: JSON has no minus infinity."""


class TokenTexts:
    """Texts of single tokens."""

    def __init__(self, codec: TextCodec | None, *, as_ids: bool = False, skip_special_tokens: bool = True) -> None:
        """``codec``: ``None``: the model has none. ``as_ids``: write ``token_id:7``. ``skip_special_tokens``: as in the
        making of the text.
        """
        self._codec = codec
        self._as_ids = as_ids or codec is None
        self._skips = skip_special_tokens
        self._found: dict[int, tuple[str, list[int] | None]] = {}
        """Name and bytes of tokens: the same ones come again and again, as alternatives above all."""

    def raw(self, token: int) -> bytes:
        """The bytes of its text; none when the model has no tokenizer."""
        return b"" if self._codec is None else self._codec.token_bytes(token)

    def name(self, token: int) -> str:
        """Its text, with U+FFFD for parts of characters."""
        return f"token_id:{token}" if self._as_ids else self.raw(token).decode("utf-8", "replace")

    def distinct_name(self, token: int) -> str:
        """Its text, or for parts of characters their bytes, so that different tokens keep different names."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def shown(self, token: int) -> bytes:
        """The bytes that it adds to the text: none for a special token that is skipped."""
        raw = self.raw(token)
        if self._codec is None or not self._skips:
            return raw
        return b"" if self._codec.special_token_id(raw.decode("utf-8", "replace")) == token else raw

    def chat_logprobs(self, scores: Sequence[TokenLogprob]) -> ChatLogprobs:
        """In the form of chat completions."""
        return ChatLogprobs([self._chat_logprob(score) for score in scores])

    def prompt_logprobs(self, scores: Sequence[TokenLogprob | None], most: int) -> PromptLogprobs:
        """In vLLM's form, with at most ``most`` alternatives."""
        return [None if score is None else self._ranked(score, most) for score in scores]

    def _chat_logprob(self, score: TokenLogprob) -> ChatTokenLogprob:
        top: list[TopLogprob] = []
        for token, value in score.top:
            name, raw = self._written(token)
            top.append(TopLogprob(name, finite(value), raw))
        name, raw = self._written(score.token_id)
        return ChatTokenLogprob(name, finite(score.logprob), raw, top)

    def _written(self, token: int) -> tuple[str, list[int] | None]:
        if token not in self._found:
            raw = None if self._codec is None else list(self.raw(token))
            self._found[token] = self.name(token), raw
        return self._found[token]

    def _ranked(self, score: TokenLogprob, most: int) -> dict[str, PromptLogprob]:
        top = score.top[:most]
        ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
        return {
            str(token): PromptLogprob(finite(value), ranks.get(token), self.name(token))
            for token, value in ((score.token_id, score.logprob), *top)
        }


class CompletionLog:
    """The log-probabilities of one sample in the form of completions, as they come in."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, ids: Sequence[int], scores: Sequence[TokenLogprob | None], most: int) -> CompletionLogprobs:
        """The entries of tokens that come next. ``most``: alternatives with each."""
        return CompletionLogprobs(
            [self._texts.distinct_name(token) for token in ids],
            [None if score is None else finite(score.logprob) for score in scores],
            [None if score is None else self._alternatives(score, most) for score in scores],
            [self._start(token) for token in ids],
        )

    def _start(self, token: int) -> int:
        start = self._offset
        self._offset += len(self._decoder.decode(self._texts.shown(token)))
        return start

    def _alternatives(self, score: TokenLogprob, most: int) -> dict[str, float]:
        found = {self._texts.distinct_name(score.token_id): finite(score.logprob)}
        for token, value in score.top[:most]:
            found.setdefault(self._texts.distinct_name(token), finite(value))
        return found


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, IMPOSSIBLE)
