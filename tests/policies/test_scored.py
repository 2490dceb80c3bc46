from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ContractBroken
from octavo.policies.eviction import Entry, EvictionPolicy, ScoredPolicy
from octavo.policies.testing import EvictionPolicyContract, PrefixModel


class ByDepth(ScoredPolicy):
    """The deepest first. Counts how often it is asked."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.asked: list[tuple[Entry, float]] = []

    def score(self, entry: Entry, now: float) -> float:
        self.asked.append((entry, now))
        return -float(entry.depth)


class ByHits(ScoredPolicy):
    def score(self, entry: Entry, now: float) -> float:
        return float(entry.hits)


class TestByHits(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return ByHits(capacity)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_the_lowest_score_goes_first_and_equal_ones_by_last_use(sizes: list[int]) -> None:
    model = PrefixModel(ByDepth(256))
    entries = [model.insert(size) for size in sizes]
    for entry in reversed(entries):
        model.release(entry)
    expected = sorted(entries, key=lambda entry: (-entry.depth, entry.last_use))
    assert [act.entry for act in model.evict(sum(sizes))] == expected


def test_the_score_is_asked_once_for_each_time_an_entry_becomes_a_candidate() -> None:
    policy = ByDepth(8)
    model = PrefixModel(policy)
    entry = model.insert(3)
    assert policy.asked == []
    model.release(entry)
    assert policy.asked == [(entry, model.now)]
    model.evict(1)
    model.evict(1)
    assert len(policy.asked) == 1
    model.hit(entry)
    model.release(entry)
    assert len(policy.asked) == 2


def test_a_use_without_a_hold_is_scored_with_the_entry_as_the_use_left_it() -> None:
    policy = ByHits(8)
    used, unused = (Entry(1, 16, insert_time=0.0, last_use=0.0, candidate=True) for _ in range(2))
    for entry in (used, unused):
        policy.on_insert(entry, 0.0)
        policy.on_candidate(entry, 0.0)
    policy.on_hit(used, 1.0)
    used.hits, used.last_use = 1, 1.0
    assert list(policy.victims(2, 2.0)) == [unused, used]


def test_a_held_entry_is_not_scored_again_for_a_use_before() -> None:
    policy = ByDepth(8)
    entry = Entry(1, 16, insert_time=0.0, last_use=0.0, candidate=True)
    policy.on_candidate(entry, 0.0)
    policy.on_hit(entry, 1.0)
    entry.candidate = False
    policy.on_held(entry)
    assert list(policy.victims(1, 2.0)) == []
    assert len(policy.asked) == 1


class Broken(ScoredPolicy):
    """Fails on what is ten tokens deep."""

    def __init__(self, result: float | None) -> None:
        super().__init__(8)
        self._result = result

    def score(self, entry: Entry, now: float) -> float:
        if entry.depth != 10:
            return 1.0
        if self._result is None:
            raise ZeroDivisionError
        return self._result


@pytest.mark.parametrize(("result", "error"), [(None, ZeroDivisionError), (math.nan, ContractBroken)])
def test_a_faulty_score_surfaces_and_its_entry_goes_first(result: float | None, error: type[Exception]) -> None:
    policy = Broken(result)
    good, bad = (Entry(1, depth, insert_time=0.0, last_use=0.0, candidate=True) for depth in (16, 10))
    policy.on_candidate(good, 0.0)
    with pytest.raises(error):
        policy.on_candidate(bad, 0.0)
    assert list(policy.victims(2, 1.0)) == [bad, good]


def test_a_score_that_fails_after_a_use_surfaces_in_victims_once() -> None:
    policy = Broken(None)
    entry, other = (Entry(1, 16, insert_time=0.0, last_use=0.0, candidate=True) for _ in range(2))
    for item in (entry, other):
        policy.on_candidate(item, 0.0)
    policy.on_hit(other, 1.0)
    other.depth = 10
    with pytest.raises(ZeroDivisionError):
        policy.victims(1, 2.0)
    assert list(policy.victims(1, 3.0)) == [other, entry]


def test_infinite_scores_are_first_and_last() -> None:
    scores = {16: math.inf, 32: 0.0, 48: -math.inf}

    class Fixed(ScoredPolicy):
        def score(self, entry: Entry, now: float) -> float:
            return scores[entry.depth]

    model = PrefixModel(Fixed(8))
    for blocks in (1, 2, 3):
        model.release(model.insert(blocks))
    assert [act.blocks for act in model.evict(6)] == [3, 2, 1]
