from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import CostAware, Entry, Lfu
from octavo.policies.testing import PrefixModel

CAPACITY = 64


class Uses:
    """Frequencies from first principles: every use is remembered with the number of blocks evicted before it."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._uses: dict[Entry, list[int]] = {}
        self.evicted = 0

    def use(self, entry: Entry) -> None:
        self._uses.setdefault(entry, []).append(self.evicted)

    def frequency(self, entry: Entry) -> float:
        return sum(math.exp2((at - self.evicted) / self._half_life) for at in self._uses[entry])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99)), max_size=150))
def test_each_victim_has_the_lowest_decayed_frequency(acts: list[tuple[int, int]]) -> None:
    model, uses = PrefixModel(Lfu(8)), Uses(half_life=4.0)
    for action, pick in acts:
        if action == 0 or not model.entries:
            entry = model.insert(1 + pick % 3)
            uses.use(entry)
            model.release(entry)
        elif action < 4:
            entry = model.entries[pick % len(model.entries)]
            uses.use(entry)
            model.glance(entry)
        else:
            lowest = min(uses.frequency(entry) for entry in model.candidates)
            [act] = model.evict(1)
            assert math.isclose(uses.frequency(act.entry), lowest, rel_tol=1e-9)
            uses.evicted += 1


def test_without_evictions_it_is_plain_lfu_however_much_time_passes() -> None:
    model = PrefixModel(Lfu(8))
    twice, once = model.insert(1), model.insert(1)
    model.release(twice)
    model.release(once)
    model.glance(twice)
    model.now += 1e9
    model.glance(once)
    model.glance(twice)
    assert [act.entry for act in model.evict(2)] == [once, twice]


def test_a_frequency_halves_with_half_the_capacity_of_evicted_blocks() -> None:
    policy = Lfu(CAPACITY)
    old, churn = (Entry(1, 16, insert_time=0.0, last_use=0.0) for _ in range(2))
    policy.on_insert(old, 0.0)
    policy.on_hit(old, 0.0)
    policy.on_insert(churn, 0.0)
    policy.on_evict(churn, CAPACITY // 2, 0.0)
    young = Entry(1, 16, insert_time=0.0, last_use=0.0)
    policy.on_insert(young, 0.0)
    assert policy.score(old, 0.0) == pytest.approx(policy.score(young, 0.0))


def test_a_head_that_is_split_off_keeps_the_frequency_of_the_whole() -> None:
    policy = Lfu(CAPACITY)
    lower = Entry(4, 64, insert_time=0.0, last_use=0.0)
    policy.on_insert(lower, 0.0)
    policy.on_hit(lower, 1.0)
    upper = Entry(2, 32, insert_time=0.0, last_use=1.0, hits=1)
    policy.on_split(upper, lower, 2.0)
    assert policy.score(upper, 2.0) == policy.score(lower, 2.0)
    policy.on_hit(upper, 3.0)
    assert policy.score(upper, 3.0) > policy.score(lower, 3.0)


def test_a_restored_entry_counts_its_former_hits() -> None:
    policy = Lfu(CAPACITY)
    restored, new = Entry(1, 16, insert_time=0.0, last_use=0.0, hits=7), Entry(1, 16, insert_time=0.0, last_use=0.0)
    policy.on_insert(restored, 0.0)
    policy.on_insert(new, 0.0)
    assert policy.score(restored, 0.0) == policy.score(new, 0.0) + 3.0


def test_long_lives_lose_no_order() -> None:
    """After 2**40 evictions with the smallest pool, one more use must still tell."""
    policy = Lfu(1)
    churn = Entry(1, 16, insert_time=0.0, last_use=0.0)
    policy.on_evict(churn, 2**40, 0.0)
    once, twice = (Entry(1, 16, insert_time=0.0, last_use=0.0) for _ in range(2))
    for entry in (once, twice):
        policy.on_insert(entry, 0.0)
    policy.on_hit(twice, 0.0)
    assert policy.score(twice, 0.0) == policy.score(once, 0.0) + 1.0


class Cache:
    """A pool of single blocks with names, and one prefix that was hot once."""

    def __init__(self, policy: Lfu) -> None:
        self.model = PrefixModel(policy)
        self._cached: dict[int, Entry] = {}
        self.hot = self.model.insert(8)
        self.model.release(self.hot)
        for _ in repeat(None, 1000):
            self.model.glance(self.hot)
        self.misses = 0

    @property
    def hot_is_cached(self) -> bool:
        return self.hot in self.model.entries

    def use(self, name: int) -> bool:
        """Whether it was a hit."""
        entry = self._cached.get(name)
        if entry is not None and entry.blocks:
            self.model.glance(entry)
            return True
        self.misses += 1
        self.model.evict(max(0, self.model.blocks + 1 - CAPACITY))
        self._cached[name] = self.model.insert(1)
        self.model.release(self._cached[name])
        return False


def one_by_one(working_set: int) -> Iterator[int]:
    for item in range(CAPACITY):
        yield from repeat(working_set * CAPACITY + item, 6)


def pass_by_pass(working_set: int) -> Iterator[int]:
    for _ in range(6):
        yield from range(working_set * CAPACITY, (working_set + 1) * CAPACITY)


@pytest.mark.parametrize("order", [one_by_one, pass_by_pass])
@pytest.mark.parametrize(
    ("policy", "pools"),
    [
        (Lfu, 7.0),  # 1000 uses are 10 half-lives, five pools; one more to fill the pool, one to meet the next victim
        (CostAware, 8.5),  # it is eight times as deep as the others, hence dear: three more half-lives
    ],
)
def test_what_was_hot_once_makes_way_for_ten_working_sets(
    policy: type[Lfu], pools: float, order: Callable[[int], Iterator[int]]
) -> None:
    cache = Cache(policy(CAPACITY))
    hits: list[int] = []
    gone_after: int | None = None
    for working_set in range(10):
        hits.append(sum(cache.use(name) for name in order(working_set)))
        if gone_after is None and not cache.hot_is_cached:
            gone_after = cache.misses
    assert gone_after is not None
    assert gone_after <= pools * CAPACITY
    assert sum(hits[-3:]) >= sum(hits[:3])


@pytest.mark.parametrize("policy", [Lfu, CostAware])
def test_only_the_ageing_makes_it_go(policy: type[Lfu]) -> None:
    ageless = policy(CAPACITY)
    ageless._half_life = math.inf
    cache = Cache(ageless)
    for working_set in range(10):
        for name in one_by_one(working_set):
            cache.use(name)
    assert cache.hot_is_cached
