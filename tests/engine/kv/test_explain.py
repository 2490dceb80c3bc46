from __future__ import annotations

import pytest

from octavo.engine.kv import CacheManager, EvictedBefore, Namespace, Relative, Sequence, encode_tokens
from octavo.engine.kv.explain import AROUND
from octavo.errors import InvalidRequest
from octavo.policies.eviction import Lru

SPACE = Namespace("m", salt="a")
BLOCK = 4


class Cache:
    def __init__(self, blocks: int = 32) -> None:
        self.now = 0.0
        self.manager = CacheManager(blocks, BLOCK, Lru(blocks), clock=lambda: self.now, on_fault=lambda *_: None)
        self._ids = 0

    def sequence(self, tokens: list[int], space: Namespace) -> Sequence:
        self._ids += 1
        return Sequence(self._ids, encode_tokens(tokens), space, block_size=BLOCK)

    def serve(self, tokens: list[int], space: Namespace = SPACE) -> None:
        sequence = self.sequence(tokens, space)
        self.manager.copied(self.manager.admit(sequence).copies)
        self.manager.commit(sequence, sequence.uncomputed, 0)
        self.manager.finish(sequence)


@pytest.mark.parametrize("length", range(1, 20))
def test_it_promises_what_an_admission_then_finds(length: int) -> None:
    cache = Cache()
    cache.serve(list(range(12)))
    cache.serve([*range(6), 90, 91, 92, 93])
    prompt = [*range(10), 70, 71, 72, 73, 74, 75, 76, 77, 78, 79][:length]
    explained = cache.manager.explain(SPACE, encode_tokens(prompt))
    assert cache.manager.admit(cache.sequence(prompt, SPACE)).cached_tokens == explained.cached_tokens


def test_never_seen() -> None:
    cache = Cache()
    found = cache.manager.explain(SPACE, encode_tokens(range(9)))
    assert found == (0, 0, None, None, None)
    cache.serve(list(range(8)))
    assert cache.manager.explain(SPACE, encode_tokens(range(12))) == (8, 8, None, None, None)
    assert cache.manager.explain(SPACE, encode_tokens(range(11))) == (8, None, None, None, None)
    assert cache.manager.explain(SPACE, encode_tokens(range(8))) == (7, None, None, None, None)


@pytest.mark.parametrize("position", [0, 1, 3, 4, 10, 15, 16, 19])
def test_the_first_token_that_differs_and_from_what(position: int) -> None:
    cache = Cache()
    stored = list(range(100, 120))
    cache.serve(stored)
    asked = [*stored[:position], 7, *stored[position + 1 :]]
    found = cache.manager.explain(SPACE, encode_tokens(asked))
    start = max(position - AROUND, 0)
    assert found.relative == Relative(position, start, tuple(stored[start : position + AROUND + 1]))
    assert found.missing_from == position // BLOCK * BLOCK


def test_of_several_relatives_the_one_that_agrees_longest() -> None:
    cache = Cache()
    for token in (3, 5, 9):
        cache.serve([1, 1, 1, 1, 2, token, token, token])
    found = cache.manager.explain(SPACE, encode_tokens([1, 1, 1, 1, 2, 5, 5, 7]))
    assert found.relative is not None
    assert (found.relative.position, found.relative.stored) == (7, (1, 1, 1, 1, 2, 5, 5, 5))
    cache.serve([1, 1, 1, 1, 2, 5, 5, 8, 6, 6, 6, 6])
    found = cache.manager.explain(SPACE, encode_tokens([1, 1, 1, 1, 2, 5, 5, 8, 6, 6, 6, 7]))
    assert found.relative is not None
    assert found.relative.position == 11


def test_evicted_when_and_why() -> None:
    cache = Cache()
    prompt = list(range(12))
    cache.serve(prompt)
    cache.now = 10.0
    cache.manager.evict(1)
    cache.now = 12.0
    cache.manager.maybe_evict(31, 31)
    cache.now = 15.0
    found = cache.manager.explain(SPACE, encode_tokens(prompt))
    assert found.evicted == EvictedBefore(3.0, "watermark", "Lru")
    assert (found.cached_tokens, found.missing_from) == (4, 4)
    assert cache.manager.explain(SPACE, encode_tokens(prompt[:7])).evicted is None, "that block was never whole"
    assert cache.manager.explain(SPACE, encode_tokens([*range(4), *range(50, 58)])).evicted is None
    assert cache.manager.explain(SPACE, encode_tokens(prompt)).evicted is not None, "a look changes nothing"
    assert cache.manager.stats().evicted_then_wanted == 0


def test_others_have_it_is_said_only_when_asked_and_never_who() -> None:
    cache = Cache()
    prompt = list(range(12))
    other = Namespace("m", salt="the other tenant")
    cache.serve(prompt, other)
    cache.serve(prompt[:4])
    quiet = cache.manager.explain(SPACE, encode_tokens(prompt))
    assert quiet.other_salt is None
    told = cache.manager.explain(SPACE, encode_tokens(prompt), others=True)
    assert told == quiet._replace(other_salt=True)
    assert "the other" not in repr(told)
    cache.serve(prompt)
    assert cache.manager.explain(SPACE, encode_tokens(prompt), others=True).other_salt is False
    cache.manager.census()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        Cache().manager.explain(SPACE, encode_tokens([]))
