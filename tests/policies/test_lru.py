from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Entry, Lru
from octavo.policies.testing import PrefixModel, play


def test_order_is_by_use_and_not_by_release() -> None:
    model = PrefixModel(Lru(8))
    old, young = model.insert(1), model.insert(1)
    model.release(young)
    model.release(old)
    assert [act.entry for act in model.evict(2)] == [old, young]


def test_a_hit_makes_young() -> None:
    model = PrefixModel(Lru(8))
    first, second = model.insert(1), model.insert(1)
    model.release(first)
    model.release(second)
    model.hit(first)
    model.release(first)
    assert [act.entry for act in model.evict(2)] == [second, first]


def test_a_hit_without_a_hold_makes_young() -> None:
    policy = Lru(8)
    first, second = (Entry(1, 16, insert_time=t, last_use=t) for t in (1.0, 2.0))
    for entry in (first, second):
        policy.on_insert(entry, entry.last_use)
        entry.candidate = True
        policy.on_candidate(entry, entry.last_use)
    policy.on_hit(first, 3.0)
    first.last_use = 3.0
    assert list(policy.victims(2, 4.0)) == [second, first]


def test_a_parent_left_behind_keeps_its_own_last_use() -> None:
    model = PrefixModel(Lru(8))
    parent = model.insert(1)
    child = model.insert(1, parent)
    between, late = model.insert(1), model.insert(1)
    for entry in (late, between, child, parent):
        model.release(entry)
    assert [act.entry for act in model.evict(4)] == [child, parent, between, late]


def test_entries_restored_in_any_order_go_by_their_last_use() -> None:
    policy = Lru(8)
    times = [5.0, 1.0, 4.0, 2.0, 3.0]
    for time in times:
        entry = Entry(1, 16, insert_time=0.0, last_use=time, candidate=True)
        policy.on_insert(entry, 6.0)
        policy.on_candidate(entry, 6.0)
    assert [entry.last_use for entry in policy.victims(5, 7.0)] == sorted(times)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 999), st.integers(0, 999)), max_size=120))
def test_each_victim_is_the_least_recently_used_candidate(acts: list[tuple[int, int, int]]) -> None:
    model = PrefixModel(Lru(32))
    for action, pick, amount in acts:
        play(model, action, pick, amount)
    while model.candidates:
        oldest = min(entry.last_use for entry in model.candidates)
        [act] = model.evict(1)
        assert act.entry.last_use == oldest
