"""What every scheduling policy must hold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from random import Random

from ..scheduling.base import Job, SchedulingPolicy

_TENANTS = (None, "a", "b", "c")


class SchedulingPolicyContract(ABC):
    """Subclass, say how the policy is made, run pytest: it collects subclasses whose name starts with ``Test``."""

    longest_wait: float | None = None
    """Seconds after which no newcomer is ranked before a job any more, if the policy claims that (by ageing, by a bound
    on the delay); ``None``: it does not, as far as priorities go."""

    @abstractmethod
    def make(self) -> SchedulingPolicy:
        """A new policy."""

    def test_is_written_for_this_version(self) -> None:
        assert self.make().api_version[0] == SchedulingPolicy.api_version[0]

    def test_ranks_are_numbers_that_can_be_compared(self) -> None:
        policy, jobs = self._served(seed=1)
        for job in jobs:
            rank = policy.rank(job, 1000.0)
            assert isinstance(rank, tuple), f"a rank is a tuple of numbers, not {rank!r}"
            assert rank, "an empty rank says nothing"
            assert all(isinstance(number, int | float) and not math.isnan(number) for number in rank), rank

    def test_asking_changes_nothing(self) -> None:
        policy, jobs = self._served(seed=2)
        first = [policy.rank(job, 1000.0) for job in jobs]
        for waiting in jobs:
            for running in jobs:
                policy.displaces(waiting, running, 1000.0)
        assert [policy.rank(job, 1000.0) for job in reversed(jobs)] == first[::-1]

    def test_the_same_events_give_the_same_ranks(self) -> None:
        def run() -> list[tuple[float, ...]]:
            policy, jobs = self._served(seed=3)
            return [policy.rank(job, 1000.0) for job in jobs]

        assert run() == run()

    def test_nobody_displaces_who_would_displace_him(self) -> None:
        """The two would take blocks from each other for ever."""
        for seed in range(5):
            policy, jobs = self._served(seed)
            for one in jobs:
                assert not policy.displaces(one, one, 1000.0)
                for other in jobs:
                    both = policy.displaces(one, other, 1000.0) and policy.displaces(other, one, 1000.0)
                    assert not both, f"{one} and {other} displace each other"

    def test_who_has_waited_long_enough_goes_before_every_newcomer(self) -> None:
        if self.longest_wait is None:
            return
        policy = self.make()
        random = Random(6)  # noqa: S311
        old = _job(random, 0, 0.0)
        old.is_waiting, old.priority = True, -2
        policy.on_arrival(old, 0.0)
        now = self.longest_wait + 1.0
        for order in range(1, 40):
            newcomer = _job(random, order, now)
            newcomer.is_waiting = True
            policy.on_arrival(newcomer, now)
            assert (policy.rank(old, now), 0) <= (policy.rank(newcomer, now), order)

    def _served(self, seed: int) -> tuple[SchedulingPolicy, list[Job]]:
        """A policy in the middle of its work, and the jobs that are not over."""
        random = Random(seed)  # noqa: S311
        policy, jobs = self.make(), list[Job]()
        for order in range(60):
            now = order * 5.0
            job = _job(random, order, now)
            jobs.append(job)
            policy.on_arrival(job, now)
            for each in random.sample(jobs, min(len(jobs), 3)):
                each.is_waiting = not each.is_waiting
                prefill, decode = random.randrange(64), random.randrange(4)
                each.computed_tokens += prefill + decode
                policy.on_served(each, prefill, decode, now)
            if order % 3 == 0:
                gone = jobs.pop(random.randrange(len(jobs)))
                policy.on_leave(gone, now)
        return policy, jobs


def _job(random: Random, order: int, arrival: float) -> Job:
    job = Job(
        order=order,
        arrival=arrival,
        priority=random.randrange(-2, 3),
        tenant=random.choice(_TENANTS),
        prompt_tokens=random.randrange(1, 500),
        max_tokens=random.randrange(1, 100),
    )
    job.cached_tokens = random.randrange(job.prompt_tokens)
    job.repeats = random.random() < 0.3
    return job
