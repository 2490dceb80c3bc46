from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Arc, Entry, EvictionPolicy, Returned
from octavo.policies.eviction.base import Json
from octavo.policies.replica import Replica
from octavo.policies.testing import EvictionPolicyContract
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
from octavo.tests.policies.eviction.paper_caches import ArcCache
from octavo.tests.policies.eviction.references import ArcReference


class TestArc(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Arc(capacity)


@given(acts=ACTS, capacity=st.sampled_from([1, 10, 16, 30]))
def test_each_victim_is_that_of_the_reference(acts: list[Act], capacity: int) -> None:
    compare_in_a_tree(Arc(capacity), ArcReference(capacity), acts)
    policy, reference = Arc(capacity), ArcReference(capacity)
    compare_in_a_cache(policy, reference, acts)
    assert policy.target == reference.p


@given(capacity=CAPACITIES, pages=PAGES)
def test_with_pages_it_is_the_cache_of_the_paper(capacity: int, pages: list[int]) -> None:
    policy, cache = Arc(capacity), ArcCache(capacity)
    assert hits_of_pages(policy, pages) == [cache.use(page) for page in pages]
    assert policy.target == cache.p


@given(acts=ACTS)
def test_a_restored_one_ranks_the_same(acts: list[Act]) -> None:
    assert_restored(lambda: Arc(16), acts)


FILLED = [1, 2, 1, 2, 3, 4, 5]
"""Of a pool of four: 1 and 2 are in T2, 4 and 5 in T1, 3 had to go and is in B1."""


def target_after(*pages: int) -> float:
    policy = Arc(4)
    hits_of_pages(policy, list(pages))
    return policy.target


def test_a_return_from_b1_makes_t1_larger_and_one_from_b2_makes_it_smaller() -> None:
    assert target_after(*FILLED) == 0.0
    assert target_after(*FILLED, 3) == 1.0
    assert target_after(*FILLED, 3, 6) == 1.0  # T1 is on target: 1 goes from T2 to B2
    assert target_after(*FILLED, 3, 6, 1) == 0.0


def test_the_rarer_kind_of_ghost_weighs_more() -> None:
    """Page 1 comes back as the only one in B1, while B2 has 6 and 5."""
    pages = [6, 2, 6, 2, 4, 5, 5, 1, 2, 7, 7, 4]
    assert target_after(*pages) == 1.0
    assert target_after(*pages, 1) == 3.0


def test_a_return_counts_as_many_times_as_blocks_are_back() -> None:
    policy = Arc(8)
    replica = Replica(8, policy)
    hot, pair, three, other = (bytes([number]) * 8 * blocks for number, blocks in enumerate((3, 2, 3, 2)))
    for now, names in enumerate((hot, hot, pair, three, other, pair)):
        lease = replica.admit(names, 0, float(now))
        assert lease is not None
        replica.publish(lease, len(names) // 8, float(now))
        replica.finish(lease, float(now))
    assert policy.target == 2.0


def test_blocks_that_are_not_back_do_not_count() -> None:
    policy = Arc(8)
    gone, back = (Entry(blocks, 16, insert_time=0.0, last_use=0.0) for blocks in (3, 1))
    policy.on_insert(gone, 1.0)
    gone.blocks = 0
    memory = policy.on_evict(gone, 3, 2.0)
    policy.on_insert(back, 3.0)
    policy.on_ghost_hit(back, Returned(memory, 0, 1.0), 3.0)
    assert policy.target == 1.0


def test_room_is_made_among_the_ghosts_before_a_run_grows() -> None:
    """T1 with 3 blocks leaves room for one block in B1; a second one came back in vain."""
    policy = Arc(4)
    gone, grown, new = (Entry(blocks, 16, insert_time=0.0, last_use=0.0) for blocks in (2, 1, 2))
    policy.on_insert(gone, 1.0)
    gone.blocks = 0
    memory = policy.on_evict(gone, 2, 2.0)
    policy.on_insert(grown, 3.0)
    policy.on_insert(new, 4.0)
    grown.blocks = 2
    policy.on_extend(grown, 1, 5.0)
    policy.on_ghost_hit(grown, Returned(memory, 0, 3.0), 5.0)
    assert policy.target == 1.0


def test_a_scan_does_not_wash_out_what_was_used_twice() -> None:
    hot = list(range(4))
    assert hits_of_pages(Arc(8), hot + hot + list(range(100, 200)) + hot)[-4:] == [True] * 4


def test_a_loop_that_almost_fits_has_hits_where_lru_has_none() -> None:
    """With the scan of one working set in a loop, as long as the returns come from B1 the target grows."""
    pages = [*range(4), *range(4), *(list(range(10, 17)) * 20)]
    assert sum(hits_of_pages(Arc(8), pages)) > 4


def test_the_target_is_saved_as_a_share_of_the_pool() -> None:
    small, large = Arc(4), Arc(400)
    hits_of_pages(small, [*FILLED, 3])
    large.load(small.dump(lambda _: 0), lambda _: None)
    assert large.target == 100.0


def test_one_that_comes_with_hits_is_in_t2() -> None:
    policy = Arc(8)
    used = Entry(1, 16, insert_time=1.0, last_use=2.0, hits=1, candidate=True)
    unused = Entry(1, 16, insert_time=3.0, last_use=3.0, candidate=True)
    for entry in (used, unused):
        policy.on_insert(entry, 4.0)
        policy.on_candidate(entry, 4.0)
    assert list(policy.victims(2, 5.0)) == [unused, used]


@pytest.mark.parametrize("state", [{"target": 2}, {"target": "1"}, {"target": -0.1}])
def test_a_target_that_is_no_share_is_refused(state: Mapping[str, Json]) -> None:
    with pytest.raises(ValueError, match="share of the pool"):
        Arc(8).load(state, lambda _: None)
