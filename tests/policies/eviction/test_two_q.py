from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Entry, EvictionPolicy, Returned, TwoQ
from octavo.policies.eviction.queues import Ghost
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
from octavo.tests.policies.eviction.paper_caches import TwoQCache
from octavo.tests.policies.eviction.references import TwoQReference


class TestTwoQ(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return TwoQ(capacity)


@given(acts=ACTS, capacity=st.sampled_from([1, 10, 16, 30]))
def test_each_victim_is_that_of_the_reference(acts: list[Act], capacity: int) -> None:
    compare_in_a_tree(TwoQ(capacity), TwoQReference(capacity), acts)
    compare_in_a_cache(TwoQ(capacity), TwoQReference(capacity), acts)


@given(capacity=CAPACITIES, pages=PAGES)
def test_with_pages_it_is_the_cache_of_the_paper(capacity: int, pages: list[int]) -> None:
    cache = TwoQCache(capacity)
    assert hits_of_pages(TwoQ(capacity), pages) == [cache.use(page) for page in pages]


@given(acts=ACTS)
def test_a_restored_one_ranks_the_same(acts: list[Act]) -> None:
    assert_restored(lambda: TwoQ(16), acts)


def test_a_use_in_a1in_changes_nothing() -> None:
    """There are four, twice of what A1in keeps: in Am the first would outlive the second."""
    model = PrefixModel(TwoQ(8))
    first, second, *others = [model.insert(1) for _ in range(4)]
    for entry in (first, second, *others):
        model.release(entry)
    for _ in range(5):
        model.glance(first)
    assert [act.entry for act in model.evict(2)] == [first, second]


SCAN = list(range(100, 150))


def test_what_comes_back_from_a1out_outlives_a_scan() -> None:
    """With 8 blocks A1in keeps 2 under pressure and A1out remembers 4."""
    assert hits_of_pages(TwoQ(8), [1, *range(2, 10), 1, *SCAN, 1])[-1]


def test_what_comes_back_too_late_is_new() -> None:
    """Eight fill the pool; six more push 1 into A1out and then out of it."""
    assert not hits_of_pages(TwoQ(8), [1, *range(2, 15), 1, *SCAN, 1])[-1]


def test_a_run_is_not_forgotten_in_favour_of_the_one_it_pushes_out() -> None:
    """A1out is full when its oldest comes back, and room for that one is made in A1in."""
    assert hits_of_pages(TwoQ(8), [1, *range(2, 13), 1, *SCAN, 1])[-1]


def test_what_came_back_takes_no_room_in_a1out() -> None:
    """When 4 is back, A1out has 2, 3 and 5, and 6 has room beside them."""
    assert hits_of_pages(TwoQ(8), [*range(1, 13), 4, 13, 2, *SCAN, 2])[-1]


def test_while_a1in_is_small_am_gives_and_leaves_no_ghost() -> None:
    am_has_six = [*range(1, 10), *range(1, 7)]  # 9 pushes 1 out, whose return pushes 2 out, and so on
    asked_again = [True, True, False]  # 10 cost Am its oldest, which is 1, and A1in nothing
    assert hits_of_pages(TwoQ(8), [*am_has_six, 10, 2, 8, 1])[-3:] == asked_again
    assert not hits_of_pages(TwoQ(8), [*am_has_six, 10, 1, *SCAN, 1])[-1]


def test_one_that_comes_with_hits_is_in_am() -> None:
    policy = TwoQ(4)
    used = Entry(1, 16, insert_time=1.0, last_use=2.0, hits=1, candidate=True)
    unused = [Entry(1, 16, insert_time=3.0, last_use=3.0, candidate=True) for _ in range(2)]
    for entry in (used, *unused):
        policy.on_insert(entry, 4.0)
        policy.on_candidate(entry, 4.0)
    assert list(policy.victims(3, 5.0)) == [*unused, used]


def test_a_memory_of_another_policy_is_no_ghost() -> None:
    policy = TwoQ(4)
    entries = [Entry(1, 16, insert_time=t, last_use=t, candidate=True) for t in (1.0, 2.0)]
    for entry in entries:
        policy.on_insert(entry, entry.last_use)
        policy.on_ghost_hit(entry, Returned(["foreign"], 0, 1.0), entry.last_use)
        policy.on_candidate(entry, entry.last_use)
    assert list(policy.victims(2, 3.0)) == entries


def test_what_is_dropped_leaves_a_bounded_number_of_ghosts() -> None:
    """Nobody is asked for a victim then, so nobody looks at A1out."""
    policy, kept = TwoQ(8), list[object]()
    for now in map(float, range(200)):
        entry = Entry(1, 16, insert_time=now, last_use=now)
        policy.on_insert(entry, now)
        entry.blocks = 0
        kept.append(policy.on_evict(entry, 1, now))
    ghosts = [memory for memory in kept if isinstance(memory, Ghost) and memory.blocks]
    assert len(ghosts) <= 4 + 8 + 1
