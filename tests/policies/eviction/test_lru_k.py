from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Entry, EvictionPolicy, LruK, Returned
from octavo.policies.eviction.base import Json
from octavo.policies.testing import EvictionPolicyContract, PrefixModel
from octavo.tests.policies.eviction.comparison import (
    ACTS,
    CAPACITIES,
    PAGES,
    Act,
    assert_restored,
    compare_in_a_cache,
    compare_in_a_tree,
    hits_of_pages,
)
from octavo.tests.policies.eviction.paper_caches import lru_2_hits
from octavo.tests.policies.eviction.references import LruKReference


class TestLruK(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return LruK(capacity)


class TestLruKWithACorrelatedReferencePeriod(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return LruK(capacity, correlated=5.0)


@given(acts=ACTS, correlated=st.sampled_from([0.0, 2.0, 10.0]))
def test_each_victim_is_that_of_the_reference(acts: list[Act], correlated: float) -> None:
    compare_in_a_tree(LruK(16, correlated=correlated), LruKReference(16, correlated), acts)
    compare_in_a_cache(LruK(16, correlated=correlated), LruKReference(16, correlated), acts)


@given(capacity=CAPACITIES, pages=PAGES)
def test_with_pages_it_is_the_cache_of_the_paper(capacity: int, pages: list[int]) -> None:
    assert hits_of_pages(LruK(capacity), pages) == lru_2_hits(capacity, pages)


@given(acts=ACTS)
def test_a_restored_one_ranks_the_same(acts: list[Act]) -> None:
    assert_restored(lambda: LruK(16), acts)


def test_what_was_used_once_goes_before_what_was_used_twice() -> None:
    model = PrefixModel(LruK(8))
    twice, once = model.insert(1), model.insert(1)
    model.release(twice)
    model.glance(twice)
    late = model.insert(1)
    for entry in (once, late):
        model.release(entry)
    assert [act.entry for act in model.evict(3)] == [once, late, twice]


def test_the_use_before_the_last_decides() -> None:
    model = PrefixModel(LruK(8))
    early, late = model.insert(1), model.insert(1)
    model.release(early)
    model.release(late)
    model.glance(late)
    model.glance(early)  # the last to be used, but its use before that is the older one
    assert [act.entry for act in model.evict(2)] == [early, late]


def test_uses_in_quick_succession_are_one_use() -> None:
    model = PrefixModel(LruK(8, correlated=5.0))
    burst, again = model.insert(1), model.insert(1)
    for entry in (burst, again):
        model.release(entry)
    model.glance(burst)
    model.now += 10.0
    model.glance(again)
    model.now += 10.0
    assert [act.entry for act in model.evict(2)] == [burst, again]


def test_what_was_just_used_goes_last_and_goes_all_the_same() -> None:
    model = PrefixModel(LruK(8, correlated=5.0))
    again = model.insert(1)
    model.release(again)
    model.now += 10.0
    model.glance(again)
    model.now += 10.0
    new = model.insert(1)
    model.release(new)
    assert [act.entry for act in model.evict(2)] == [again, new]


def test_a_use_of_a_candidate_that_nobody_holds_counts() -> None:
    policy = LruK(8)
    used, unused = (Entry(1, 16, insert_time=t, last_use=t, candidate=True) for t in (1.0, 2.0))
    for entry in (used, unused):
        policy.on_insert(entry, entry.last_use)
        policy.on_candidate(entry, 3.0)
    policy.on_hit(used, 4.0)
    used.last_use = 4.0
    assert list(policy.victims(2, 5.0)) == [unused, used]


def test_a_head_that_is_split_off_has_the_history_of_the_whole() -> None:
    model = PrefixModel(LruK(8))
    lower = model.insert(2)
    model.release(lower)
    model.glance(lower)
    upper = model.split(lower, 1)
    held = model.insert(1, upper)
    model.evict(1)
    once = model.insert(1)
    for entry in (once, held):
        model.release(entry)
    assert [act.entry for act in model.evict(3)] == [held, once, upper]


def test_the_use_before_the_last_is_saved() -> None:
    model = PrefixModel(LruK(8))
    early, late = model.insert(1), model.insert(1)
    for entry in (early, late, late, early):
        model.glance(entry)
        model.release(entry)
    other = LruK(8)
    for entry in (early, late):
        other.on_insert(entry, model.now)
        other.on_candidate(entry, model.now + 1)
    names = {model.name(entry): entry for entry in model.entries}
    other.load(model.policy.dump(model.name), names.get)
    assert list(other.victims(2, model.now + 2)) == [early, late]


def test_what_comes_back_has_its_history() -> None:
    policy = LruK(8)
    gone, back, new = (Entry(1, 16, insert_time=t, last_use=t) for t in (1.0, 3.0, 4.0))
    policy.on_insert(gone, 1.0)
    gone.blocks = 0
    memory = policy.on_evict(gone, 1, 2.0)
    policy.on_insert(back, 3.0)
    policy.on_ghost_hit(back, Returned(memory, 0, 1.0), 3.0)
    policy.on_insert(new, 4.0)
    for entry in (back, new):
        entry.candidate = True
        policy.on_candidate(entry, 5.0)
    assert list(policy.victims(2, 6.0)) == [new, back]


def test_a_memory_of_another_policy_is_no_history() -> None:
    policy = LruK(8)
    first, second = (Entry(1, 16, insert_time=t, last_use=t, candidate=True) for t in (1.0, 2.0))
    for entry in (first, second):
        policy.on_insert(entry, entry.last_use)
    policy.on_ghost_hit(first, Returned("foreign", 0, 1.0), 2.0)
    for entry in (first, second):
        policy.on_candidate(entry, 3.0)
    assert list(policy.victims(2, 4.0)) == [first, second]


def test_one_that_comes_with_hits_was_used_when_it_was_inserted() -> None:
    policy = LruK(8)
    used = Entry(1, 16, insert_time=1.0, last_use=2.0, hits=1, candidate=True)
    unused = Entry(1, 16, insert_time=3.0, last_use=3.0, candidate=True)
    for entry in (used, unused):
        policy.on_insert(entry, 4.0)
        policy.on_candidate(entry, 4.0)
    assert list(policy.victims(2, 5.0)) == [unused, used]


@pytest.mark.parametrize(
    "state", [{"uses": 3}, {"uses": {"0": "ab"}}, {"uses": {"0": [2, 1]}}, {"uses": {"x": [1, 2]}}]
)
def test_a_broken_state_is_refused(state: Mapping[str, Json]) -> None:
    model = PrefixModel(LruK(8))
    entry = model.insert(1)
    with pytest.raises((TypeError, ValueError)):
        model.policy.load(state, lambda _: entry)


def test_a_state_that_says_nothing_changes_nothing() -> None:
    model = PrefixModel(LruK(8))
    entry = model.insert(1)
    model.release(entry)
    model.policy.load({}, lambda _: entry)
    assert list(model.policy.victims(1, model.now)) == [entry]
