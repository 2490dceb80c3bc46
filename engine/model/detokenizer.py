"""Text while it grows: from token ids, a few at a time, to characters that will not change any more."""

from __future__ import annotations

from collections.abc import Sequence

from .text import TextCodec

REPLACEMENT = "\ufffd"
KEPT_IDS = 8
"""Ids kept when the window is cut. An unfinished UTF-8 character has at most 3 bytes, so at most 3 ids; the others are
context, which the decoders of some tokenizers need to tell the middle of a text from its start (leading spaces)."""
MAX_IDS = 16
"""The window is cut when it is longer."""


class IncrementalDetokenizer:
    """Decodes a stream of ids so that the pieces join to ``codec.decode`` of all of them.

    Only a window of the last ids is decoded, so the time per token is flat however long the output is. Decoding the
    window again yields the text that was given out before, plus what is new; UTF-8 finds its own character boundaries,
    so where the window starts does not matter. Whatever follows, all of that text is final except one trailing U+FFFD,
    which may stand for a character whose last bytes are still to come: it is held back until the next id, never longer.
    """

    __slots__ = ("_codec", "_given", "_skip", "_window")

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool = True) -> None:
        """``skip_special_tokens``: leave the text of special tokens out."""
        self._codec = codec
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._given = 0
        """How many characters of the window's text were given out."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` make final: everything but at most one unfinished character at the end."""
        self._window.extend(ids)
        text = self._decode(self._window)
        final = len(text) - text.endswith(REPLACEMENT)
        delta = text[self._given : final]
        self._given = final
        if len(self._window) > MAX_IDS:
            self._cut(len(text) - final)
        return delta

    def flush(self) -> str:
        """The unfinished character, as U+FFFD, when one was held back; call it at the end of the output."""
        text = self._decode(self._window)
        delta = text[self._given :]
        self._given = len(text)
        return delta

    def copy(self) -> IncrementalDetokenizer:
        """An independent detokenizer with the same past, for a fork of the sequence."""
        twin = IncrementalDetokenizer(self._codec, skip_special_tokens=self._skip)
        twin._window = list(self._window)
        twin._given = self._given
        return twin

    def _cut(self, held: int) -> None:
        """Shorten the window to its last ids that have text; ``held`` characters of it are still to be given out."""
        kept: list[int] = []
        for token in reversed(self._window):
            if self._has_text(token):
                kept.append(token)
            if len(kept) == KEPT_IDS:
                break
        self._window = kept[::-1]
        self._given = len(self._decode(self._window)) - held

    def _has_text(self, token: int) -> bool:
        """Whether the id adds anything. Doubled, as a token that is only a space may vanish at the start of a text."""
        return bool(self._decode((token, token)))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=self._skip)
