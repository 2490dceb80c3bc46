"""QuotaRules: what quotas mean for the scheduler. Who may take blocks from whom, and who may overtake.

A request is *entitled* if its tenant stays within its quota with it. Whoever is not runs on what the others leave:

* Only blocks beyond a tenant's quota are ever taken for another tenant. Cached ones that nobody uses go first (the
  eviction sees to that), then requests that run are preempted, the last in rank first, until enough is free.
* Where the first in rank finds no room and is not entitled, those after it who are go before it.
* Who has been overtaken or preempted like that for longer than ``quota_wait`` and is the oldest of its tenant becomes
  the *favoured* one: nobody is let in before it, and once it runs, newcomers leave room for all that it may need and
  displace others. So a request that is larger than its tenant's quota runs too, however busy the others are. There is
  one favoured request at a time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..policies.scheduling.base import Job
from .kv import CacheManager
from .ranks import Ranks
from .sequence import Sample

LOOK_AHEAD = 64
"""Waiting samples that one plan looks at, at most; with quotas each group of tenants has its part of them."""
LEAST_LOOK_AHEAD = 4
"""Of each group."""


class QuotaRules:
    """Without quotas there is one tenant, and nothing is forbidden. All calls while a plan is made."""

    def __init__(self, cache: CacheManager, ranks: Ranks, patience: float) -> None:
        """``patience``: seconds after which one that is overtaken becomes the favoured one."""
        self._cache = cache
        self._quotas = cache.quotas
        self._ranks = ranks
        self._patience = patience
        self._overtaken: dict[Job, float] = {}
        """Who was overtaken or had to give way for one that is entitled, and since when."""
        self._blocked: list[Job] = []
        """Who found no room in this plan and is not entitled."""
        self._now = 0.0
        self._held: Counter[str] | None = None
        """Blocks held by group, since somebody last came or went."""
        self.favoured: Job | None = None

    def begin(self, samples: Iterable[Sample], now: float) -> None:
        """A plan is made: forget who has gone, and see whether somebody was overtaken for too long."""
        if self._quotas is None:
            return
        self._blocked, self._held, self._now = [], None, now
        jobs = sorted({sample.group.job for sample in samples}, key=lambda job: job.order)
        oldest = {self._quotas.group(job.tenant): job for job in reversed(jobs)}
        present = set(jobs)
        self._overtaken = {job: since for job, since in self._overtaken.items() if job in present}
        if self.favoured not in present:
            late = [job for job in oldest.values() if now - self._overtaken.get(job, now) > self._patience]
            self.favoured = min(late, key=lambda job: job.order, default=None)

    # who is let in

    def queue(self, waiting: Sequence[Sample]) -> list[Sample]:
        """Those of the waiting that are looked at, in order of rank, but the favoured one first."""
        if self._quotas is None:
            return heapq.nsmallest(LOOK_AHEAD, waiting, key=self._ranks.place)
        ordered = sorted(waiting, key=lambda s: (s.group.job is not self.favoured, self._ranks.place(s)))
        most = max(LOOK_AHEAD // len(self._quotas.blocks), LEAST_LOOK_AHEAD)
        seen: Counter[str] = Counter()
        chosen = []
        for sample in ordered:
            group = self._group(sample)
            seen[group] += 1
            if seen[group] <= most:
                chosen.append(sample)
        return chosen

    def lets_in(self, sample: Sample, headroom: Callable[[Sample], int]) -> bool:
        """Whether ``sample`` may be let in, even if one before it found no room in this plan."""
        return not self._blocked or self._is_entitled(sample, headroom(sample))

    def found_no_room(self, sample: Sample, headroom: int) -> bool:
        """Note that there is no room for ``sample``; whether those after it may be looked at all the same."""
        if self._quotas is None or sample.group.job is self.favoured or self._is_entitled(sample, headroom):
            return False
        self._blocked.append(sample.group.job)
        return True

    def let_in(self, sample: Sample) -> None:
        """``sample`` was let in, past all who found no room. If its tenant is within its quota, it is there to stay."""
        self.changed()
        for job in self._blocked:
            self._overtaken.setdefault(job, self._now)
        job = sample.group.job
        if job in self._overtaken and not self._is_beyond(sample, self._cache.held_by_group()):
            del self._overtaken[job]

    def changed(self) -> None:
        """Somebody got blocks or gave them back."""
        self._held = None

    def favoured_among(self, admitted: Iterable[Sample]) -> list[Sample]:
        """For what newcomers have to leave room, with all that it may grow to."""
        return [] if self.favoured is None else [s for s in admitted if s.group.job is self.favoured]

    # who gives way

    def displaced_for(self, sample: Sample, headroom: int, running: Sequence[Sample]) -> list[Sample]:
        """Whom to preempt so that ``sample`` can be let in: requests of tenants beyond their quotas, the last in rank
        first. None if that would not be enough, or if ``sample`` is not entitled.
        """
        self.changed()
        if self._quotas is None or not self._is_entitled(sample, headroom):
            return []
        own = self._group(sample)
        others = [s for s in running if self._group(s) != own and s.group.job is not self.favoured]
        wanted = self._new_blocks(sample) + headroom
        chosen: list[Sample] = []
        held = self._cache.held_by_group()
        while self._room(held) < wanted:
            beyond = [s for s in others if s not in chosen and self._is_beyond(s, held)]
            if not beyond:
                return []
            last = max(beyond, key=self._ranks.place)
            chosen += [s for s in others if s is last or (s.group is last.group and s.group.beam is not None)]
            held = self._cache.held_by_group(without={s.sequence for s in chosen})
        for each in chosen:
            self._overtaken.setdefault(each.group.job, self._now)
        return chosen

    def may_take_from(self, taker: Sample, admitted: Collection[Sample]) -> Collection[Sample]:
        """Of those who are admitted, whose blocks ``taker``, which runs, may get: of its own tenant those that rank
        below it; of tenants beyond their quotas the same, or if it is entitled to grow, all.
        """
        below = [s for s in admitted if self._ranks.place(s) > self._ranks.place(taker)]
        if self._quotas is None:
            return below
        own, held = self._group(taker), self._cache.held_by_group()
        if held[own] < self._quotas.blocks[own]:
            beyond = [s for s in admitted if self._group(s) != own and self._is_beyond(s, held)]
            if beyond:
                return beyond
        return [s for s in below if self._group(s) == own or self._is_beyond(s, held)]

    def unprotected(self, taker: Sample, others: Collection[Sample]) -> list[Sample]:
        """Of ``others``, those who may be preempted for ``taker`` at all: the same tenant's, and such as are beyond
        their quotas.
        """
        if self._quotas is None:
            return list(others)
        own, held = self._group(taker), self._cache.held_by_group()
        return [s for s in others if self._group(s) == own or self._is_beyond(s, held)]

    def gives_first(self, samples: Collection[Sample]) -> Collection[Sample]:
        """Of ``samples``, those of tenants beyond their quotas; all, if there are none."""
        if self._quotas is None:
            return samples
        held = self._cache.held_by_group()
        return [s for s in samples if self._is_beyond(s, held)] or samples

    # inside

    def _group(self, sample: Sample) -> str:
        return "" if self._quotas is None else self._quotas.group(sample.group.namespace.salt)

    def _is_beyond(self, sample: Sample, held: Mapping[str, int]) -> bool:
        group = self._group(sample)
        return self._quotas is not None and held[group] > self._quotas.blocks[group]

    def _is_entitled(self, sample: Sample, headroom: int) -> bool:
        """Whether the tenant of ``sample`` stays within its quota with it, the room included that it has to leave."""
        if self._quotas is None:
            return False
        if self._held is None:
            self._held = self._cache.held_by_group()
        group = self._group(sample)
        left = self._quotas.blocks[group] - self._held[group] - headroom
        return left > 0 and self._new_blocks(sample) <= left

    def _new_blocks(self, sample: Sample) -> int:
        return self._cache.new_blocks(sample.sequence, reuse=not sample.group.wants_prompt_scores)

    def _room(self, held: Mapping[str, int]) -> int:
        """Blocks that would be free or idle if these were held."""
        return self._cache.pool.num_blocks - self._cache.pool.in_transfer - sum(held.values())
