from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import CostAware, Entry
from octavo.policies.testing import PrefixModel

seconds = st.floats(1e-6, 10.0)


def entry(depth: int = 64, recompute: float = 0.0, reload: float | None = None) -> Entry:
    return Entry(1, depth, 0.0, 0.0, recompute_seconds=recompute, reload_seconds=reload, candidate=True)


def order(policy: CostAware, entries: Sequence[Entry]) -> list[Entry]:
    for item in entries:
        policy.on_insert(item, 0.0)
    for item in entries:
        policy.on_candidate(item, 0.0)
    return list(policy.victims(len(entries), 0.0))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30, unique=True))
def test_before_any_measurement_the_deeper_is_the_dearer(depths: list[int]) -> None:
    entries = [entry(depth) for depth in depths]
    assert [item.depth for item in order(CostAware(64), entries)] == sorted(depths)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), seconds), max_size=120))
def test_each_victim_is_worth_least(acts: list[tuple[int, int, float]]) -> None:
    """From first principles: all uses and all measurements are remembered. A worth is of the time of the last use."""
    model, half_life = PrefixModel(CostAware(8)), 4.0
    evicted, uses, ratios, worth = 0, dict[Entry, list[int]](), list[float](), dict[Entry, float]()

    def used(item: Entry) -> None:
        uses.setdefault(item, []).append(evicted)
        ratios.append(math.log2(item.recompute_seconds / item.depth))
        frequency = math.log2(sum(math.exp2(at / half_life) for at in uses[item]))
        worth[item] = frequency + math.log2(item.recompute_seconds) - math.fsum(ratios) / len(ratios)

    for action, pick, cost in acts:
        if action == 0 or not model.entries:
            new = model.insert(1 + pick % 3)
            new.recompute_seconds = cost
            model.release(new)
            used(new)
        elif action < 4:
            item = model.entries[pick % len(model.entries)]
            model.glance(item)
            used(item)
        else:
            lowest = min(worth[item] for item in model.candidates)
            [act] = model.evict(1)
            assert math.isclose(worth[act.entry], lowest, abs_tol=1e-6)
            evicted += 1


def settled(*costs: float) -> CostAware:
    """A policy that has measured these costs often enough for its scale to stand still."""
    policy = CostAware(64)
    for _ in range(1000):
        for cost in costs:
            policy.score(entry(recompute=cost), 0.0)
    return policy


def test_equally_deep_ones_go_by_their_measured_cost() -> None:
    costs = [0.004, 0.001, 0.003, 0.002]
    policy = settled(*costs)
    entries = [entry(recompute=cost) for cost in costs]
    assert [item.recompute_seconds for item in order(policy, entries)] == sorted(costs)


def test_twice_the_cost_is_worth_as_much_as_twice_the_uses() -> None:
    policy = settled(0.001, 0.002)
    dear, often = entry(recompute=0.002), entry(recompute=0.001)
    for item in (dear, often):
        policy.on_insert(item, 0.0)
    policy.on_hit(often, 0.0)
    assert policy.score(dear, 0.0) == pytest.approx(policy.score(often, 0.0), abs=0.01)


@given(seconds, st.integers(1, 10_000))
def test_measured_and_unmeasured_entries_of_the_same_depth_are_alike(cost: float, depth: int) -> None:
    """Whatever the speed of the machine: seconds must not be set against tokens."""
    policy = CostAware(64)
    measured, unmeasured = entry(depth, cost), entry(depth)
    for item in (measured, unmeasured):
        policy.on_insert(item, 0.0)
    assert policy.score(measured, 0.0) == pytest.approx(policy.score(unmeasured, 0.0), abs=1e-9)


def test_a_quick_reload_makes_cheap_and_a_slow_one_changes_nothing() -> None:
    policy = settled(0.01)
    quick, slow, none = entry(recompute=0.01, reload=0.001), entry(recompute=0.01, reload=1.0), entry(recompute=0.01)
    for item in (quick, slow, none):
        policy.on_insert(item, 0.0)
    scores = [policy.score(item, 0.0) for item in (quick, slow, none)]
    assert scores[0] < scores[1] == pytest.approx(scores[2])


def test_a_reload_that_took_no_time_is_no_error() -> None:
    policy = CostAware(64)
    assert order(policy, [entry(recompute=0.01), entry(recompute=0.01, reload=0.0)])[0].reload_seconds == 0.0


def test_the_scale_follows_a_machine_that_got_slower() -> None:
    policy = CostAware(64)
    for _ in range(100):
        policy.score(entry(recompute=0.001), 0.0)
    for _ in range(3000):
        policy.score(entry(recompute=0.1), 0.0)
    slow, unmeasured = entry(recompute=0.1), entry()
    assert policy.score(slow, 0.0) == pytest.approx(policy.score(unmeasured, 0.0), abs=0.1)
