"""The books of quotas, and the eviction policy that goes by them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from random import Random

import pytest

from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.engine.kv.quotas import OTHERS, OwnedRuns, Quotas
from octavo.engine.kv.shares import TenantShares
from octavo.errors import CensusFailed, OutOfBlocks
from octavo.policies.eviction.base import Entry, EvictionPolicy
from octavo.policies.eviction.lfu import Lfu
from octavo.policies.eviction.lru import Lru
from octavo.policies.eviction.priority_ttl import PriorityTtl
from octavo.policies.testing import EvictionPolicyContract

B = 4


def cache_of(
    shares: dict[str, float], num_blocks: int = 20, make: Callable[[int], EvictionPolicy] = Lru
) -> tuple[CacheManager, Quotas]:
    quotas = Quotas(shares, num_blocks)
    clock = iter(range(10**6)).__next__

    def fail(where: str, error: BaseException | str) -> None:
        raise AssertionError(where, error)

    policy = TenantShares(num_blocks, make, quotas)
    return CacheManager(num_blocks, B, policy, clock=lambda: float(clock()), on_fault=fail, quotas=quotas), quotas


def run(cache: CacheManager, number: int, tenant: str | None, tokens: list[int]) -> Sequence:
    """A sequence that is admitted and computed."""
    sequence = Sequence(number, encode_tokens(tokens), Namespace("w", salt=tenant), block_size=B)
    cache.copied(cache.admit(sequence).copies)
    cache.commit(sequence, sequence.uncomputed)
    return sequence


@pytest.mark.parametrize(
    ("shares", "blocks"),
    [
        ({"a": 0.5}, {"a": 5, OTHERS: 5}),
        ({"a": 0.5, OTHERS: 0.2}, {"a": 5, OTHERS: 2}),
        ({"": 0.3, "a": 0.7}, {"": 3, "a": 7, OTHERS: 0}),
        ({"a": 0.05}, {"a": 0, OTHERS: 9}),
    ],
)
def test_quotas_are_whole_blocks_and_the_rest_is_for_all_others(
    shares: dict[str, float], blocks: dict[str, int]
) -> None:
    quotas = Quotas(shares, 10)
    assert quotas.blocks == blocks
    assert sum(quotas.blocks.values()) <= 10
    assert quotas.group("a") == ("a" if "a" in shares else OTHERS)
    assert quotas.group(None) == quotas.group("") == ("" if "" in shares else OTHERS)
    assert quotas.group("stranger") == OTHERS


def test_blocks_are_owned_from_allocation_until_they_are_free() -> None:
    cache, quotas = cache_of({"a": 0.5, "b": 0.25})
    one, two, three = run(cache, 1, "a", [1] * 9), run(cache, 2, "b", [1] * 9), run(cache, 3, None, [1] * 4)
    assert quotas.used == {"a": 3, "b": 3, OTHERS: 1}
    fork = cache.fork(one, 4)
    cache.copied(cache.extend(fork, 4))
    assert quotas.used["a"] == 5
    assert cache.held_by_group() == {"a": 5, "b": 3, OTHERS: 1}
    cache.finish(one)
    assert cache.held_by_group(without={fork}) == {"b": 3, OTHERS: 1}
    cache.finish(fork)
    assert quotas.used["a"] == 2  # what was published stays
    cache.finish(two)
    cache.finish(three)
    assert cache.held_by_group() == {}
    cache.census()
    cache.evict(20)
    assert quotas.used == {"a": 0, "b": 0, OTHERS: 0}


def test_what_two_hold_counts_once_and_pins_count() -> None:
    cache, _ = cache_of({"a": 0.5})
    one = run(cache, 1, "a", [1] * 8 + [2])
    two = run(cache, 2, "a", [1] * 8 + [3])
    assert cache.held_by_group() == {"a": 4}
    lease = cache.pin(Namespace("w", salt="a"), array("i", [1] * 8))
    assert lease is not None
    cache.finish(one)
    cache.finish(two)
    assert cache.held_by_group() == {"a": 2}
    cache.unpin(lease)
    assert cache.held_by_group() == {}


def test_the_census_notices_a_block_in_the_wrong_books() -> None:
    cache, quotas = cache_of({"a": 0.5})
    sequence = run(cache, 1, "a", [1] * 4)
    cache.census()
    quotas._owners[sequence.table.blocks[0]] = OTHERS
    with pytest.raises(CensusFailed, match="owned by another tenant"):
        cache.census()
    quotas._owners[sequence.table.blocks[0]] = "a"
    quotas.used["a"] += 1
    with pytest.raises(CensusFailed, match="tenants own"):
        cache.census()


def test_a_failed_allocation_leaves_the_books_alone() -> None:
    cache, quotas = cache_of({"a": 0.5}, num_blocks=4)
    run(cache, 1, "a", [1] * 12)
    with pytest.raises(OutOfBlocks):
        cache.admit(Sequence(2, encode_tokens([2] * 12), Namespace("w", salt="b"), block_size=B))
    assert quotas.used == {"a": 3, OTHERS: 0}
    cache.census()


def test_who_is_furthest_beyond_its_quota_gives_first_and_no_more_than_that() -> None:
    """a has 10 of 8, b 8 of 4, c 2 of 8, all cached. The next two blocks of c cost b two, the next four two each."""
    cache, quotas = cache_of({"a": 0.4, "b": 0.2, OTHERS: 0.4})
    for number, (tenant, blocks) in enumerate((("a", 10), ("b", 8), ("c", 2))):
        cache.finish(run(cache, number, tenant, [number + 1] * blocks * B))
    run(cache, 3, "c", [9] * 2 * B)
    assert quotas.used == {"a": 10, "b": 6, OTHERS: 4}
    run(cache, 4, "c", [8] * 4 * B)
    assert quotas.used == {"a": 8, "b": 4, OTHERS: 8}


def test_who_goes_beyond_its_quota_by_what_it_takes_gives_itself() -> None:
    """Everybody has exactly what is his: the next block of a is one of a's, though b's are older."""
    cache, quotas = cache_of({"a": 0.5, "b": 0.5})
    for number, tenant in enumerate("ba"):
        cache.finish(run(cache, number, tenant, [number + 1] * 10 * B))
    run(cache, 2, "a", [9] * 3 * B)
    assert quotas.used == {"a": 10, "b": 10, OTHERS: 0}


class Failing(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise ValueError("no idea")


def test_quotas_hold_where_the_policy_fails_and_when_it_is_set_aside() -> None:
    quotas, clock = Quotas({"a": 0.5, "b": 0.5}, 20), iter(range(10**6)).__next__
    policy = TenantShares(20, Failing, quotas)
    cache = CacheManager(20, B, policy, clock=lambda: float(clock()), on_fault=lambda *_: None, quotas=quotas)
    for number, tenant in enumerate("abbbbbbbbbbbbbbbbbbb"):
        cache.finish(run(cache, number, tenant, [number + 1] * 10 * B))
        assert quotas.used["a"] == 10
    assert cache.policy.set_aside
    cache.census()


def test_who_is_within_its_quota_gives_what_nobody_holds_when_nobody_else_can() -> None:
    cache, quotas = cache_of({"a": 0.5, "b": 0.5})
    cache.finish(run(cache, 0, "a", [1] * 8 * B))
    run(cache, 1, "b", [2] * 12 * B)
    run(cache, 2, "b", [3] * 5 * B)
    assert quotas.used == {"a": 3, "b": 17, OTHERS: 0}
    cache.census()


@pytest.mark.parametrize("seed", range(5))
def test_the_books_agree_with_the_pool_whatever_happens(seed: int) -> None:
    """And no eviction takes from one within its quota while one beyond it has a candidate."""
    random = Random(seed)  # noqa: S311  # a test's
    cache, quotas = cache_of({"a": 0.3, "b": 0.4}, num_blocks=24, make=lambda n: PriorityTtl(n, Lfu))
    live: dict[int, Sequence] = {}
    for number in range(300):
        kind = random.choice(("admit", "admit", "finish", "fork", "extend", "evict"))
        if kind == "admit":
            tokens = [random.randrange(2)] * random.randint(1, 24) + [number]
            sequence = Sequence(number, encode_tokens(tokens), Namespace("w", salt=random.choice("abcd")), block_size=B)
            admission = cache.try_admit(sequence)
            if admission is not None:
                cache.copied(admission.copies)
                cache.commit(sequence, sequence.uncomputed)
                live[number] = sequence
        elif kind == "evict":
            cache.evict(random.randint(1, 3))
        elif live:
            chosen = random.choice(list(live))
            if kind == "finish":
                cache.finish(live.pop(chosen))
            elif kind == "fork":
                live[number] = cache.fork(live[chosen], number)
            else:
                try:
                    cache.copied(cache.extend(live[chosen], random.randint(1, 6)))
                except OutOfBlocks:
                    cache.preempt(live.pop(chosen))
        cache.census()
        held = dict.fromkeys(quotas.blocks, 0) | dict(cache.held_by_group())
        assert all(held[group] <= quotas.used[group] for group in held)
    assert cache.stats().evictions


def test_free_runs_tell_who_gets_his_back() -> None:
    quotas = Quotas({"a": 0.5}, 10)
    runs = OwnedRuns(10, quotas)
    start, length = runs.take(4)
    quotas.took("a", range(start, start + length))
    runs.give(start + 1, 2)
    assert quotas.used["a"] == 2
    assert not quotas.owns("a", start + 1)
    assert quotas.owns("a", start)


class Learner(Lru):
    """Has a state."""

    learned = 0

    def dump(self, key: Callable[[Entry], int]) -> dict[str, int]:
        return {"learned": self.learned}

    def load(self, state: object, entry: Callable[[int], Entry | None]) -> None:
        assert isinstance(state, dict)
        self.learned = state["learned"]


def test_states_are_kept_apart_and_tell_no_tenant() -> None:
    quotas = Quotas({"secret": 0.5}, 8)
    policy, again = TenantShares(8, Learner, quotas), TenantShares(8, Learner, quotas)
    for number, part in enumerate(policy._policies.values(), 1):
        assert isinstance(part, Learner)
        part.learned = number
    state = policy.dump(lambda _: 0)
    assert "secret" not in str(state)
    again.load(state, lambda _: None)
    assert [part.learned for part in again._policies.values() if isinstance(part, Learner)] == [1, 2]
    with pytest.raises(TypeError, match="must be a mapping"):
        again.load(dict.fromkeys(state, 5), lambda _: None)
    assert policy.name == "Learner"


class TestShares(EvictionPolicyContract):
    """The kit, with all entries of one group."""

    def make(self, capacity: int) -> EvictionPolicy:
        return TenantShares(capacity, lambda blocks: PriorityTtl(blocks, Lru), Quotas({"a": 0.5}, capacity))
