"""StepLoop: plan -> execute -> commit. The one coroutine that changes the engine's state.

What a commit has changed is told to the outside while the model makes the next step (:mod:`.delivery`). Everything
else talks to the loop through ``post``: what is posted runs at the next step edge, when no step is under way. So a
cancellation that comes during a step takes effect before the result of that step does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TypeVar

import anyio
import anyio.lowlevel

from ..errors import (
    CannotContinue,
    CensusFailed,
    DeviceOutOfMemory,
    EngineClosed,
    ModelError,
    OctavoError,
    OutOfBlocks,
    StorageError,
    caused,
    describe,
)
from ..storage.manager.tier_manager import LoadOutcome
from ..telemetry import names
from ..telemetry.logging import RateLimited, bound_to, fault_fields
from ..telemetry.record import RequestTrace, Step, Value
from .commit import Committer
from .config import EngineConfig
from .counters import Counters, EngineStats, SaveStats
from .delivery import Delivery
from .edges import Question
from .execution import RowResult, StepExecutor
from .forking import Forking, NewSequence
from .insight.backlog import waiting_tokens
from .insight.measures import Measures
from .insight.under_way import RequestView, request_views
from .kv import CacheManager
from .model.runner import RowOutput
from .pins import Pin, Pins
from .plan import PlannedRow
from .request import FinishReason
from .scheduler import Scheduler
from .sequence import Phase, Sample, SequenceGroup
from .surroundings import Surroundings
from .tiering import Tiering

T = TypeVar("T")
GOOD_STEPS_TO_WIDEN = 64
TRANSFER_POLL = 0.001
ROOM_POLL = 0.02
"""Seconds between two looks of an idle loop whether a tier takes more of what waits to be exported."""
RECOVERY_PAUSE = 0.01
WIDE = 64
"""Rows from which on a step edge takes milliseconds: it is cut in pieces, and others have their turn between them."""
TOLD_AT_ONCE = 8
"""Requests whose readers are woken together while the model runs: they all take their turn before anybody else does."""


class StepLoop:
    """See the module. Built by :class:`AsyncEngine`."""

    def __init__(  # noqa: PLR0913  # the parts that it drives
        self,
        *,
        cache: CacheManager,
        scheduler: Scheduler,
        tiering: Tiering,
        pins: Pins,
        executor: StepExecutor,
        config: EngineConfig,
        counters: Counters,
        measures: Measures,
        outside: Surroundings,
        new_id: Callable[[], int],
    ) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        """Requests that are not over, or have not been told so, by id."""
        self.cache = cache
        self._scheduler = scheduler
        self._tiering = tiering
        self._pins = pins
        self._executor = executor
        self._config = config
        self._counters = counters
        self._measures = measures
        self._clock, _, self._logger, self._tracing = outside
        self._limited = RateLimited(10.0, outside.clock)
        self._delivery = Delivery(counters, measures, on_done=self._forget, on_fault=self._text_failed)
        self._committer = Committer(cache, scheduler, counters, measures, self._delivery, new_id=new_id)
        self._forking = Forking(cache, scheduler, new_id=new_id, clock=self._clock, end=self._end)
        self._inbox: deque[Callable[[], None]] = deque()
        self._news = anyio.Event()
        self._idle = anyio.Event()
        self._stopping = False
        self._step_began: float | None = None
        self._at_fault: set[Sample] = set()
        self._ended = False
        self._good_steps = 0

    # for the doors: called from the event loop at any time

    def post(self, change: Callable[[], None]) -> None:
        """Let ``change`` run at the next step edge."""
        self._inbox.append(change)
        self._news.set()

    def wake(self) -> None:
        """Let an idle loop look again."""
        self.post(_nothing)  # the event alone could be missed by a loop that is about to wait

    async def at_edge(self, look: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """See :class:`~octavo.engine.edges.Edges`.

        :raises EngineClosed: when the loop ends before.
        """
        if self._ended:
            raise EngineClosed("the engine has ended")
        question = Question(look)
        self.post(question.answer)
        try:
            return await question.answered()
        except BaseException:
            found = question.withdraw()
            if undo is not None and found:
                self.post(partial(undo, found[0]))
            raise

    def submit(self, group: SequenceGroup) -> None:
        """Take a new request."""
        self.groups[group.request_id] = group
        self._counters.submitted += 1
        for sample in group.samples:
            sample.sequence.track = group.trace.track(sample.index)
            sample.sequence.track.enter(names.QUEUE)
        self.post(lambda: self._start(group))

    def abort(self, group: SequenceGroup) -> None:
        """End a request at the next step edge; nothing happens when it is done already."""
        if self.groups.get(group.request_id) is group:
            self.post(lambda: self._end(group, FinishReason.ABORT))

    @property
    def queued(self) -> int:
        """Requests that were submitted and have not been admitted yet."""
        return sum(1 for group in self.groups.values() if group.metrics.scheduled is None and not group.is_over)

    def fork(self, source: SequenceGroup, child: SequenceGroup, new_sequence: NewSequence) -> None:
        """Let ``child`` go on from where the first sample of ``source`` stands at the next step edge.

        Where the source decodes and a slot is free the child shares its blocks at once; otherwise it is queued with the
        same tokens, and finds what the source has published.
        """
        self.groups[child.request_id] = child
        self._counters.submitted += 1
        self.post(lambda: self._forking.begin(source, child, new_sequence, self._at_fault))

    def stop(self) -> None:
        """Finish the step under way, abort everything, and return from ``run``."""
        self._stopping = True
        self._news.set()

    def requests(self) -> tuple[RequestView, ...]:
        """What is under way."""
        return request_views(self._live(), self._clock())

    def pins(self) -> tuple[Pin, ...]:
        """What is pinned, as of the last step edge."""
        return self._pins.held()

    async def wait_idle(self) -> None:
        """Until no request is left."""
        while self.groups:
            if self._idle.is_set():
                self._idle = anyio.Event()
            await self._idle.wait()

    def stats(self) -> EngineStats:
        counters = self._counters
        return EngineStats(
            running=len(self._scheduler.running),
            loading=len(self._scheduler.loading),
            waiting=sum(s.phase is Phase.WAITING for group in self.groups.values() for s in group.samples),
            waiting_tokens=waiting_tokens(self._live(), self.cache),
            waiting_reasons=dict(self._scheduler.waiting_reasons),
            preemptions=self._scheduler.preemptions.total(),
            preemptions_by_kind=dict(self._scheduler.preemptions),
            submitted=counters.submitted,
            rejected=counters.rejected,
            finished=dict(counters.finished),
            steps=counters.steps,
            failed_rows=counters.failed_rows,
            step_seconds=counters.step_seconds,
            batch_tokens=counters.batch_tokens,
            prefill_tokens=counters.prefill_tokens,
            generated_tokens=counters.generated_tokens,
            prompt_tokens=counters.prompt_tokens,
            scheduling_policy=self._scheduler.policy_name,
            policy_faults=counters.policy_faults,
            stuck_seconds=self._stuck_seconds(),
            cache=self.cache.stats(),
            tiers=self._tiering.manager.stats(),
            transfers=self._tiering.transfers(),
            restore=self._tiering.restored(),
            saved=self._saved(),
            pins=len(self._pins),
            failed_in_a_row=counters.failed_in_a_row,
            tenant_blocks={} if self.cache.quotas is None else dict(self.cache.quotas.used),
        )

    def _live(self) -> Iterator[SequenceGroup]:
        return (group for group in self.groups.values() if not group.is_over)

    def _saved(self) -> SaveStats:
        known = [when for when in (self._counters.snapshot_at, self._tiering.checkpoint.made_at) if when is not None]
        age = max(self._clock() - max(known), 0.0) if known else None
        return SaveStats(age, self._counters.snapshot_bytes)

    # the loop

    async def run(self) -> None:
        """Until ``stop``. Never raises for what a request, a policy or the model did."""
        try:
            while not self._stopping:
                try:
                    await self._turn()
                except Exception as error:  # noqa: BLE001  # a fault of the engine itself: its requests fail, it lives
                    self._recover(error)
                    await anyio.sleep(RECOVERY_PAUSE)  # a fault that stays must not take the event loop for itself
        finally:
            self._ended = True
            self._end_all(FinishReason.ABORT)

    async def watch(self) -> None:
        """The watchdog: report a step that does not come back. It cannot be stopped, only made known."""
        reported: float | None = None
        while True:
            await anyio.sleep(self._config.step_timeout / 4)
            if self._stuck_seconds() > 0 and reported != self._step_began:
                reported = self._step_began
                self._logger.error("the model step does not return", seconds=round(self._stuck_seconds(), 1))

    async def _turn(self) -> None:
        self._run_inbox()
        if self._tiering.is_due or not self._config.acceleration.overlap:
            self._deliver()
        await self._tiering.bring_in()
        now = self._clock()
        self._pins.expire(now)
        self.cache.expire(now)
        rows = self._scheduler.plan(now).rows
        if self._tiering.is_due or not rows:
            self._deliver()
        await self._tiering.save(is_idle=not rows)
        if not rows:
            await self._wait()
            return
        if is_wide := len(rows) >= WIDE:
            await _let_others_in()
        began = self._step_began = self._clock()
        try:
            results = await self._executor.execute(rows, on_out_of_memory=self._narrow, meanwhile=self._deliver_some)
        finally:
            self._step_began = None
        self._deliver()  # what was not told meanwhile, since the step was short or failed
        self._at_fault = {
            row.sample for row, result in zip(rows, results, strict=True) if not isinstance(result, RowOutput)
        }
        traces = self._traces_in(rows) if self._tracing.live else ()  # before some of them are aborted
        self._run_inbox()
        self._at_fault = set()
        self._commit(rows, results, began, traces)
        if is_wide:
            await _let_others_in()

    def _deliver_some(self) -> bool:
        """Tell some of what is new; True when there is more."""
        self._deliver(TOLD_AT_ONCE)
        return self._delivery.has_news

    def _deliver(self, most: int | None = None) -> None:
        """Tell what is new. A fault in that is one of the engine: it comes out at the next step edge."""
        try:
            self._delivery.run(most)
        except Exception as error:  # noqa: BLE001  # also one of the host's, of its meters say
            self.post(partial(_raise, error))

    def _text_failed(self, group: SequenceGroup, error: ModelError) -> None:
        self.post(lambda: self._end(group, FinishReason.ERROR, error))

    def _commit(
        self, rows: list[PlannedRow], results: list[RowResult], began: float, traces: SequenceOf[RequestTrace]
    ) -> None:
        now = self._clock()
        seconds = now - began
        self._counters.steps += 1
        self._counters.step_seconds += seconds
        self._tracing.step_number = self._counters.steps
        good = [(row, result) for row, result in zip(rows, results, strict=True) if isinstance(result, RowOutput)]
        bad = [(row, result) for row, result in zip(rows, results, strict=True) if not isinstance(result, RowOutput)]
        is_dead = all(isinstance(result, ModelError) for result in results)
        self._counters.failed_in_a_row = self._counters.failed_in_a_row + 1 if is_dead else 0
        computed = sum(row.count for row, _ in good)
        step = self._note_step(rows, computed, began, now, traces) if traces else None
        for row, error in bad:
            self._row_failed(row, error)
        self._counters.batch_tokens += computed
        self._committer.apply([row for row, _ in good], [result for _, result in good], seconds, now, step)
        if not bad:
            self._widen()
        self.cache.maybe_evict(
            low=int(self._config.evict_below * self._config.num_blocks),
            high=int(self._config.evict_until * self._config.num_blocks),
        )
        self._measures.step_done(seconds, computed, 1 - self.cache.available / self._config.num_blocks)
        if self._config.check_every_step:
            self._check()

    def _traces_in(self, rows: list[PlannedRow]) -> list[RequestTrace]:
        """Of the requests in the step that was just made, those that are traced; none for most of the steps that only
        decode, since one is like the other.
        """
        if (self._counters.steps + 1) % self._config.trace_decode_steps and not any(row.is_prefill for row in rows):
            return []
        return list({row.sample.group.trace: None for row in rows if row.sample.group.trace.is_on})

    def _note_step(
        self, rows: list[PlannedRow], computed: int, began: float, ended: float, traces: SequenceOf[RequestTrace]
    ) -> Step:
        """Note the step for the requests in it that are traced. ``computed``: tokens in the rows that went well."""
        prefills = sum(row.is_prefill for row in rows)
        shown: dict[str, Value] = {
            names.ROWS: len(rows),
            names.PREFILL_ROWS: prefills,
            names.DECODE_ROWS: len(rows) - prefills,
            names.TOKENS: computed,
            names.USAGE_RATIO: 1 - self.cache.available / self.cache.pool.num_blocks,
        }
        return self._tracing.step(began, ended, shown, traces)

    def _row_failed(self, row: PlannedRow, error: ModelError | CannotContinue) -> None:
        """A row too large for memory is tried again in smaller pieces; any other fault ends its request."""
        sample, is_of_model = row.sample, isinstance(error, ModelError)
        self._counters.failed_rows += is_of_model
        if isinstance(error, DeviceOutOfMemory) and row.count > 1 and sample.phase is Phase.RUNNING:
            sample.copies, row.copies = row.copies, ()  # perhaps not made: they go with the next try
            return
        self.cache.copied(row.take_copies())
        self._end(sample.group, FinishReason.ERROR, error)
        if is_of_model:
            logger = bound_to(self._logger, sample.group.request_id, sample.group.trace)
            self._limited.log(logger.error, "a request failed in the model", **fault_fields(error))

    def _narrow(self, tokens: int) -> None:
        """A step of ``tokens`` tokens ran out of memory: for a while make smaller ones."""
        self._scheduler.token_limit = max(min(self._scheduler.token_limit, tokens) // 2, 1)
        self._good_steps = 0
        self._limited.log(self._logger.warning, "a step ran out of memory", tokens=tokens)

    def _widen(self) -> None:
        """Some time after a step ran out of memory, try larger ones again."""
        self._good_steps += 1
        if self._scheduler.token_limit < self._config.max_batch_tokens and self._good_steps >= GOOD_STEPS_TO_WIDEN:
            self._scheduler.token_limit = min(self._scheduler.token_limit * 2, self._config.max_batch_tokens)
            self._good_steps = 0

    async def _wait(self) -> None:
        """Nothing can be computed: wait for news. What waits with nothing to wait for is told so."""
        if self._tiering.has_work or self._inbox:  # what was posted since the plan may be what somebody waits for
            return
        stuck = None if self._scheduler.loading or self._scheduler.is_looking else self._scheduler.first_in_rank()
        if stuck is not None:
            if not self.cache.pool.in_transfer:
                self._give_up(stuck)
                return
            await anyio.sleep(TRANSFER_POLL)
            return
        if not self._stopping:
            self._news = anyio.Event()
            with anyio.move_on_after(ROOM_POLL if self._tiering.waits_for_room else None):
                await self._news.wait()

    def _give_up(self, sample: Sample) -> None:
        error = OutOfBlocks(f"the request needs more blocks than can come free ({self.cache.available} can)")
        self._end(sample.group, FinishReason.ERROR, error)

    def _run_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        for sample, outcome in self._scheduler.take_failed_loads():
            self._load_failed(sample, outcome)

    def _load_failed(self, sample: Sample, outcome: LoadOutcome) -> None:
        """Blocks that were promised did not come. They are computed instead, unless the configuration says to fail."""
        if self._config.load_failure == "fail":
            error = StorageError(f"the cached prefix could not be loaded: {outcome.reason}")
            self._end(sample.group, FinishReason.ERROR, error)

    def _start(self, group: SequenceGroup) -> None:
        if group.ended_by is not None:
            return
        if group.max_tokens == 0 and not group.wants_prompt_scores:
            group.samples[0].end(FinishReason.LENGTH)
            group.samples[0].phase = Phase.DONE
            self._end(group, FinishReason.LENGTH)
            return
        for sample in group.live:
            self._scheduler.add(sample)

    def _end(self, group: SequenceGroup, reason: FinishReason, error: OctavoError | None = None) -> None:
        if self.groups.get(group.request_id) is group and not group.is_over:  # the id may be in use again
            self._committer.end(group, reason, self._clock(), error)

    def _forget(self, group: SequenceGroup) -> None:
        if self.groups.get(group.request_id) is group:
            del self.groups[group.request_id]
        if not self.groups:
            self._idle.set()

    # when something is wrong

    def _check(self) -> None:
        try:
            self.cache.census()
        except CensusFailed as error:  # told, not fatal: clients keep their streams
            self._logger.error("the cache's self-check failed", error=str(error))

    def _recover(self, error: Exception) -> None:
        """A fault in the loop itself: every request fails with it, blocks go back, and the loop goes on."""
        self._limited.log(self._logger.error, "the engine loop failed; all requests are ended", **fault_fields(error))
        if isinstance(error, EngineClosed):
            self._stopping = True
        self._end_all(FinishReason.ERROR, error)

    def _end_all(self, reason: FinishReason, cause: Exception | None = None) -> None:
        """End every request, by force where the books are wrong. An error is made for each: they are raised apart."""
        self._contained(self._scheduler.abandon_plan)
        while self._inbox:
            self._contained(self._inbox.popleft())
        for group in list(self.groups.values()):
            error = None if cause is None else caused(ModelError(f"the engine failed inside: {describe(cause)}"), cause)
            fault = cause
            try:
                self._end(group, reason, error)
                self._delivery.run()
            except Exception as again:  # noqa: BLE001  # the others must get their end too
                fault = again
                logger = bound_to(self._logger, group.request_id, group.trace)
                logger.error("a request could not be ended cleanly", **fault_fields(again))
            if self.groups.get(group.request_id) is group:  # nobody has been told
                self._end_by_force(group, reason, error, fault)

    def _end_by_force(
        self, group: SequenceGroup, reason: FinishReason, error: ModelError | None, fault: Exception | None
    ) -> None:
        self._scheduler.drop(group)
        group.ended_by, group.error = reason, error
        self._counters.finished[reason.value] += 1
        group.trace.finish("aborted" if fault is None else type(fault).__name__, "the engine failed inside")
        self._forget(group)
        group.stream.close()

    def _contained(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # something is wrong already, and the rest must be ended too
            self._logger.error("a change could not be made while all requests are ended", **fault_fields(error))

    def _stuck_seconds(self) -> float:
        if self._step_began is None:
            return 0.0
        return max(self._clock() - self._step_began - self._config.step_timeout, 0.0)


async def _let_others_in() -> None:
    """What came from outside is seen in one turn of the event loop, called back in the next and awaited in a third."""
    for _ in range(3):
        await anyio.lowlevel.checkpoint()


def _raise(error: Exception) -> None:
    raise error


def _nothing() -> None:
    """What happens at an edge that is only waited for."""
