"""The contract of tool formats: how a family of models writes down that it wants a function called.

There is no common notation: each family was trained on its own. A format reads calls out of the text while it is
generated, and gives the grammar that forces one. What goes into the prompt is the business of the chat template.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from ...output_format import OutputFormat
from .cursor import Cursor, Reading
from .grammar import SpecialTokenId, no_special_tokens
from .pieces import Invocation, Piece, TextPiece, Tool, ToolCall
from .reader import ToolReader

__all__ = [
    "Cursor",
    "Invocation",
    "Piece",
    "Reading",
    "SpecialTokenId",
    "TextPiece",
    "Tool",
    "ToolCall",
    "ToolFormat",
    "ToolReader",
    "no_special_tokens",
]


class ToolFormat(ABC):
    """How one family writes calls. An object has no state: one serves all requests."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    """Another major version than the server's is refused; minor ones only add methods with defaults."""
    openings: ClassVar[tuple[str, ...]] = ()
    """What a call begins with, wherever it stands. None begins with another."""
    openings_in_front: ClassVar[tuple[str, ...]] = ()
    """What a call begins with when nothing but space and other calls stand before it: too common elsewhere."""
    padding: ClassVar[str] = " \t\r\n"
    """Characters that mean nothing right behind a call."""
    has_special_tokens: ClassVar[bool] = True
    """Whether its marks are special tokens for some models. They have to be in the text to be seen, so a request that
    offers tools then needs ``skip_special_tokens=False``."""

    @abstractmethod
    def matches(self, chat_template: str) -> bool:
        """Whether a model with this chat template (Jinja source) writes its calls like this."""

    @abstractmethod
    def read(self, cursor: Cursor, tools: Sequence[Tool]) -> Reading[Sequence[Invocation] | None]:
        """Read the calls that begin with the opening at the cursor; ``None``: there is none after all.

        Leaves the cursor behind what it has read. Without a call everything up to there is text, and what follows may
        begin another call: so a reading that fails stops at the first character that is in its way. Yields only to
        wait for text, and not when the cursor has ended.
        """

    @abstractmethod
    def output_format(
        self,
        tools: Sequence[Tool],
        choice: str | None = None,
        *,
        parallel: bool = True,
        special_token_id: SpecialTokenId = no_special_tokens,
    ) -> OutputFormat:
        """The grammar of an answer that is nothing but calls, as :meth:`read` reads them.

        ``choice``: the name of the one function to be called, once; ``None``: any of ``tools``, at least once, and no
        more than once unless ``parallel``.

        :raises InvalidRequest: when there is no such tool, or its calls cannot be written in this notation.
        """

    def call_id(self, number: str) -> str:
        """The id of a call. ``number``: 32 random hexadecimal digits."""
        return f"call_{number}"

    def reader(self, tools: Sequence[Tool], new_number: Callable[[], str]) -> ToolReader:
        """A reader for one answer. ``tools``: those of the request. ``new_number``: gives 32 random hexadecimal digits
        at each call, as ``lambda: uuid.uuid4().hex`` does."""
        return ToolReader(self, tools, new_number)
