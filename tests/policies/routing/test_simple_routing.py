"""The routing policies that look at no cache."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.policies.routing import FleetView, Reason, ReplicaStatus, RoutedRequest
from octavo.policies.routing.least_loaded import LeastLoaded
from octavo.policies.routing.power_of_two import PowerOfTwo
from octavo.policies.routing.rendezvous import Rendezvous
from octavo.policies.routing.round_robin import RoundRobin
from octavo.tests.policies.routing.small_fleet import chain

BLOCK = 16
UNKNOWN = RoutedRequest((), 100, 10, BLOCK)
PROMPTS = [RoutedRequest(chain(number, *range(9)), 160, 10, BLOCK) for number in range(400)]


def view_of(*replicas: str) -> FleetView:
    view = FleetView(clock=lambda: 0.0)
    for replica in replicas:
        view.join(replica)
    return view


# rendezvous


def test_prompts_are_spread_by_their_first_blocks() -> None:
    view = view_of(*"abcd")
    counts = Counter(Rendezvous().choose(prompt, view).replicas[0] for prompt in PROMPTS)
    assert min(counts.values()) > 70
    assert len(counts) == 4


def test_only_the_first_blocks_count() -> None:
    view, beginning = view_of(*"abcdefgh"), chain(*range(4))
    prompts = [RoutedRequest([*beginning, *chain(number)], 80, 10, BLOCK) for number in range(50)]
    assert len({Rendezvous().choose(prompt, view).replicas[0] for prompt in prompts}) == 1
    assert len({Rendezvous(first_blocks=5).choose(prompt, view).replicas[0] for prompt in prompts}) > 4


@pytest.mark.parametrize("gone", "abcde")
def test_only_the_prompts_of_who_leaves_move_and_they_go_to_their_second_choice(gone: str) -> None:
    view, policy = view_of(*"abcde"), Rendezvous()
    before = [policy.choose(prompt, view).replicas for prompt in PROMPTS]
    view.leave(gone)
    after = [policy.choose(prompt, view).replicas for prompt in PROMPTS]
    assert after == [[each for each in ranked if each != gone] for ranked in before]


def test_who_joins_takes_its_share_and_moves_nothing_else() -> None:
    view, policy = view_of(*"abcd"), Rendezvous()
    before = [policy.choose(prompt, view).replicas[0] for prompt in PROMPTS]
    view.join("new")
    after = [policy.choose(prompt, view).replicas[0] for prompt in PROMPTS]
    moved = [now for then, now in zip(before, after, strict=True) if then != now]
    assert set(moved) == {"new"}
    assert 50 < len(moved) < 110  # a fifth is 80


def test_without_a_block_the_least_loaded_is_chosen() -> None:
    view = view_of(*"abc")
    for replica in "ac":
        view.placed(UNKNOWN, replica, 0)
    choice = Rendezvous().choose(UNKNOWN, view)
    assert (choice.replicas[0], choice.reason) == ("b", Reason.LOAD)


# least loaded


def test_the_least_loaded_is_first_and_the_most_loaded_last() -> None:
    view = view_of(*"abc")
    for replica, times in (("a", 2), ("b", 3), ("c", 1)):
        for _ in range(times):
            view.placed(UNKNOWN, replica, 0)
    choice = LeastLoaded().choose(PROMPTS[0], view)
    assert (choice.replicas, choice.reason) == (["c", "a", "b"], Reason.LOAD)


def test_what_others_have_waiting_there_counts() -> None:
    view = view_of(*"ab")
    view.report("a", ReplicaStatus(waiting_tokens=500))
    view.placed(UNKNOWN, "b", 0)
    assert LeastLoaded().choose(PROMPTS[0], view).replicas == ["b", "a"]


# power of two


def test_of_two_drawn_the_one_with_fewer_requests_is_chosen() -> None:
    view = view_of(*"abcd")
    for replica, times in (("a", 0), ("b", 1), ("c", 2), ("d", 3)):
        for _ in range(times):
            view.placed(UNKNOWN, replica, 0)
    policy = PowerOfTwo(seed=1)
    counts = Counter(policy.choose(UNKNOWN, view).replicas[0] for _ in range(1200))
    expected = {"a": 600, "b": 400, "c": 200, "d": 0}  # 3, 2, 1 and 0 of the six pairs
    assert all(abs(counts[replica] - count) < 60 for replica, count in expected.items()), counts


def test_requests_count_not_their_tokens() -> None:
    view = view_of(*"ab")
    view.placed(RoutedRequest((), 10**6, 0, BLOCK), "a", 0)
    for _ in range(2):
        view.placed(RoutedRequest((), 1, 0, BLOCK), "b", 0)
    assert PowerOfTwo().choose(UNKNOWN, view).replicas[0] == "a"


def test_the_seed_decides() -> None:
    view = view_of(*"abcdefgh")

    def drawn(seed: int) -> list[list[str]]:
        policy = PowerOfTwo(seed)
        return [list(policy.choose(UNKNOWN, view).replicas) for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_busy_one_is_chosen_before_one_to_be_avoided() -> None:
    view = view_of(*"ab")
    view.placed(UNKNOWN, "a", 0)
    for seed in range(5):
        assert PowerOfTwo(seed).choose(UNKNOWN._replace(avoid=frozenset("b")), view).replicas == ["a", "b"]


# round robin


def test_everybody_has_its_turn() -> None:
    view, policy = view_of(*"abc"), RoundRobin()
    choices = [policy.choose(UNKNOWN, view) for _ in range(6)]
    assert ["".join(choice.replicas) for choice in choices] == ["abc", "bca", "cab"] * 2
    assert choices[0].reason is Reason.TURN


def test_who_may_not_be_chosen_leaves_its_turn_to_all_others_alike() -> None:
    view, policy = view_of(*"abc"), RoundRobin()
    view.report("b", ReplicaStatus(is_draining=True))
    assert ["".join(policy.choose(UNKNOWN, view).replicas) for _ in range(4)] == ["acb", "cab"] * 2
