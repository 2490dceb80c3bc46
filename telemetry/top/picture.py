"""Picture: a moment as a rich renderable that fits the space it is given."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..metrics import catalogue as c
from .board import Board, Tier
from .lines import BAD, QUIET, listed
from .panels import cache_lines, latency_lines, pool_lines, request_lines, restart_things, upkeep_things
from .tier_table import tier_table
from .watching import Moment, Outage
from .wording import ASCII, UNICODE, UNKNOWN, Glyphs, count, duration, printable

TWO_COLUMNS: Final = 76
"""Terminals that are narrower have one frame below the other."""
ROOMY: Final = 30
"""Lines from which lists may take two."""
FRAME: Final = 4
"""Columns of a frame and its padding."""
LEAST_LINES: Final = 5
"""Of the map and of what stands beside it."""
CACHE_LINES: Final = 8
"""What can be said of the cache takes no more."""
MAP_LINES: Final = 24
"""A larger map says no more."""


class Picture:
    """Draws ``moment`` at whatever width and height the console has."""

    def __init__(self, moment: Moment, zone: dt.tzinfo | None = None, hint: str = "") -> None:
        """``zone``: of the times shown; ``None`` is the one of this machine. ``hint`` ends the first line."""
        self._moment = moment
        self._zone = zone
        self._hint = hint

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UNICODE
        moment, height = self._moment, options.height
        yield self._head(glyphs, options.max_width)
        if moment.outage is not None:  # what was seen last stays below it
            height = None if height is None else height - 1
            one_line = moment.board is not None
            reason = printable(moment.outage.failure.reason)
            yield Text(reason, BAD, no_wrap=one_line, overflow="crop" if one_line else "fold")
        if moment.board is not None:
            yield from _body(moment, moment.board, _Space(glyphs, options.max_width, height))

    def _head(self, glyphs: Glyphs, width: int) -> RenderableType:
        moment = self._moment
        left = [self._state(moment.outage)]
        right = [self._time(moment.when)]
        if moment.board is not None and moment.board.window is not None:
            right.append(f"last {duration(moment.board.window)}")
        if moment.restarts:
            left.append(Text(f"restarted {moment.restarts}x", "yellow"))
        left += _engine(moment.board)
        if self._hint:
            right.append(self._hint)
        dot = Text(f" {glyphs.dot} ", QUIET)
        row = Table.grid(expand=True, padding=(0, 1, 0, 0))
        row.add_column(no_wrap=True, overflow="crop", ratio=1)
        row.add_column(no_wrap=True, overflow="crop", justify="right")
        row.add_row(dot.join(left), dot.join([Text(part, QUIET) for part in right]) if width >= TWO_COLUMNS else "")
        return row

    def _state(self, outage: Outage | None) -> Text:
        if outage is None:
            return Text("octavo", "bold green")
        what = "no metrics" if outage.failure.answered else "unreachable"
        return Text(f"{what} since {self._time(outage.since)}, retrying", BAD)

    def _time(self, when: float) -> str:
        return dt.datetime.fromtimestamp(when, dt.UTC).astimezone(self._zone).strftime("%H:%M:%S")


class _Space(NamedTuple):
    glyphs: Glyphs
    width: int
    height: int | None

    @property
    def columns(self) -> tuple[int, ...]:
        """Widths of the frames side by side."""
        half = self.width // 2
        return (self.width - half, half) if self.width >= TWO_COLUMNS else (self.width,)

    @property
    def most(self) -> int:
        """Lines that a list may take."""
        if self.height is not None and self.height < ROOMY:
            return 1
        return 2 if self.width >= TWO_COLUMNS else 6

    def room_for_map(self, others: int) -> int:
        """Lines within the frame of the pool, where ``others`` are taken: what a tall terminal has to spare."""
        if self.height is None or len(self.columns) == 1:
            return CACHE_LINES
        return max(LEAST_LINES, min(MAP_LINES, self.height - others - 2))


def _body(moment: Moment, board: Board, space: _Space) -> Iterable[RenderableType]:
    inner = [max(1, column - FRAME) for column in space.columns]
    requests = request_lines(board.requests, moment.trends, space.glyphs, inner[0], space.most)
    latency = latency_lines(board.latencies)
    tiers = _tiers(board.tiers, space)
    gap = f" {space.glyphs.dot} "
    below = [
        *listed("restart", restart_things(board.restart), space.width, space.most, gap),
        *listed("upkeep", upkeep_things(board.upkeep), space.width, space.most, gap),
    ]
    lower = _beside(("requests", requests), ("latency", latency), space)
    room = space.room_for_map(1 + lower.lines + tiers.lines + len(below))
    cache = cache_lines(board.cache, moment.trends, space.glyphs, inner[-1], min(room, CACHE_LINES))
    pool = pool_lines(board.pool, moment.trends, space.glyphs, inner[0], max(room, len(cache)))
    yield _beside((_pool_title(board), pool), ("prefix cache", cache), space).drawn
    yield lower.drawn
    yield tiers.drawn
    yield Group(*below)


def _pool_title(board: Board) -> str:
    if board.pool is None:
        return "pool"
    sizes = sorted({printable(engine.get("block_size", UNKNOWN)) for engine in board.engines})
    return f"pool: {count(board.pool.blocks)} blocks" + (f" of {', '.join(sizes)}" if sizes else "")


class _Drawn(NamedTuple):
    drawn: RenderableType
    lines: int


def _beside(left: tuple[str, Sequence[Text]], right: tuple[str, Sequence[Text]], space: _Space) -> _Drawn:
    """Two frames, side by side where there is room."""
    columns = space.columns
    if len(columns) == 1:
        frames = [_frame(title, lines, len(lines)) for title, lines in (left, right)]
        return _Drawn(Group(*frames), len(left[1]) + len(right[1]) + 4)
    height = max(len(left[1]), len(right[1]))
    row = Table.grid()
    for column in columns:
        row.add_column(width=column)
    row.add_row(*(_frame(title, lines, height) for title, lines in (left, right)))
    return _Drawn(row, height + 2)


def _frame(title: str, lines: Sequence[Text], height: int) -> Panel:
    return _framed(title, Group(*lines), height + 2)


def _framed(title: str, inside: RenderableType, height: int | None = None) -> Panel:
    return Panel(inside, title=title, title_align="left", border_style=QUIET, height=height)


def _engine(board: Board | None) -> list[Text]:
    """Which engine it is, or how many there are."""
    if board is None or not board.engines:
        return []
    if len(board.engines) > 1:
        return [Text(f"{len(board.engines)} engines", "bold")]
    [engine] = board.engines
    own = [printable(f"{name}={value}") for name, value in engine.items() if name not in c.INFO.labels]
    told = [printable(engine.get(name, UNKNOWN)) for name in c.INFO.labels if name != "block_size"]
    return [Text(part) for part in (*own, *told)]


def _tiers(tiers: Sequence[Tier], space: _Space) -> _Drawn:
    if not tiers:
        return _Drawn(Group(*listed("tiers", [Text("none")], space.width, 1)), 1)
    return _Drawn(_framed("tiers", tier_table(tiers, space.width)), len(tiers) + 3)
