"""What the benchmarks of this folder share: options, turns, medians, tables, targets, pictures, and the machine.

A benchmark measures its contenders in ``turns``, gathers each one's values in a ``Spread``, and ends with a ``Report``,
which is shown as tables and written as JSON. Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from octavo.errors import InvalidRequest
from octavo.policies.simulator.plot import check_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
PLAIN_WIDTH = 160
"""Characters of a line where there is no terminal."""
PANEL = (6.0, 4.0)
"""Inches."""
DOTS_PER_INCH = 120


# the machine


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the numbers come from; nothing that names it."""

    cpu: str
    cores: int
    threads: int
    """That the model may use."""
    memory_gib: float
    system: str
    versions: Mapping[str, str]
    """By package; packages that are not installed are left out."""

    def __str__(self) -> str:
        parts = [f"{self.cpu}, {self.cores} cores, {self.threads} threads, {self.memory_gib:.0f} GiB", self.system]
        return "; ".join([*parts, ", ".join(f"{name} {number}" for name, number in self.versions.items())])


def this_machine(threads: int, packages: Iterable[str] = ("octavo", "torch", "transformers")) -> Machine:
    """The machine that this runs on. ``packages``: distributions whose versions matter."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.machine()}"
    return Machine(_cpu_name(), os.cpu_count() or 1, threads, memory, system, versions)


def _cpu_name() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found is not None:
            return found[1]
    return platform.processor() or platform.machine()


# options


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """With what every benchmark takes: ``quick``, ``json`` and ``plot``, the last two paths or ``None``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and rough")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="save a picture there (.png)")
    return parser


def _picture(name: str) -> Path:
    """Checked before anything is measured."""
    try:
        check_plot(Path(name))
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(name)


# measuring


def turns(contenders: Sequence[T], rounds: int, *, name: Callable[[T], str] = str) -> Iterator[T]:
    """All contenders in every round, each round begun by another, with a bar on stderr: what else the machine does
    meets all of them."""
    order = [contenders[(turn + at) % len(contenders)] for turn in range(rounds) for at in range(len(contenders))]
    with progress(len(order)) as step:
        for contender in order:
            step(name(contender))
            yield contender


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each of ``total`` pieces of work as it begins."""
    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=escape(name))
            begun += 1
            if bar.disable:
                console.print(f"{begun}/{total} {name}", markup=False, highlight=False, soft_wrap=True)

        yield step


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of all rounds, in order."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        """:raises statistics.StatisticsError: when there is no value."""
        return median(self.values)

    def over(self, other: Spread) -> float:
        """Median ratio to ``other``, round by round; of the medians where the rounds are not the same number."""
        if len(self.values) != len(other.values):
            return self.median / other.median
        return median(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True))

    def text(self, digits: int = 1) -> str:
        """The median, and the range where there is one."""
        shown = f"{self.median:,.{digits}f}"
        if len(self.values) == 1:
            return shown
        return f"{shown} ({min(self.values):,.{digits}f}..{max(self.values):,.{digits}f})"


# the report


@dataclass(frozen=True, slots=True)
class Target:
    """What was to be reached. One that could not be measured is missed."""

    name: str
    value: float | None
    limit: float
    at_most: bool = False
    """Whether less is better."""

    @property
    def passes(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3g}"
        return f"{'pass' if self.passes else 'MISS'}  {self.name}: {value} (at {self._side} {self.limit:g})"

    @property
    def _side(self) -> str:
        return "most" if self.at_most else "least"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: the first column is text, all others are numbers ready to show."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a benchmark found."""

    benchmark: str
    machine: Machine
    sheets: Sequence[Sheet]
    numbers: object
    """For the JSON: dataclasses, lists, dictionaries, numbers."""
    targets: Sequence[Target] = ()
    notes: Sequence[str] = field(default=())

    def show(self) -> None:
        """On stdout: coloured on a terminal, plain lines elsewhere."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=PLAIN_WIDTH)
        console.print(f"{self.benchmark}: {self.machine}", markup=False, highlight=False, soft_wrap=True)
        for sheet in self.sheets:
            console.print(_table(sheet))
        for note in self.notes:
            console.print(f"note  {note}", markup=False, highlight=False, soft_wrap=True)
        for target in self.targets:
            style = "green" if target.passes else "red"
            console.print(str(target), style=style, markup=False, highlight=False, soft_wrap=True)

    def save(self, path: Path | None) -> None:
        """As JSON, if there is a path."""
        if path is None:
            return
        whole = {
            "benchmark": self.benchmark,
            "machine": self.machine,
            "numbers": self.numbers,
            "targets": [{"name": each.name, "value": each.value, "passes": each.passes} for each in self.targets],
            "notes": list(self.notes),
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")


def _table(sheet: Sheet) -> Table:
    first, *others = sheet.columns
    heads = [Column(first, no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in others)]
    table = Table(
        *heads, title=escape(sheet.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for row in sheet.rows:
        table.add_row(*map(escape, row))
    return table


# pictures


def panels(title: str, count: int) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels, at most three in a row, all in one look; nothing is registered anywhere."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # only when a picture is wanted
    from matplotlib.figure import Figure  # noqa: PLC0415

    wide = min(count, 3)
    high = -(-count // wide)
    figure = Figure(figsize=(PANEL[0] * wide, PANEL[1] * high), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure, [_panel(figure.add_subplot(high, wide, at + 1)) for at in range(count)]


def _panel(axes: Axes) -> Axes:
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def bars(axes: Axes, values: Mapping[str, Mapping[str, float]], *, unit: str) -> None:
    """Groups of bars: ``values`` by group and contender. A contender has the same place and colour in every group; what
    is missing stays empty."""
    contenders = list(dict.fromkeys(name for group in values.values() for name in group))
    width = 0.8 / max(len(contenders), 1)
    for at, name in enumerate(contenders):
        places = [group + (at - (len(contenders) - 1) / 2) * width for group in range(len(values))]
        heights = [group.get(name, 0.0) for group in values.values()]
        axes.bar(places, heights, width, label=name)
    axes.set_xticks(range(len(values)), list(values))
    axes.set_ylabel(unit)
    axes.legend(fontsize="small")
