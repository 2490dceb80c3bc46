"""Traces: requests in order of arrival, their blocks as names. Readers stream: they hold a line at a time.

A name has ``NAME_BYTES`` bytes and stands for its block and everything before it, so equal names mean equal prefixes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Request(NamedTuple):
    """One line of a trace."""

    arrival: float
    """Seconds from the start of the trace."""
    input_tokens: int
    output_tokens: int
    names: bytes
    """Of the whole blocks of the prompt."""
    published: bytes = b""
    """Of the generated blocks that it leaves cached beyond those, where the trace knows them."""
    session: int = -1
    """-1: unknown."""
    tenant: str = ""
    priority: int = 0
    """Of retention."""
    end: str = ""
    """How it ended, in the words of the trace; empty: unknown."""


class TraceInfo(NamedTuple):
    """What a trace says of itself."""

    name: str
    block_tokens: int
    source: str = ""
    license: str = ""


class Trace(ABC):
    """Requests in order of arrival. Each iteration begins at the start."""

    info: TraceInfo
    requests: int | None = None
    """How many there are, once that is known."""
    has_priorities: bool = False
    """Whether any request may have a retention priority."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """:raises TraceError: on reaching a line that is wrong; the message names file, line and what is wrong."""


class ListTrace(Trace):
    """Requests from anywhere, held in memory."""

    def __init__(self, info: TraceInfo, requests: Iterable[Request]) -> None:
        """``requests`` may come in any order; those of one moment stay in theirs."""
        self.info = info
        self._all = sorted(requests, key=lambda request: request.arrival)
        self.requests = len(self._all)
        self.has_priorities = any(request.priority for request in self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all)
