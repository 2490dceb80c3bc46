"""The scheduling policies that come with Octavo, by their contract."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from octavo.engine.assembly import SCHEDULING_POLICIES
from octavo.policies.scheduling import Job, SchedulingPolicy
from octavo.policies.scheduling.fcfs import Fcfs
from octavo.policies.scheduling.priority import Priority


def job(order: int, priority: int = 0, arrival: float = 0.0) -> Job:
    return Job(order, arrival, priority, tenant=None, prompt_tokens=4, max_tokens=8)


def order_of(policy: SchedulingPolicy, jobs: list[Job], now: float) -> list[int]:
    return [each.order for each in sorted(jobs, key=lambda each: policy.rank(each, now))]


@pytest.mark.parametrize(("name", "policy"), [("fcfs", Fcfs), ("priority", Priority)])
def test_policies_are_found_by_name(name: str, policy: type[SchedulingPolicy]) -> None:
    assert SCHEDULING_POLICIES.resolve(name) is policy


@pytest.mark.parametrize("now", [0.0, 29.0, 30.0, 1e6])
def test_first_come_first_served(now: float) -> None:
    jobs = [job(i, priority=i % 3, arrival=float(i)) for i in range(6)]
    assert order_of(Fcfs(), jobs[::-1], now) == [0, 1, 2, 3, 4, 5]
    assert not any(Fcfs().displaces(a, b, now) for a, b in permutations(jobs, 2))


def test_the_higher_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    jobs = [job(0, -(2**30)), job(1, 2**30), job(2), job(3, 1), job(4), job(5, 1)]
    assert order_of(Priority(), jobs, now=1.0) == [1, 3, 5, 2, 4, 0]


def test_only_strictly_higher_priorities_displace() -> None:
    policy = Priority()
    for high, low in permutations([job(0, -1), job(1), job(2), job(3, 7)], 2):
        assert policy.displaces(high, low, now=1e6) is (high.priority > low.priority)
        assert not (policy.displaces(high, low, 0.0) and policy.displaces(low, high, 0.0))


@pytest.mark.parametrize(("waited", "first"), [(29.9, 1), (30.0, 0), (59.9, 0)])
def test_waiting_lifts_by_one_level_per_interval(waited: float, first: int) -> None:
    """SCHED-08: a low one overtakes newcomers one level above it once it has waited long enough."""
    now = 100.0
    low = job(0, priority=0, arrival=now - waited)
    assert order_of(Priority(), [low, job(1, priority=1, arrival=now)], now)[0] == first


def test_ageing_does_not_reverse_equals_and_interrupts_nobody() -> None:
    policy = Priority(seconds_per_level=10.0)
    for gap in (0.0, 3.0, 9.9, 25.0):
        older, younger = job(0, arrival=0.0), job(1, arrival=gap)
        assert order_of(policy, [younger, older], now=gap + 7.0) == [0, 1]
    ancient, fresh = job(0, priority=0, arrival=0.0), job(1, priority=1, arrival=999.0)
    assert policy.rank(ancient, 1000.0) < policy.rank(fresh, 1000.0)
    assert not policy.displaces(ancient, fresh, 1000.0)


@pytest.mark.parametrize("policy", [Fcfs(), Priority()])
def test_ranks_are_pure(policy: SchedulingPolicy) -> None:
    one = job(3, priority=2, arrival=5.0)
    before = replace(one)
    assert policy.rank(one, 50.0) == policy.rank(one, 50.0)
    assert repr(one) == repr(before)
