"""Breaker: leaves a faulty tier alone for a while, so that nobody waits for it again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

BreakerState: TypeAlias = Literal["closed", "open", "trial"]
LONGEST_PAUSE = 60.0


class Breaker:
    """Counts failures in a row. Enough of them open it: nothing is admitted for a pause, then one call on trial. Its
    success closes the breaker, its failure doubles the pause.

    ``state``: ``closed`` (calls go through), ``open`` (pausing, or the pause is over and nobody has called yet),
    ``trial`` (one call is finding out).
    """

    def __init__(
        self, failures: int, pause: float, clock: Callable[[], float], *, longest: float = LONGEST_PAUSE
    ) -> None:
        """``failures`` in a row that open it; ``pause`` in seconds of ``clock`` (monotonic), at most ``longest``."""
        self.state: BreakerState = "closed"
        self._limit = failures
        self._first_pause = min(pause, longest)
        self._longest = longest
        self._clock = clock
        self._era = 0
        self._failures = 0
        self._pause = self._first_pause
        self._until = 0.0

    def usable(self) -> bool:
        """Whether a call would be admitted now. Changes nothing."""
        return self.state == "closed" or (self.state == "open" and self._clock() >= self._until)

    def admit(self) -> int | None:
        """Let one call through; what it returns goes back with ``report``. ``None``: not now."""
        if not self.usable():
            return None
        if self.state == "open":
            self._turn("trial")
        return self._era

    def report(self, era: int, success: bool | None) -> None:
        """How an admitted call ended; ``None``: it was given up, which says nothing about the tier.

        A call that began before the breaker last changed its state is too old to count.
        """
        if era != self._era:
            return
        if self.state == "trial":
            self._judge(success)
        elif success:
            self._failures = 0
        elif success is not None:
            self._failures += 1
            if self._failures >= self._limit:
                self._open(self._first_pause)

    def _judge(self, success: bool | None) -> None:
        if success:
            self._failures = 0
            self._turn("closed")
        elif success is None:
            self._turn("open")  # the pause is over: the next call is the trial
        else:
            self._open(min(self._pause * 2, self._longest))

    def _open(self, pause: float) -> None:
        self._pause = pause
        self._until = self._clock() + pause
        self._turn("open")

    def _turn(self, state: BreakerState) -> None:
        self.state = state
        self._era += 1
