"""Every installed eviction policy on four traces of real traffic, beside the offline optimum.

    python examples/benchmarks/policies.py                    # some minutes
    python examples/benchmarks/policies.py --quick            # two traces, two capacities, the first requests: seconds
    python examples/benchmarks/policies.py --atomic           # no two requests overlap, as in most papers on caching
    python examples/benchmarks/policies.py --save results/    # also JSON and a picture of the curves

For each trace (``examples/traces``) and capacity (share of its different blocks) it prints hit ratios, and how much of
the gap between ``lru`` and the offline optimum each policy closes. Requests overlap by default: what a running request
holds cannot go. At the end come the promises that Octavo makes for ``adaptive``, and whether they hold; the exit status
is 1 when one does not. They are about whole traces: ``--quick`` judges nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from octavo.plugins import PluginGroup
from octavo.policies.eviction.base import EvictionPolicy
from octavo.policies.simulator.capacity import parse_capacities
from octavo.policies.simulator.grid import Contender, Progress, Setting, run_grid, with_baseline
from octavo.policies.simulator.plot import check_plot, save_plot
from octavo.policies.simulator.readers import open_trace
from octavo.policies.simulator.report import as_json, failures, notes, percent
from octavo.policies.simulator.rows import Kind, Row
from octavo.policies.simulator.selection import First
from octavo.policies.simulator.service import ATOMIC, Service
from octavo.policies.simulator.trace import Trace

FOLDER = Path(__file__).parents[1] / "traces"
TRACES = ("mooncake_conversation", "mooncake_synthetic", "claude_code", "ragpulse")
CAPACITIES = "1%,2%,5%,10%,25%,50%"
QUICK_TRACES = "mooncake_conversation,ragpulse"
QUICK_CAPACITIES = "2%,10%"
QUICK_REQUESTS = 2_000
JUDGED = "adaptive"
TOLERANCE = 0.005
"""Of hit ratio: how much less than lru is still no loss."""
GAP_TRACE = "mooncake_conversation"
GAP_PROMISES = {0.01: 0.25, 0.02: 0.25, 0.05: 0.10, 0.10: 0.10}
"""By capacity: how much of the gap is to be closed on ``GAP_TRACE``."""


class Verdict(NamedTuple):
    """One promise."""

    kept: bool
    text: str

    def __str__(self) -> str:
        return f"{'pass' if self.kept else 'FAIL'}  {self.text}"


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """What the rows say about the promises; promises about traces or capacities that were not run are left out."""
    return [*_never_worse(rows), *_gap_closed(rows)]


def _never_worse(rows: Sequence[Row]) -> Iterable[Verdict]:
    usual = {_place(row): row.hit_ratio for row in _of(rows, "lru")}
    for row in _of(rows, JUDGED):
        low = usual.get(_place(row))
        if row.hit_ratio is None or low is None:
            yield Verdict(False, f"{_where(row)}: no result")
            continue
        change = row.hit_ratio - low
        yield Verdict(
            change >= -TOLERANCE,
            f"{_where(row)}: {JUDGED} {row.hit_ratio:.4f}, lru {low:.4f} ({change:+.4f}; at least {-TOLERANCE})",
        )


def _gap_closed(rows: Sequence[Row]) -> Iterable[Verdict]:
    for row in _of(rows, JUDGED):
        promised = GAP_PROMISES.get(round(row.capacity_share, 3))
        if row.trace == GAP_TRACE and promised is not None:
            closed = row.gap_closed
            shown = "unknown" if closed is None else f"{closed:.1%}"
            text = f"{_where(row)}: {JUDGED} closes {shown} of the gap (at least {promised:.0%})"
            yield Verdict(closed is not None and closed >= promised, text)


def _of(rows: Iterable[Row], policy: str) -> list[Row]:
    return [row for row in rows if row.kind is Kind.POLICY and row.policy == policy]


def _place(row: Row) -> tuple[str, int]:
    return row.trace, row.capacity


def _where(row: Row) -> str:
    return f"{row.trace} at {percent(row.capacity_share)}"


def two_tables(rows: Sequence[Row]) -> str:
    """One trace: hit ratios, and shares of the gap, policies down and capacities across."""
    columns = list({row.capacity: percent(row.capacity_share) for row in rows if row.kind is not Kind.LIMIT}.items())
    names = list(dict.fromkeys((row.kind, row.policy) for row in rows if row.kind is not Kind.LIMIT))
    cells = {(row.kind, row.policy, row.capacity): row for row in rows}
    limit = next((row.hit_ratio for row in rows if row.kind is Kind.LIMIT), None)
    lines = [f"{'hit ratio':<16}" + "".join(f"{share:>9}" for _, share in columns) + "   share of the gap closed"]
    for kind, name in names:
        line = [cells.get((kind, name, capacity)) for capacity, _ in columns]
        ratios = "".join(_cell(row and row.hit_ratio, "{:>9.4f}") for row in line)
        gaps = "".join(_cell(row and row.gap_closed, "{:>9.1%}") for row in line) if kind is Kind.POLICY else ""
        lines.append(f"{name:<16}{ratios}  {gaps}".rstrip())
    if limit is not None:
        lines.append(f"{'no eviction':<16}" + f"{limit:>9.4f}" * len(columns))
    return "\n".join(lines)


def _cell(number: float | None, form: str) -> str:
    return form.format(number) if number is not None else f"{'-':>9}"


def contenders(names: str) -> list[Contender]:
    """The policies named, or all that are installed and can be used; ``lru`` always."""
    group = PluginGroup("octavo.eviction_policies", EvictionPolicy)
    chosen = names.split(",") if names else [report.name for report in group.report() if report.error is None]
    return with_baseline(Contender(name, group.resolve(name)) for name in chosen)


def opened(name: str, requests: int | None) -> Trace:
    """One of the example traces, or its first requests."""
    trace = open_trace(FOLDER / f"{name}.jsonl.xz")
    return trace if requests is None else First(trace, requests)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", help=f"of {', '.join(TRACES)}; default: all")
    parser.add_argument("--policies", default="", help="names, with commas; default: all that are installed")
    parser.add_argument("--capacity", help=f"default: {CAPACITIES}".replace("%", "%%"))
    parser.add_argument("--atomic", action="store_true", help="no two requests overlap")
    quick = f"{QUICK_TRACES}, {QUICK_CAPACITIES}, first requests only"
    parser.add_argument("--quick", action="store_true", help=quick.replace("%", "%%"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write policies.json and policies.png there")
    return parser.parse_args(arguments)


def _progress(name: str) -> Callable[[Progress], None] | None:
    if not sys.stderr.isatty():
        return None
    return lambda progress: print(f"\r{name} {progress.done / max(progress.total, 1):6.1%} ", end="", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    options = _options(arguments)
    names = options.traces or (QUICK_TRACES if options.quick else ",".join(TRACES))
    capacities = parse_capacities([options.capacity or (QUICK_CAPACITIES if options.quick else CAPACITIES)])
    chosen = contenders(options.policies)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        check_plot(options.save / "policies.png")
    rows: list[Row] = []
    for name in names.split(","):
        trace = opened(name, QUICK_REQUESTS if options.quick else None)
        setting = Setting(trace, ATOMIC if options.atomic else Service())
        found = run_grid(setting, chosen, capacities, jobs=options.jobs, on_progress=_progress(name))
        print(f"\n{name}: {found[0].requests:,} requests", two_tables(found), *notes(found), sep="\n", flush=True)
        rows += found
    if options.save is not None:
        (options.save / "policies.json").write_text(as_json(rows), encoding="utf-8")
        save_plot(rows, options.save / "policies.png")
    return _conclude(rows, [] if options.quick else judge(rows))


def _conclude(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> int:
    failed = failures(rows)
    print("", *failed, *verdicts, sep="\n")
    return 1 if failed or not all(verdict.kept for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
