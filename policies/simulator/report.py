"""The rows of a simulation for readers and for programs. Pure functions: nothing is printed here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .rows import Kind, Row

HEADINGS = (
    "policy",
    "hit ratio",
    "gap closed",
    "prefill saved",
    "FLOPs saved",
    "evicted",
    "wanted again",
    "waits",
)
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
NOTHING = "-"


def as_json(rows: Sequence[Row]) -> str:
    """One array with an object for each row; keys are the fields of :class:`~.rows.Row`, ``None`` is ``null``."""
    return json.dumps([row._asdict() for row in rows], indent=2, allow_nan=False)


def capacity_of(row: Row) -> str:
    """As ``5% (1,234)``: the share of the trace's different blocks, and the blocks."""
    return f"{percent(row.capacity_share)} ({row.capacity:,})"


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table below ``HEADINGS``, a line for each row, in the order given. A policy that failed has no numbers; see
    :func:`failures`."""
    return [_line(row) for row in rows]


def failures(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row without results."""
    return [f"{row.policy} at {capacity_of(row)}: {row.error}" for row in rows if row.error is not None]


def notes(rows: Sequence[Row]) -> list[str]:
    """What the numbers do not say by themselves: requests that no pool of that size can serve."""
    refused = {capacity_of(row): row.refused for row in rows if row.kind is Kind.POLICY and row.refused}
    return [f"at {size}, {count:,} requests are larger than the pool: all missed" for size, count in refused.items()]


def _line(row: Row) -> tuple[str, ...]:
    if row.error is not None:
        return (row.policy, "failed", *[""] * (len(HEADINGS) - 2))
    return (
        "no eviction" if row.kind is Kind.LIMIT else row.policy,
        NOTHING if row.hit_ratio is None else f"{row.hit_ratio:.4f}",
        NOTHING if row.gap_closed is None else f"{100 * row.gap_closed:.1f}%",
        NOTHING if row.saved_seconds is None else f"{row.saved_seconds:,.0f} s",
        NOTHING if row.saved_flops is None else scaled(row.saved_flops),
        _count(row.evicted),
        _count(row.evicted_then_wanted),
        _count(row.waits),
    )


def scaled(number: float) -> str:
    """Three digits and a decimal prefix: 1.23 P."""
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g}"


def percent(share: float) -> str:
    """To a tenth, which is nearer than a whole number of blocks comes: 2.5%, 10%."""
    hundred = 100 * share
    return f"{hundred:.1g}%" if hundred < 0.1 else f"{hundred:.1f}".removesuffix(".0") + "%"


def _count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"
