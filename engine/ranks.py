"""Ranks: the order in which a scheduling policy wants requests served, and whom it gives up for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..policies.scheduling.base import Job, SchedulingPolicy
from .sequence import Sample


class Ranks:
    """Asks the policy once per request and plan. Then places count: whatever ranks are, a plan sees one order. A policy
    that raises is reported, and requests are served as they came.
    """

    def __init__(self, policy: SchedulingPolicy, on_fault: Callable[[str, BaseException | str], None]) -> None:
        """``on_fault(where, error)`` hears of what the policy raises."""
        self._policy = policy
        self._on_fault = on_fault
        self._places: dict[Job, int] = {}
        self._now = 0.0

    def renew(self, samples: Iterable[Sample], now: float) -> None:
        """Rank the requests of ``samples`` for a plan made at ``now``."""
        self._now = now
        jobs = sorted({sample.group.job for sample in samples}, key=lambda job: job.order)
        try:
            ranked = sorted(jobs, key=lambda job: self._policy.rank(job, now))
        except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
            self._on_fault("rank", error)
            ranked = jobs
        self._places = {job: place for place, job in enumerate(ranked)}

    def place(self, sample: Sample) -> int:
        """In the order of ranks, lowest first."""
        return self._places[sample.group.job]

    def displaces(self, waiting: Sample, running: Sample) -> bool:
        """Whether the policy gives ``running`` up for ``waiting``."""
        try:
            return bool(self._policy.displaces(waiting.group.job, running.group.job, self._now))
        except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
            self._on_fault("displaces", error)
            return False
