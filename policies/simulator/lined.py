"""Traces that are one request a line, in whatever order: read line by line where their times ascend, else sorted.

Sorting takes a copy of the text in a temporary file and 24 bytes of memory for each request, so a trace need not fit
into memory either way.
"""

from __future__ import annotations

import math
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np

from .text import Line, bad_line, lines
from .trace import Request, Trace, TraceInfo

MOST_BLOCKS = 2**24
"""In one run. No prompt has that many; a range with a digit too many would take all memory."""


class _Survey(NamedTuple):
    requests: int
    ascending: bool


class LinedTrace(Trace):
    """The first line is a header; every other one is a request, and blank ones are passed over."""

    def __init__(self, path: Path, info: TraceInfo) -> None:
        self.path = path
        self.info = info
        self._surveyed: _Survey | None = None

    @abstractmethod
    def read(self, line: Line) -> Request:
        """The request in one line.

        :raises ValueError: that says what is wrong.
        """

    def arrival(self, line: Line) -> float:
        """When it arrives, in seconds.

        :raises ValueError: that says what is wrong.
        """
        return self.read(line).arrival

    def __iter__(self) -> Iterator[Request]:
        if self._surveyed is None:
            self._surveyed = self._survey()
            self.requests = self._surveyed.requests
        return self._in_file_order() if self._surveyed.ascending else self._sorted()

    def _survey(self) -> _Survey:
        requests, ascending, before = 0, True, -math.inf
        for line in self._lines():
            now = self._arrival(line)
            requests, ascending, before = requests + 1, ascending and now >= before, now
        return _Survey(requests, ascending)

    def _in_file_order(self) -> Iterator[Request]:
        for line in self._lines():
            yield self._read(line)

    def _sorted(self) -> Iterator[Request]:
        """By arrival; those of one moment as they are in the file."""
        with tempfile.TemporaryFile() as spool:
            arrivals, places = array("d"), array("q")
            for line in self._lines():
                arrivals.append(self._arrival(line))
                places.append(_spool(spool, line))
            for index in np.argsort(np.frombuffer(arrivals, np.float64), kind="stable"):
                yield self._read(_unspool(spool, places[index]))

    def _lines(self) -> Iterator[Line]:
        return (line for line in lines(self.path, 2) if line.text and not line.text.isspace())

    def _arrival(self, line: Line) -> float:
        try:
            return self.arrival(line)
        except (ValueError, msgspec.DecodeError) as error:
            raise bad_line(self.path, line, error) from error

    def _read(self, line: Line) -> Request:
        try:
            return self.read(line)
        except (ValueError, msgspec.DecodeError) as error:
            raise bad_line(self.path, line, error) from error


def checked_counts(arrival: float, input_tokens: int, output_tokens: int) -> None:
    """Of one request.

    :raises ValueError: when one is negative or no number.
    """
    if not 0 <= arrival < math.inf:
        raise ValueError(f"the arrival is {arrival}; it must be seconds from the start, 0 or more")
    if input_tokens < 0 or output_tokens < 0:
        raise ValueError(f"{input_tokens} input and {output_tokens} output tokens: neither can be negative")


def names_of_range(first: int, count: int) -> bytes:
    """Of ``count`` blocks with consecutive ids.

    :raises ValueError: when an id is negative or needs more than 8 bytes, or the run is empty or longer than
        ``MOST_BLOCKS``.
    """
    if count > MOST_BLOCKS:
        raise ValueError(f"a run of {count} blocks from id {first} on: no prompt has more than {MOST_BLOCKS}")
    if first < 0 or count < 1 or first + count > 2**63:
        raise ValueError(f"a run of {count} blocks from id {first} on: ids are 0 ... 2**63 - 1, and a run has a block")
    return np.arange(first, first + count, dtype="<u8").tobytes()


def _spool(spool: IO[bytes], line: Line) -> int:
    place = spool.tell()
    spool.write(f"{line.number} {int(line.whole)} {line.text}\n".encode())
    return place


def _unspool(spool: IO[bytes], place: int) -> Line:
    spool.seek(place)
    number, whole, text = spool.readline().decode().rstrip("\n").split(" ", 2)
    return Line(int(number), text, whole == "1")
