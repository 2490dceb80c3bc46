"""Lines of a given width, out of things that may not all fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from .board import Counted
from .wording import UNKNOWN, count, printable, rate

LABEL: Final = 11
"""Columns of what stands in front of a line."""
GAP: Final = "  "
QUIET: Final = "bright_black"
LOUD: Final = "bold"
BAD: Final = "bold red"


def line(label: str, *things: Text, gap: str = GAP) -> Text:
    """One line with ``label`` in front; what does not fit is cut off where it is drawn."""
    return _whole(Text(f"{label:{LABEL}}", QUIET) + Text(gap).join(things))


def listed(label: str, things: Sequence[Text], width: int, most: int, gap: str = GAP) -> list[Text]:
    """Lines with ``label`` in front of the first; see :func:`packed`."""
    rows = packed(things or [Text(UNKNOWN)], width - LABEL, most, gap)
    return [line(label if number == 0 else "", row) for number, row in enumerate(rows)]


def packed(things: Sequence[Text], width: int, most: int, gap: str = GAP) -> list[Text]:
    """``things`` side by side on at most ``most`` lines; of those that do not fit, the last line has the number."""
    for shown in range(len(things), 0, -1):
        left_out = len(things) - shown
        rest = [Text(f"+{left_out}", QUIET)] if left_out else []
        rows = _filled([*things[:shown], *rest], width, gap)
        if len(rows) <= most:
            return rows
    return [_whole(things[0])] if things else []


def pair(name: str, value: str, style: str = "") -> Text:
    """``value`` and, before it, what it is of. ``name`` may come from outside."""
    return Text.assemble((f"{printable(name)} ", QUIET), (value, style))


def tally(name: str, counted: Counted) -> Text:
    """A counter; with its rate, while it grows."""
    grows = f" ({rate(counted.rate)})" if counted.rate else ""
    return pair(name, f"{count(counted.total)}{grows}")


def tallied(label: str, counted: Mapping[str, Counted], width: int, most: int) -> list[Text]:
    """Lines with the counters that are above 0: each with its rate, or one rate for all, or none, as there is room."""
    told = {name: one for name, one in counted.items() if one.total is not None}
    grown = {name: one for name, one in told.items() if one.total}
    if not grown:
        return [line(label, Text("0" if told else UNKNOWN))]
    each = [tally(name, one) for name, one in grown.items()]
    totals = [pair(name, count(one.total)) for name, one in grown.items()]
    growth = Text(rate(sum(one.rate or 0.0 for one in grown.values())))
    for things in (each, [growth, *totals]):
        if len(_filled(things, width - LABEL, GAP)) <= most:
            return listed(label, things, width, most)
    return listed(label, totals, width, most)


def alarm(name: str, counted: Counted) -> Text:
    """A counter that should be 0: loud when it is not."""
    return pair(name, count(counted.total), BAD if counted.total else "")


def _filled(things: Iterable[Text], width: int, gap: str) -> list[Text]:
    rows: list[Text] = []
    for thing in things:
        if rows and cell_len(rows[-1].plain) + cell_len(gap) + cell_len(thing.plain) <= width:
            rows[-1] = rows[-1] + Text(gap) + thing
        else:
            rows.append(thing)
    return [_whole(row) for row in rows]


def _whole(text: Text) -> Text:
    """A copy that stays on one line."""
    copy = text.copy()
    copy.no_wrap = True
    copy.overflow = "crop"
    return copy
