"""Prefix: where a prompt goes, and what bounds the load of the replica it goes to."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.policies.routing import Choice, FleetView, Reason, ReplicaStatus, RoutedRequest
from octavo.policies.routing.prefix import Prefix
from octavo.tests.policies.routing.small_fleet import chain

BLOCK = 16
SYSTEM = chain(*[("system", number) for number in range(10)])


def chat(number: int, blocks: int = 20, system: int = 10) -> list[bytes]:
    return chain(*[("system", each) for each in range(system)], *[(number, each) for each in range(blocks - system)])


def view_of(replicas: int) -> FleetView:
    view = FleetView(clock=lambda: 0.0)
    for number in range(replicas):
        view.join(f"r{number}")
    return view


def asked(names: list[bytes], *avoid: str, output: int = 20) -> RoutedRequest:
    return RoutedRequest(names, len(names) * BLOCK + 3, output, BLOCK, frozenset(avoid))


def burden(view: FleetView, replica: str, tokens: int) -> None:
    view.placed(RoutedRequest((), tokens, 0, BLOCK), replica, 0)


def choose(view: FleetView, request: RoutedRequest, policy: Prefix | None = None) -> Choice:
    return (policy or Prefix()).choose(request, view)


def test_a_prompt_goes_to_where_most_of_it_is() -> None:
    view = view_of(4)
    view.stored("r2", chat(1)[:19])
    view.stored("r1", chat(1)[:12])
    choice = choose(view, asked(chat(1)))
    assert (choice.replicas[:2], choice.matched, choice.reason) == (["r2", "r1"], 19, Reason.PREFIX)


def test_it_goes_elsewhere_once_the_wait_costs_more_than_the_prefix_saves() -> None:
    view, policy = view_of(2), Prefix(min_match=0.0)
    view.stored("r0", chat(1))
    burden(view, "r0", 740)  # 740 - 1.15 * 370 = 314.5 of overload, 320 saved
    assert choose(view, asked(chat(1)), policy).replicas[0] == "r0"
    burden(view, "r0", 20)  # 323
    choice = choose(view, asked(chat(1)), policy)
    assert (choice.replicas[0], choice.matched, choice.reason) == ("r1", 0, Reason.OVERLOAD)


def test_a_replica_that_carries_no_more_than_others_keeps_its_chats_however_much_there_is() -> None:
    view = view_of(2)
    view.stored("r0", chat(1))
    for replica in view.replicas:
        burden(view, replica, 10**6)
    burden(view, "r0", 10**5)
    assert choose(view, asked(chat(1))).reason is Reason.PREFIX


def test_what_all_have_draws_nobody() -> None:
    view = view_of(4)
    for replica in view.replicas:
        view.stored(replica, SYSTEM)
    firsts = [choose(view, asked(chat(number))) for number in range(200)]
    assert {choice.reason for choice in firsts} == {Reason.UNSEEN}
    counts = [sum(choice.replicas[0] == replica for choice in firsts) for replica in view.replicas]
    assert min(counts) > 30


@pytest.mark.parametrize(("holders", "reason"), [(1, Reason.PREFIX), (2, Reason.OVERLOAD)])
def test_what_two_have_draws_half_as_much(holders: int, reason: Reason) -> None:
    """Who has it has 150 tokens to do, which is an overload of 128 or 107. It saves 160, or half of them each."""
    view = view_of(8)
    for number in range(holders):
        view.stored(f"r{number}", SYSTEM)
        burden(view, f"r{number}", 150)
    assert choose(view, asked(chat(1))).reason is reason


def test_a_small_difference_draws_nobody() -> None:
    view = view_of(3)
    view.stored("r0", chat(1)[:18])
    view.stored("r1", chat(1)[:17])
    prompts = [asked([*chat(1)[:18], *chain(number, number)]) for number in range(40)]
    assert {choose(view, prompt).replicas[0] for prompt in prompts} == {"r0", "r1"}
    assert {choose(view, prompt, Prefix(min_match=0.0)).replicas[0] for prompt in prompts} == {"r0"}


def test_several_routers_send_a_new_prompt_to_the_same_replica() -> None:
    """Whatever they did before and whoever joined first, as long as the loads allow."""
    names = [f"r{number}" for number in range(6)]
    views = []
    for seed in range(3):
        view = FleetView(clock=lambda: 0.0)
        for name in Random(seed).sample(names, len(names)):  # noqa: S311
            view.join(name)
        views.append(view)
    for number in range(50):
        assert len({tuple(choose(view, asked(chat(number, system=0))).replicas) for view in views}) == 1


def test_new_prompts_with_the_same_beginning_go_to_the_same_replica() -> None:
    view = view_of(6)
    firsts = {choose(view, asked([*SYSTEM[:4], *chain(number, number)])).replicas[0] for number in range(30)}
    assert len(firsts) == 1


def test_a_prompt_without_blocks_goes_to_the_least_loaded() -> None:
    view = view_of(3)
    for replica, tokens in zip(view.replicas, (30, 10, 20), strict=True):
        burden(view, replica, tokens)
    choice = choose(view, RoutedRequest((), 5, 5, BLOCK))
    assert (choice.replicas, choice.reason) == (["r1", "r2", "r0"], Reason.LOAD)


def test_who_drains_gets_nothing_new_even_if_it_has_everything() -> None:
    view = view_of(3)
    view.stored("r0", chat(1))
    view.report("r0", ReplicaStatus(is_draining=True))
    choice = choose(view, asked(chat(1)))
    assert (choice.replicas[-1], choice.matched) == ("r0", 0)
    assert choice.reason is Reason.UNSEEN


def test_what_is_heard_of_those_who_may_not_be_chosen_moves_nobody() -> None:
    """Neither their load nor their cache."""
    view, plain = view_of(4), view_of(4)
    for each in (view, plain):
        each.stored("r1", chat(1)[:15])
        burden(each, "r1", 400)
    burden(view, "r0", 10**6)
    request = asked(chat(1), "r0")
    assert choose(view, request) == choose(plain, request)


def test_those_avoided_are_ranked_by_the_same_rule_when_there_are_no_others() -> None:
    view = view_of(3)
    view.stored("r2", chat(1))
    choice = choose(view, asked(chat(1), "r0", "r1", "r2", "gone"))
    assert (choice.replicas[0], choice.matched, choice.reason) == ("r2", 20, Reason.PREFIX)


@given(
    seed=st.integers(0, 10**6),
    replicas=st.integers(1, 6),
    overload=st.sampled_from([1.0, 1.15, 2.0]),
    min_match=st.sampled_from([0.0, 0.1, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_nobody_gets_more_than_its_bound_and_one_request(
    seed: int, replicas: int, overload: float, min_match: float
) -> None:
    """Over random streams, with some requests in flight for long and others not at all."""
    random, now = Random(seed), [0.0]  # noqa: S311  # not for secrets
    view = FleetView(clock=lambda: now[0])
    for number in range(replicas):
        view.join(f"r{number}")
    policy, open_ = Prefix(overload, min_match), []
    for _ in range(60):
        now[0] += random.random() * 4
        request = asked(chat(random.randrange(8), random.randrange(1, 40), random.randrange(12)), output=100)
        before = float(np.mean(view.loads))
        choice = policy.choose(request, view)
        open_.append(view.placed(request, choice.replicas[0], choice.matched))
        assert view.load(choice.replicas[0]) <= overload * before + request.work(0) + 1e-6
        while open_ and random.random() < 0.5:
            view.finished(open_.pop(random.randrange(len(open_))))


@pytest.mark.parametrize("names", [0, 3, 40])
def test_more_blocks_than_the_prompt_has_tokens_do_no_harm(names: int) -> None:
    """Whoever counts tokens and blocks may not agree."""
    view = view_of(2)
    view.stored("r0", chat(1, 40))
    for tokens in (0, 1, 20):
        choice = choose(view, RoutedRequest(chat(1, 40)[:names], tokens, 0, BLOCK))
        assert sorted(choice.replicas) == ["r0", "r1"]
