"""``prefix_first`` and the margin of ``priority``, by their rules."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.assembly import SCHEDULING_POLICIES
from octavo.errors import InvalidRequest
from octavo.policies.scheduling.base import Job
from octavo.policies.scheduling.prefix_first import PrefixFirst
from octavo.policies.scheduling.priority import Priority

JOBS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(0, 500), st.booleans()).map(
        lambda given: Job(0, given[0], 0, "t", 600, 8, cached_tokens=given[1], repeats=given[2])
    ),
    max_size=12,
)


def test_it_is_found_by_name() -> None:
    assert SCHEDULING_POLICIES.resolve("prefix_first") is PrefixFirst


@given(JOBS, st.floats(0, 10))
def test_the_order_is_late_ones_by_arrival_then_by_prefix_then_copies(jobs: list[Job], max_delay: float) -> None:
    now = 20.0
    for order, each in enumerate(sorted(jobs, key=lambda job: job.arrival)):
        each.order = order
    policy = PrefixFirst(max_delay)
    ranked = sorted(jobs, key=lambda job: policy.rank(job, now))
    late = [job for job in ranked if now - job.arrival > max_delay]
    rest = [job for job in ranked if now - job.arrival <= max_delay]
    own = [job for job in rest if not job.repeats]
    copies = [job for job in rest if job.repeats]
    assert ranked == late + own + copies
    assert [job.order for job in late] == sorted(job.order for job in late)
    for part in (own, copies):
        assert part == sorted(part, key=lambda job: (-job.cached_tokens, job.order))


def test_it_displaces_nobody() -> None:
    jobs = [Job(i, 0.0, i, None, 10, 10, cached_tokens=100 * i) for i in range(3)]
    assert not any(PrefixFirst().displaces(a, b, 9.0) for a, b in permutations(jobs, 2))


@pytest.mark.parametrize("delay", [-1.0, float("nan")])
def test_a_bad_delay_is_refused(delay: float) -> None:
    with pytest.raises(InvalidRequest, match="max_delay"):
        PrefixFirst(delay)


@pytest.mark.parametrize(
    ("margin", "difference", "displaced"), [(1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True)]
)
def test_priorities_displace_from_the_margin_on(margin: int, difference: int, displaced: bool) -> None:
    high, low = (Job(0, 0.0, 5 + difference, None, 4, 8), Job(1, 0.0, 5, None, 4, 8))
    assert Priority(margin=margin).displaces(high, low, 99.0) is displaced
    assert not Priority(margin=margin).displaces(low, high, 99.0)
    assert Priority(margin=margin).rank(high, 0.0) < Priority(margin=margin).rank(low, 0.0)


@pytest.mark.parametrize("options", [{"margin": 0}, {"margin": -1}, {"seconds_per_level": 0.0}], ids=str)
def test_bad_margins_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="positive"):
        Priority(**options)
