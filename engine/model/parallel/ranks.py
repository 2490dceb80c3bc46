"""The processes that a model is split over, as those see it who load it: doing things together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """Some processes that do the same."""

    @property
    def size(self) -> int:
        """How many they are."""

    def together(self, act: Callable[[], T], *, unhurried: bool = False) -> T:
        """Do ``act``, as all of them do, and wait until all are done.

        :param unhurried: some may take much longer than others.
        :raises ModelError: when it failed on others.
        :raises Exception: whatever it raised here.
        """

    def require_same(self, what: str, mine: str) -> None:
        """Check that all have the same.

        :param mine: at most 500 bytes.
        :raises ModelError: on all of them, when they have not.
        """


class Alone:
    """One process that has the whole model."""

    @property
    def size(self) -> int:
        """One."""
        return 1

    def together(self, act: Callable[[], T], *, unhurried: bool = False) -> T:
        """Do it."""
        return act()

    def require_same(self, what: str, mine: str) -> None:
        """It is."""
