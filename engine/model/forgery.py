"""Keeps what users write from becoming special tokens.

A template makes one text of its own special tokens and of what users wrote, so that a user could write the end of a
turn and begin another one in somebody else's name. Therefore marks, characters that occur nowhere else, are put round
special tokens that are spelled out in a user's string, before the template runs. What stands between marks afterwards
is encoded as plain text. The marks survive what templates do with strings: trimming, splitting, and JSON, even where
it escapes all that is not ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from ...errors import InvalidRequest
from .chat_messages import Json, PlainChat
from .fast_tokenizer import FastBackend, encoded

PRIVATE_USE = range(0xE000, 0xF900)
"""Unicode's characters without a meaning."""


class Span(NamedTuple):
    """Where a string spells a special token, in characters."""

    start: int
    end: int


class Marks(NamedTuple):
    """Characters that stand in no string of a conversation."""

    begin: str
    end: str
    between: str
    """Put where a string's edge may be a part of a special token, to keep it from its neighbour."""


class Forgeries:
    """Finds special tokens in strings. May be used from any thread."""

    def __init__(self, backend: FastBackend, special: Mapping[int, str], unknown_id: int | None) -> None:
        """``special``: text of each special token. ``unknown_id``: the one that words become that nobody knows."""
        self._backend = backend
        self._special = special
        self._unknown_id = unknown_id
        names = [text.lower() for text in special.values()]
        self._heads = {name[:length] for name in names for length in range(1, len(name))}
        self._tails = {name[length:] for name in names for length in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        self._all = "\0".join(names)

    def spans(self, text: str) -> list[Span]:
        """Where ``text`` spells special tokens, one or a row of them. The tokenizer itself is asked: it may normalise
        the text first.
        """
        encoding = encoded(self._backend, text, add_special_tokens=False)
        spans: list[Span] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if not self._is_special(token, text[start:end]):
                continue
            if spans and spans[-1].end == start:
                start = spans.pop().start  # noqa: PLW2901  # they are one
            spans.append(Span(start, end))
        return spans

    def begins_inside(self, text: str) -> bool:
        """Whether ``text`` begins with the end of a special token."""
        start = text[: self._longest].lower()
        return any(start[:length] in self._tails for length in range(1, len(start) + 1))

    def ends_inside(self, text: str) -> bool:
        """Whether ``text`` ends with the beginning of a special token."""
        end = text[-self._longest :].lower()
        return any(end[-length:] in self._heads for length in range(1, len(end) + 1))

    def is_inside(self, text: str) -> bool:
        """Whether all of ``text`` is a part of a special token."""
        return 0 < len(text) < self._longest and text.lower() in self._all

    def specials(self, ids: Iterable[int]) -> list[int]:
        """The special tokens of ``ids``, but for the one of unknown words."""
        return [token for token in ids if token in self._special and token != self._unknown_id]

    def _is_special(self, token: int, text: str) -> bool:
        """Whether ``text`` became a special token by being its name, and not as a word that the vocabulary lacks."""
        return token in self._special and (token != self._unknown_id or text == self._special[token])


def strings(chat: PlainChat) -> set[str]:
    """Every string that came from the user, names of fields as well, but for the roles: those are known ones."""
    parts: list[Json] = [*chat.messages, *chat.tools, chat.options]
    return {text for part in parts for text in _strings(part)} - {str(message["role"]) for message in chat.messages}


def rewritten(chat: PlainChat, texts: Mapping[str, str]) -> PlainChat:
    """``chat`` with other strings for some of its strings."""

    def rewrite(value: Json) -> Json:
        if isinstance(value, str):
            return texts.get(value, value)
        if isinstance(value, list):
            return [rewrite(item) for item in value]
        if isinstance(value, dict):
            return rewrite_object(value)
        return value

    def rewrite_object(value: dict[str, Json]) -> dict[str, Json]:
        return {texts.get(name, name): rewrite(item) for name, item in value.items()}

    messages = [{**rewrite_object(message), "role": message["role"]} for message in chat.messages]
    tools = [rewrite(tool) for tool in chat.tools]
    return chat._replace(messages=messages, tools=tools, options=rewrite_object(chat.options))


def unused_marks(texts: Iterable[str]) -> Marks:
    """Three private-use characters that occur in none of the texts, not even as JSON escapes.

    :raises InvalidRequest: when there are none left.
    """
    used: set[str] = set()
    escaped: set[str] = set()
    for text in texts:
        used.update(text)
        escaped.update(re.findall(r"\\u[ef][0-9a-f]{3}", text))
    candidates = map(chr, PRIVATE_USE)
    unused = (mark for mark in candidates if mark not in used and _escape(mark) not in escaped)
    free = list(islice(unused, len(Marks._fields)))
    if len(free) < len(Marks._fields):
        raise InvalidRequest("the messages use every private-use character and a special token; remove either")
    return Marks(*free)


def marked(text: str, spans: Iterable[Span], marks: Marks) -> str:
    """``text`` with marks round each span."""
    pieces, at = [], 0
    for start, end in spans:
        pieces += [text[at:start], marks.begin, text[start:end], marks.end]
        at = end
    return "".join([*pieces, text[at:]])


def pieces(rendered: str, marks: Marks) -> list[str | None]:
    """A text cut at the marks, which are dropped: [text, forged, text, forged, ..., text].

    Where a mark has lost its partner (a template may split strings), it still parts what it stood between, and the
    forged piece there is ``None``.
    """
    begin, end, between = map(_written, marks)
    any_mark = f"(?:{begin}|{end}|{between})"
    return re.split(f"{begin}((?:(?!{any_mark}).)*){end}|{any_mark}", rendered, flags=re.DOTALL)


def _strings(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings(item)


def _written(mark: str) -> str:
    """A pattern for what JSON writers make of a mark."""
    return f"(?:{mark}|{re.escape(_escape(mark))})"


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"
