from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Entry, EvictionPolicy, Slru
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
from octavo.tests.policies.eviction.paper_caches import slru_hits
from octavo.tests.policies.eviction.references import SlruReference


class TestSlru(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Slru(capacity)


@given(acts=ACTS, capacity=st.sampled_from([1, 4, 10, 16, 30]))
def test_each_victim_is_that_of_the_reference(acts: list[Act], capacity: int) -> None:
    compare_in_a_tree(Slru(capacity), SlruReference(capacity), acts)
    compare_in_a_cache(Slru(capacity), SlruReference(capacity), acts)


@given(capacity=CAPACITIES, pages=PAGES)
def test_with_pages_it_is_the_cache_of_the_paper(capacity: int, pages: list[int]) -> None:
    assert hits_of_pages(Slru(capacity), pages) == slru_hits(capacity, pages)


@given(acts=ACTS)
def test_a_restored_one_ranks_the_same(acts: list[Act]) -> None:
    assert_restored(lambda: Slru(16), acts)


def test_a_scan_does_not_wash_out_what_was_used_again() -> None:
    hot = list(range(8))
    scan = list(range(100, 200))
    assert hits_of_pages(Slru(10), hot + hot + scan + hot)[-8:] == [True] * 8


def test_what_is_too_much_goes_back_on_probation_as_the_youngest_there() -> None:
    model = PrefixModel(Slru(5))  # four are protected
    entries = [model.insert(1) for _ in range(6)]
    for entry in entries:
        model.release(entry)
    *used, unused = entries
    for entry in used:
        model.glance(entry)
    demoted, *rest = used
    assert [act.entry for act in model.evict(6)] == [unused, demoted, *rest]


def test_demotion_takes_runs_that_are_held_or_have_children_too() -> None:
    model = PrefixModel(Slru(5))
    inner = model.insert(2)
    child = model.insert(1, inner)
    model.release(inner)
    model.hit(inner)
    later = model.insert(3)
    model.release(later)
    model.glance(later)  # five are used again: the inner run falls back
    for entry in (child, inner):
        model.release(entry)
    assert [act.entry for act in model.evict(6)] == [child, inner, later]


def test_a_run_larger_than_the_protected_list_drives_nobody_out() -> None:
    model = PrefixModel(Slru(5))
    small, large, new = model.insert(1), model.insert(5), model.insert(1)
    for entry in (small, large, new):
        model.release(entry)
    model.glance(small)
    model.glance(large)
    assert [act.entry for act in model.evict(7)] == [new, large, small]


def test_nor_does_one_that_grows_as_large() -> None:
    model = PrefixModel(Slru(5))
    small, grown = model.insert(1), model.insert(1)
    for entry in (small, grown):
        model.release(entry)
        model.glance(entry)
    model.extend(grown, 4)
    assert [act.entry for act in model.evict(6)] == [grown, small]


def test_growth_in_the_protected_list_drives_the_oldest_out() -> None:
    model = PrefixModel(Slru(5))
    old, grown = model.insert(1), model.insert(1)
    for entry in (old, grown):
        model.release(entry)
        model.glance(entry)
    model.extend(grown, 3)
    new = model.insert(1)
    model.release(new)
    assert [act.entry for act in model.evict(6)] == [old, new, grown]


def test_one_that_comes_with_hits_is_protected() -> None:
    policy = Slru(8)
    used = Entry(1, 16, insert_time=1.0, last_use=2.0, hits=1, candidate=True)
    unused = Entry(1, 16, insert_time=3.0, last_use=3.0, candidate=True)
    for entry in (used, unused):
        policy.on_insert(entry, 4.0)
        policy.on_candidate(entry, 4.0)
    assert list(policy.victims(2, 5.0)) == [unused, used]


def test_the_state_of_a_larger_pool_fits() -> None:
    model = PrefixModel(Slru(100))
    entries = [model.insert(1) for _ in range(10)]
    for entry in entries:
        model.release(entry)
        model.glance(entry)
    small = Slru(5)
    for entry in entries:
        small.on_insert(entry, model.now)
        small.on_candidate(entry, model.now)
    names = {model.name(entry): entry for entry in entries}
    small.load(model.policy.dump(model.name), names.get)
    dumped = small.dump(model.name)
    assert dumped == {"probation": list(range(6)), "protected": list(range(6, 10))}
