"""Which reader a file needs: told by its first line, not by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ...errors import TraceError
from ..history import FORMAT as RECORDING
from .csv_trace import CsvTrace, looks_like_csv
from .kvtrace import DAY_SECONDS, FORMAT, KvTrace, Merging
from .recording import RecordingTrace
from .text import bad_line, first_line
from .trace import Trace


class _Stamp(msgspec.Struct):
    format: str


def open_trace(
    path: str | os.PathLike[str],
    *,
    window: float = DAY_SECONDS,
    seed: int = 0,
    share_prefixes: bool = True,
    block_tokens: int = 16,
) -> Trace:
    """A trace in any of the formats: ``kvtrace-1``, a recording of an engine, or CSV; plain or compressed.

    ``window``, ``seed``, ``share_prefixes``: for traces whose sessions have no common clock, see
    :class:`~octavo.policies.simulator.kvtrace.Merging`. ``block_tokens``: for CSV, which does not say it.

    :raises TraceError: when the file cannot be read or is none of these.
    :raises InvalidRequest: when ``window`` is negative or infinite.
    """
    file = Path(path)
    line = first_line(file)
    by_format: Mapping[str, Callable[[], Trace]] = {
        FORMAT: lambda: KvTrace(file, Merging(window, seed, share_prefixes=share_prefixes)),
        RECORDING: lambda: RecordingTrace(file),
    }
    if looks_like_csv(line.text):
        return CsvTrace(file, block_tokens=block_tokens)
    try:
        name = msgspec.json.decode(line.text, type=_Stamp).format
    except msgspec.DecodeError as error:
        what = "this is neither a JSON header with a format nor the header row of a CSV trace"
        raise bad_line(file, line, what) from error
    if name not in by_format:
        raise TraceError(f"{file} has the format {name!r}; known are {', '.join(by_format)} and CSV")
    return by_format[name]()
