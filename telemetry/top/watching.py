"""Watch: what a series of readings leaves for the picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from .board import Board, board
from .rates import Increase, increase, together
from .reading import Failure, Scrape

REMEMBERED: Final = 240
"""Readings in a sparkline: more than the widest terminal shows."""


class Outage(NamedTuple):
    """Since when nothing can be read, and why."""

    since: float
    """Seconds since the epoch."""
    failure: Failure


class Trends(NamedTuple):
    """One value for each reading, oldest first; ``None`` where there was none."""

    usage: tuple[float | None, ...]
    hit_rate: tuple[float | None, ...]
    prefill: tuple[float | None, ...]
    """Tokens by second."""
    decode: tuple[float | None, ...]
    """Tokens by second."""


class Moment(NamedTuple):
    """What the picture is drawn from."""

    board: Board | None
    """``None`` until something has been read."""
    when: float
    """Of the newest reading, also a failed one; seconds since the epoch."""
    outage: Outage | None
    restarts: int
    """Of engines, since the first reading."""
    trends: Trends


class Watch:
    """Takes readings in their order and says what to show."""

    def __init__(self, window: float) -> None:
        """``window``: seconds over which rates and quantiles are taken; at least one reading is."""
        self._window = window
        self._last: Scrape | None = None
        self._increases: deque[Increase] = deque()
        self._outage: Outage | None = None
        self._restarts = 0
        self._points: deque[_Point] = deque(maxlen=REMEMBERED)

    def take(self, reading: Scrape | Failure, when: float) -> Moment:
        """Add ``reading``, made ``when`` (seconds since the epoch)."""
        if isinstance(reading, Failure):
            self._miss(reading, when)
        else:
            self._see(reading)
        last = self._last
        shown = None if last is None else board(last, together(self._increases) if self._increases else None)
        return Moment(
            board=shown,
            when=when,
            outage=self._outage,
            restarts=self._restarts,
            trends=_trends(self._points),
        )

    def _miss(self, failure: Failure, when: float) -> None:
        self._outage = Outage(self._outage.since if self._outage else when, failure)
        self._points.append(_Point(None, None, None, None))

    def _see(self, scrape: Scrape) -> None:
        self._outage = None
        grown = None
        if self._last is not None:
            grown = increase(self._last, scrape)
            self._restarts += grown.restarts
            self._increases.append(grown)
            self._forget()
        self._last = scrape
        self._points.append(_point(board(scrape, grown)))

    def _forget(self) -> None:
        """Drop what lies wholly before the window."""
        seconds = sum(one.seconds for one in self._increases)
        while len(self._increases) > 1 and seconds - self._increases[0].seconds >= self._window:
            seconds -= self._increases.popleft().seconds


class _Point(NamedTuple):
    """One value of each trend."""

    usage: float | None
    hit_rate: float | None
    prefill: float | None
    decode: float | None


def _point(shown: Board) -> _Point:
    return _Point(
        usage=shown.pool.usage if shown.pool else None,
        hit_rate=shown.cache.recent_hit_rate,
        prefill=shown.requests.prefill.rate,
        decode=shown.requests.decode.rate,
    )


def _trends(points: Sequence[_Point]) -> Trends:
    return Trends(*zip(*points, strict=True))
