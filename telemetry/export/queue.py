"""Exporting: a bounded queue between the engine and a span exporter, with an exact account of what was lost.

The SDK's own batch processor only logs what it loses, and its flush and shutdown wait for as long as an exporter hangs.
This one counts each span to its end and returns in time. It needs the SDK, so it is imported by ``setup`` alone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import overload

from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,  # what every instrumentation of an HTTP client looks at; it has no public name
    attach,
    set_value,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ..logging import Logger, RateLimited
from .settings import BatchSettings, SpanLosses

SPANS_AT_A_TIME = 4
PAUSE = 0.0001
REPEAT_SECONDS = 60.0
"""At most once in so long is told that spans are lost."""


class Unhurried(Sequence[ReadableSpan]):
    """A batch that lets other threads run between its spans.

    An exporter turns a batch into bytes in one go, and the interpreter takes 5 ms to take the turn from it: by then the
    model would have waited longer than some of its steps take.
    """

    def __init__(self, spans: list[ReadableSpan]) -> None:
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, at: int) -> ReadableSpan: ...
    @overload
    def __getitem__(self, at: slice) -> list[ReadableSpan]: ...
    def __getitem__(self, at: int | slice) -> ReadableSpan | list[ReadableSpan]:
        return self._spans[at]

    def __iter__(self) -> Iterator[ReadableSpan]:
        for number, span in enumerate(self._spans, 1):
            yield span
            if number % SPANS_AT_A_TIME == 0:
                time.sleep(PAUSE)


class ExportQueue(SpanProcessor):
    """Hands ended spans to ``exporter`` in batches, from a thread of its own.

    A span that finds the queue full is lost. Every sampled span that ended is counted once: as exported, as lost, or as
    pending. All methods may be called from any thread; only :meth:`flush` and :meth:`close` wait, for no longer than
    they are told.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        settings: BatchSettings,
        logger: Logger,
        *,
        close_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``close_timeout``: seconds for :meth:`shutdown`, which the SDK calls when the interpreter ends."""
        self._exporter = exporter
        self._settings = settings
        self._logger = logger
        self._close_timeout = close_timeout
        self._limited = RateLimited(REPEAT_SECONDS, clock)
        self._closing = False
        self._is_shut = False
        self._begin()
        _after_fork(self._begin_in_child)

    def _begin(self) -> None:
        self._lock = threading.RLock()  # taken for each span, where a condition would be slower
        self._changed = threading.Condition(self._lock)
        self._queue: deque[ReadableSpan] = deque()
        self._sending = 0
        self._abandoned = False
        self._flush_to = 0
        self._exported = 0
        self._lost: Counter[str] = Counter()
        self._told = 0
        self._thread = threading.Thread(target=self._work, name="octavo-spans", daemon=True)
        self._thread.start()

    def _begin_in_child(self) -> None:
        """Threads do not survive a fork, and what waited then is the parent's to send."""
        if not self._closing:
            self._begin()

    @property
    def exported(self) -> int:
        """Spans that the exporter said it has delivered."""
        return self._exported

    @property
    def pending(self) -> int:
        """Spans that wait or are under way."""
        with self._changed:
            return len(self._queue) + self._sending

    @property
    def losses(self) -> SpanLosses:
        with self._changed:
            return SpanLosses(self._lost["queue_full"], self._lost["failed"], self._lost["closing"])

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        with self._lock:
            if self._closing:
                self._lost["closing"] += 1
            elif len(self._queue) >= self._settings.max_queue:
                self._lost["queue_full"] += 1
            else:
                self._queue.append(span)
                if len(self._queue) == self._settings.max_batch:
                    self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Send what has ended until now. False: that was not done within ``timeout`` seconds, and goes on."""
        with self._changed:
            wanted = self._settled() + len(self._queue) + self._sending
            self._flush_to = max(self._flush_to, wanted)
            self._changed.notify_all()
            seconds = min(timeout, threading.TIMEOUT_MAX)
            return self._changed.wait_for(lambda: self._settled() >= wanted, seconds)

    def close(self, timeout: float) -> bool:
        """Send what is left and shut the exporter down. False: that was not done within ``timeout`` seconds.

        What is then left is lost; a call of the exporter that hangs ends by its own timeout, in its thread.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._abandoned:
                return False
        self._thread.join(min(timeout, threading.TIMEOUT_MAX))
        if self._thread.is_alive() or self.pending:  # pending: the thread died
            self._abandon()
        return not self._abandoned

    def shutdown(self) -> None:
        self.close(self._close_timeout)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self.flush(timeout_millis / 1000.0)

    def _settled(self) -> int:
        return self._exported + self._lost["failed"] + self._lost["closing"]

    def _abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._lost["closing"] += len(self._queue) + self._sending
            self._queue.clear()
            self._sending = 0
            self._changed.notify_all()
        # Apart, since some exporters wait for a call under way; it makes the others give up a retry.
        threading.Thread(target=self._shut_exporter, name="octavo-spans-end", daemon=True).start()
        self._tell()

    # in the thread

    def _work(self) -> None:
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # sending spans must not make spans
        while (batch := self._next_batch()) is not None:
            if batch:
                self._send(batch)
            if sum(self._lost.values()) > self._told and self._limited.admit("lost") is not None:
                self._tell()
        self._shut_exporter()

    def _is_due(self) -> bool:
        waiting = len(self._queue)
        return (
            self._closing or waiting >= self._settings.max_batch or (waiting > 0 and self._settled() < self._flush_to)
        )

    def _next_batch(self) -> list[ReadableSpan] | None:
        """Perhaps an empty one; ``None``: that was all."""
        with self._changed:
            self._changed.wait_for(self._is_due, min(self._settings.delay, threading.TIMEOUT_MAX))
            if self._closing and not self._queue:
                return None
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._settings.max_batch))]
            self._sending = len(batch)
            return batch

    def _send(self, batch: list[ReadableSpan]) -> None:
        delivered = self._deliver(batch)
        with self._changed:
            if self._abandoned:  # counted as lost when it was not known
                return
            self._sending = 0
            if delivered:
                self._exported += len(batch)
            else:
                self._lost["failed"] += len(batch)
            self._changed.notify_all()

    def _deliver(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(Unhurried(batch)) is SpanExportResult.SUCCESS
        except BaseException as error:  # noqa: BLE001  # foreign code; what it raises may quote what is in a span
            if self._limited.admit("failed") is not None:
                self._warn("the span exporter failed", error=type(error).__name__)
            return False

    def _shut_exporter(self) -> None:
        with self._changed:
            if self._is_shut:
                return
            self._is_shut = True
        try:
            self._exporter.shutdown()
        except Exception as error:  # noqa: BLE001  # foreign code, at its end
            self._warn("the span exporter could not be shut down", error=type(error).__name__)

    def _tell(self) -> None:
        losses = self.losses
        self._told = sum(losses)
        if self._told:
            self._warn("spans were lost on the way to the collector", **losses._asdict())

    def _warn(self, event: str, **fields: object) -> None:
        with suppress(Exception):  # the host's log may be closed already; the account goes on without it
            self._logger.warning(event, **fields)


def _after_fork(method: Callable[[], None]) -> None:
    """Call it in every child, for as long as its object lives."""
    if not hasattr(os, "register_at_fork"):
        return
    weak = weakref.WeakMethod(method)

    def in_child() -> None:
        alive = weak()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=in_child)
