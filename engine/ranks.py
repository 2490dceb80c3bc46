"""Ranks: the order in which a scheduling policy wants requests served, and whom it gives up for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from ..policies.scheduling.base import Job, SchedulingPolicy
from .prefixes import Prefixes
from .sequence import Sample

EVENTS = ("on_arrival", "on_served", "on_leave")


class Ranks:
    """Asks the policy once per request and plan. Then places count: whatever ranks are, a plan sees one order. A policy
    that raises is reported, and requests are served as they came.

    Who arrives and who leaves is seen from plan to plan, so no end of a request can be missed.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        on_fault: Callable[[str, BaseException | str], None],
        prefixes: Prefixes | None = None,
    ) -> None:
        """``on_fault(where, error)`` hears of what the policy raises. ``prefixes``: for a policy that wants them."""
        self._policy = policy
        self._on_fault = on_fault
        self._prefixes = prefixes
        self._listens = any(getattr(type(policy), name) is not getattr(SchedulingPolicy, name) for name in EVENTS)
        self._places: dict[Job, int] = {}
        self._waiting: set[Job] = set()
        self._now = 0.0

    def renew(self, waiting: Sequence[Sample], admitted: Sequence[Sample], now: float) -> None:
        """Rank the requests of all samples for a plan made at ``now``."""
        self._now = now
        wanting = {sample.group.job for sample in waiting}
        for job in wanting:
            job.is_waiting = True
        jobs = sorted(wanting.union(sample.group.job for sample in admitted), key=attrgetter("order"))
        if self._prefixes is not None:
            self._prefixes.renew(waiting, admitted)
        if self._listens:
            self._tell_changes(jobs, now)
        for job in self._waiting - wanting:
            job.is_waiting = False
        self._waiting = wanting
        rank = self._policy.rank
        try:
            ranked = sorted(jobs, key=lambda job: rank(job, now))
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

    def served(self, job: Job, prefill_tokens: int, decode_tokens: int, now: float) -> None:
        """A step has computed so much of ``job``."""
        job.computed_tokens += prefill_tokens + decode_tokens
        if self._listens:
            self._tell("on_served", self._policy.on_served, job, prefill_tokens, decode_tokens, now)

    def _tell_changes(self, jobs: Sequence[Job], now: float) -> None:
        """``jobs``: all there are, in order of arrival."""
        for job in sorted(self._places.keys() - set(jobs), key=attrgetter("order")):
            self._tell("on_leave", self._policy.on_leave, job, now)
        for job in jobs:
            if job not in self._places:
                self._tell("on_arrival", self._policy.on_arrival, job, now)

    def _tell(self, where: str, event: Callable[..., None], *args: object) -> None:
        try:
            event(*args)
        except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
            self._on_fault(where, error)
