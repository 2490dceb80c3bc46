"""First come, first served."""

from __future__ import annotations

from .base import Job, SchedulingPolicy


class Fcfs(SchedulingPolicy):
    """In order of arrival; nothing is displaced for a newcomer."""

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (job.order,)
