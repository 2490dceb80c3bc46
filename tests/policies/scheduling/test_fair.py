"""``fair`` against a slow book-keeping of the same rules, and its bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.assembly import SCHEDULING_POLICIES
from octavo.errors import InvalidRequest
from octavo.policies.scheduling.base import Job
from octavo.policies.scheduling.fair import REMEMBERED, Fair

BAD_SETTINGS: list[dict[str, object]] = [
    {"weights": {"a": 0.0}},
    {"weights": {"a": float("inf")}},
    {"input_weight": -1.0},
    {"output_weight": float("nan")},
    {"max_delay": -1.0},
]


def job(order: int, tenant: str | None, *, arrival: float = 0.0, cached: int = 0, repeats: bool = False) -> Job:
    made = Job(order, arrival, 0, tenant, prompt_tokens=100, max_tokens=8, is_waiting=True)
    return replace(made, cached_tokens=cached, repeats=repeats)


def order_of(policy: Fair, jobs: list[Job], now: float = 0.0) -> list[int]:
    return [each.order for each in sorted(jobs, key=lambda each: policy.rank(each, now))]


def arrived(policy: Fair, *jobs: Job) -> list[Job]:
    for each in jobs:
        policy.on_arrival(each, 0.0)
    return list(jobs)


def test_it_is_found_by_name() -> None:
    assert SCHEDULING_POLICIES.resolve("fair") is Fair


@pytest.mark.parametrize("options", BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="fair"):
        Fair(**options)  # type: ignore[arg-type]  # what is tested


def test_the_least_served_tenant_goes_first() -> None:
    policy = Fair()
    jobs = arrived(policy, job(0, "a"), job(1, "b"), job(2, None))
    policy.on_served(jobs[0], 30, 0, 0.0)
    policy.on_served(jobs[1], 0, 10, 0.0)
    policy.on_served(jobs[2], 25, 0, 0.0)
    assert order_of(policy, jobs) == [1, 2, 0]  # 20, 25, 30: an output token counts twice


def test_weights_divide_what_was_served() -> None:
    policy = Fair(weights={"a": 3.0, "": 2.0})
    jobs = arrived(policy, job(0, "a"), job(1, "b"), job(2, None))
    policy.on_served(jobs[0], 29, 0, 0.0)
    policy.on_served(jobs[1], 10, 0, 0.0)
    policy.on_served(jobs[2], 22, 0, 0.0)
    assert order_of(policy, jobs) == [0, 1, 2]


def test_inside_a_tenant_cached_prefixes_go_first_then_arrival_and_copies_last() -> None:
    policy = Fair()
    jobs = arrived(
        policy, job(0, "a", repeats=True), job(1, "a"), job(2, "a", cached=8), job(3, "a", cached=64), job(4, "a")
    )
    assert order_of(policy, jobs) == [3, 2, 1, 4, 0]


def test_delay_inside_a_tenant_is_bounded() -> None:
    policy = Fair(max_delay=5.0)
    jobs = arrived(policy, job(0, "a"), job(1, "a", arrival=1.0, repeats=True), job(2, "a", arrival=9.0, cached=99))
    assert order_of(policy, jobs, now=5.0) == [2, 0, 1]
    assert order_of(policy, jobs, now=5.5) == [0, 2, 1]
    assert order_of(policy, jobs, now=6.5) == [0, 1, 2]


def test_a_pause_saves_nothing_up() -> None:
    """One that comes back, or comes late, starts with the least served of those who wait, not below."""
    policy = Fair()
    early, late, other = arrived(policy, job(0, "a"), job(1, "b"), job(2, "c"))
    policy.on_leave(late, 0.0)
    policy.on_served(early, 1000, 0, 0.0)
    policy.on_served(other, 700, 0, 0.0)
    (back,) = arrived(policy, job(3, "b"))
    assert order_of(policy, [early, back, other]) == [2, 3, 0]
    policy.on_served(back, 1, 0, 0.0)
    assert order_of(policy, [early, back, other]) == [2, 3, 0]


def test_leaving_and_coming_back_wins_nothing() -> None:
    """What somebody had beyond the others is not forgotten as long as they have not caught up."""
    policy = Fair()
    greedy, modest = arrived(policy, job(0, "greedy"), job(1, "modest"))
    policy.on_served(greedy, 500, 0, 0.0)
    policy.on_served(modest, 100, 0, 0.0)
    policy.on_leave(greedy, 0.0)
    (back,) = arrived(policy, job(2, "greedy"))
    policy.on_served(modest, 399, 0, 0.0)
    assert order_of(policy, [back, modest]) == [1, 2]
    policy.on_served(modest, 2, 0, 0.0)
    assert order_of(policy, [back, modest]) == [2, 1]


def test_who_only_runs_does_not_pull_newcomers_down() -> None:
    """A tenant with one endless answer falls far behind one that floods; a third starts level with the flood."""
    policy = Fair()
    slow, flood = arrived(policy, job(0, "slow"), job(1, "flood"))
    slow.is_waiting = False
    policy.on_served(slow, 0, 5, 0.0)
    policy.on_served(flood, 900, 0, 0.0)
    (new,) = arrived(policy, job(2, "new"))
    policy.on_served(new, 1, 0, 0.0)
    assert order_of(policy, [new, flood]) == [1, 2]


def test_the_tenants_that_are_remembered_are_bounded() -> None:
    policy = Fair()
    (patient,) = arrived(policy, job(0, "patient"))
    for order in range(1, 3 * REMEMBERED):
        (one,) = arrived(policy, job(order, f"t{order}"))
        policy.on_served(one, order, 0, 0.0)
        policy.on_leave(one, 0.0)
    assert policy.known_tenants <= REMEMBERED + 1
    policy.on_served(patient, 10 * REMEMBERED, 0, 0.0)
    (one,) = arrived(policy, job(4 * REMEMBERED, "last"))
    policy.on_leave(one, 0.0)
    assert policy.known_tenants == 1


def test_coming_and_going_of_one_does_not_forgive_another() -> None:
    policy = Fair()
    arrived(policy, job(0, "patient"))
    for order, tenant in enumerate(["greedy", *["restless"] * 3 * REMEMBERED], 1):
        (one,) = arrived(policy, job(order, tenant))
        policy.on_served(one, 50 if tenant == "greedy" else 100, 0, 0.0)
        policy.on_leave(one, 0.0)
    assert policy.known_tenants == 3


def test_a_burst_of_tenants_does_not_look_at_all_the_others_for_each() -> None:
    class Looked(Fair):
        looks = 0

        def _waits(self, tenant: str) -> bool:
            self.looks += 1
            return super()._waits(tenant)

    policy = Looked()
    arrived(policy, *(job(order, f"t{order}") for order in range(300)))
    assert policy.looks <= 2 * 300


EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrive", "serve", "leave", "admit"]), st.sampled_from("abcd"), st.integers(1, 50)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_counters_follow_the_paper(events: list[tuple[str, str, int]]) -> None:
    """Algorithm 2 of the paper, that forgets nobody, beside the policy: the same counters for all who are present."""
    policy, counters, last = Fair(), dict.fromkeys("abcd", 0.0), 0.0
    present: dict[str, list[Job]] = {tenant: [] for tenant in "abcd"}
    for number, (kind, tenant, amount) in enumerate(events):
        mine = present[tenant]
        if kind == "arrive":
            waiting = [counters[t] for t in "abcd" if any(each.is_waiting for each in present[t])]
            running = [counters[t] for t in "abcd" if present[t]]
            if not any(each.is_waiting for each in mine):
                start = min(waiting) if waiting else max(running, default=0.0)
                counters[tenant] = max(counters[tenant], start, last)
            mine.append(job(number, tenant))
            policy.on_arrival(mine[-1], 0.0)
        elif kind == "serve" and mine:
            counters[tenant] += 2 * amount
            policy.on_served(mine[0], 0, amount, 0.0)
        elif kind == "admit" and mine:
            mine[amount % len(mine)].is_waiting = False
        elif kind == "leave" and mine:
            policy.on_leave(mine.pop(amount % len(mine)), 0.0)
            last = max(last, counters[tenant]) if not any(present.values()) else last
        shown = {t: policy.rank(present[t][0], 0.0)[0] for t in "abcd" if present[t]}
        assert shown == {t: counters[t] for t in shown}
