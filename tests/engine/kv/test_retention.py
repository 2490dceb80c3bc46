from __future__ import annotations

import math
from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.kv import CacheManager, Namespace, Retention, Sequence, encode_tokens
from octavo.engine.kv.keep import PLAIN, Keep
from octavo.engine.kv.retention import spans
from octavo.errors import InvalidRequest
from octavo.policies.eviction import CostAware, EvictionPolicy, Lfu, Lru, PriorityTtl

SPACE = Namespace("m")
BLOCK = 4


class Cache:
    """A manager with a clock that is set by hand."""

    def __init__(self, blocks: int = 32, policy: Callable[[int], EvictionPolicy] = Lru) -> None:
        self.now = 0.0
        self.faults: list[str] = []
        self.manager = CacheManager(
            blocks,
            BLOCK,
            PriorityTtl(blocks, policy),
            clock=lambda: self.now,
            on_fault=lambda where, error: self.faults.append(f"{where}: {error}"),
        )
        self._ids = 0

    def admit(self, tokens: list[int], *retention: Retention) -> Sequence:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens(tokens), SPACE, block_size=BLOCK, retention=retention)
        self.manager.copied(self.manager.admit(sequence).copies)
        return sequence

    def serve(self, tokens: list[int], *retention: Retention) -> None:
        sequence = self.admit(tokens, *retention)
        self.manager.commit(sequence, sequence.uncomputed, 0)
        self.manager.finish(sequence)
        self.manager.census()

    def keeps(self, tokens: list[int]) -> list[Keep]:
        """How each cached block of a prompt is kept."""
        match = self.manager.tree.match(SPACE, encode_tokens(tokens).tobytes(), len(tokens))
        if match.node is None:
            return []
        blocks = [part.keep for part in self.manager.tree.path(match.node) for _ in part.ids]
        return blocks[::-1][: len(match.ids)]


RANGES = st.builds(
    lambda start, length, priority, ttl: Retention(start, None if length is None else start + length, priority, ttl),
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(-2, 2),
    st.one_of(st.none(), st.integers(1, 9)),
)


@given(st.lists(RANGES, max_size=5), st.integers(0, 8), st.integers(1, 6), st.integers(0, 100))
def test_every_block_gets_the_dearest_wish_that_touches_it(
    retention: list[Retention], start: int, blocks: int, since: int
) -> None:
    found = spans(retention, start, start + blocks, BLOCK, float(since))
    assert [span.start for span in found] == [start, *(span.stop for span in found[:-1])]
    assert found[-1].stop == start + blocks
    for span in found:
        for number in range(span.start, span.stop):
            asked = [
                (each.priority, inf if each.ttl is None or not each.priority else since + each.ttl)
                for each in retention
                if any(
                    each.start <= token and (each.end is None or token < each.end)
                    for token in range(number * BLOCK, (number + 1) * BLOCK)
                )
            ]
            priority, end = max(asked, default=(0, inf))
            assert span.keep == (Keep(priority, None if math.isinf(end) else end) if priority else PLAIN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, None, 1, None), "token number"),
        ((True, None, 1, None), "token number"),
        ((1.5, None, 1, None), "token number"),
        ((4, 4, 1, None), "must end after"),
        ((4, "9", 1, None), "must end after"),
        ((0, None, 1.0, None), "priority"),
        ((0, None, True, None), "priority"),
        ((0, None, 2**31, None), "priority"),
        ((0, None, -(2**31), None), "priority"),
        ((0, None, 1, 0), "ttl"),
        ((0, None, 1, -1.0), "ttl"),
        ((0, None, 1, inf), "ttl"),
        ((0, None, 1, math.nan), "ttl"),
        ((0, None, 1, True), "ttl"),
        ((0, None, 1, "60"), "ttl"),
    ],
)
def test_malformed_wishes_are_refused(arguments: tuple[int, int, int, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Retention(*arguments)


KEEPS = st.builds(lambda p, e: Keep(p, e) if p else PLAIN, st.integers(-2, 2), st.one_of(st.none(), st.floats(0, 9)))


@given(KEEPS, KEEPS, KEEPS)
def test_raising_takes_the_dearer_whatever_the_order(a: Keep, b: Keep, c: Keep) -> None:
    assert a.raised(b) == b.raised(a)
    assert a.raised(b).raised(c) == a.raised(b.raised(c))
    assert a.raised(a) is a
    assert a.raised(b).priority == max(a.priority, b.priority)
    assert a.agrees(b) == b.agrees(a)


def test_a_wish_that_is_over_is_none() -> None:
    assert Keep.until(3, 5.0, now=5.0) is PLAIN
    assert Keep.until(0, None, now=0.0) is PLAIN
    assert Keep.until(3, 5.1, now=5.0) == Keep(3, 5.1)
    assert Keep.until(-3, None, now=5.0) == Keep(-3)


def test_ranges_part_the_edge_and_only_there() -> None:
    cache = Cache()
    prompt = list(range(20))
    cache.serve(prompt, Retention(5, 9, 3, None), Retention(0, 2, 1, 60))
    assert cache.keeps(prompt) == [Keep(1, 60.0), Keep(3), Keep(3), PLAIN, PLAIN]
    assert sorted(len(node.ids) for node in cache.manager.tree.nodes()) == [1, 2, 2]


def test_output_is_kept_like_the_prompt_and_grows_one_edge() -> None:
    cache = Cache()
    sequence = cache.admit([1] * 4, Retention(0, None, 2, 50))
    cache.manager.commit(sequence, 4, 7)
    for token in range(12):
        cache.now += 0.7
        cache.manager.extend(sequence, 1)
        cache.manager.commit(sequence, 1, token)
    assert [(len(node.ids), node.keep) for node in cache.manager.tree.nodes()] == [(4, Keep(2, 50.0))]


def test_a_later_request_raises_what_it_hits_and_lowers_nothing() -> None:
    cache = Cache()
    prompt = list(range(17))
    cache.serve(prompt, Retention(0, 8, 5, None))
    cache.now = 10.0
    cache.serve(prompt, Retention(4, 12, 3, 60))
    assert cache.keeps(prompt) == [Keep(5), Keep(5), Keep(3, 70.0), PLAIN]
    cache.now = 20.0
    cache.serve(prompt, Retention(0, None, 3, 60))
    assert cache.keeps(prompt) == [Keep(5), Keep(5), Keep(3, 80.0), Keep(3, 80.0)], "its time is extended"
    cache.serve(prompt)
    assert cache.keeps(prompt) == [Keep(5), Keep(5), Keep(3, 80.0), Keep(3, 80.0)]


def test_a_block_that_is_not_dear_stays_so_when_nobody_asks_for_more() -> None:
    cache = Cache()
    cache.serve([1] * 8, Retention(0, None, -1, None))
    cache.serve([1] * 9)
    assert cache.keeps([1] * 8) == [Keep(-1), Keep(-1)]


def test_publishing_what_is_there_already_raises_it() -> None:
    cache = Cache()
    prompt = [1] * 8
    first, second = cache.admit(prompt), cache.admit(prompt, Retention(0, 4, 2, None))
    for sequence in (first, second):
        cache.manager.commit(sequence, 8, 0)
    assert cache.keeps(prompt) == [Keep(2), PLAIN]
    cache.manager.census()


@pytest.mark.parametrize("policy", [Lru, Lfu, CostAware])
def test_the_dear_outlive_the_cheap_until_their_time_is_over(policy: type[EvictionPolicy]) -> None:
    cache = Cache(8, policy)
    cache.serve([1] * 4, Retention(0, None, 1, 100))
    for prompt in range(2, 6):
        cache.now += 1
        cache.serve([prompt] * 4)
        cache.serve([prompt] * 5)  # much used
    assert cache.manager.evict(4) == 4
    assert cache.keeps([1] * 4) == [Keep(1, 100.0)]
    cache.serve([6] * 4)
    cache.serve([6] * 5)
    assert cache.manager.expire(99.9) == 0
    assert cache.manager.expire(100.0) == 1
    assert cache.manager.expire(100.0) == 0
    assert cache.keeps([1] * 4) == [PLAIN]
    cache.manager.evict(1)
    assert (cache.keeps([1] * 4), cache.keeps([6] * 4)) == ([], [PLAIN]), "its own order decides again"
    assert cache.faults == []
    cache.manager.census()


@pytest.mark.parametrize("policy", [Lru, Lfu, CostAware])
def test_what_is_not_wanted_goes_first(policy: type[EvictionPolicy]) -> None:
    cache = Cache(8, policy)
    cache.serve([1] * 4)
    cache.now += 1
    cache.serve([2] * 4, Retention(0, None, -1, None))
    cache.serve([2] * 5)
    cache.manager.evict(1)
    assert (cache.keeps([1] * 4), cache.keeps([2] * 4)) == ([PLAIN], [])


def test_a_soft_pin_raises_exactly_the_cached_blocks() -> None:
    cache = Cache()
    prompt = list(range(20))
    cache.serve(prompt[:16])
    assert cache.manager.keep(SPACE, encode_tokens(prompt[:10]), 2, 40.0) == 8
    assert cache.keeps(prompt) == [Keep(2, 40.0), Keep(2, 40.0), PLAIN, PLAIN]
    assert cache.manager.keep(SPACE, encode_tokens(prompt), 1, None) == 16
    assert cache.keeps(prompt) == [Keep(2, 40.0), Keep(2, 40.0), Keep(1), Keep(1)]
    assert cache.manager.keep(SPACE, encode_tokens([9]), 1, None) == 0
    assert cache.manager.keep(Namespace("n"), encode_tokens(prompt), 1, None) == 0
    cache.manager.census()
    assert cache.manager.tree.namespaces() == [SPACE]


def test_a_soft_pin_in_the_past_does_nothing() -> None:
    cache = Cache()
    cache.now = 50.0
    cache.serve([1] * 4)
    assert cache.manager.keep(SPACE, encode_tokens([1] * 4), 2, 50.0) == 4
    assert cache.keeps([1] * 4) == [PLAIN]


def test_only_time_that_has_come_is_looked_at() -> None:
    """GROWTH-01: neither evicted nodes nor ends that were put off stay behind."""
    cache = Cache(8)
    for number in range(2000):
        cache.now += 1
        cache.serve([number % 97] * 8, Retention(0, None, 1, 1e6 + number))
    expiries = cache.manager.tree.expiries
    assert len(expiries) == len(list(cache.manager.tree.nodes()))
    assert len(expiries._heap) < 100
    cache.manager.evict(8)
    assert len(expiries) == 0
    assert cache.manager.expire(inf) == 0
