"""Delivery: outputs on their way out. What a step has changed is told while the next one runs.

Commit notes whose request has news; ``run`` then makes the text, wakes the readers and says good-bye to requests that
are over. Nothing of it changes what the next step computes, so the model need not wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from ..errors import ModelError, caused, describe
from .counters import Counters
from .insight.measures import Measures
from .insight.request_trace import finish_trace
from .request import FinishReason
from .sequence import Sample, SequenceGroup


class Delivery:
    """Requests with news. All calls from the loop, between the changes of its state."""

    def __init__(
        self,
        counters: Counters,
        measures: Measures,
        *,
        on_done: Callable[[SequenceGroup], None],
        on_fault: Callable[[SequenceGroup, ModelError], None],
    ) -> None:
        """``on_done``: a request is over and told so. ``on_fault``: one that goes on has a token without a text, and
        must end.
        """
        self._counters = counters
        self._measures = measures
        self._on_done = on_done
        self._on_fault = on_fault
        self._news: OrderedDict[SequenceGroup, None] = OrderedDict()

    def add(self, group: SequenceGroup) -> None:
        """``group`` has new tokens, or is over."""
        self._news[group] = None

    @property
    def has_news(self) -> bool:
        """Whether somebody has not been told."""
        return bool(self._news)

    def run(self, most: int | None = None) -> None:
        """Tell what is new, in the order in which it came, of ``most`` requests or of all. Nothing happens when nothing
        is.

        What one request raises keeps nobody from hearing of the others: the first such error comes out at the end.
        """
        faults: list[Exception] = []
        told = 0
        while self._news and told != most:
            told += 1
            group, _ = self._news.popitem(last=False)
            try:
                if group.is_over:
                    self._see_off(group)
                else:
                    self._tell(group)
            except Exception as error:  # noqa: BLE001  # of the engine, or of a host's meter
                faults.append(error)
        if faults:
            raise faults[0]

    def _tell(self, group: SequenceGroup) -> None:
        if group.is_shown_whole:
            return
        fault = _decoded(group.samples)
        if fault is not None:
            self._on_fault(group, _textless(fault))
        group.stream.notify()

    def _see_off(self, group: SequenceGroup) -> None:
        results = group.results()
        shown = group.samples if results is None else results
        fault = _decoded(shown)
        if fault is not None:
            group.fail(group.error or _textless(fault))
        group.stream.close(results)
        reason = group.ended_by or next((s.finish_reason for s in shown if s.finish_reason), FinishReason.STOP)
        self._counters.finished[reason.value] += 1
        self._counters.prompt_tokens += len(group.prompt_ids)
        self._on_done(group)
        try:
            self._measures.request_done(group, reason)  # the host's meters and exporters come last: they may raise
        finally:
            if group.trace.is_on:
                finish_trace(group, results)


def _textless(error: Exception) -> ModelError:
    return caused(ModelError(f"the text of what came out could not be made: {describe(error)}"), error)


def _decoded(samples: Iterable[Sample]) -> Exception | None:
    """Make the text of all; returns what went wrong with the first for which it could not be made."""
    faults = [sample.text.fault for sample in samples if sample.text is not None]
    return next((fault for fault in faults if fault is not None), None)
