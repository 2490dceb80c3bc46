"""How numbers and trends are written: short, and of one width whatever their size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from .rates import Estimate

UNKNOWN: Final = "-"
"""For what an engine does not tell, and what has not happened."""


class Glyphs(NamedTuple):
    """The characters that pictures are made of."""

    used: str
    pinned: str
    idle: str
    free: str
    levels: str
    """Of a sparkline, lowest first."""
    dot: str
    """Between things."""


UNICODE: Final = Glyphs("█", "▓", "░", "·", "▁▂▃▄▅▆▇█", "·")
ASCII: Final = Glyphs("#", "P", "o", ".", "_.-=*#", "|")
"""For terminals that can write no more."""


def count(value: float | None) -> str:
    """``9876``, ``98.8k``, ``4.56M``."""
    if value is None:
        return UNKNOWN
    for least, unit, sign in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / unit:.{_places(value / unit)}f}{sign}"
    return f"{value:.0f}"


def rate(value: float | None) -> str:
    """By second."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}/s" if 0 < value < 10 else f"{count(value)}/s"


def size(value: float | None) -> str:
    """Bytes in powers of 1024: ``512``, ``1.25K``, ``8.00G``."""
    if value is None:
        return UNKNOWN
    for power, sign in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if value >= 1024**power:
            scaled = value / 1024**power
            return f"{scaled:.{_places(scaled)}f}{sign}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """``250 us``, ``12.3 ms``, ``1.23 s``, ``4 m 05 s``, ``3 h 20 m``, ``2 d 04 h``."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 86400:
        return f"{seconds // 86400:.0f} d {seconds % 86400 // 3600:02.0f} h"
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} m"
    if seconds >= 100:
        return f"{seconds // 60:.0f} m {math.floor(seconds % 60):02d} s"
    for scale, sign in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.{_places(seconds * scale)}f} {sign}"
    return f"{seconds * 1e6:.0f} us"


def estimate(value: Estimate | None) -> str:
    """A quantile in seconds."""
    if value is None:
        return UNKNOWN
    return f"> {duration(value.value)}" if value.beyond else duration(value.value)


def percent(share: float | None) -> str:
    """With one decimal."""
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def sparkline(values: Sequence[float | None], width: int, levels: str, top: float | None = None) -> str:
    """The newest ``width`` values as bars from 0 to ``top`` (by default their largest); a blank where there is none."""
    shown = values[-width:] if width > 0 else ()
    known = [value for value in shown if value is not None]
    highest = top if top is not None else max(known, default=0.0)
    return "".join(" " if value is None else _bar(value, highest, levels) for value in shown)


def cells(parts: Sequence[float], number: int) -> list[int]:
    """``number`` cells shared out in proportion to ``parts``; a part above 0 has one at least, while they last."""
    whole = sum(parts)
    if whole <= 0:
        return [0] * len(parts)
    exact = [part / whole * number for part in parts]
    given = [math.floor(share) for share in exact]
    for index in sorted(range(len(parts)), key=lambda index: given[index] - exact[index])[: number - sum(given)]:
        given[index] += 1
    for index, part in enumerate(parts):
        if part > 0 and not given[index] and max(given) > 1:
            given[given.index(max(given))] -= 1
            given[index] = 1
    return given


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: labels come from whoever serves the address."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _bar(value: float, highest: float, levels: str) -> str:
    if highest <= 0:
        return levels[0]
    return levels[max(0, min(len(levels) - 1, math.ceil(value / highest * len(levels)) - 1))]


def _places(value: float) -> int:
    """Decimals that make three figures."""
    return 2 if value < 9.995 else 1 if value < 99.95 else 0
