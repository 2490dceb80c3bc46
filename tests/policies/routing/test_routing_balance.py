"""Whole workloads through small fleets: hits, and who has to do how much."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.policies.routing.power_of_two import PowerOfTwo
from octavo.policies.routing.prefix import Prefix
from octavo.tests.policies.routing.small_fleet import Chats, SmallFleet, Tally

FAIR = 1.5
"""The most work that any replica may have, in means."""
CAPACITY = 2400
"""Blocks of a cache: about as many as 40 chats of four turns."""


def run(policy: Prefix | PowerOfTwo, replicas: int, chats: Chats, *, with_news: bool = True) -> Tally:
    return SmallFleet(policy, replicas, capacity=CAPACITY, with_news=with_news).run(chats)


@pytest.mark.parametrize("with_news", [True, False])
@pytest.mark.parametrize("replicas", [2, 4])
def test_chats_over_one_system_prompt_stay_where_they_are_and_are_spread(replicas: int, *, with_news: bool) -> None:
    chats = Chats()
    tally = run(Prefix(), replicas, chats, with_news=with_news)
    assert tally.imbalance < 1.2
    best = run(Prefix(), 1, chats).hit_ratio
    assert tally.hit_ratio > best - 0.05


@pytest.mark.parametrize("replicas", [2, 4])
def test_more_is_found_again_than_with_two_random_choices(replicas: int) -> None:
    """The more turns the more: the second turn is found by chance otherwise."""
    chats = Chats(fewest_turns=3, most_turns=9, system_blocks=4, turn_blocks=10)
    ours, theirs = run(Prefix(), replicas, chats), run(PowerOfTwo(), replicas, chats)
    assert ours.hit_ratio > 1.5 * theirs.hit_ratio
    assert ours.imbalance < FAIR
    assert ours.longest < theirs.longest


@pytest.mark.parametrize(
    "chats",
    [
        Chats(fewest_turns=1, most_turns=12),
        Chats(system_blocks=100, turn_blocks=3),
        Chats(system_blocks=0),
        Chats(per_second=1000, think=0.0),
        Chats(chats=60, per_second=0.2, think=20),
        Chats(chats=8, fewest_turns=30, most_turns=30, per_second=1, think=3),
    ],
    ids=["uneven", "large system prompt", "no system prompt", "all at once", "little to do", "few long chats"],
)
@pytest.mark.parametrize("replicas", [2, 4])
def test_no_replica_has_much_more_to_do_than_the_mean(replicas: int, chats: Chats) -> None:
    tally = run(Prefix(), replicas, chats)
    assert tally.imbalance < FAIR
    assert tally.hit_ratio >= run(PowerOfTwo(), replicas, chats).hit_ratio - 0.005


def test_who_joins_is_neither_flooded_nor_starved() -> None:
    fleet, before = SmallFleet(Prefix(), 3, capacity=CAPACITY), Counter[str]()
    since: list[Counter[str]] = []

    def join() -> None:
        before.update(fleet.tally.work)
        fleet.join("new")

    def look() -> None:
        since.append(fleet.tally.work - before)

    fleet.run(Chats(), {20.0: join, 26.0: look, 45.0: look})
    soon, later = since
    assert soon["new"] < 2 * sum(soon.values()) / 4
    assert later["new"] > 0.5 * sum(later.values()) / 4


def test_who_leaves_leaves_its_chats_to_all_others() -> None:
    fleet, before = SmallFleet(Prefix(), 4, capacity=CAPACITY), Counter[str]()

    def leave() -> None:
        before.update(fleet.tally.work)
        fleet.leave("r1")

    tally = fleet.run(Chats(), {20.0: leave})
    since = tally.work - before
    assert set(since) == {"r0", "r2", "r3"}
    assert max(since.values()) < 1.25 * sum(since.values()) / 3


def test_a_fleet_of_one_has_no_choice() -> None:
    tally = run(Prefix(), 1, Chats(chats=10))
    assert tally.requests == {"r0": 40}
