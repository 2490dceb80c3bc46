"""A run as a picture: distributions of TTFT and TPOT, and over time throughput and what was in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidRequest, describe
from ...policies.simulator.plot import check_plot
from .rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (12.0, 8.0)
"""Inches."""
DOTS_PER_INCH = 120
BINS = 60
QUANTILES = (50, 90, 99)


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """As PNG.

    :raises InvalidRequest: when matplotlib is missing, the name does not end in .png, or the file cannot be written.
    """
    check_plot(path)
    figure = draw(rows, title)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InvalidRequest(f"the plot cannot be saved: {describe(error)}") from error


def draw(rows: Sequence[Row], title: str) -> Figure:
    """The figure, bound to a canvas of its own: nothing is registered anywhere, so nothing has to be closed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    good = [row for row in rows if row.is_ok]
    _draw_distribution(figure.add_subplot(2, 2, 1), "time to first token", good, lambda row: row.ttft)
    _draw_distribution(figure.add_subplot(2, 2, 2), "time per output token", good, lambda row: row.tpot)
    _draw_throughput(figure.add_subplot(2, 2, 3), rows)
    _draw_in_flight(figure.add_subplot(2, 2, 4), rows)
    return figure


def content_moments(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """When content came, in seconds from the first request, and how many tokens it stands for."""
    start = min((row.sent for row in rows), default=0.0)
    found: list[tuple[float, float]] = []
    for row in rows:
        if row.ttft is not None and row.output_tokens:
            weight = row.output_tokens / (len(row.gaps) + 1)
            found += [(moment, weight) for moment in accumulate(row.gaps, initial=row.sent + row.ttft - start)]
    return found


def in_flight(rows: Sequence[Row]) -> list[tuple[float, int]]:
    """Steps: from each moment (seconds from the first request) so many requests are under way."""
    start = min((row.sent for row in rows), default=0.0)
    begins = [(row.sent - start, 1) for row in rows]
    changes = sorted(begins + [(row.ended - start, -1) for row in rows], key=lambda step: (step[0], -step[1]))
    levels = accumulate(change for _, change in changes)
    return [(moment, level) for (moment, _), level in zip(changes, levels, strict=True)]


def _draw_distribution(axes: Axes, title: str, rows: Sequence[Row], value: Callable[[Row], float | None]) -> None:
    values = sorted(1000 * found for row in rows if (found := value(row)) is not None)
    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of the requests at most so slow")
    axes.grid(visible=True, alpha=0.3)
    if not values:
        return
    axes.step(values, [(place + 1) / len(values) for place in range(len(values))], where="post")
    for which in QUANTILES:
        at = float(np.percentile(values, which))
        axes.axvline(at, color="grey", linestyle=":", label=f"p{which}: {at:,.1f} ms")
    axes.legend(fontsize="small")


def _draw_throughput(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_title("throughput")
    axes.set_xlabel("seconds")
    axes.set_ylabel("output tokens/s")
    axes.grid(visible=True, alpha=0.3)
    found = content_moments(rows)
    if not found:
        return
    moments, weights = zip(*found, strict=True)
    sums, edges = np.histogram(moments, bins=BINS, range=(0.0, max(*moments, 1e-3)), weights=weights)
    axes.stairs(sums / np.diff(edges), edges, fill=True, alpha=0.6)


def _draw_in_flight(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_title("requests in flight")
    axes.set_xlabel("seconds")
    axes.grid(visible=True, alpha=0.3)
    steps = in_flight(rows)
    if steps:
        axes.step(*zip(*steps, strict=True), where="post")
        axes.set_ylim(bottom=0)
