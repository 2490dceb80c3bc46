"""Step edges: how others reach the loop. What they hand in is carried out when no step is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import anyio

T = TypeVar("T")


class Edges(Protocol):
    """The loop, as those see it who work beside it."""

    def post(self, change: Callable[[], None]) -> None:
        """Let ``change`` run at the next step edge."""

    def wake(self) -> None:
        """Let an idle loop look again; what has changed it cannot see by itself."""

    async def at_edge(self, look: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """What ``look`` returns or raises at the next step edge. When the caller is cancelled before, nobody looks;
        when it is cancelled just after, ``undo`` takes what was found, at the next edge.

        :raises EngineClosed: when the loop ends before.
        """


class Question(Generic[T]):
    """Something to be looked up at a step edge, and who waits for it."""

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._found: list[T] = []
        self._error: Exception | None = None
        self._done = anyio.Event()
        self._withdrawn = False

    def withdraw(self) -> list[T]:
        """Nobody waits any more; returns what was found, if anything."""
        self._withdrawn = True
        return self._found

    def answer(self) -> None:
        if self._withdrawn:
            return
        try:
            self._found.append(self._look())
        except Exception as error:  # noqa: BLE001  # it belongs to who asked
            self._error = error
        self._done.set()

    async def answered(self) -> T:
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._found[0]
