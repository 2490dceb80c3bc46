"""Guides by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over the bytes of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ...errors import CannotContinue, ModelError, caused, describe
from .guide_trial import compiled
from .guides import UInt32Array
from .text import TextCodec

UNWRITABLE = "it wants a text that this model's tokens cannot write"
MAX_FORCED = 1024
"""Bytes of a forced text that are spelled at a time; several times the longest token."""
MAX_TOKEN_BYTES = 64
"""Longer tokens are not used where text that is forced is spelled out greedily."""


class GuideVocabulary:
    """The tokens of a model as llguidance wants them. Made once; takes about a second for 100,000 tokens.

    One end token more than the model has stands behind them all, so that a model without any can be guided, too.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, end_ids: frozenset[int]) -> None:
        """``end_ids``: what the model ends a text with; never a part of the text."""
        self.end_ids = sorted(token for token in end_ids if token < vocab_size) or [vocab_size]
        tokens = [codec.token_bytes(token) for token in range(vocab_size)]
        special = {token for token in range(vocab_size) if tokens[token] and _has_no_text(codec, token)}
        spelling = Spelling(codec, tokens, frozenset(special | end_ids), self.end_ids[0])
        self._tokenizer = LLTokenizer(TokenizerWrapper(spelling), eos_token=self.end_ids)

    def guide(self, kind: str, text: str) -> LLGuide:
        """A guide at the beginning of a text.

        :raises ValueError: when the definition is no good, or only the empty text would do.
        """
        try:
            guide = LLGuide(compiled(self._tokenizer, kind, text))
        except ValueError as error:
            raise ValueError(UNWRITABLE if UNWRITABLE in str(error) else str(error)) from error
        ends = set(self.end_ids)
        words = guide.allowed()
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        if ends.issuperset(np.flatnonzero(bits).tolist()):
            raise ValueError("only the empty text would keep to it, or none that this model's tokens can write")
        return guide


class Spelling:
    """How text is written in tokens, for the parts of a form that are forced. What llguidance asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, codec: TextCodec, tokens: Sequence[bytes], special: frozenset[int], eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = [*sorted(special), len(tokens)]
        self.tokens = [*tokens, b"<end of text>"]
        self._codec = codec
        self._special = special
        self._ids = {name: token for token, name in enumerate(tokens) if name and token not in special}

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens that the model knows the text by, as far as they spell it; else any that do.

        :raises ValueError: when none do. The message shows nothing of the text.
        """
        wanted = _head(text.encode() if isinstance(text, str) else text)
        ids = self._encoded(wanted)
        return ids if b"".join(self.tokens[token] for token in ids) == wanted else list(self._greedy(wanted))

    def _encoded(self, text: bytes) -> list[int]:
        """Without the special tokens that tokenizers begin a text with."""
        try:
            return [token for token in self._codec.encode(text.decode()) if token not in self._special]
        except Exception:  # noqa: BLE001  # a tokenizer that does not know a character
            return []

    def _greedy(self, text: bytes) -> Iterator[int]:
        start = 0
        while start < len(text):
            sizes = range(min(MAX_TOKEN_BYTES, len(text) - start), 0, -1)
            size = next((size for size in sizes if text[start : start + size] in self._ids), None)
            if size is None:
                raise ValueError(UNWRITABLE)
            yield self._ids[text[start : start + size]]
            start += size


class LLGuide:
    """A :class:`~octavo.engine.model.guides.Guide`."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        """``matcher`` belongs to the guide from here on."""
        self._matcher = matcher

    def allowed(self) -> UInt32Array:
        """See :meth:`AllowedTokens.allowed`."""
        with _foreign():
            mask = self._matcher.compute_bitmask()
            fault = self._matcher.get_error() if self._matcher.is_error() else None
        if fault is not None:
            raise _told(fault)
        return np.frombuffer(mask, dtype=np.uint32)

    @property
    def is_done(self) -> bool:
        with _foreign():
            return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        """See :meth:`Guide.accept`."""
        with _foreign():
            accepted = self._matcher.consume_token(token)
            fault = None if accepted else self._matcher.get_error()
        if fault is not None:
            raise _told(fault)

    def copy(self) -> LLGuide:
        """See :meth:`Guide.copy`."""
        with _foreign():
            return LLGuide(self._matcher.deep_copy())


def _head(text: bytes) -> bytes:
    """Of a long text that is forced, only the next tokens are wanted, and it is asked for with each of them."""
    return text if len(text) <= MAX_FORCED else text[:MAX_FORCED].decode(errors="ignore").encode()


def _told(fault: str) -> ModelError | CannotContinue:
    """What went wrong in the middle of a text. llguidance's own words may show the text."""
    if "doesn't satisfy" in fault:
        return ModelError("a token was chosen that the output format does not allow")
    if UNWRITABLE in fault:
        return CannotContinue(f"the output format cannot be followed any further: {UNWRITABLE}")
    return CannotContinue("the output format is too complex to be followed any further")


@contextmanager
def _foreign() -> Iterator[None]:
    """Panics of native code are no ``Exception``: they would end the event loop."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise caused(ModelError(f"llguidance failed: {describe(error)}"), error) from error


def _has_no_text(codec: TextCodec, token: int) -> bool:
    """Whether it is a special token. Doubled, as a token that is only a space may vanish at the start of a text."""
    return not codec.decode((token, token), skip_special_tokens=True)
