"""Moment: the engine's clock as operations of the cache see it."""

from __future__ import annotations

from collections.abc import Callable


class Moment:
    """Stands still while one operation of the cache runs, so all that a policy hears of it has one time.

    Whoever plays a recording back has one time for each line, and must come to the same order of entries.
    """

    __slots__ = ("clock", "now")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        """What time it is meanwhile, to tell how long something takes."""
        self.now = clock()

    def __call__(self) -> float:
        return self.now

    def begin(self) -> float:
        """An operation begins; returns when."""
        self.now = self.clock()
        return self.now
