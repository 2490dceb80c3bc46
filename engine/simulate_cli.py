"""The command ``octavo simulate``: eviction policies on a trace, beside the best that knowledge of the future gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..policies.simulator.capacity import parse_capacities
from ..policies.simulator.costs import CostModel
from ..policies.simulator.grid import BASELINE, Contender, Setting, run_grid, with_baseline
from ..policies.simulator.grid import Progress as Done
from ..policies.simulator.kvtrace import DAY_SECONDS
from ..policies.simulator.plot import check_plot, save_plot
from ..policies.simulator.readers import open_trace
from ..policies.simulator.report import HEADINGS, as_json, capacity_of, cells, failures, notes
from ..policies.simulator.rows import Kind, Row
from ..policies.simulator.selection import First, SomeSessions
from ..policies.simulator.service import ATOMIC, Service
from ..policies.simulator.trace import Trace
from .assembly import EVICTION_POLICIES

ALL = "all"
DEFAULT_CAPACITIES = "1%,2%,5%,10%,25%,50%"


def simulate(
    trace: Annotated[Path, typer.Argument(help="A kvtrace-1 file, a recording of an engine, or CSV; also .xz or .gz.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Name or pkg.module:Class; repeatable. all: every one. Default: lru."),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option("--capacity", "-c", help="Shares of the trace's different blocks or numbers of blocks: 5%,4096."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One array of rows instead of the table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Save hit ratio over capacity in this PNG file.")] = None,
    optimum: Annotated[bool, typer.Option("--optimum/--no-optimum", help="Beside the offline optimum.")] = True,
    atomic: Annotated[
        bool, typer.Option("--atomic/--overlap", help="Every request is over as it comes: nothing is held meanwhile.")
    ] = False,
    prefill_rate: Annotated[float, typer.Option(help="Tokens that are prefilled in a second.")] = 20_000.0,
    decode_rate: Annotated[float, typer.Option(help="Tokens that a request generates in a second.")] = 50.0,
    window: Annotated[
        float, typer.Option(help="Seconds over which sessions start, where the trace has no absolute times.")
    ] = DAY_SECONDS,
    seed: Annotated[int, typer.Option(help="Of the session starts, and of the choice of --sessions.")] = 0,
    sessions: Annotated[float, typer.Option(help="Only about this share of the sessions: above 0, at most 1.")] = 1.0,
    block_tokens: Annotated[int, typer.Option(help="Tokens in a block of a CSV trace, which does not say it.")] = 16,
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes. Default: one a CPU.")] = None,
) -> None:
    """Replay a trace through eviction policies.

    lru runs in any case: the gap to the optimum is measured from it.
    """
    contenders = _contenders(policy or [BASELINE])
    capacities = parse_capacities(capacity or [DEFAULT_CAPACITIES])
    if plot is not None:
        check_plot(plot)
    service = Service(prefill_rate, decode_rate).checked()
    costs = CostModel(prefill_tokens_per_second=prefill_rate)
    requests = _selected(open_trace(trace, window=window, seed=seed, block_tokens=block_tokens), sessions, seed, limit)
    setting = Setting(requests, ATOMIC if atomic else service, costs)
    with _bar() as advance:
        rows = run_grid(
            setting, contenders, capacities, optimum=optimum, jobs=jobs or os.cpu_count() or 1, on_progress=advance
        )
    if plot is not None:
        save_plot(rows, plot)
    _show(rows, json)


def _show(rows: Sequence[Row], json: bool) -> None:
    if json:
        typer.echo(as_json(rows))
    else:
        Console().print(_table(rows), *map(escape, notes(rows)), sep="\n")
    failed = failures(rows)
    for line in failed:
        Console(stderr=True).print(f"[red]{escape(line)}[/]", highlight=False)
    raise typer.Exit(1 if failed else 0)


def _contenders(specs: Sequence[str]) -> list[Contender]:
    names = list(dict.fromkeys(name for spec in specs for name in (_installed() if spec == ALL else [spec])))
    return with_baseline(Contender(name, EVICTION_POLICIES.resolve(name)) for name in names)


def _installed() -> list[str]:
    """Names of the policies that can be used; of the others it says why not."""
    reports = EVICTION_POLICIES.report()
    for report in reports:
        if report.error is not None:
            Console(stderr=True).print(f"[yellow]left out[/] {escape(report.error)}", highlight=False)
    return [report.name for report in reports if report.error is None]


def _selected(trace: Trace, sessions: float, seed: int, limit: int | None) -> Trace:
    if sessions != 1:
        trace = SomeSessions(trace, sessions, seed)
    return trace if limit is None else First(trace, limit)


@contextmanager
def _bar() -> Iterator[Callable[[Done], None]]:
    """A bar on the error stream, if that is a terminal."""
    console = Console(stderr=True)
    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading the trace", total=None)

        def advance(done: Done) -> None:
            progress.update(task, description="replaying", completed=done.done, total=done.total)

        yield advance


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{escape(first.trace)}: {first.requests:,} requests, blocks of {first.block_tokens} tokens"
    numbers = [Column(heading, justify="right") for heading in HEADINGS[1:]]
    table = Table(
        Column(HEADINGS[0], no_wrap=True),
        *numbers,
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    above = None
    for row, line in zip(rows, cells(rows), strict=True):
        if row.capacity != above:
            table.add_section()
            table.add_row(capacity_of(row), style="bold")
        plain = "" if row.kind is Kind.POLICY else "dim"
        table.add_row(*map(escape, line), style="red" if row.error is not None else plain)
        above = row.capacity
    return table
