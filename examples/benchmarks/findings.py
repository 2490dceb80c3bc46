"""What ``engines.py`` found: medians and ranges, who was best, tables, targets and the picture."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.process import Run
    from octavo.examples.benchmarks.report import Sheet, Spread, Target, bars, panels
    from octavo.examples.benchmarks.workloads import Workload
else:
    FOLDER = Path(__file__).parent  # neither this folder nor that of the peers is a package
    sys.path[:0] = [str(FOLDER), str(FOLDER / "peers")]
    from process import Run
    from report import Sheet, Spread, Target, bars, panels
    from workloads import Workload

OURS = "octavo"


@dataclass(slots=True)
class Findings:
    """All runs so far."""

    runs: dict[tuple[str, str], list[Run]] = field(default_factory=lambda: defaultdict(list))
    """By row and contender."""
    notes: list[str] = field(default_factory=list)

    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for row, _ in self.runs))

    def contenders(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.runs))

    def spread(self, row: str, contender: str) -> Spread | None:
        """Tokens per second, or seconds to the first token."""
        runs = self.runs.get((row, contender))
        return Spread.of(_value(row, run) for run in runs) if runs else None

    def others(self, row: str) -> Mapping[str, Spread]:
        """What the peers have in a row. One that knows no tiers does without."""
        plain = row.removesuffix(" tiers")
        found = {name: self.spread(row, name) or self.spread(plain, name) for name in self.contenders() if name != OURS}
        return {name: spread for name, spread in found.items() if spread is not None}

    def best(self, row: str) -> tuple[str, Spread] | None:
        """The fastest peer."""
        others = sorted(self.others(row).items(), key=lambda item: item[1].median, reverse=not is_latency(row))
        return others[0] if others else None

    def agreement(self, contender: str) -> float:
        """Share of the first tokens that are those of octavo, where both are greedy."""
        same = [
            mine == theirs
            for (row, name), runs in self.runs.items()
            if name == contender and not row.startswith("W4")
            for run, ours in zip(runs, self.runs.get((row, OURS), []), strict=False)
            for mine, theirs in zip(run.heads, ours.heads, strict=True)
        ]
        return sum(same) / len(same) if same else float("nan")


def is_latency(row: str) -> bool:
    """Whether less is better."""
    return row.startswith("W6")


def _value(row: str, run: Run) -> float:
    return run.seconds if is_latency(row) else run.tokens / run.seconds


def table(tasks: Sequence[Workload], findings: Findings) -> Sheet:
    """A row for each workload, a column for each engine."""
    names = findings.contenders()
    titles = {row: task.title for task in tasks for row in findings.rows() if row.startswith(task.name)}
    rows = []
    for row in sorted(findings.rows()):
        digits = 3 if is_latency(row) else 1
        spreads = [findings.spread(row, name) for name in names]
        cells = [spread.text(digits) if spread else "-" for spread in spreads]
        best, ratio = findings.best(row), gain(findings, row)
        last = [best[0] if best else "-", f"{ratio:.2f}" if ratio else "-"]
        rows.append([f"{row}: {titles[row]}", *cells, *last])
    agreements = [f"{findings.agreement(name):.0%}" for name in names]
    rows.append(["agree", *agreements, "", ""])
    return Sheet("tokens per second; W6: seconds to the first token", ["", *names, "best peer", "octavo / best"], rows)


def ratios(findings: Findings) -> Sheet:
    """How much faster octavo is than each."""
    others = [name for name in findings.contenders() if name != OURS]
    rows = [
        [row, *(f"{_faster(row, ours, theirs[name]):.2f}" if name in theirs else "-" for name in others)]
        for row in sorted(findings.rows())
        if others and (ours := findings.spread(row, OURS)) is not None
        for theirs in [findings.others(row)]
    ]
    return Sheet("octavo is so many times faster than", ["", *others], rows)


def gain(findings: Findings, row: str) -> float | None:
    """How much faster octavo is than the best peer; ``None`` where one of them is missing."""
    ours, best = findings.spread(row, OURS), findings.best(row)
    return _faster(row, ours, best[1]) if ours is not None and best is not None else None


def _faster(row: str, ours: Spread, theirs: Spread) -> float:
    return theirs.over(ours) if is_latency(row) else ours.over(theirs)


def targets(tasks: Sequence[Workload], findings: Findings) -> list[Target]:
    """Where there is a peer: how much faster octavo had to be. A cold prompt has no target."""
    rows = {task.name: f"{task.name} cached" if task.repeats else task.name for task in tasks}
    goals = {rows[task.name]: task.goal for task in tasks}
    named = [(row, goal) for row, goal in goals.items() if row != "W8" or "W8 tiers" not in goals]
    return [Target(f"{row}: octavo / best peer", gain(findings, row), goal) for row, goal in named]


def picture(findings: Findings, title: str, path: Path) -> None:
    """Tokens per second, and times to first token."""
    rows = {
        latency: [row for row in sorted(findings.rows()) if is_latency(row) == latency] for latency in (False, True)
    }
    shown = {latency: names for latency, names in rows.items() if names}
    figure, places = panels(title, len(shown))
    for axes, (latency, names) in zip(places, shown.items(), strict=True):
        spreads = {row: {name: findings.spread(row, name) for name in findings.contenders()} for row in names}
        values = {row: {name: each.median for name, each in found.items() if each} for row, found in spreads.items()}
        bars(axes, values, unit="seconds to the first token" if latency else "tokens per second")
    figure.savefig(path)
