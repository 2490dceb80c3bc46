"""Scheduler: who takes part in the next step, and with how many tokens.

One rule for all work: a sequence has tokens whose K and V are computed and some that are not; a step computes a few
more. A sequence with one uncomputed token decodes, one with more is in prefill, be it the first time or again after a
preemption.

* Decodes go first, then prefills share what is left of the token budget: each takes at most half of the rest while
  others come after it, and where one takes all, the others go first in the next step. So a long prompt neither waits
  for ever nor holds up the short ones behind it.
* Prefill chunks end at block borders (canonical boundaries), so K and V do not depend on who else was in the batch.
* A prompt is admitted whole or not at all, in rank order, with room left for the growth of what runs.
* A prompt whose prefix lies in a tier is admitted like any other and then sits in ``loading`` until that is on the
  device or cannot be had: in no step, and in nobody's way.
* Whoever needs a block and gets none takes it from a sequence of lower rank, the one that is cheapest to recompute;
  if there is none it steps back itself. The first in rank never steps back for another, so something always finishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from ..errors import OutOfBlocks
from ..policies.scheduling.base import SchedulingPolicy
from ..storage.manager.tier_manager import LoadOutcome
from ..storage.naming import BlockName
from ..telemetry import names
from ..telemetry.record import Value
from .config import EngineConfig
from .giving_way import GivingWay
from .kv import Admission, CacheManager
from .kv.cache_manager import Copies
from .plan import PlannedRow, StepPlan
from .prefixes import Prefixes
from .quotas import QuotaRules
from .ranks import Ranks
from .sequence import Phase, Sample, SequenceGroup
from .slots import slots_for, used_slots
from .tiering import Tiering


class Scheduler:
    """Owns the waiting and the running samples. All calls from the loop."""

    def __init__(
        self,
        cache: CacheManager,
        policy: SchedulingPolicy,
        config: EngineConfig,
        tiering: Tiering,
        *,
        on_fault: Callable[[str, BaseException | str], None],
    ) -> None:
        self.waiting: list[Sample] = []
        self.loading: list[Sample] = []
        """Admitted with all their blocks; a part of their prefix is on its way from a tier."""
        self.running: list[Sample] = []
        self.preemptions: Counter[str] = Counter()
        """Groups sent back to the queue, by kind."""
        self.policy_name = type(policy).__name__
        self.token_limit = config.max_batch_tokens
        """Tokens in the next step; lowered for a while when the device ran out of memory."""
        self.waiting_reasons: Counter[str] = Counter()
        """Why the samples that were looked at in the last plan wait: ``blocks``, ``slots``, ``prefix``, ``lookup``."""
        self._cache = cache
        self._ranks = Ranks(policy, on_fault, Prefixes(cache) if policy.wants_cached_prefix else None)
        self._rules = QuotaRules(cache, self._ranks, config.quota_wait)
        self._giving = GivingWay(cache, self._ranks, self._rules, tiering, max_running=config.max_running)
        self._config = config
        self._tiering = tiering
        self._failed_loads: list[tuple[Sample, LoadOutcome]] = []
        self._reserve = int(config.admission_reserve * config.num_blocks)
        self._plan = StepPlan(0)
        self._passed_over = False
        """Whether one prefill took all that was left of the budget in the last step: the others go first in this."""
        self._was_too_wide = False
        """Whether the decodes of the last step left nothing for prefills."""
        self._step = 0
        self._now = 0.0

    def add(self, sample: Sample) -> None:
        """A new sample that has to be admitted."""
        self.waiting.append(sample)
        self._tiering.arrived(sample.sequence)

    def adopt(self, sample: Sample) -> None:
        """A fork of a running sample: it is on blocks already."""
        sample.phase = Phase.RUNNING
        self.running.append(sample)
        sample.sequence.track.enter(names.DECODE if sample.has_prompt_behind else names.PREFILL)

    def has_slots(self, count: int) -> bool:
        """Whether ``count`` more sequences may run."""
        return used_slots((*self.running, *self.loading)) + count <= self._config.max_running

    def served(self, row: PlannedRow, now: float) -> None:
        """A step has computed ``row``, and it is about to be committed."""
        prefill, decode = (row.count, 0) if row.is_prefill else (0, row.count)
        self._ranks.served(row.sample.group.job, prefill, decode, now)

    def remove(self, sample: Sample, *, distrust: bool = False) -> None:
        """The sample is done: its blocks go back, it is planned no more. Harmless for one that is done already.

        ``distrust``: its K and V may be bad, so nobody shall find what it has published.
        """
        if sample.phase is Phase.WAITING:
            self.waiting.remove(sample)
            self._cache.abandon(sample.sequence)
        elif sample.phase is not Phase.DONE:
            self._leave(sample)
            if distrust:
                self._tiering.distrusted(sample.sequence.namespace, self._cache.discard(sample.sequence))
            else:
                self._tiering.completed(sample.sequence)
                self._cache.finish(sample.sequence)
        if sample.group.beam is None:  # beams have one track together
            sample.sequence.track.leave()
        sample.phase = Phase.DONE

    def take_failed_loads(self) -> list[tuple[Sample, LoadOutcome]]:
        """Loads that brought less than was promised since the last call."""
        failed, self._failed_loads = self._failed_loads, []
        return failed

    @property
    def is_looking(self) -> bool:
        """Whether tiers are being asked about a sample that waits."""
        return any(self._tiering.is_looking(sample.sequence) for sample in self.waiting)

    def first_in_rank(self) -> Sample | None:
        """Of the waiting, or if none waits of the running, the one that the last plan should have served first."""
        return min(self.waiting or self.running, key=self._ranks.place, default=None)

    def drop(self, group: SequenceGroup) -> None:
        """Forget a group whose samples cannot be removed in order: its blocks may be lost, the loop is not."""
        self.waiting = [sample for sample in self.waiting if sample.group is not group]
        self.running = [sample for sample in self.running if sample.group is not group]
        self.loading = [sample for sample in self.loading if sample.group is not group]
        for sample in group.samples:
            self._tiering.loads.give_up(sample.sequence)
            sample.phase = Phase.DONE

    def abandon_plan(self) -> None:
        """The last plan is not going to be committed (any further): give back the copies that its rows still have."""
        for row in self._plan.rows:
            self._cache.copied(row.take_copies())

    def plan(self, now: float) -> StepPlan:
        """The next step. Empty when nothing can be computed now."""
        self._now = now
        self._step += 1
        self._ranks.renew(self.waiting, (*self.running, *self.loading), now)
        self._plan_once()
        for _ in self._running_groups():
            if self._plan or not self.running or (not self.waiting and len(self._running_groups()) == 1):
                break
            self._preempt(self._giving.in_a_stand_off(self.running))
            self._plan_once()
        for row in self._plan.rows:
            row.sample.last_step = self._step
        return self._plan

    # the three parts of a plan

    def _plan_once(self) -> None:
        self._plan = StepPlan(self.token_limit)
        self._rules.begin((*self.running, *self.loading, *self.waiting), self._now)
        self.waiting_reasons.clear()
        self._plan_decodes()
        decodes = len(self._plan)
        ahead, behind = self._prefill_turns()
        self._passed_over = False
        self._plan_prefills(ahead, others=len(ahead) + len(behind) > 1)
        self._admit()
        self._plan_prefills(behind, others=False)
        self._passed_over &= len(self._plan) == decodes + 1  # while several are served, rank alone decides
        self._give_rest_to(ahead + behind)
        if not self._plan:  # perhaps beams came back that lack nothing but their last token
            self._plan_decodes()

    def _plan_decodes(self) -> None:
        """One token for everyone who decodes; when they exceed the budget, for those who waited longest."""
        decoding = [s for s in self.running if s.is_decoding and self._is_in_step(s)]
        room = self.token_limit - self._kept_for_prefill(len(decoding))
        if len(decoding) > room:
            decoding = self._longest_unserved(decoding, room)
        too_wide = len(decoding) > room  # beams go together or not at all
        if too_wide and self._was_too_wide:
            decoding, too_wide = [], False  # every other step belongs to the prefills
        self._was_too_wide = too_wide
        for sample in sorted(decoding, key=self._ranks.place):
            if sample.phase is Phase.RUNNING and (copies := self._make_room(sample, 1)) is not None:
                self._add_row(sample, 1, copies)

    def _prefill_turns(self) -> tuple[list[Sample], list[Sample]]:
        """The running prefills that go before newcomers and those that go after them, each in order."""
        prefills = sorted((s for s in self.running if not s.is_decoding), key=self._ranks.place)
        if not self._passed_over:
            return prefills, []
        prefills.sort(key=lambda s: s.last_step)
        return prefills[:-1], prefills[-1:]  # whom the last step served comes last

    def _plan_prefills(self, prefills: list[Sample], *, others: bool) -> None:
        for sample in prefills:
            if sample.phase is not Phase.RUNNING:  # it was preempted for one before it
                continue
            count = self._chunk(sample, self._share(others=others or bool(self.waiting)))
            if count < 1:
                self._passed_over = True
            elif (copies := self._make_room(sample, count)) is not None:
                self._add_row(sample, count, copies)

    def _admit(self) -> None:
        """Let waiting samples in, best rank first, until a resource is short; who waits for a prefix is skipped."""
        for sample in self._rules.queue(self.waiting):
            share = self._share(others=len(self.waiting) > 1)
            if share < min(self._unit, sample.sequence.uncomputed):
                self._passed_over = True
                break
            if reason := self._cannot_be_judged(sample):
                self.waiting_reasons[reason] += 1
                continue
            admission = self._try_admit(sample) if self._rules.lets_in(sample, self._headroom) else None
            if admission is None:
                if self._may_be_passed(sample):
                    continue
                break
            self._rules.let_in(sample)
            self.waiting.remove(sample)
            if stored := self._worth_loading(sample):
                self._load(sample, admission, stored)
                continue
            self._note_admission(sample)
            self.adopt(sample)
            sample.copies = admission.copies
            self._cache.keep_copy(sample.sequence, admission.copies)
            self._add_row(sample, self._chunk(sample, share), ())

    def _note_admission(self, sample: Sample) -> None:
        """What the queue ended with; of one that comes back, also that it does."""
        track = sample.sequence.track
        if not track.is_on:
            return
        found = {names.CACHED_TOKENS: sample.sequence.computed, names.BLOCKS: len(sample.sequence.table)}
        track.describe({**found, **_resumed(sample)})
        if sample.group.metrics.preemptions:
            track.event(names.RESUME, found)

    def _cannot_be_judged(self, sample: Sample) -> str | None:
        """Why it is not known yet what the sample will find: tiers are being asked, or another one computes it."""
        if self._tiering.is_looking(sample.sequence):
            return "lookup"
        return "prefix" if self._follows(sample) else None

    def _worth_loading(self, sample: Sample) -> list[BlockName]:
        if sample.group.wants_prompt_scores:
            return []
        return self._tiering.loads.worthwhile(sample.sequence)

    def _load(self, sample: Sample, admission: Admission, wanted: list[BlockName]) -> None:
        """Let a tier fill the next blocks of a sample that was just admitted."""
        self._cache.forgo_copy(sample.sequence, admission.copies)
        self._note_admission(sample)
        sample.phase = Phase.LOADING
        sample.sequence.track.enter(names.LOAD, {names.BLOCKS: len(wanted), **_resumed(sample)})
        self.loading.append(sample)
        self._tiering.loads.begin(sample.sequence, wanted, partial(self._loaded, sample))

    def _loaded(self, sample: Sample, outcome: LoadOutcome) -> None:
        """What could be had is on the device; the rest is computed."""
        self.loading.remove(sample)
        sample.sequence.track.describe({names.OUTCOME: outcome.reason})
        self._note_found(sample)
        self.adopt(sample)
        if outcome.reason in ("missing", "corrupt", "failed"):
            self._failed_loads.append((sample, outcome))

    def _note_found(self, sample: Sample) -> None:
        """A load is over: what its request need not compute is known now. Coming back does not count."""
        if not sample.sequence.resumed:
            sample.group.cached_tokens = sample.sequence.computed

    def _give_rest_to(self, prefills: list[Sample]) -> None:
        """What the others left of the budget goes to the first in line."""
        for sample in prefills:
            row = self._plan.row(sample)
            if row is None or self._plan.left < 1:
                continue
            more = self._chunk(sample, min(row.count + self._plan.left, self._prefill_cap)) - row.count
            if more > 0 and not self._cache.extend(sample.sequence, row.count + more):
                self._plan.widen(row, more)

    def _add_row(self, sample: Sample, count: int, copies: Copies) -> None:
        """A row, with the copies that the sample still owes; none for ``count`` 0 (a beam ahead of the others)."""
        if count > 0:
            self._plan.add(PlannedRow(sample, count, sample.copies + copies))
            sample.copies = ()

    # who and how much

    def _try_admit(self, sample: Sample) -> Admission | None:
        """Slots and blocks for ``sample``, displacing others where the policy says so; ``None``: it has to wait."""
        group = sample.group
        while not self.has_slots(slots_for(sample)):
            if not self._displace(self._giving.for_slots(sample, self.running, self.loading)):
                self.waiting_reasons["slots"] += 1
                return None
        resumed = group.metrics.scheduled is not None
        while True:
            headroom = self._headroom(sample)
            reuse = not group.wants_prompt_scores
            admission = self._cache.try_admit(sample.sequence, headroom=headroom, reuse=reuse, resumed=resumed)
            if admission is not None:
                break
            if not (
                self._tiering.warming.gives_way()
                or self._displace(self._giving.for_blocks(sample, headroom, self.running))
            ):
                self.waiting_reasons["blocks"] += 1
                return None
        sample.following_since = None
        if not resumed:
            group.cached_tokens = admission.cached_tokens
            group.metrics = group.metrics._replace(scheduled=self._now)
        return admission

    def _headroom(self, sample: Sample) -> int:
        """Blocks that an admission leaves over for the growth of those that run and come before it in rank."""
        before = sum(
            1 for other in (*self.running, *self.loading) if self._ranks.place(other) < self._ranks.place(sample)
        )
        favoured = self._rules.favoured_among((*self.running, *self.loading))
        return (self._reserve + before if before else 0) + sum(map(self._growth, favoured))

    def _growth(self, sample: Sample) -> int:
        """Blocks that an admitted sample may still come to need, at most."""
        most = self._cache.blocks_for(len(sample.group.prompt_ids) + sample.group.max_tokens)
        return max(most - len(sample.sequence.table), 0)

    def _may_be_passed(self, sample: Sample) -> bool:
        """Whether others may be let in before ``sample``, which found no room: not if slots are short, for all need
        one, and not if it would be within its rights.
        """
        return self.has_slots(slots_for(sample)) and self._rules.found_no_room(sample, self._headroom(sample))

    def _displace(self, victims: list[Sample]) -> bool:
        """Preempt those who give way; whether there was anybody."""
        for victim in victims:
            if victim.phase is Phase.RUNNING:  # not yet, together with another beam
                self._preempt(victim)
        return bool(victims)

    def _follows(self, sample: Sample) -> bool:
        """Whether another sequence is computing what this one needs, and it has not waited for that too long."""
        producer = None if sample.group.wants_prompt_scores else self._cache.producer(sample.sequence)
        if producer is None or self._tiering.warming.gives_way(producer):
            sample.following_since = None
            return False
        if sample.following_since is None:
            sample.following_since = self._now
        return self._now - sample.following_since < self._config.prefix_wait

    def _is_in_step(self, sample: Sample) -> bool:
        """Beams go in lockstep: none decodes before all of them can."""
        return sample.group.beam is None or all(
            beam.phase is Phase.RUNNING and beam.is_decoding for beam in sample.group.samples
        )

    def _chunk(self, sample: Sample, limit: int) -> int:
        """Tokens of a prefill within ``limit``: all that is left, or up to a block border."""
        sequence = sample.sequence
        lockstep = sample.group.beam is not None and len(sample.group.samples) > 1
        wanted = sequence.uncomputed - lockstep  # the last token of a beam is computed together with the others'
        if wanted <= limit:
            return wanted
        end = (sequence.computed + limit) // self._unit * self._unit
        return max(end - sequence.computed, 0)

    def _share(self, *, others: bool) -> int:
        """Tokens that the next prefill may take: half of what is left, at least a block, while others come after it."""
        left = min(self._plan.left, self._prefill_cap)
        return max(left // 2, min(left, self._unit)) if others else left

    @property
    def _prefill_cap(self) -> int:
        return self._config.prefill_chunk or self.token_limit

    @property
    def _unit(self) -> int:
        """Prefill chunks end at multiples of this."""
        size = self._cache.block_size
        # decodes leave at least half of the budget; a whole block has to fit into that, or no prompt would ever get on
        return size if min(self._prefill_cap, self.token_limit // 2) >= size else 1

    def _kept_for_prefill(self, decoding: int) -> int:
        busy = bool(self.waiting) or decoding < len(self.running)
        return min(self._cache.block_size, self.token_limit // 2) if busy else 0

    def _longest_unserved(self, decoding: list[Sample], room: int) -> list[Sample]:
        """Whole lockstep groups and single samples, those served longest ago first, at least one of them."""
        chosen: dict[Sample, None] = {}
        for sample in sorted(decoding, key=lambda s: (s.last_step, self._ranks.place(s))):
            unit = sample.group.samples if sample.group.beam is not None else [sample]
            if sample not in chosen and (not chosen or len(chosen) + len(unit) <= room):
                chosen.update(dict.fromkeys(unit))
        return list(chosen)

    def _running_groups(self) -> list[SequenceGroup]:
        return list(dict.fromkeys(sample.group for sample in self.running))

    # blocks for those who run

    def _make_room(self, sample: Sample, count: int) -> Copies | None:
        """Slots for the next ``count`` tokens; ``None``: there are none and the sample stepped back."""
        while True:
            try:
                return self._cache.extend(sample.sequence, count)
            except OutOfBlocks:
                victim = self._giving.for_growth(sample, (*self.running, *self.loading))
                self._preempt(victim or sample)
                if victim is None:
                    return None

    def _preempt(self, sample: Sample) -> None:
        """Back to the queue; of a beam search all beams together, as none can go on alone."""
        group = sample.group
        together = [other for other in group.samples if other.is_admitted] if group.beam is not None else [sample]
        self._note_preemption(together)
        self._rules.changed()
        for member in together:
            self._cache.copied(self._plan.drop(member))
            self._leave(member)
            self._tiering.preempted(member.sequence)
            self._cache.preempt(member.sequence)
            member.phase = Phase.WAITING
            self.waiting.append(member)
        if group.wants_prompt_scores:
            group.prompt_scores.clear()  # the prompt is computed again, and so are they
        group.metrics = group.metrics._replace(preemptions=group.metrics.preemptions + 1)
        self.preemptions[self._preemption_kind] += 1

    @property
    def _preemption_kind(self) -> str:
        """Whether what is evicted of a preempted sequence goes to a tier, from where it comes back."""
        return "swap" if self._tiering.manager.takes_blocks else "recompute"

    def _note_preemption(self, together: list[Sample]) -> None:
        """Once for all beams of a search, which have one track."""
        track = together[0].sequence.track
        if track.is_on:
            given: dict[str, Value] = {
                names.KIND: self._preemption_kind,
                names.BLOCKS: sum(len(member.sequence.table) for member in together),
                names.TOKENS: sum(member.sequence.computed for member in together),
            }
            track.event(names.PREEMPT, given)
            track.enter(names.QUEUE, {names.RESUMED: True})

    def _leave(self, sample: Sample) -> None:
        if sample.phase is Phase.LOADING:
            self.loading.remove(sample)
            self._tiering.loads.give_up(sample.sequence)
            self._note_found(sample)
        else:
            self.running.remove(sample)
        self._cache.copied(sample.copies)
        sample.copies = ()


def _resumed(sample: Sample) -> dict[str, Value]:
    """What is shown of an admission that is not the first one of its request."""
    return {names.RESUMED: True} if sample.group.metrics.preemptions else {}
