"""Reader of ``kvtrace-1``: JSON lines, a header first, then ``[t, input, output, session, end, [[first id, count]]]``.

Block ids are prefix-chained: an id stands for its block and everything before it. Where the header's ``arrivals`` is
``session``, times and ids are those of each session alone, and two assumptions merge them (see :class:`Merging`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ...errors import InvalidRequest
from .lined import LinedTrace, checked_counts, names_of_range
from .text import Line, bad_line, first_line
from .trace import Request, TraceInfo

FORMAT = "kvtrace-1"
DAY_SECONDS = 86_400.0

_LOCAL_BITS = 40  # of a name: the id within its session or group; above it that one's number
_SESSIONS = 2**22
_GROUP = 1 << 62

_Runs: TypeAlias = list[tuple[int, int]]
_Fields: TypeAlias = tuple[float, int, int, int, str, _Runs]
_REQUEST = msgspec.json.Decoder(_Fields)


class Merging(NamedTuple):
    """How sessions without a common clock become one trace: assumptions, not facts."""

    window: float = DAY_SECONDS
    """Sessions start anywhere in so many seconds, uniformly and independently."""
    seed: int = 0
    share_prefixes: bool = True
    """Whether sessions that the header puts in one group have their first blocks in common."""

    def start(self, session: int) -> float:
        """When a session starts. Depends on nothing but the seed and its number."""
        return random.Random(f"{self.seed} {session}").random() * self.window  # noqa: S311  # no secret


class _Header(msgspec.Struct):
    format: str
    name: str
    block_tokens: int
    arrivals: Literal["absolute", "session"]
    source: str = ""
    license: str = ""
    session_prefix: dict[str, tuple[int, int]] = {}


class KvTrace(LinedTrace):
    """One file. Holds the sessions and groups of its header, and what :mod:`~octavo.policies.simulator.lined` says."""

    def __init__(self, path: Path, merging: Merging | None = None) -> None:
        """Reads the header. ``merging``: for traces of sessions; by default as its fields have it.

        :raises TraceError: when it is none of this format.
        :raises InvalidRequest: when the window is negative or infinite.
        """
        merging = merging or Merging()
        if not 0 <= merging.window < math.inf:
            raise InvalidRequest(f"window is {merging.window}; it must be seconds, 0 or more")
        header = _read_header(path)
        super().__init__(path, TraceInfo(header.name, header.block_tokens, header.source, header.license))
        self._merging = merging if header.arrivals == "session" else None
        self._starts: dict[int, float] = {}
        self._groups: Mapping[int, tuple[int, int]] = {}
        if merging.share_prefixes:
            self._groups = {int(session): prefix for session, prefix in header.session_prefix.items()}

    def arrival(self, line: Line) -> float:
        arrival, _, _, session, _, _ = _REQUEST.decode(line.text)
        return arrival + self._start(session)

    def read(self, line: Line) -> Request:
        arrival, tokens_in, tokens_out, session, end, runs = _REQUEST.decode(line.text)
        checked_counts(arrival, tokens_in, tokens_out)
        if self._merging is not None:
            runs = list(self._told_apart(session, runs))
        names = b"".join([names_of_range(first, count) for first, count in runs])
        return Request(arrival + self._start(session), tokens_in, tokens_out, names, session=session, end=end)

    def _start(self, session: int) -> float:
        if self._merging is None:
            return 0.0
        if session not in self._starts:
            self._starts[session] = self._merging.start(session)
        return self._starts[session]

    def _told_apart(self, session: int, runs: _Runs) -> Iterator[tuple[int, int]]:
        """The runs of a session with ids that no other session has, except for the prefix that its group shares."""
        if not 0 <= session < _SESSIONS:
            raise ValueError(f"session {session}: sessions are numbered 0 ... {_SESSIONS - 1}")
        group, shared = self._groups.get(session, (0, 0))
        own, common = (session + 1) << _LOCAL_BITS, _GROUP | group << _LOCAL_BITS
        at = 0
        for first, count in runs:
            if not 0 <= first <= first + count <= 1 << _LOCAL_BITS:
                raise ValueError(f"{count} blocks from id {first} on: ids of a session are 0 ... 2**{_LOCAL_BITS} - 1")
            inside = min(count, shared - at) if first == at + 1 else 0  # ids of a session count from 1
            if inside > 0:
                yield common + first, inside
            if inside < count:
                yield own + first + max(inside, 0), count - max(inside, 0)
            at += count


def _read_header(path: Path) -> _Header:
    line = first_line(path)
    try:
        header = msgspec.json.decode(line.text, type=_Header)
    except msgspec.DecodeError as error:
        raise bad_line(path, line, f"this is no header of {FORMAT}: {error}") from error
    if header.format != FORMAT:
        raise bad_line(path, line, f"the format is {header.format!r}; this reader knows {FORMAT!r}")
    if header.block_tokens < 1:
        raise bad_line(path, line, f"block_tokens is {header.block_tokens}; a block has a token at least")
    if not all(session.isdecimal() for session in header.session_prefix):
        raise bad_line(path, line, "session_prefix names something that is no number of a session")
    return header
