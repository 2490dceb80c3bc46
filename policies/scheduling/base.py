"""The contract of scheduling policies.

A policy only ranks. The scheduler does the rest: it admits waiting jobs in rank order, lets everything that runs go
on, and when blocks are short takes them from the job of worst standing, choosing the cheapest to recompute among
those below the one in need. So the job of best rank always makes progress, whatever the policy says.

All calls come from the engine's one coroutine and must not block. A policy that raises is contained: the fault is
counted and logged, and the jobs are ranked first come, first served for that call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, eq=False)
class Job:
    """What a policy may know about a request. Read only for policies."""

    order: int
    """Number of the request in order of arrival."""
    arrival: float
    """Seconds on the engine's monotonic clock."""
    priority: int
    """As the caller gave it; higher is more urgent."""
    tenant: str | None
    prompt_tokens: int
    max_tokens: int


class SchedulingPolicy(ABC):
    """Ranks requests. Times are seconds on the engine's monotonic clock."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    """Another major version than the engine's is refused; minor ones only add methods with defaults."""

    @abstractmethod
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        """Position of ``job``: the lowest goes first. Compared between jobs; ties go by arrival. Pure."""

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        """Whether ``running`` should be preempted when ``waiting`` has no room otherwise. Pure; never both ways
        round.
        """
        return False
