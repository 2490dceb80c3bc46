"""Commit: what a step computed becomes state. Blocks are published, tokens accepted, beams re-parented, the done
released.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import CannotContinue, ModelError, caused, describe
from ..telemetry import names
from ..telemetry.record import Step
from .counters import Counters
from .delivery import Delivery
from .insight.measures import Measures
from .kv import CacheManager
from .model.runner import RowOutput
from .plan import PlannedRow
from .request import FinishReason
from .scheduler import Scheduler
from .sequence import Phase, Sample, SequenceGroup


class Committer:
    """Applies step results. Synchronous; called by the loop at step edges."""

    def __init__(
        self,
        cache: CacheManager,
        scheduler: Scheduler,
        counters: Counters,
        measures: Measures,
        delivery: Delivery,
        *,
        new_id: Callable[[], int],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._counters = counters
        self._measures = measures
        self._delivery = delivery
        self._new_id = new_id
        self._step: Step | None = None

    def apply(
        self,
        rows: Sequence[PlannedRow],
        outputs: Sequence[RowOutput],
        seconds: float,
        now: float,
        step: Step | None = None,
    ) -> None:
        """Take the results of rows that went well. Rows whose sample has ended meanwhile (aborted) only return their
        copies.

        ``seconds``: duration of the step, shared out by tokens. ``step``: its note, if anybody in it is traced.
        """
        self._step = step
        per_token = seconds / max(sum(row.count for row in rows), 1)
        beams: dict[SequenceGroup, dict[Sample, RowOutput]] = {}
        for row, output in zip(rows, outputs, strict=True):
            if row.copies:
                self._cache.copied(row.take_copies())
            sample = row.sample
            if sample.phase is not Phase.RUNNING:
                continue
            try:
                is_chosen = self._compute(row, output, per_token, now)
                if is_chosen and sample.group.beam is None:
                    self._sampled(sample, output, now)
                elif is_chosen:
                    beams.setdefault(sample.group, {})[sample] = output
            except Exception as error:  # noqa: BLE001  # whatever it is
                self._gone_wrong(sample.group, error, now)
        for group, group_outputs in beams.items():
            try:
                self._advance_beams(group, group_outputs, now)
            except Exception as error:  # noqa: BLE001  # whatever it is
                self._gone_wrong(group, error, now)
        self._step = None

    def _gone_wrong(self, group: SequenceGroup, error: Exception, now: float) -> None:
        """Whatever it was (a token that the output format does not allow, say) ends this request; the others go on."""
        self.end(group, FinishReason.ERROR, now, error if isinstance(error, CannotContinue) else _unusable(error))

    def end(self, group: SequenceGroup, reason: FinishReason, now: float, error: BaseException | None = None) -> None:
        """End a whole group now: abort it, or fail it with ``error``.

        What one that failed has published may be the cause and would fail whoever hits it: it goes too.
        """
        group.trace.begin_finish()
        for sample in group.live:
            self._scheduler.remove(sample, distrust=isinstance(error, ModelError))
            try:
                sample.end(reason)
            except Exception as fault:  # noqa: BLE001  # its text cannot be completed
                error = error or _unusable(fault)
        group.ended_by, group.error = reason, error
        self._close(group, now)

    def _compute(self, row: PlannedRow, output: RowOutput, per_token: float, now: float) -> bool:
        """Book the computed tokens; True when they were the last known ones, so that the next is chosen."""
        sample, last = row.sample, row.is_last
        self._scheduler.served(row, now)
        if row.is_prefill:
            self._cache.measured(sample.sequence, per_token * row.count)
            self._counters.prefill_tokens += row.count
            if self._step is not None:
                self._note_prefill(row, self._step)
        self._cache.commit(sample.sequence, row.count)
        if output.prompt_scores:
            sample.group.prompt_scores.extend(output.prompt_scores)
        return last

    def _note_prefill(self, row: PlannedRow, step: Step) -> None:
        sequence = row.sample.sequence
        sequence.track.prefilled(step, row.count)
        if row.is_last and row.sample.group.max_tokens > 0:
            sequence.track.enter(names.DECODE)

    def _sampled(self, sample: Sample, output: RowOutput, now: float) -> None:
        group, fresh = sample.group, [sample]
        if group.max_tokens == 0:
            sample.end(FinishReason.LENGTH)
        elif not group.is_started and len(output.sampled) > 1:
            fresh = self._branch(sample, output, now)
        else:
            self._accept(sample, output, 0, now)
        self._delivery.add(group)
        ended = [each for each in fresh if each.finish_reason is not None]
        for each in ended:
            self._scheduler.remove(each)
        if ended and group.is_done:
            self._close(group, now)

    def _branch(self, first: Sample, output: RowOutput, now: float) -> list[Sample]:
        """The prompt is computed: one sequence for every parallel sample, all on the blocks of the prompt. Returns the
        samples.
        """
        group = first.group
        seeds = list(group.sample_seeds())
        group.trace.event(names.FORK, {names.SAMPLES: len(output.sampled)}, self._step)
        for index in range(1, len(output.sampled)):
            child = first.branch(index, self._cache.fork(first.sequence, self._new_id()), seeds[index])
            child.sequence.track = group.trace.track(index)
            group.samples.append(child)
            self._scheduler.adopt(child)
        for index, sample in enumerate(group.samples):
            self._accept(sample, output, index, now)
        return group.samples

    def _accept(self, sample: Sample, output: RowOutput, draw: int, now: float) -> None:
        sampled = output.sampled[draw]
        self._cache.commit(sample.sequence, 0, sampled.token_id)
        sample.accept(sampled)
        self._token_came(sample.group, now)

    def _advance_beams(self, group: SequenceGroup, outputs: dict[Sample, RowOutput], now: float) -> None:
        """One step of beam search, in place: kept beams go on, others fork from them, the rest gives its blocks
        back.
        """
        if group.beam is None or group.ended_by is not None:
            return
        parents = group.samples
        step = group.beam.advance([outputs[sample].beam for sample in parents])
        self._token_came(group, now)
        if step.finished:
            for sample in parents:
                self._scheduler.remove(sample)
            group.samples = [group.hypothesis(index, found) for index, found in enumerate(group.beam.results())]
            self._close(group, now)
            return
        chosen = [parents[continuation.parent] for continuation in step.next]
        group.samples = [self._child(parent, index, chosen) for index, parent in enumerate(chosen)]
        for parent in parents:
            if parent not in chosen:
                self._scheduler.remove(parent)
        for sample, continuation in zip(group.samples, step.next, strict=True):
            self._cache.commit(sample.sequence, 0, continuation.token_id)
            sample.token_ids.append(continuation.token_id)

    def _child(self, parent: Sample, index: int, chosen: list[Sample]) -> Sample:
        """The beam in place ``index``: its parent itself where this is the parent's first child, else a fork of it."""
        if chosen.index(parent) == index:
            return parent
        child = parent.branch(index, self._cache.fork(parent.sequence, self._new_id()), parent.seed)
        self._scheduler.adopt(child)
        return child

    def _token_came(self, group: SequenceGroup, now: float) -> None:
        self._counters.generated_tokens += 1
        group.generated += 1
        first = group.metrics.first_token
        if first is None:
            group.trace.event(names.FIRST_TOKEN, {}, self._step)
        group.metrics = group.metrics._replace(first_token=now if first is None else first, last_token=now)
        if first is None:
            self._measures.first_token(group, now)

    def _close(self, group: SequenceGroup, now: float) -> None:
        """It is over; whoever waits for it is told with the other news."""
        group.trace.begin_finish()
        group.metrics = group.metrics._replace(finished=now)
        self._delivery.add(group)


def _unusable(error: Exception) -> ModelError:
    return caused(ModelError(f"what the model returned could not be used: {describe(error)}"), error)
