"""The rows of a simulation as a picture: hit ratio over capacity. Needs ``pip install 'octavo[bench]'``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InvalidRequest, describe
from .rows import Kind, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES_A_PANEL = (7.0, 5.0)
DOTS_PER_INCH = 120
MARKERS = "osv^D<>pPX*hd"
TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LINES = {Kind.OPTIMUM: ("--", "optimum"), Kind.BOUND: ("-.", "bound"), Kind.LIMIT: (":", "no eviction")}


def check_plot(path: Path) -> None:
    """Tell before a long run that its picture could not be made.

    :raises InvalidRequest: when matplotlib is missing, the name does not end in .png, or its folder is not there.
    """
    if find_spec("matplotlib") is None:
        raise InvalidRequest("a plot needs matplotlib: pip install 'octavo[bench]'")
    if path.suffix.lower() != ".png":
        raise InvalidRequest(f"the plot is a PNG: give a file name that ends in .png, not {path.name!r}")
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent} for the plot")


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw one panel for each trace: a line for each policy, the optimum dashed, the no-eviction limit dotted.

    :raises InvalidRequest: as ``check_plot``, and when the file cannot be written.
    """
    save_figure(lambda: draw(rows), path)


def save_figure(drawn: Callable[[], Figure], path: Path) -> None:
    """Draw, and save it as a PNG.

    :raises InvalidRequest: as ``check_plot``, and when the file cannot be written.
    """
    check_plot(path)
    try:
        drawn().savefig(path, format="png")
    except OSError as error:
        raise InvalidRequest(f"the plot cannot be saved: {describe(error)}") from error


def draw(rows: Sequence[Row]) -> Figure:
    """The figure, bound to a canvas of its own: nothing is registered anywhere, so nothing has to be closed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    traces = list(dict.fromkeys(row.trace for row in rows))
    width, height = INCHES_A_PANEL
    columns = min(2, len(traces)) or 1
    lines = -(-len(traces) // columns) or 1
    figure = Figure(figsize=(width * columns, height * lines), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    for number, trace in enumerate(traces, 1):
        _draw_trace(figure.add_subplot(lines, columns, number), trace, [row for row in rows if row.trace == trace])
    return figure


def _draw_trace(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    shares = sorted({row.capacity_share for row in rows if row.kind is not Kind.LIMIT})
    axes.set_title(title)
    axes.set_xlabel("capacity, share of the different blocks")
    axes.set_ylabel("hit ratio")
    axes.grid(visible=True, alpha=0.3)
    _scale(axes, shares)
    markers = cycle(MARKERS)
    for name in dict.fromkeys(row.policy for row in rows if row.kind is Kind.POLICY):
        points = _points(rows, Kind.POLICY, name)
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker=next(markers), markersize=4, linewidth=1.2)
    for kind, (style, label) in LINES.items():
        _draw_reference(axes, rows, kind, style, label)
    if axes.lines:
        axes.legend(fontsize="small")


def _draw_reference(axes: Axes, rows: Sequence[Row], kind: Kind, style: str, label: str) -> None:
    points = _points(rows, kind, kind.value)
    if not points:
        return
    if kind is Kind.LIMIT:
        axes.axhline(points[0][1], color="black", linestyle=style, label=label)
        return
    axes.plot(*zip(*points, strict=True), color="black", linestyle=style, marker=".", linewidth=1.2, label=label)


def _points(rows: Sequence[Row], kind: Kind, name: str) -> list[tuple[float, float]]:
    return sorted(
        (row.capacity_share, row.hit_ratio)
        for row in rows
        if row.kind is kind and row.policy == name and row.hit_ratio is not None
    )


def _scale(axes: Axes, shares: Sequence[float]) -> None:
    """Logarithmic, with ticks that can be read as per cent."""
    if not shares or shares[0] <= 0:
        return
    axes.set_xscale("log")
    ticks = [tick for tick in TICKS if shares[0] <= tick <= shares[-1]] or list(shares)
    axes.set_xticks(ticks, labels=[f"{100 * tick:.3g}%" for tick in ticks])
    axes.set_xticks([], minor=True)
