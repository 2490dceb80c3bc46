"""Two reports beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from .report import Report
from .rows import METRICS

SHOWN = ("mean", "p50", "p90", "p99")
SAME = 0.02
"""Ratios nearer to 1 are no news."""


class Line(NamedTuple):
    """One number of two reports."""

    title: str
    first: float | None
    second: float | None
    more_is_better: bool

    @property
    def ratio(self) -> float | None:
        """Second by first; ``None``: one of them has nothing to compare."""
        if self.first is None or self.second is None or not self.first:
            return None
        return self.second / self.first

    @property
    def verdict(self) -> str:
        """Of the second."""
        if self.ratio is None or abs(self.ratio - 1) < SAME:
            return ""
        return "better" if (self.ratio > 1) == self.more_is_better else "worse"


def compare(first: Report, second: Report) -> list[Line]:
    """All that both are about. Latencies are in milliseconds."""
    lines = [Line(title, of(first), of(second), more_is_better=True) for title, of in _SUMS.items()]
    return [line for line in [*lines, *_latencies(first, second)] if (line.first, line.second) != (None, None)]


def differences(first: Report, second: Report) -> list[str]:
    """Settings that are not the same: what the ratios may come from."""
    ours, theirs = _flat(first.settings), _flat(second.settings)
    names = sorted(ours.keys() | theirs.keys())
    return [f"{name}: {ours.get(name)} | {theirs.get(name)}" for name in names if ours.get(name) != theirs.get(name)]


def show_comparison(console: Console, first: Report, second: Report, names: tuple[str, str]) -> None:
    """A table of ratios, and below it what was set differently."""
    heads = [Column(escape(name), justify="right") for name in names]
    table = Table(Column(""), *heads, Column("ratio", justify="right"), Column(""), box=SIMPLE_HEAD, pad_edge=False)
    colors = {"better": "green", "worse": "red", "": "none"}
    for line in compare(first, second):
        ratio = "-" if line.ratio is None else f"{line.ratio:.3f}"
        cells = (line.title, _number(line.first), _number(line.second), ratio, line.verdict)
        table.add_row(*cells, style=colors[line.verdict])
    console.print(table)
    for difference in differences(first, second):
        console.print(f"differs: {difference}", markup=False, highlight=False, soft_wrap=True)


_SUMS: Mapping[str, Callable[[Report], float | None]] = {
    "requests/s": lambda report: report.rates.requests,
    "output tokens/s": lambda report: report.rates.output_tokens,
    "tokens/s": lambda report: report.rates.total_tokens,
    "goodput, requests/s": lambda report: None if report.goodput is None else report.goodput.rate,
    "cache hit share": lambda report: report.tokens.cache_hit_share,
    "succeeded": lambda report: report.requests.ok / report.requests.all if report.requests.all else None,
}


def _latencies(first: Report, second: Report) -> Iterator[Line]:
    for name in METRICS:
        for which in SHOWN:
            yield Line(
                f"{name} {which}, ms", _latency(first, name, which), _latency(second, name, which), more_is_better=False
            )


def _latency(report: Report, name: str, which: str) -> float | None:
    found = report.latency.get(name)
    return None if found is None else 1000 * float(getattr(found, which))


def _flat(settings: Mapping[str, object], above: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return flat


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
