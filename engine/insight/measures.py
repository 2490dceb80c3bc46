"""Measures: the engine's histograms. The loop observes, whoever scrapes reads.

A request counts once, whatever its number of samples: its prompt once, its tokens over all samples, its first token the
earliest. What depends on the first token is observed when that comes, the rest at the end. A fork that begins with
tokens has neither waited for them nor computed them: its queue, its first token and its prefill are not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from ...telemetry.metrics import catalogue
from ...telemetry.metrics.catalogue import Metric
from ...telemetry.metrics.genai import GenAiHistograms
from ...telemetry.metrics.histogram import Exemplar, Histogram, HistogramState
from ...telemetry.record import RequestTrace
from ..request import FinishReason
from ..sequence import SequenceGroup

MEASURED: tuple[Metric, ...] = (
    catalogue.QUEUE_SECONDS,
    catalogue.TIME_TO_FIRST_TOKEN,
    catalogue.TIME_PER_TOKEN,
    catalogue.END_TO_END,
    catalogue.PREFILL_SECONDS,
    catalogue.DECODE_SECONDS,
    catalogue.REQUEST_PROMPT,
    catalogue.REQUEST_GENERATED,
    catalogue.STEP_SECONDS,
    catalogue.STEP_TOKENS,
    catalogue.UTILIZATION,
    catalogue.LOOP_LAG,
)


OnFault: TypeAlias = Callable[[str, BaseException | str], None]


class Measures:
    """The histograms of one engine. All calls from its loop."""

    def __init__(self, wall: Callable[[], float], sink: GenAiHistograms | None = None, *, on_fault: OnFault) -> None:
        """``wall``: seconds since the epoch, for exemplars. ``sink`` hears of every request too, and ``on_fault(where,
        error)`` of what goes wrong there.
        """
        self._wall = wall
        self._sink = sink
        self._on_fault = on_fault
        self.when_done: list[Callable[[SequenceGroup, FinishReason], None]] = []
        """Who else hears of every request that is over."""
        self._histograms = {metric: Histogram(metric.bounds) for metric in MEASURED}
        self.lag = self._histograms[catalogue.LOOP_LAG]
        self._step_seconds = self._histograms[catalogue.STEP_SECONDS]
        self._step_tokens = self._histograms[catalogue.STEP_TOKENS]
        self._utilization = self._histograms[catalogue.UTILIZATION]

    def states(self) -> dict[Metric, HistogramState]:
        """All of them, as they are now."""
        return {metric: histogram.state() for metric, histogram in self._histograms.items()}

    def step_done(self, seconds: float, tokens: int, utilization: float) -> None:
        """A step computed ``tokens`` tokens; ``utilization`` of the pool is referenced now, in [0, 1]."""
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(tokens)
        self._utilization.observe(utilization)

    def first_token(self, group: SequenceGroup, now: float) -> None:
        """The earliest token of any sample has come."""
        arrival, scheduled = group.metrics.arrival, group.metrics.scheduled
        self._note(catalogue.TIME_TO_FIRST_TOKEN, now - arrival, group.trace)
        if scheduled is not None:
            self._note(catalogue.QUEUE_SECONDS, scheduled - arrival, group.trace)
            self._note(catalogue.PREFILL_SECONDS, now - scheduled, group.trace)
        if self._sink is not None:
            with self._contained():
                self._sink.first_token(group.operation, now - arrival)

    def request_done(self, group: SequenceGroup, reason: FinishReason) -> None:
        """A request is over; its times and samples are final."""
        for hear in self.when_done:
            hear(group, reason)
        metrics, trace = group.metrics, group.trace
        self._note(catalogue.REQUEST_PROMPT, len(group.prompt_ids), trace)
        self._note(catalogue.REQUEST_GENERATED, group.generated, trace)
        if metrics.first_token is None and metrics.scheduled is not None:
            self._note(catalogue.QUEUE_SECONDS, metrics.scheduled - metrics.arrival, trace)
        if metrics.finished is None:
            return
        seconds, per_token = metrics.finished - metrics.arrival, seconds_per_token(group)
        if reason is not FinishReason.ABORT:
            self._note(catalogue.END_TO_END, seconds, trace)
            if metrics.first_token is not None:
                self._note(catalogue.DECODE_SECONDS, metrics.finished - metrics.first_token, trace)
            if per_token is not None:
                self._note(catalogue.TIME_PER_TOKEN, per_token, trace)
        if self._sink is not None:
            with self._contained():
                self._sink.done(group.operation, seconds, per_token, _error_type(group, reason))

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """The host's meter provider may raise; no request fails with it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # foreign code
            self._on_fault("metrics", error)

    def _note(self, metric: Metric, value: float, trace: RequestTrace) -> None:
        origin = trace.origin
        if origin is None or not origin.trace_flags.sampled:
            self._histograms[metric].observe(value)
        else:
            self._histograms[metric].observe_traced(Exemplar(value, trace.trace_id or "", self._wall()))


def seconds_per_token(group: SequenceGroup) -> float | None:
    """Between two tokens of the longest sample, on average; ``None``: it has less than two."""
    metrics = group.metrics
    longest = max((len(sample.token_ids) for sample in group.samples), default=0)
    # a fork that began with tokens has generated less than it shows, all of it after what counts as its first token
    gaps = longest - 1 if longest <= group.generated else group.generated
    if gaps < 1 or metrics.first_token is None or metrics.last_token is None:
        return None
    return (metrics.last_token - metrics.first_token) / gaps


def _error_type(group: SequenceGroup, reason: FinishReason) -> str | None:
    if group.error is not None:
        return type(group.error).__name__
    return "aborted" if reason is FinishReason.ABORT else None
