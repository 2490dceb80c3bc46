"""The table of storage tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.table import Table
from rich.text import Text

from .board import Tier
from .lines import BAD, QUIET
from .wording import UNKNOWN, count, duration, printable, size


class _Column(NamedTuple):
    title: str
    least: int
    """Columns that the terminal must have to show it."""


COLUMNS: Final = (
    _Column("tier", 0),
    _Column("blocks", 50),
    _Column("bytes", 0),
    _Column("read/s", 60),
    _Column("write/s", 60),
    _Column("read", 76),
    _Column("write", 76),
    _Column("queued", 76),
    _Column("errors", 40),
    _Column("corrupt", 100),
    _Column("dropped", 100),
    _Column("state", 0),
)


def tier_table(tiers: Sequence[Tier], width: int) -> Table:
    """Tiers in their order; a terminal ``width`` columns wide shows what there is room for."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=QUIET)
    shown = [column for column in COLUMNS if column.least <= width]
    for column in shown:
        table.add_column(column.title, justify="left" if column.title in {"tier", "state"} else "right", no_wrap=True)
    for tier in tiers:
        cells = _tier_cells(tier)
        table.add_row(*(cells[column.title] for column in shown))
    return table


def _tier_cells(tier: Tier) -> dict[str, Text]:
    bound = "" if tier.capacity is None else f"/{size(tier.capacity)}"
    return {
        "tier": Text(printable(tier.name), "bold"),
        "blocks": Text(count(tier.blocks)),
        "bytes": Text(f"{size(tier.bytes)}{bound}"),
        "read/s": Text(size(tier.read.rate)),
        "write/s": Text(size(tier.written.rate)),
        "read": Text(duration(tier.read_seconds)),
        "write": Text(duration(tier.write_seconds)),
        "queued": Text(size(tier.queued)),
        "errors": Text(count(tier.errors.total), BAD if tier.errors.rate else ""),
        "corrupt": Text(count(tier.corrupt.total), BAD if tier.corrupt.total else ""),
        "dropped": Text(count(tier.dropped.total), BAD if tier.dropped.rate else ""),
        "state": _tier_state(tier),
    }


def _tier_state(tier: Tier) -> Text:
    if tier.open_breakers:
        return Text("open:" + "".join(printable(direction[:1]) for direction in tier.open_breakers), BAD)
    return {None: Text(UNKNOWN), True: Text("ok", "green"), False: Text("down", BAD)}[tier.healthy]
