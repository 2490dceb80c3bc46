"""The rows of a simulation of fleets as a picture. Needs ``pip install 'octavo[bench]'``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ..plot import DOTS_PER_INCH, INCHES_A_PANEL, MARKERS, save_figure
from .rows import FleetRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_plot(rows: Sequence[FleetRow], path: Path) -> None:
    """Draw two panels, hit ratio and balance of the work, with a line for each routing policy: over the number of
    replicas, or over their capacity where all fleets have the same number.

    :raises InvalidRequest: when matplotlib is missing, ``path`` is no name of a PNG, or the file cannot be written.
    """
    save_figure(lambda: draw(rows), path)


def draw(rows: Sequence[FleetRow]) -> Figure:
    """The figure, bound to a canvas of its own: nothing is registered anywhere, so nothing has to be closed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    width, height = INCHES_A_PANEL
    figure = Figure(figsize=(2 * width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(rows[0].trace if rows else "")
    _draw_panel(figure.add_subplot(1, 2, 1), rows, "hit ratio, with the tier", lambda row: row.hit_ratio_with_tier)
    _draw_panel(figure.add_subplot(1, 2, 2), rows, "work of the busiest replica / mean", lambda row: row.work_balance)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[FleetRow], title: str, value: Callable[[FleetRow], float | None]) -> None:
    by_replicas = len({row.replicas for row in rows}) > 1
    axes.set_xscale("log")
    axes.set_xlabel("replicas" if by_replicas else "blocks of a replica")
    axes.set_ylabel(title)
    axes.grid(visible=True, alpha=0.3)
    markers = cycle(MARKERS)
    for label, line in _lines(rows, by_replicas=by_replicas).items():
        points = sorted(
            (row.replicas if by_replicas else row.capacity, found) for row in line if (found := value(row)) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=next(markers), markersize=4, linewidth=1.2)
    if axes.lines:
        axes.legend(fontsize="small")


def _lines(rows: Sequence[FleetRow], *, by_replicas: bool) -> dict[str, list[FleetRow]]:
    """Rows of one line each, by its label, which says only what tells lines apart."""
    many_evictions = len({row.eviction for row in rows}) > 1
    many_capacities = by_replicas and len({row.capacity for row in rows}) > 1
    lines = dict[str, list[FleetRow]]()
    for row in rows:
        parts = [row.routing, row.eviction if many_evictions else "", f"{row.capacity:,}" if many_capacities else ""]
        lines.setdefault(", ".join(part for part in parts if part), []).append(row)
    return lines
