"""For tests of output formats: a tokenizer with all of ASCII, and formats with a second opinion on what fits them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.engine.output_format import OutputFormat
from octavo.engine.request import Chat
from octavo.errors import InvalidRequest

WORDS = ("ab", "abc", '"a"', '":', "true", "[1", "12", "cd", '{"')
END = 128 + len(WORDS)
"""The end token; its name could be a text, too."""
SIZE = END + 1
HEAD = SIZE + 11
"""Ids that a padded head has logits for."""


class WordCodec:
    """Id i is the character chr(i); behind them come some words, then ``<end>``."""

    def encode(self, text: str) -> list[int]:
        """The longest word that fits, from the left."""
        ids = []
        while text:
            name, token = max((n, t) for t, n in enumerate(self._names()) if t != END and text.startswith(n))
            ids.append(token)
            text = text[len(name) :]
        return ids

    def encode_chat(self, chat: Chat) -> list[int]:
        raise InvalidRequest("no chats")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        names = self._names()
        return "".join(names[t] for t in ids if 0 <= t < END or (t == END and not skip_special_tokens))

    def special_token_id(self, text: str) -> int | None:
        return END if text == "<end>" else None

    def token_bytes(self, token_id: int) -> bytes:
        return self._names()[token_id].encode() if 0 <= token_id < SIZE else b""

    @staticmethod
    def _names() -> tuple[str, ...]:
        return (*map(chr, range(128)), *WORDS, "<end>")


class Case(NamedTuple):
    """A format and who says whether a complete text keeps to it."""

    wanted: OutputFormat
    holds: Callable[[str], bool]


def some_regex(rng: random.Random) -> Case:
    pattern = _pattern(rng, 3)
    return Case(OutputFormat.regex(pattern), lambda text: re.fullmatch(pattern, text) is not None)


def some_schema(rng: random.Random) -> Case:
    schema = _schema(rng, 2)
    return Case(OutputFormat.json_schema(schema), lambda text: _fits(json.loads(text), schema))


def some_choice(rng: random.Random) -> Case:
    choices = [_literal(rng) for _ in range(rng.randint(1, 4))]
    return Case(OutputFormat.choice(choices), lambda text: text in choices)


def some_case(rng: random.Random) -> Case:
    return rng.choice([some_regex, some_schema, some_choice])(rng)


def _pattern(rng: random.Random, depth: int) -> str:
    """Never matches the empty text alone: every pattern begins with a letter."""
    parts = [rng.choice("abcxyz")]
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(5 if depth else 3)
        if kind == 0:
            parts.append(f"[a-d]{{{rng.randint(0, 2)},{rng.randint(2, 5)}}}")
        elif kind == 1:
            parts.append(rng.choice(["[0-9]+", "ab?", r"\.", "[^a-z\\n]?", "(?:12|true)"]))
        elif kind == 2:
            parts.append(re.escape(_literal(rng)))
        else:
            inner = [_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            parts.append("(?:" + "|".join(inner) + ")" + rng.choice(["", "?", "*", "{1,2}"]))
    return "".join(parts)


def _literal(rng: random.Random) -> str:
    return "".join(rng.choice(['a"', "ab", "c", "<end>", "1", " ", "\\", "\n", "{"]) for _ in range(rng.randint(1, 3)))


def _schema(rng: random.Random, depth: int) -> dict[str, object]:
    kind = rng.randrange(7 if depth else 4)
    if kind == 0:
        return {"type": "integer", "minimum": -20, "maximum": 1000}
    if kind == 1:
        return {"enum": ["a", 1, True, None, 'x"y'][: rng.randint(1, 5)]}
    if kind == 2:
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == 3:
        return {"type": "boolean"}
    if kind == 4:
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": 1, "maxItems": 3}
    names = [f"k{i}" for i in range(rng.randint(1, 3))]
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": names[: rng.randint(0, len(names))],
        "additionalProperties": False,
    }


def _fits(value: object, schema: dict[str, object]) -> bool:
    """Whether a JSON value is of a schema as they are made above."""
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])  # type: ignore[attr-defined]
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and -20 <= value <= 1000
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]  # type: ignore[operator]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "array":
        items = schema["items"]
        return isinstance(value, list) and 1 <= len(value) <= 3 and all(_fits(each, items) for each in value)  # type: ignore[arg-type]
    properties: dict[str, dict[str, object]] = schema["properties"]  # type: ignore[assignment]
    required: list[str] = schema["required"]  # type: ignore[assignment]
    return (
        isinstance(value, dict)
        and set(required) <= value.keys() <= properties.keys()
        and all(_fits(each, properties[name]) for name, each in value.items())
    )
