"""A sheet of SVG: bars over a time axis, with text that stays text and colours for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

FONT = 11
CHARACTER = 6.8
"""Width of a character in the widest of the fonts asked for, at that size."""
TITLE = 14
TITLE_CHARACTER = CHARACTER * TITLE / FONT
LEAST_BAR = 2.0
"""A shorter bar would not be seen."""
MERGE = 8.0
"""Marks with the same name that are closer become one."""

STYLE = """\
text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328}
.title{font-size:14px;font-weight:600}
.quiet{fill:#59636e}.in{fill:#fff}.link{fill:#0550ae}.bad{fill:#a40e26}
.paper{fill:#fff;stroke:#d1d9e0}.grid{stroke:#e4e8ec}.mark{stroke:#59636e}.tie{stroke:#0550ae;stroke-dasharray:2 3}
.dot{fill:#0550ae}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.quiet{fill:#9198a1}.in{fill:#fff}.link{fill:#79c0ff}.bad{fill:#ff8182}
.paper{fill:#0d1117;stroke:#3d444d}.grid{stroke:#262c34}.mark{stroke:#9198a1}.tie{stroke:#79c0ff}.dot{fill:#79c0ff}
}
.b{fill:#4a5563}.queue{fill:#6e7781}.load,.swap_in{fill:#8250df}.prefill,.prefill_chunk{fill:#0969da}
.decode{fill:#1a7f37}.evict{fill:#cf222e}.swap_out{fill:#bc4c00}.cow_fork{fill:#bf3989}
.persist,.restore,.snapshot{fill:#9a6700}"""


class Box(NamedTuple):
    """Where something is."""

    x: float
    y: float
    width: float
    height: float


class Scale(NamedTuple):
    """From times (nanoseconds) to places."""

    start: int
    end: int
    left: float
    width: float

    def at(self, when: int) -> float:
        """A time outside is at the edge."""
        inside = min(max(when, self.start), self.end)
        return self.left + (inside - self.start) / max(self.end - self.start, 1) * self.width

    def ticks(self) -> list[tuple[float, str]]:
        """Round times from the start on, with their places."""
        span = max(self.end - self.start, 1)
        step = next(step for step in _round_steps() if step * 8 >= span)
        return [
            (self.at(self.start + offset), in_words(offset)) for offset in range(0, self.end - self.start + 1, step)
        ]


class Mark(NamedTuple):
    """A moment with a name, and the tier of its label: 0 is the lowest."""

    x: float
    words: str
    tier: int


def width_of(words: str) -> float:
    """Of a text in the small font."""
    return len(words) * CHARACTER


def cut(words: str, width: float) -> str:
    """As much of ``words`` as ``width`` has room for."""
    most = max(int(width / CHARACTER), 1)
    return words if len(words) <= most else f"{words[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def in_words(nanoseconds: int) -> str:
    """A duration with its unit, three digits or so."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns" if nanoseconds else "0"


def marks(moments: Sequence[tuple[float, str]]) -> list[Mark]:
    """Labels that begin at their moments, in as many tiers as keep them, and the lines that go down, apart."""
    told: list[tuple[float, str, int]] = []
    for x, words in sorted(moments):
        same = next((n for n, (at, known, _) in enumerate(told) if known == words and x - at < MERGE), None)
        if same is None:
            told.append((x, words, 1))
        else:
            at, _, count = told[same]
            told[same] = (at, words, count + 1)
    placed: list[Mark] = []
    for x, words, count in reversed(told):  # from the right, so that those to the right of a label are known
        label = f"{words} x{count}" if count > 1 else words
        under = [mark.tier for mark in placed if mark.x <= x + CHARACTER + width_of(label)]
        placed.append(Mark(x, label, 1 + max(under, default=-1)))
    return placed[::-1]


class Sheet:
    """What was drawn so far."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._parts: list[str] = []

    def bar(self, box: Box, kind: str, tip: str) -> None:
        """``kind`` chooses the colour; ``tip`` is shown where the mouse rests."""
        known = f"b {kind}" if kind.isidentifier() else "b"
        place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{max(box.width, LEAST_BAR):.1f}" height="{box.height:.1f}"'
        self._parts.append(f'<rect class="{known}" {place} rx="2"><title>{escape(tip)}</title></rect>')

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        """``y`` is the base line. ``style``: ``title``, ``quiet``, ``in`` (a bar), ``link``, ``bad``."""
        chosen = f' class="{style}"' if style else ""
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text{chosen} x="{x:.1f}" y="{y:.1f}"{placed}>{escape(words)}</text>')

    def line(self, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
        """``style``: ``grid``, ``mark`` or ``tie``."""
        (x1, y1), (x2, y2) = start, end
        self._parts.append(f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')

    def dot(self, x: float, y: float) -> None:
        """The end of a tie."""
        self._parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')

    def axis(self, scale: Scale, top: float, bottom: float) -> None:
        """Lines at round times, with the times below."""
        for x, words in scale.ticks():
            self.line((x, top), (x, bottom), "grid")
            self.text(x, bottom + FONT + 3, words, "quiet", "middle")

    def beside(self, bar: Box, words: str, edges: tuple[float, float], style: str, *, may_be_inside: bool) -> None:
        """A note to the right of ``bar``, else inside it, else to its left, within ``edges``; cut if none has room."""
        base, wide, end = bar.y + bar.height - 3, width_of(words), bar.x + max(bar.width, LEAST_BAR)
        left, right = bar.x - 5 - edges[0], edges[1] - end - 5
        if wide <= right or (right >= left and not (may_be_inside and wide + 10 <= bar.width)):
            self.text(end + 5, base, cut(words, right), style)
        elif may_be_inside and wide + 10 <= bar.width:
            self.text(bar.x + 5, base, words, "in")
        else:
            self.text(bar.x - 5, base, cut(words, left), style, "end")

    def svg(self, height: float, label: str) -> str:
        """The whole document. ``label``: what it shows, for those who cannot see it."""
        size = f'viewBox="0 0 {self._width:.0f} {height:.0f}" width="{self._width:.0f}" height="{height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(label)}>'
        paper = f'<rect class="paper" x="0.5" y="0.5" width="{self._width - 1:.0f}" height="{height - 1:.0f}" rx="6"/>'
        return "\n".join((head, f"<style>{STYLE}</style>", paper, *self._parts, "</svg>", ""))


def _round_steps() -> list[int]:
    """1, 2 and 5 of each power of ten, from a microsecond to some days."""
    return [digit * 10**power for power in range(3, 16) for digit in (1, 2, 5)]
