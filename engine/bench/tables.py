"""The report for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from .report import Counts, Report
from .rows import METRICS
from .statistics import Spread

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "maximum")
SHOWN_QUEUE = 0.05
"""Seconds: what is held back for less is the event loop of this process."""


def show_report(console: Console, report: Report) -> None:
    """Latencies as a table, all else in lines below."""
    where, counts = report.environment, report.requests
    console.print(f"{escape(where.model)}: {counts.all:,} requests in {report.seconds:,.2f} s", highlight=False)
    if counts.ok:
        console.print(_latencies(report))
    for line in [*_sums(report), *_troubles(report)]:
        console.print(line, highlight=False, soft_wrap=True)


def _latencies(report: Report) -> Table:
    numbers = [Column(name.replace("maximum", "max"), justify="right") for name in COLUMNS]
    heads = (Column("ms", no_wrap=True), Column("", no_wrap=True), *numbers)
    table = Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, metric in METRICS.items():
        found = report.latency.get(name)
        if found is not None and (name != "queue" or found.maximum >= SHOWN_QUEUE):
            table.add_row(name, metric.title, *_cells(found))
    return table


def _cells(found: Spread) -> Iterator[str]:
    for name in COLUMNS:
        yield f"{1000 * getattr(found, name):,.1f}"


def _sums(report: Report) -> Iterator[str]:
    rates, tokens, goodput = report.rates, report.tokens, report.goodput
    yield (
        f"throughput   {rates.requests:,.2f} requests/s, {rates.output_tokens:,.1f} output tokens/s, "
        f"{rates.total_tokens:,.1f} tokens/s in all"
    )
    yield f"tokens       {tokens.prompt:,} of prompts, {tokens.output:,} of answers"
    if tokens.cache_hit_share is not None:
        yield f"prefix cache {100 * tokens.cache_hit_share:.1f}% of the prompt tokens ({tokens.cached:,})"
    if goodput is not None:
        limits = escape(str(report.settings.get("slo", "")))
        share = f"{100 * goodput.share:.1f}%"
        yield f"goodput      {goodput.rate:,.2f} requests/s, {share} of all requests keep {limits}"


def _troubles(report: Report) -> Iterator[str]:
    counts = report.requests
    yield f"requests     {_counts(counts)}"
    for kind, number in report.errors.items():
        yield f"[red]error[/]        {number:,} x {escape(kind)}"
    for message in report.messages:
        yield f"[dim]             {escape(' '.join(message.split()))}[/]"
    for note in report.notes:
        yield f"[yellow]note[/]         {escape(note)}"


def _counts(counts: Counts) -> str:
    text = f"{counts.ok:,} ok, {counts.refused:,} refused (429), {counts.failed:,} failed"
    if counts.refusals > counts.refused:
        text += f"; {counts.refusals:,} times answered with 429"
    return text + (f"; {counts.unfinished:,} cut short" if counts.unfinished else "")
