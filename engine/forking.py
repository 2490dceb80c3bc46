"""Forking: a request that goes on from where another one stands, on the same blocks where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Sequence as SequenceOf
from typing import Protocol, TypeAlias

from ..errors import ModelError, OctavoError, caused, describe
from ..telemetry import names
from .kv import CacheManager, Sequence
from .request import FinishReason
from .scheduler import Scheduler
from .sequence import Phase, Sample, SequenceGroup

NewSequence: TypeAlias = Callable[[SequenceGroup, SequenceOf[int]], Sequence]


class End(Protocol):
    """Ends a whole request."""

    def __call__(self, group: SequenceGroup, reason: FinishReason, error: OctavoError | None = None) -> None: ...


class Forking:
    """Changes the engine's state: only the loop calls it."""

    def __init__(
        self,
        cache: CacheManager,
        scheduler: Scheduler,
        *,
        new_id: Callable[[], int],
        clock: Callable[[], float],
        end: End,
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._new_id = new_id
        self._clock = clock
        self._end = end

    def begin(
        self,
        source: SequenceGroup,
        group: SequenceGroup,
        new_sequence: NewSequence,
        at_fault: Container[Sample],
    ) -> None:
        """Let ``group`` go on from where the first sample of ``source`` stands. At a step edge. ``at_fault``: samples
        whose rows have just failed.
        """
        if group.ended_by is not None:
            return
        parent = next(iter(source.live or source.samples), None)
        if parent is None:
            self._end(group, FinishReason.ABORT)
            return
        try:  # before any block is taken: its text may have to be decoded anew
            sequence = new_sequence(group, parent.sequence.tokens)
            sample = parent.continued_by(group, 0, sequence, next(group.sample_seeds()))
        except Exception as error:  # noqa: BLE001  # a tokenizer's fault is this request's alone
            fault = caused(ModelError(f"the fork's text could not be made: {describe(error)}"), error)
            self._end(group, FinishReason.ERROR, fault)
            return
        group.samples.append(sample)
        source.trace.event(names.FORK, {names.REQUEST_ID: group.request_id})
        track = sample.sequence.track = group.trace.track(0)
        if parent.finish_reason is FinishReason.STOP or len(parent.token_ids) >= group.max_tokens:
            self._end_fork(sample, parent)
        elif self._can_share(parent, at_fault):
            sample.sequence = self._cache.fork(parent.sequence, self._new_id(), group.job.order)
            sample.sequence.track = track
            self._scheduler.adopt(sample)
        else:
            track.enter(names.QUEUE)
            self._scheduler.add(sample)
        self._begin_in_the_middle(sample)

    def _begin_in_the_middle(self, sample: Sample) -> None:
        """Times of a fork that runs already or has tokens already."""
        group, now = sample.group, self._clock()
        if sample.phase is Phase.RUNNING or sample.token_ids:
            group.metrics = group.metrics._replace(scheduled=now)
        if sample.token_ids:
            group.metrics = group.metrics._replace(first_token=now, last_token=now)

    def _can_share(self, parent: Sample, at_fault: Container[Sample]) -> bool:
        """Not the blocks of a row that has just failed: the copies that go with it were perhaps not made."""
        ready = parent.phase is Phase.RUNNING and parent.is_decoding and not parent.copies
        return ready and parent not in at_fault and self._scheduler.has_slots(1)

    def _end_fork(self, sample: Sample, parent: Sample) -> None:
        """There is nothing to go on with: the source came to a stop before this step edge, or is as long as may be."""
        sample.end(FinishReason.LENGTH)
        if parent.finish_reason is FinishReason.STOP:
            sample.finish_reason, sample.stop_reason = parent.finish_reason, parent.stop_reason
        sample.phase = Phase.DONE
        self._end(sample.group, sample.finish_reason or FinishReason.LENGTH)
