"""What stands in each frame of the picture, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from .board import Cache, Latency, Pool, Requests, Restart, Upkeep
from .lines import BAD, GAP, LABEL, LOUD, QUIET, alarm, line, listed, packed, pair, tallied, tally
from .watching import Trends
from .wording import UNKNOWN, Glyphs, cells, count, duration, estimate, percent, rate, size, sparkline

TREND: Final = "cyan"
NUMBER: Final = 10
"""Columns of a quantile."""


def pool_lines(pool: Pool | None, trends: Trends, glyphs: Glyphs, width: int, height: int) -> list[Text]:
    """A map that fills ``height`` lines together with its legend and how full the pool is and was."""
    if pool is None:
        return [line("pool", Text(UNKNOWN))]
    parts = (
        (pool.used - pool.pinned, glyphs.used, "green", "used"),
        (pool.pinned, glyphs.pinned, "magenta", "pinned"),
        (pool.idle, glyphs.idle, "yellow", "idle"),
        (pool.free, glyphs.free, "bright_black", "free"),
    )
    amounts = {name: pool.used if name == "used" else amount for amount, _, _, name in parts}
    legend = packed(
        [Text(glyph, style) + pair(name, count(amounts[name])) for _, glyph, style, name in parts], width, 2
    )
    usage = _trended("usage", percent(pool.usage), trends.usage, glyphs, width, top=1.0)
    number = int(min(pool.blocks, width * max(1, height - len(legend) - 1)))  # of a small pool, a cell is a block
    shares = cells([amount for amount, _, _, _ in parts], number)
    drawn = Text.assemble(*((glyph * share, style) for share, (_, glyph, style, _) in zip(shares, parts, strict=True)))
    return [*(drawn[start : start + width] for start in range(0, number, width)), *legend, usage]


def cache_lines(cache: Cache, trends: Trends, glyphs: Glyphs, width: int, height: int) -> list[Text]:
    """Hits and evictions, on at most ``height`` lines; there must be five."""
    lines = [
        _trended("hit rate", percent(cache.recent_hit_rate), trends.hit_rate, glyphs, width, top=1.0),
        line("overall", Text(percent(cache.hit_rate)), pair("regretted", count(cache.evicted_then_wanted.total))),
    ]
    lines += tallied("hit tokens", cache.hit_tokens, width, 2 if height > 5 else 1)
    lines += tallied("evicted", cache.evictions, width, min(3, height - len(lines)))
    if len(lines) < height:
        copied = {"for writing": cache.cow_forks, "in part": cache.partial_copies}
        lines += tallied("copied", copied, width, min(2, height - len(lines)))
    return lines


def request_lines(requests: Requests, trends: Trends, glyphs: Glyphs, width: int, most: int) -> list[Text]:
    """Who is served, who waits for what, and how fast it goes."""
    states = {"running": requests.running, "loading": requests.loading, "waiting": requests.waiting}
    reasons = [pair(name, count(number)) for name, number in requests.waiting_reasons.items() if number]
    return [
        *packed([pair(name, count(number), LOUD) for name, number in states.items()], width, 1, gap=" "),
        *listed("waits for", reasons, width, most),
        _trended("prefill", rate(requests.prefill.rate), trends.prefill, glyphs, width),
        _trended("decode", rate(requests.decode.rate), trends.decode, glyphs, width),
        *tallied("preempted", requests.preemptions, width, most),
        *tallied("ended", requests.finished | {"rejected": requests.rejected}, width, most),
    ]


def latency_lines(latencies: Sequence[Latency]) -> list[Text]:
    """A table of quantiles."""
    head = line("", *(Text(f"{name:>{NUMBER}}", QUIET) for name in ("p50", "p95")), gap="")
    return [head, *(_quantiles(latency) for latency in latencies)]


def restart_things(restart: Restart) -> list[Text]:
    """What a restart would keep, and what the last one kept."""
    ready = {None: Text(UNKNOWN), True: Text("ready", "green"), False: Text("warming", "yellow")}[restart.ready]
    sized = "" if restart.snapshot_bytes is None else f", {size(restart.snapshot_bytes)}B"
    age = "none yet" if restart.snapshot_age is None else f"{duration(restart.snapshot_age)} old{sized}"
    return [
        ready,
        pair("snapshot", age),
        pair("restored tokens", count(restart.restored_tokens.total)),
        pair("checkpoints", count(restart.checkpoints.total)),
        *(tally(f"loads {outcome}", counted) for outcome, counted in restart.loads.items() if counted.total),
    ]


def upkeep_things(upkeep: Upkeep) -> list[Text]:
    """What should be 0 or small."""
    stuck = upkeep.stuck_seconds
    return [
        pair("loop lag p95", estimate(upkeep.lag.high)),
        alarm("spans dropped", upkeep.spans_dropped),
        alarm("policy faults", upkeep.policy_faults),
        alarm("failed rows", upkeep.failed_rows),
        *([pair("stuck for", duration(stuck), BAD)] if stuck else []),
    ]


def _quantiles(latency: Latency) -> Text:
    numbers = (f"{estimate(value):>{NUMBER}}" for value in (latency.middle, latency.high))
    return line(latency.name, *(Text(number, LOUD) for number in numbers), gap="")


def _trended(
    label: str, value: str, trend: Sequence[float | None], glyphs: Glyphs, width: int, top: float | None = None
) -> Text:
    """A value and how it came there, which fills the line."""
    shown = f"{value:<7}"
    return line(
        label,
        Text(shown, LOUD),
        Text(sparkline(trend, width - LABEL - len(shown) - len(GAP), glyphs.levels, top), TREND),
    )
