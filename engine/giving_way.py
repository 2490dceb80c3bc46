"""GivingWay: who gives up blocks or slots so that another one gets on. It chooses; the scheduler preempts."""

from __future__ import annotations

from collections.abc import Sequence

from .kv import CacheManager
from .quotas import QuotaRules
from .ranks import Ranks
from .sequence import Sample
from .slots import slots_for, used_slots, width
from .tiering import Tiering


class GivingWay:
    """Never the first in rank for others of its tenant, whatever the policy says."""

    def __init__(
        self, cache: CacheManager, ranks: Ranks, rules: QuotaRules, tiering: Tiering, *, max_running: int
    ) -> None:
        self._cache = cache
        self._ranks = ranks
        self._rules = rules
        self._tiering = tiering
        self._max_running = max_running

    def for_growth(self, sample: Sample, admitted: Sequence[Sample]) -> Sample | None:
        """Of the admitted samples that may lose blocks to ``sample``, which runs, the one that is cheapest to bring
        back for what it gives.
        """
        return min(self._rules.may_take_from(sample, admitted), key=self._loss, default=None)

    def for_slots(self, sample: Sample, running: Sequence[Sample], loading: Sequence[Sample]) -> list[Sample]:
        """Whom to preempt next so that ``sample`` gets a slot; nobody if all who may be displaced were not enough."""
        lesser = self._lesser(sample, running)
        freed = sum(width(group) for group in {other.group for other in lesser})
        wanted = used_slots((*running, *loading)) - freed + slots_for(sample)
        return self._last(lesser) if wanted <= self._max_running else []

    def for_blocks(self, sample: Sample, headroom: int, running: Sequence[Sample]) -> list[Sample]:
        """Whom to preempt so that ``sample`` gets its blocks: all at once where that follows from quotas, else one
        after the other, as long as all who may be displaced could do. At best, that is: what they share counts more
        than once.
        """
        if by_quota := self._rules.displaced_for(sample, headroom, running):
            return by_quota
        lesser = self._lesser(sample, running)
        at_best = self._cache.available + sum(len(other.sequence.table) for other in lesser)
        return self._last(lesser) if at_best >= self._cache.blocks_for(len(sample.sequence.tokens)) else []

    def in_a_stand_off(self, running: Sequence[Sample]) -> Sample:
        """Everybody holds blocks that another one needs: the last in rank gives way, if need be of those who hold more
        than is theirs.
        """
        return max(self._rules.gives_first(running), key=self._ranks.place)

    def _lesser(self, sample: Sample, running: Sequence[Sample]) -> list[Sample]:
        """Those of worse rank that the policy gives up for ``sample``."""
        place = self._ranks.place(sample)
        given_up = [s for s in running if self._ranks.place(s) > place and self._ranks.displaces(sample, s)]
        return self._rules.unprotected(sample, given_up) if given_up else []

    def _last(self, samples: Sequence[Sample]) -> list[Sample]:
        return [max(samples, key=self._ranks.place)] if samples else []

    def _loss(self, sample: Sample) -> tuple[bool, float, int]:
        """What preempting costs: useless ones last, then seconds (at first, blocks), then the youngest."""
        gain = self._cache.exclusive_blocks(sample.sequence)
        seconds = self._tiering.seconds_to_come_back(self._cache.cost.seconds(sample.sequence.computed))
        return gain == 0, gain * seconds if seconds else gain, -sample.group.job.order
