"""The command ``octavo simulate``: eviction policies on a trace, beside the best that knowledge of the future gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..errors import InvalidRequest
from ..policies.simulator.capacity import parse_capacities
from ..policies.simulator.costs import CostModel
from ..policies.simulator.fleet import plot as fleet_plot
from ..policies.simulator.fleet import report as fleet_report
from ..policies.simulator.fleet.chats import FORM as CHATS_FORM
from ..policies.simulator.fleet.chats import ChatTrace, parse_chats
from ..policies.simulator.fleet.grid import Eviction, run_fleets
from ..policies.simulator.fleet.setting import TierWrites
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
from .simulate_fleet import FleetOptions, check_unused, fleets_of, read_options, shown

ALL = "all"
DEFAULT_CAPACITIES = "1%,2%,5%,10%,25%,50%"
DEFAULT_FLEET_CAPACITY = "5%"


FLEET: Final = FleetOptions()
TRACE_HELP = "A kvtrace-1 file, a recording of an engine, or CSV; also .xz or .gz. Not with --chats."
TraceFile = Annotated[Path | None, typer.Argument(metavar="TRACE", help=TRACE_HELP, show_default=False)]
CHATS_HELP = f"Chats that are made up instead: {CHATS_FORM}."
MadeUp = Annotated[str | None, typer.Option("--chats", metavar="CHATS", help=CHATS_HELP)]
POLICY_HELP = "Name or pkg.module:Class; repeatable. all: every one. Default: lru."
Policies = Annotated[list[str] | None, typer.Option("--policy", "-p", help=POLICY_HELP)]
CAPACITY_HELP = "Shares of the trace's different blocks or numbers of blocks: 5%,4096. Of each replica."
Capacities = Annotated[list[str] | None, typer.Option("--capacity", "-c", help=CAPACITY_HELP)]
Json = Annotated[bool, typer.Option("--json", help="One array of rows instead of the table.")]
Plot = Annotated[Path | None, typer.Option(help="Save hit ratios as a picture in this PNG file.")]
Best = Annotated[bool, typer.Option("--optimum/--no-optimum", help="Beside the offline optimum. Not of fleets.")]
ATOMIC_HELP = "Every request is over as it comes: nothing is held meanwhile."
Atomic = Annotated[bool, typer.Option("--atomic/--overlap", help=ATOMIC_HELP)]
Prefill = Annotated[float, typer.Option(help="Tokens that are prefilled in a second.")]
Decode = Annotated[float, typer.Option(help="Tokens that a request generates in a second.")]
WINDOW_HELP = "Seconds over which sessions start, where the trace has no absolute times."
Window = Annotated[float, typer.Option(help=WINDOW_HELP)]
Seed = Annotated[int, typer.Option(help="Of the session starts, of the choice of --sessions, and of --chats.")]
Sessions = Annotated[float, typer.Option(help="Only about this share of the sessions: above 0, at most 1.")]
BlockTokens = Annotated[int, typer.Option(help="Tokens in a block of a CSV trace, which does not say it.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many requests.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes. Default: one a CPU.")]
# fleets
PANEL = "Fleets (with --replicas)"
REPLICAS_HELP = "Simulate fleets of so many replicas, behind a router: 4 or 2,4,8."
Replicas = Annotated[str | None, typer.Option(metavar="N", help=REPLICAS_HELP, rich_help_panel=PANEL)]
ROUTING_HELP = (
    "Who chooses replicas: names or pkg.module:Class, with commas or repeated. all: every one. Default: prefix."
)
RoutingNames = Annotated[list[str] | None, typer.Option("--routing", "-r", help=ROUTING_HELP, rich_help_panel=PANEL)]
ROUTING_OPTIONS_HELP = "Settings of the routing policies, by name, in JSON."
RoutingOptions = Annotated[str, typer.Option(metavar="JSON", help=ROUTING_OPTIONS_HELP, rich_help_panel=PANEL)]
RUNNING_HELP = "Requests that a replica computes side by side. Default: as many as its blocks allow."
Running = Annotated[int | None, typer.Option(help=RUNNING_HELP, rich_help_panel=PANEL)]
OWN_HELP = "Whether the prefills of a replica share its rate, one after another, or each has it for itself."
OwnPrefill = Annotated[bool, typer.Option("--own-prefill/--shared-prefill", help=OWN_HELP, rich_help_panel=PANEL)]
NEWS_HELP = "Seconds until the router hears what a replica stored or evicted. none: it knows only what it did itself."
NewsDelay = Annotated[str, typer.Option(metavar="SECONDS", help=NEWS_HELP, rich_help_panel=PANEL)]
TIER_HELP = "Blocks in a store that all share. all: without bound; none: there is no such store."
SharedTier = Annotated[str, typer.Option(metavar="BLOCKS", help=TIER_HELP, rich_help_panel=PANEL)]
WRITES_HELP = "When blocks go down: when they are evicted (back), or as soon as they are computed (through)."
Writes = Annotated[TierWrites, typer.Option(help=WRITES_HELP, rich_help_panel=PANEL)]
LINK_HELP = "Bytes a second between a replica and the store."
Link = Annotated[float, typer.Option(help=LINK_HELP, rich_help_panel=PANEL)]
STORE_HELP = "Bytes a second of the store, for all replicas together."
Store = Annotated[float, typer.Option(help=STORE_HELP, rich_help_panel=PANEL)]
Latency = Annotated[float, typer.Option(help="Seconds until a load begins.", rich_help_panel=PANEL)]
LOST_HELP = "Second of the trace at which the store is lost, with all that is in it."
LostAt = Annotated[float, typer.Option(help=LOST_HELP, rich_help_panel=PANEL)]
TokenBytes = Annotated[int, typer.Option(help="Of one token in the store.", rich_help_panel=PANEL)]
KILL_HELP = (
    "AT:REPLICA[:BACK_AFTER]: a replica dies at that second, and is back, empty, so many seconds later. Repeatable."
)
Kills = Annotated[list[str] | None, typer.Option("--kill", metavar="KILL", help=KILL_HELP, rich_help_panel=PANEL)]
BALANCE_HELP = "Seconds of the windows in which the load of replicas is compared."
BalanceWindow = Annotated[float, typer.Option(help=BALANCE_HELP, rich_help_panel=PANEL)]


class _Asked(NamedTuple):
    """What both kinds of run are told."""

    trace: Trace
    policies: Sequence[str]
    capacities: Sequence[str]
    service: Service
    json: bool
    plot: Path | None
    jobs: int


def simulate(  # each option is an argument
    context: typer.Context,
    trace: TraceFile = None,
    policy: Policies = None,
    capacity: Capacities = None,
    json: Json = False,
    plot: Plot = None,
    optimum: Best = True,
    atomic: Atomic = False,
    prefill_rate: Prefill = 20_000.0,
    decode_rate: Decode = 50.0,
    window: Window = DAY_SECONDS,
    seed: Seed = 0,
    sessions: Sessions = 1.0,
    block_tokens: BlockTokens = 16,
    limit: Limit = None,
    jobs: Jobs = None,
    chats: MadeUp = None,
    replicas: Replicas = None,
    routing: RoutingNames = None,
    routing_options: RoutingOptions = FLEET.routing_options,
    max_running: Running = FLEET.max_running,
    own_prefill: OwnPrefill = FLEET.own_prefill,
    news_delay: NewsDelay = FLEET.news_delay,
    shared_tier: SharedTier = FLEET.shared_tier,
    tier_writes: Writes = FLEET.tier_writes,
    tier_bandwidth: Link = FLEET.tier_bandwidth,
    store_bandwidth: Store = FLEET.store_bandwidth,
    tier_latency: Latency = FLEET.tier_latency,
    tier_lost_at: LostAt = FLEET.tier_lost_at,
    token_bytes: TokenBytes = FLEET.token_bytes,
    kill: Kills = None,
    balance_window: BalanceWindow = FLEET.balance_window,
) -> None:
    """Replay a trace through eviction policies; with --replicas, through fleets of engines behind a router.

    Without --replicas lru runs in any case: the gap to the optimum is measured from it.
    """
    options = read_options(context.params)
    if plot is not None:
        check_plot(plot)
    service = Service(prefill_rate, decode_rate).checked()
    source = _source(trace, chats, window=window, seed=seed, block_tokens=block_tokens)
    asked = _Asked(
        _selected(source, sessions, seed, limit),
        policy or [BASELINE],
        capacity or [],
        ATOMIC if atomic else service,
        json,
        plot,
        jobs or os.cpu_count() or 1,
    )
    if replicas is not None:
        _simulate_fleets(asked, options, replicas)
    else:
        check_unused(options)
        _replay(asked, CostModel(prefill_tokens_per_second=prefill_rate), optimum=optimum)


def _replay(asked: _Asked, costs: CostModel, *, optimum: bool) -> None:
    contenders = with_baseline(Contender(name, EVICTION_POLICIES.resolve(name)) for name in _names(asked.policies))
    capacities = parse_capacities(asked.capacities or [DEFAULT_CAPACITIES])
    setting = Setting(asked.trace, asked.service, costs)
    with _bar() as advance:
        rows = run_grid(setting, contenders, capacities, optimum=optimum, jobs=asked.jobs, on_progress=advance)
    if asked.plot is not None:
        save_plot(rows, asked.plot)
    if asked.json:
        typer.echo(as_json(rows))
    else:
        Console().print(_table(rows), *map(escape, notes(rows)), sep="\n")
    _end(failures(rows))


def _simulate_fleets(asked: _Asked, options: FleetOptions, replicas: str) -> None:
    evictions = [Eviction(name, EVICTION_POLICIES.resolve(name)) for name in _names(asked.policies)]
    capacities = parse_capacities(asked.capacities or [DEFAULT_FLEET_CAPACITY])
    fleets = fleets_of(options, replicas=replicas, capacities=capacities, evictions=evictions, service=asked.service)
    with _bar() as advance:
        rows = run_fleets(asked.trace, fleets, jobs=asked.jobs, on_progress=advance)
    if asked.plot is not None:
        fleet_plot.save_plot(rows, asked.plot)
    if asked.json:
        typer.echo(fleet_report.as_json(rows))
    else:
        Console().print(*shown(rows), sep="\n")
    _end(fleet_report.failures(rows))


def _end(failed: Sequence[str]) -> None:
    for line in failed:
        Console(stderr=True).print(f"[red]{escape(line)}[/]", highlight=False)
    raise typer.Exit(1 if failed else 0)


def _source(trace: Path | None, chats: str | None, *, window: float, seed: int, block_tokens: int) -> Trace:
    if (trace is None) == (chats is None):
        raise InvalidRequest("give a trace, or --chats: one of the two")
    if chats is not None:
        return ChatTrace(parse_chats(chats, seed))
    return open_trace(trace or Path(), window=window, seed=seed, block_tokens=block_tokens)


def _names(specs: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for spec in specs for name in (_installed() if spec == ALL else [spec])))


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
