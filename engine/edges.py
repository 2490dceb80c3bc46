"""Step edges: how others reach the loop. What they hand in is carried out when no step is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

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
