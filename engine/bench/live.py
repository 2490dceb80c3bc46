"""Live: how a run stands, with rates over the last seconds."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from .recorder import Recorder
from .rows import REFUSED

RATE_WINDOW = 10.0
"""Seconds over which rates are taken."""


class Live(NamedTuple):
    """One look."""

    phase: str
    seconds: float
    """Since the phase began."""
    done: int
    in_flight: int
    refused: int
    failed: int
    request_rate: float
    content_rate: float
    """Events with content a second: nearly tokens."""
    of: int | None = None
    """Requests in all, if they are bounded."""
    duration: float | None = None
    """Seconds in all, if they are."""

    @property
    def share(self) -> float | None:
        """How far it is, from 0 to 1; ``None``: nobody knows."""
        shares = []
        if self.of:
            shares.append(self.done / self.of)
        if self.duration:
            shares.append(self.seconds / self.duration)
        return min(1.0, max(shares)) if shares else None


class Screen(Protocol):
    """Where it is shown."""

    @property
    def interval(self) -> float:
        """Seconds between two looks."""

    def show(self, live: Live) -> None: ...


class _Mark(NamedTuple):
    moment: float
    done: int
    content_events: int


class Phase:
    """A part of a run that is watched."""

    def __init__(
        self, title: str, recorder: Recorder, start: float, *, of: int | None = None, duration: float | None = None
    ) -> None:
        self._title = title
        self._recorder = recorder
        self._start = start
        self._of = of
        self._duration = duration
        self._marks = deque([_Mark(start, 0, 0)])

    def look(self, now: float) -> Live:
        """How it stands at ``now``, which must not go back."""
        recorder = self._recorder
        mark = _Mark(now, len(recorder.rows), recorder.content_events)
        self._marks.append(mark)
        while now - self._marks[0].moment > RATE_WINDOW:
            self._marks.popleft()
        first = self._marks[0]
        seconds = now - first.moment
        return Live(
            self._title,
            seconds=now - self._start,
            done=mark.done,
            in_flight=recorder.in_flight,
            refused=recorder.outcomes[REFUSED],
            failed=recorder.failed,
            request_rate=(mark.done - first.done) / seconds if seconds else 0.0,
            content_rate=(mark.content_events - first.content_events) / seconds if seconds else 0.0,
            of=self._of,
            duration=self._duration,
        )
