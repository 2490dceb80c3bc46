from __future__ import annotations

import pytest

from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.errors import CacheMisuse, InvalidRequest, OutOfBlocks
from octavo.policies.eviction import Lru

SPACE = Namespace("m", salt="secret")
BLOCK = 4


class Cache:
    def __init__(self, blocks: int = 16) -> None:
        self.manager = CacheManager(blocks, BLOCK, Lru(blocks), clock=lambda: 0.0, on_fault=lambda *_: None)
        self._ids = 0

    def admit(self, tokens: list[int]) -> Sequence:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens(tokens), SPACE, block_size=BLOCK)
        self.manager.copied(self.manager.admit(sequence).copies)
        return sequence

    def serve(self, tokens: list[int]) -> None:
        sequence = self.admit(tokens)
        self.manager.commit(sequence, sequence.uncomputed, 0)
        self.manager.finish(sequence)

    def cached(self, tokens: list[int]) -> int:
        return len(self.manager.tree.match(SPACE, encode_tokens(tokens).tobytes(), len(tokens)).ids)


def test_what_is_pinned_stays_and_nothing_else() -> None:
    cache = Cache()
    prompt = list(range(16))
    cache.serve(prompt)
    lease = cache.manager.pin(SPACE, encode_tokens(prompt[:10]))
    assert lease is not None
    assert (lease.tokens, cache.manager.pinned_blocks) == (8, 2)
    assert cache.manager.evict(16) == 2
    assert cache.cached(prompt) == 2
    census = cache.manager.census()
    assert (census.held, census.idle) == (2, 0)
    cache.manager.unpin(lease)
    assert cache.manager.pinned_blocks == 0
    assert cache.manager.evict(16) == 2
    assert cache.manager.census().free == 16


def test_a_lease_holds_through_splits_and_growth_below_it() -> None:
    cache = Cache()
    prompt = list(range(12))
    cache.serve(prompt)
    lease = cache.manager.pin(SPACE, encode_tokens(prompt))
    cache.serve([*prompt[:4], 90, 90, 90, 90])
    cache.serve([*prompt, 91, 91, 91, 91])
    assert cache.manager.pinned_blocks == 3
    cache.manager.evict(16)
    assert cache.cached(prompt) == 3
    assert lease is not None
    cache.manager.unpin(lease)
    cache.manager.census()
    assert cache.manager.available == 16


def test_only_what_is_cached_as_a_whole_can_be_pinned() -> None:
    cache = Cache()
    cache.serve(list(range(8)))
    assert cache.manager.pin(SPACE, encode_tokens(range(12))) is None
    assert cache.manager.pin(Namespace("m"), encode_tokens(range(8))) is None
    with pytest.raises(InvalidRequest, match="at least 4 tokens"):
        cache.manager.pin(SPACE, encode_tokens(range(3)))
    assert cache.manager.tree.namespaces() == [SPACE]
    assert cache.manager.census().held == 0


def test_a_lease_is_given_back_once_and_to_its_own_cache() -> None:
    cache, other = Cache(), Cache()
    cache.serve([1] * 4)
    lease = cache.manager.pin(SPACE, encode_tokens([1] * 4))
    assert lease is not None
    with pytest.raises(CacheMisuse, match="another cache"):
        other.manager.unpin(lease)
    cache.manager.unpin(lease)
    with pytest.raises(CacheMisuse, match="given back before"):
        cache.manager.unpin(lease)
    assert not lease.is_held
    cache.manager.census()


def test_leases_hold_half_of_the_pool_at_most_and_shared_blocks_count_once() -> None:
    cache = Cache(8)
    prompt = list(range(12))
    cache.serve(prompt)
    first = cache.manager.pin(SPACE, encode_tokens(prompt))
    assert cache.manager.pin(SPACE, encode_tokens(prompt[:8])) is not None
    assert cache.manager.pinned_blocks == 3
    cache.serve([7] * 8)
    with pytest.raises(OutOfBlocks, match="takes 2 blocks more; pinned prefixes hold 3 of at most 4"):
        cache.manager.pin(SPACE, encode_tokens([7] * 8))
    assert cache.manager.pinned_blocks == 3
    assert cache.manager.pin(SPACE, encode_tokens([7] * 4)) is not None
    assert first is not None
    cache.manager.unpin(first)
    assert cache.manager.pinned_blocks == 3, "two of its blocks belong to another lease too"
    cache.manager.census()


def test_the_tenant_is_not_in_the_text_of_a_lease() -> None:
    cache = Cache()
    cache.serve([1] * 4)
    assert "secret" not in repr(cache.manager.pin(SPACE, encode_tokens([1] * 4)))
