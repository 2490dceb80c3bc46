"""Prefixes: what the cache has of the prompts that wait, for scheduling policies that go by it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ..policies.scheduling.base import Job
from .kv import CacheManager
from .kv.outlook import Wanted
from .sequence import Sample

LOOKS = 64
"""Prompts that are looked up before one plan, at most: a look costs a walk down the tree and a copy of the tokens."""


class Prefixes:
    """Keeps ``cached_tokens`` and ``repeats`` of jobs. Looks again at those that it has not looked at for longest, as
    long as the tree changes.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._looks: dict[Job, tuple[int, Wanted | None, bool]] = {}
        """Of waiting jobs, the last look that was longest ago first: state of the tree then, what the job lacks first,
        and whether a running one computes that."""

    def renew(self, waiting: Iterable[Sample], running: Iterable[Sample]) -> None:
        """Bring the jobs of all samples up to date for a plan."""
        for sample in running:
            sample.group.job.cached_tokens, sample.group.job.repeats = sample.sequence.computed, False
        first = {sample.group.job: sample for sample in waiting}
        self._looks = {job: look for job, look in self._looks.items() if job in first}
        new = (job for job in first if job not in self._looks)
        changes = self._cache.tree.changes
        old = (job for job, (seen, _, computed) in self._looks.items() if seen != changes or computed)
        for job in list(islice((job for group in (new, old) for job in group), LOOKS)):
            self._look(job, first[job])
        self._mark_repeats()

    def _look(self, job: Job, sample: Sample) -> None:
        found = self._cache.outlook(sample.sequence)
        job.cached_tokens = found.cached_tokens
        self._looks.pop(job, None)
        self._looks[job] = (self._cache.tree.changes, found.wanted, found.is_computed)

    def _mark_repeats(self) -> None:
        """Of the jobs that lack the same block the first to come is to compute it, if nobody does."""
        leaders: set[Wanted] = set()
        for job, (_, wanted, is_computed) in sorted(self._looks.items(), key=lambda item: item[0].order):
            job.repeats = is_computed or wanted in leaders
            if wanted is not None:
                leaders.add(wanted)
