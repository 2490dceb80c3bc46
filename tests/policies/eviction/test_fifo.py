from __future__ import annotations

from hypothesis import given

from octavo.policies.eviction import EvictionPolicy, Fifo
from octavo.policies.testing import EvictionPolicyContract, PrefixModel
from octavo.tests.policies.eviction.comparison import (
    ACTS,
    CAPACITIES,
    PAGES,
    Act,
    compare_in_a_cache,
    compare_in_a_tree,
    hits_of_pages,
)
from octavo.tests.policies.eviction.paper_caches import fifo_hits
from octavo.tests.policies.eviction.references import FifoReference


class TestFifo(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Fifo(capacity)


@given(acts=ACTS)
def test_each_victim_is_that_of_a_plain_queue(acts: list[Act]) -> None:
    compare_in_a_tree(Fifo(16), FifoReference(16), acts)
    compare_in_a_cache(Fifo(16), FifoReference(16), acts)


@given(capacity=CAPACITIES, pages=PAGES)
def test_with_pages_it_is_the_cache_of_the_paper(capacity: int, pages: list[int]) -> None:
    assert hits_of_pages(Fifo(capacity), pages) == fifo_hits(capacity, pages)


def test_uses_change_nothing() -> None:
    model = PrefixModel(Fifo(8))
    first, second = model.insert(1), model.insert(1)
    model.release(second)
    model.release(first)
    model.glance(first)
    assert [act.entry for act in model.evict(2)] == [first, second]


def test_a_run_that_grew_is_as_old_as_its_first_block() -> None:
    model = PrefixModel(Fifo(8))
    first, second = model.insert(1), model.insert(1)
    for entry in (first, second):
        model.release(entry)
    model.extend(first, 2)
    assert [act.entry for act in model.evict(4)] == [first, second]


def test_beladys_anomaly() -> None:
    """More room and fewer hits: no policy that ranks by uses does that (Belady, Nelson, Shedler, CACM 12(6), 1969)."""
    pages = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]
    assert sum(hits_of_pages(Fifo(3), pages)) == 3
    assert sum(hits_of_pages(Fifo(4), pages)) == 2
