"""The rows of a simulation of fleets for readers and for programs. Pure functions: nothing is printed here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..report import NOTHING, percent
from .rows import FleetRow

HEADINGS = (
    "routing",
    "hit ratio",
    "with tier",
    "work max/mean",
    "in windows",
    "wait p50 p99",
    "TTFT p50 p99",
    "tier up",
    "tier down",
    "sent again",
)
SIZES = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def as_json(rows: Sequence[FleetRow]) -> str:
    """One array with an object for each row; keys are the fields of :class:`~.rows.FleetRow`, ``None`` is ``null``."""
    return json.dumps([row._asdict() for row in rows], indent=2, allow_nan=False)


def trace_of(rows: Sequence[FleetRow]) -> str:
    """A line on what they have in common."""
    first = rows[0]
    return f"{first.trace}: {first.requests:,} requests, blocks of {first.block_tokens} tokens"


def fleet_of(row: FleetRow) -> str:
    """As ``4 replicas of 1,828 blocks (1%), lru``: what the rows of one section have in common."""
    return f"{row.replicas:,} replicas of {row.capacity:,} blocks ({percent(row.capacity_share)}), {row.eviction}"


def cells(rows: Sequence[FleetRow]) -> list[tuple[str, ...]]:
    """The table below ``HEADINGS``, a line for each row. One that failed has no numbers; see :func:`failures`."""
    return [_line(row) for row in rows]


def failures(rows: Sequence[FleetRow]) -> list[str]:
    """A sentence for each row without results."""
    return [f"{row.routing}, {fleet_of(row)}: {row.error}" for row in rows if row.error is not None]


def notes(rows: Sequence[FleetRow]) -> list[str]:
    """What the numbers do not say by themselves: requests that were never answered."""
    refused = {fleet_of(row): row.refused for row in rows if row.refused}
    left = [(row, row.unanswered) for row in rows if row.unanswered]
    return [
        *(
            f"{fleet}: {count:,} requests are larger than the pool of a replica: all missed"
            for fleet, count in refused.items()
        ),
        *(f"{row.routing}, {fleet_of(row)}: no replica was left for {count:,} requests" for row, count in left),
    ]


def _line(row: FleetRow) -> tuple[str, ...]:
    if row.error is not None:
        return (row.routing, "failed", *[""] * (len(HEADINGS) - 2))
    return (
        row.routing,
        _number(row.hit_ratio, 4),
        _number(row.hit_ratio_with_tier, 4),
        _number(row.work_balance, 2),
        _number(row.window_balance, 2),
        f"{_seconds(row.wait_p50)} {_seconds(row.wait_p99)}",
        f"{_seconds(row.ttft_p50)} {_seconds(row.ttft_p99)}",
        _size(row.bytes_up),
        _size(row.bytes_down),
        NOTHING if row.sent_again is None else f"{row.sent_again:,}",
    )


def _number(value: float | None, places: int) -> str:
    return NOTHING if value is None else f"{value:.{places}f}"


def _seconds(value: float | None) -> str:
    """Three digits at least, and milliseconds below a second."""
    if value is None:
        return NOTHING
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:,.1f} s"


def _size(count: int | None) -> str:
    if count is None:
        return NOTHING
    for size, unit in SIZES:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
