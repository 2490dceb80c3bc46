"""Cursor: reads a text of which more is to come, so that a parser can be written as if all of it were there.

A parser is a generator: it yields when it needs more text than there is, and is resumed when there is more, or when
there will be none. It never looks at a character twice, so reading takes time in proportion to the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

R = TypeVar("R")
Reading: TypeAlias = Generator[None, None, R]
"""A parser that comes to an ``R``."""

SPACE: Final = " \t\r\n"
CLOSING: Final = {"{": "}", "[": "]", "(": ")"}
JSON_OUTSIDE_STRINGS: Final = frozenset(SPACE + ':,+-.0123456789eE"' + "truefalsenull")
MAX_DEPTH: Final = 100
"""Brackets within brackets; what is deeper is no call (and would be a burden to the parsers of JSON and Python)."""


class Cursor:
    """A place in a growing text. All readings start there and leave it behind what they have taken."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.ended = False
        """Whether no more text will come."""

    def peek(self) -> Reading[str]:
        """The next character; nothing at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def space(self) -> Reading[None]:
        """Skip white space."""
        while (char := (yield from self.peek())) and char in SPACE:
            self.at += 1

    def literal(self, *choices: str) -> Reading[str | None]:
        """One of these texts; ``None``, and nothing taken, when none stands here. None may begin with another."""
        while True:
            ahead = self.text[self.at : self.at + max(map(len, choices))]
            for choice in choices:
                if ahead.startswith(choice):
                    self.at += len(choice)
                    return choice
            if self.ended or not any(choice.startswith(ahead) for choice in choices):
                return None
            yield

    def closing(self, literal: str) -> Reading[bool]:
        """Space and then ``literal``. Whether it is there, whole or as far as the text goes: an answer that ends within
        its last mark, or right before it, is complete all the same."""
        yield from self.space()
        if (yield from self.literal(literal)):
            return True
        rest = self.text[self.at :]
        is_cut = self.ended and literal.startswith(rest)
        self.at += len(rest) if is_cut else 0
        return is_cut

    def until(self, literal: str) -> Reading[str | None]:
        """What stands before the next ``literal``, which is taken, too; ``None``, and all taken, if none comes."""
        start = searched = self.at
        while (found := self.text.find(literal, searched)) < 0:
            if self.ended:
                self.at = len(self.text)
                return None
            searched = max(start, len(self.text) - len(literal) + 1)
            yield
        self.at = found + len(literal)
        return self.text[start:found]

    def word(self, characters: re.Pattern[str]) -> Reading[str]:
        """All characters from here on that match."""
        start = self.at
        while (char := (yield from self.peek())) and characters.match(char):
            self.at += 1
        return self.text[start : self.at]

    def json(self) -> Reading[str | None]:
        """The text of a JSON object or array; ``None`` at the first character that cannot be in one."""
        return (yield from self.brackets('"', JSON_OUTSIDE_STRINGS))

    def brackets(self, quotes: str, allowed: frozenset[str] | None = None) -> Reading[str | None]:
        """From the bracket here to the one that closes it; ``None`` at the first character that cannot be.

        ``quotes``: characters that begin and end a string, in which brackets mean nothing and a backslash takes the
        next character with it. ``allowed``: characters outside strings, apart from brackets; ``None``: all.
        """
        start, open_brackets = self.at, list[str]()
        while char := (yield from self.peek()):
            if not _follows(char, open_brackets, allowed):
                return None
            self.at += 1
            if char in quotes:
                yield from self._string(char)
            if not open_brackets:
                return self.text[start : self.at]
        return None

    def value(self, quotes: str, stops: str) -> Reading[str | None]:
        """What stands before the next of ``stops`` outside strings and brackets; ``None`` if none comes."""
        start = self.at
        while (char := (yield from self.peek())) and char not in stops:
            if char in CLOSING:
                if (yield from self.brackets(quotes)) is None:
                    return None
                continue
            self.at += 1
            if char in quotes:
                yield from self._string(char)
        return self.text[start : self.at] if char else None

    def _string(self, quote: str) -> Reading[None]:
        """The rest of a string, behind its first quote."""
        special = re.compile(rf"[\\{quote}]")
        while True:
            found = special.search(self.text, self.at)
            self.at = len(self.text) if found is None else found.end()
            if found is not None and found.group() == quote:
                return
            if not (yield from self.peek()):
                return
            self.at += found is not None  # what a backslash stands before


def _follows(char: str, open_brackets: list[str], allowed: frozenset[str] | None) -> bool:
    """Whether ``char`` may stand here; notes what it opens or closes."""
    if char in CLOSING:
        open_brackets.append(CLOSING[char])
        return len(open_brackets) <= MAX_DEPTH
    if char in "}])":
        return bool(open_brackets) and open_brackets.pop() == char
    return bool(open_brackets) and (allowed is None or char in allowed)
