"""What tool formats and their callers pass to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, object] | None = None
    """JSON schema of its arguments, an object; ``None``: it takes none."""
    strict: bool = False
    """Whether a schema that cannot be enforced to the letter is refused, rather than enforced as far as it can be."""


class Invocation(NamedTuple):
    """A call as it stands in the text."""

    name: str
    arguments: str
    """The text of a JSON object."""


class ToolCall(NamedTuple):
    """A call as the client gets it."""

    name: str
    arguments: str
    """The text of a JSON object."""
    id: str
    """By which the client's answer refers to it."""


class TextPiece(NamedTuple):
    """What is no call."""

    text: str


Piece: TypeAlias = TextPiece | ToolCall
