"""The contract of scheduling policies.

A policy only ranks. The scheduler does the rest: it admits waiting jobs in rank order, lets everything that runs go
on, and when blocks are short takes them from the job of worst standing, choosing the cheapest to recompute among
those below the one in need. So the job of best rank always makes progress, whatever the policy says.

A policy may keep books of its own from the events: ``on_arrival``, any number of ``on_served``, ``on_leave``, in this
order for every job, however it ends.

All calls come from the engine's one coroutine and must not block. A policy that raises is contained: the fault is
counted and logged. If ``rank`` raised, the jobs are ranked first come, first served for that call; an event that
raised is lost to the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, eq=False)
class Job:
    """What a policy may know about a request. Read only for policies; compared by identity, the same object from
    ``on_arrival`` to ``on_leave``.
    """

    order: int
    """Number of the request in order of arrival."""
    arrival: float
    """Seconds on the engine's monotonic clock."""
    priority: int
    """As the caller gave it; higher is more urgent."""
    tenant: str | None
    prompt_tokens: int
    max_tokens: int
    is_waiting: bool = False
    """Whether it, or one of its samples, holds no blocks and wants some. As of the last plan; while events come, those
    who were let in by the last plan still are said to wait, and those who have just come are, too."""
    computed_tokens: int = 0
    """Tokens that were computed for it so far, over all samples; those of a prompt that is computed again after a
    preemption count again, those that were found in the cache never."""
    cached_tokens: int = 0
    """How many tokens of its front need not be computed: of a waiting one those that its own tenant has on the device,
    of a running one those that are computed. Only for policies with ``wants_cached_prefix``."""
    repeats: bool = False
    """Whether a request that came earlier and waits, or one that runs, is to compute the very block that this waiting
    one lacks first: soon it will find more. Only for policies with ``wants_cached_prefix``."""


class SchedulingPolicy(ABC):
    """Ranks requests. Times are seconds on the engine's monotonic clock."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    """Another major version than the engine's is refused; minor ones only add methods with defaults."""
    wants_cached_prefix: ClassVar[bool] = False
    """Whether ``Job.cached_tokens`` and ``Job.repeats`` are of use. Looking them up costs, so only then are they kept:
    before each plan for a bounded number of the waiting jobs, new ones and then those not looked at for longest. What
    is known of the others is that many plans old."""

    @abstractmethod
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        """Position of ``job``: the lowest goes first. Compared between jobs; ties go by arrival. Pure."""

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        """Whether ``running`` should be preempted when ``waiting`` has no room otherwise. Pure; never both ways
        round.
        """
        return False

    def on_arrival(self, job: Job, now: float) -> None:
        """``job`` is there; it is ranked from now on. Those that arrive together come in order of arrival."""

    def on_served(self, job: Job, prefill_tokens: int, decode_tokens: int, now: float) -> None:
        """A step that has ended computed so many tokens of ``job``: of its prompt (or again, after a preemption), and
        generated ones. Its answer's first token comes with the prompt; each further one is a decode token of the step
        that brings it."""

    def on_leave(self, job: Job, now: float) -> None:
        """``job`` is over, well or badly, or was aborted. The last that is heard of it."""
