"""Report: a run in one document, for readers of JSON and for the table."""

from __future__ import annotations

import datetime as dt
import os
import platform
from importlib.metadata import version
from pathlib import Path

import msgspec

from ...errors import InvalidRequest, describe
from .recorder import Recorder
from .rows import OK, REFUSED, Row
from .settings import Settings
from .statistics import Goodput, Rates, Spread, Tokens, goodput, latencies, rates, tokens, window
from .vocabulary import Vocabulary

FORMAT = "octavo-bench-1"
MAX_MESSAGES = 5
LATE = 0.05
"""Seconds: what leaves later is the fault of this process, where nothing held it back."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when, and against what."""

    began: str
    """ISO 8601, UTC."""
    octavo: str
    python: str
    system: str
    cpus: int | None
    model: str
    server: str | None = None
    """What ``/version`` answers."""
    tokens_per_word: float = 1.0
    vocabulary_measured: bool = False
    """Whether that was asked of the server's tokenizer."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests."""

    all: int
    ok: int
    refused: int
    """Answered with 429 in the end."""
    failed: int
    unfinished: int
    """Cut short by the end of the run; they are in no other number."""
    refusals: int
    """Answers with 429, those that were tried again as well."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """All of it. Times are in seconds."""

    format: str = FORMAT
    environment: Environment
    settings: dict[str, object]
    seconds: float
    """From the first request to the end of the last answer."""
    requests: Counts
    errors: dict[str, int]
    """By kind."""
    messages: list[str]
    """Of the first errors, each once."""
    latency: dict[str, Spread | None]
    rates: Rates
    tokens: Tokens
    goodput: Goodput | None
    notes: list[str]
    """What a reader should know before trusting a number."""
    rows: list[Row] | msgspec.UnsetType = msgspec.UNSET


def environment(model: str, server: str | None, vocabulary: Vocabulary, now: dt.datetime) -> Environment:
    """Of this process."""
    return Environment(
        began=now.isoformat(timespec="seconds"),
        octavo=version("octavo"),
        python=platform.python_version(),
        system=platform.platform(),
        cpus=os.cpu_count(),
        model=model,
        server=server,
        tokens_per_word=vocabulary.tokens_per_word,
        vocabulary_measured=vocabulary.measured,
    )


def make_report(settings: Settings, where: Environment, recorder: Recorder, notes: list[str]) -> Report:
    """``notes``: of the run; those of the numbers are added."""
    rows = recorder.rows
    sums, found = tokens(rows), latencies(rows)
    return Report(
        environment=where,
        settings=plain_settings(settings),
        seconds=window(rows),
        requests=_counts(recorder),
        errors={kind: number for kind, number in sorted(recorder.outcomes.items()) if kind not in (OK, REFUSED)},
        messages=list(dict.fromkeys(row.message for row in rows if row.message))[:MAX_MESSAGES],
        latency=found,
        rates=rates(rows),
        tokens=sums,
        goodput=goodput(rows, settings.slo),
        notes=[*notes, *_notes(settings, sums, found["queue"])],
    )


def with_rows(report: Report, rows: list[Row]) -> Report:
    """The same with what became of each request."""
    return msgspec.structs.replace(report, rows=rows)


def plain_settings(settings: Settings) -> dict[str, object]:
    """As JSON has them."""
    plain: dict[str, object] = msgspec.to_builtins(settings, enc_hook=str)
    return plain


def save_report(report: Report, path: Path) -> None:
    """:raises InvalidRequest: when the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise InvalidRequest(f"the report cannot be saved: {describe(error)}") from error


def read_report(path: Path) -> Report:
    """:raises InvalidRequest: when the file cannot be read or is no report."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise InvalidRequest(f"the report cannot be read: {describe(error)}") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path} is no report of octavo bench: {error}") from error
    if report.format != FORMAT:
        raise InvalidRequest(f"{path} has the format {report.format!r:.40}; known is {FORMAT}")
    return report


def _counts(recorder: Recorder) -> Counts:
    outcomes = recorder.outcomes
    return Counts(
        all=len(recorder.rows),
        ok=outcomes[OK],
        refused=outcomes[REFUSED],
        failed=recorder.failed,
        unfinished=recorder.unfinished,
        refusals=sum(row.refusals for row in recorder.rows),
    )


def _notes(settings: Settings, sums: Tokens, queue: Spread | None) -> list[str]:
    notes, load = [], settings.load
    held = load.max_in_flight is not None or settings.target.retries
    if queue is not None and queue.p95 > LATE and not held:
        late = f"1 request in 20 left more than {1000 * queue.p95:,.0f} ms late"
        notes.append(f"this process did not keep up with its own load: {late}, and all latencies are too long")
    if sums.uncounted:
        notes.append(f"{sums.uncounted:,} answers came without a usage: events with content stand for tokens there")
    if sums.output and sums.cache_hit_share is None:
        notes.append("the server does not tell how many prompt tokens it had cached")
    if load.pace.concurrency is not None and settings.prompts.think and settings.prompts.turns_each > 1:
        notes.append("conversations that think keep their place: fewer requests are in flight than --concurrency")
    return notes
