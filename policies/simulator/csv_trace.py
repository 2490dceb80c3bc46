"""Reader of traces as CSV, for those who have a log of their own.

A header row names the columns, in any order: ``arrival`` (seconds), ``input_tokens``, ``output_tokens``, ``blocks``,
and where known ``session`` (integer), ``tenant``, ``priority`` (integer, of retention) and ``end``. ``blocks`` lists
the blocks of the prompt from its start, separated by spaces: ids, or ranges ``first-last`` with both ends in it. Ids
are prefix-chained: one stands for its block and for everything before it, so equal ids mean equal prefixes::

    arrival,input_tokens,output_tokens,blocks,tenant
    0.0,48,20,0-2,acme
    1.5,64,9,0-1 3-4,acme

CSV does not say how many tokens a block has: that is an argument.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from ...errors import TraceError
from .lined import LinedTrace, checked_counts, names_of_range
from .text import Line, bad_line, first_line
from .trace import Request, TraceInfo

NEEDED = ("arrival", "input_tokens", "output_tokens", "blocks")
KNOWN = (*NEEDED, "session", "tenant", "priority", "end")


class CsvTrace(LinedTrace):
    """One file; a field cannot contain the end of a line."""

    def __init__(self, path: Path, *, block_tokens: int = 16) -> None:
        """Reads the header row.

        :raises TraceError: when a column is missing, unknown or there twice, or ``block_tokens`` is below 1.
        """
        if block_tokens < 1:
            raise TraceError(f"{path}: block_tokens is {block_tokens}; a block has a token at least")
        super().__init__(path, TraceInfo(path.name.partition(".")[0], block_tokens))
        self._columns = _read_header(path)
        self.has_priorities = "priority" in self._columns

    def read(self, line: Line) -> Request:
        try:
            fields = next(csv.reader([line.text], strict=True))
        except csv.Error as error:
            raise ValueError(f"{error}; a field with a comma or a quote in it stands in quotes") from error
        if len(fields) != len(self._columns):
            raise ValueError(f"{len(fields)} fields; the header has {len(self._columns)}")
        row = dict(zip(self._columns, fields, strict=True))
        arrival, tokens_in, tokens_out = float(row["arrival"]), int(row["input_tokens"]), int(row["output_tokens"])
        checked_counts(arrival, tokens_in, tokens_out)
        return Request(
            arrival,
            tokens_in,
            tokens_out,
            b"".join([_names(part) for part in row["blocks"].split()]),
            session=int(row.get("session") or -1),
            tenant=row.get("tenant", ""),
            priority=int(row.get("priority") or 0),
            end=row.get("end", ""),
        )


def looks_like_csv(header: str) -> bool:
    """Whether a first line is that of such a file."""
    return "," in header and "blocks" in _split(header)


def _read_header(path: Path) -> Sequence[str]:
    line = first_line(path)
    columns = _split(line.text)
    missing = [name for name in NEEDED if name not in columns]
    unknown = [name for name in columns if name not in KNOWN]
    if missing or unknown or len(set(columns)) < len(columns):
        raise bad_line(
            path,
            line,
            f"missing columns: {', '.join(missing) or 'none'}; unknown: {', '.join(map(repr, unknown)) or 'none'}; "
            f"each of {', '.join(NEEDED)} is needed once, {', '.join(KNOWN[len(NEEDED) :])} may be there once",
        )
    return columns


def _split(header: str) -> list[str]:
    return [name.strip() for name in header.removeprefix("\ufeff").split(",")]


def _names(part: str) -> bytes:
    first, dash, last = part.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"{part!r} is neither a block id nor a range of ids like 3-7")
    return names_of_range(int(first), int(last or first) - int(first) + 1)
