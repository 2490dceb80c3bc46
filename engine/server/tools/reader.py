"""ToolReader: parts the text of an answer, while it comes in, into text and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from .cursor import SPACE, Cursor, Reading
from .pieces import Invocation, Piece, TextPiece, Tool, ToolCall


class Notation(Protocol):
    """What a reader has to know of a format; see :class:`~octavo.engine.server.tools.base.ToolFormat`."""

    @property
    def openings(self) -> tuple[str, ...]: ...
    @property
    def openings_in_front(self) -> tuple[str, ...]: ...
    @property
    def padding(self) -> str: ...
    def read(self, cursor: Cursor, tools: Sequence[Tool]) -> Reading[Sequence[Invocation] | None]: ...
    def call_id(self, number: str) -> str: ...


class ToolReader:
    """Reads one answer. The same text gives the same pieces, however it is cut into deltas (but for the borders between
    texts that follow each other).

    Text goes through as it is, but for white space next to a call, which belongs to the notation. What may become a
    call is held back until it is one, or cannot be: then it is text like any other, whole.
    """

    def __init__(self, notation: Notation, tools: Sequence[Tool], new_number: Callable[[], str]) -> None:
        """``new_number``: gives 32 random hexadecimal digits at each call."""
        self._notation = notation
        self._tools = tools
        self._new_number = new_number
        self._cursor = Cursor("")
        """At the beginning of what was not handed out, or within it while a call is read."""
        self._reading: Reading[Sequence[Invocation] | None] | None = None
        self._space = ""
        """White space behind text. It is text itself, unless a call follows."""
        self._is_in_front = True
        """Whether no text was handed out yet."""
        self._is_behind_call = False

    def push(self, delta: str) -> list[Piece]:
        """What is certain now that ``delta`` has come."""
        return list(self._advance(delta, ended=False))

    def finish(self) -> list[Piece]:
        """What is left, now that nothing more will come."""
        return [*self._advance("", ended=True), *([TextPiece(self._space)] if self._space else [])]

    def _advance(self, delta: str, *, ended: bool) -> Iterator[Piece]:
        self._cursor.text += delta
        self._cursor.ended = ended
        while True:
            if self._reading is None:
                yield from self._pass_text()
            if self._reading is None:
                return
            try:
                next(self._reading)
            except StopIteration as done:
                yield from self._hand_out(done.value)
            else:
                return

    def _pass_text(self) -> Iterator[Piece]:
        """Hand out what stands before the next opening, and begin to read there."""
        text = self._cursor.text
        start, is_whole = self._opening(text)
        if self._cursor.ended and not is_whole:
            start = len(text)
        yield from self._as_text(text[:start])
        self._go_on(text[start:])
        if is_whole:
            self._reading = self._notation.read(self._cursor, self._tools)

    def _hand_out(self, found: Sequence[Invocation] | None) -> Iterator[Piece]:
        """What was read is text, or calls."""
        self._reading = None
        text, end = self._cursor.text, self._cursor.at
        if found is None:
            end = max(end, 1)  # an opening that begins nothing must not be found again
            yield from self._as_text(text[:end])
        else:
            self._space, self._is_behind_call = "", True
            yield from (ToolCall(name, arguments, self._new_id()) for name, arguments in found)
        self._go_on(text[end:])

    def _go_on(self, text: str) -> None:
        ended = self._cursor.ended
        self._cursor = Cursor(text)
        self._cursor.ended = ended

    def _as_text(self, text: str) -> Iterator[Piece]:
        if self._is_behind_call:
            text = text.lstrip(self._notation.padding)
        if not text:
            return
        self._is_behind_call = False
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._is_in_front = False
            yield TextPiece(shown)

    def _opening(self, text: str) -> tuple[int, bool]:
        """Where the first opening stands, and whether it is whole; at the end, if there is none."""
        whole = [at for opening in self._notation.openings if (at := text.find(opening)) >= 0]
        cut = [_cut_at(text, opening) for opening in self._notation.openings]
        if self._is_in_front:
            skipped = len(text) - len(text.lstrip(self._notation.padding if self._is_behind_call else SPACE))
            for opening in self._notation.openings_in_front:
                whole += [skipped] if text.startswith(opening, skipped) else []
                cut += [skipped] if opening.startswith(text[skipped:]) else []
        return (min(whole), True) if whole else (min(cut, default=len(text)), False)

    def _new_id(self) -> str:
        return self._notation.call_id(self._new_number())


def _cut_at(text: str, opening: str) -> int:
    """Where the end of ``text`` could be the beginning of ``opening``; its length: nowhere."""
    lengths = range(min(len(text), len(opening) - 1), 0, -1)
    return next((len(text) - length for length in lengths if text.endswith(opening[:length])), len(text))
