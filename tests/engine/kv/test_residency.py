from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.engine.kv.residency import Residency
from octavo.policies.eviction import Lru
from octavo.policies.eviction.base import Entry
from octavo.telemetry.metrics.histogram import Histogram, HistogramState

SIZE = 4
SPACE = Namespace("w")


class Cache:
    """A manager on a clock that the test sets."""

    def __init__(self, blocks: int, policy: Lru | None = None) -> None:
        self.now = 1000.0
        self.faults: list[str] = []
        self.manager = CacheManager(
            blocks,
            SIZE,
            policy or Lru(blocks),
            clock=lambda: self.now,
            on_fault=lambda where, _: self.faults.append(where),
        )
        self._ids = count()

    @property
    def residency(self) -> Residency:
        return self.manager.residency

    def serve(self, tokens: list[int]) -> None:
        """From admission to the end at one moment."""
        sequence = Sequence(next(self._ids), encode_tokens(tokens), SPACE, block_size=SIZE)
        self.manager.copied(self.manager.admit(sequence).copies)
        self.manager.commit(sequence, sequence.uncomputed, 0)
        self.manager.finish(sequence)
        self.manager.census()


def only(histogram: Histogram, *values: float) -> bool:
    """Whether the histogram is what these values make."""
    expected = Histogram(histogram.state().bounds)
    for value in values:
        expected.observe(value)
    return histogram.state() == expected.state()


def test_evicted_blocks_count_one_by_one_with_their_ages() -> None:
    cache = Cache(32)
    cache.serve([1] * 13)  # three whole blocks
    cache.now += 7
    cache.serve([1] * 13)  # the same again: a use
    cache.now += 50
    assert cache.manager.evict(1000) == 3
    assert only(cache.residency.lifetime, 57.0, 57.0, 57.0)
    assert only(cache.residency.idle, 50.0, 50.0, 50.0)
    assert cache.manager.stats().evictions == {"call": 3}


def test_each_edge_on_a_path_that_is_used_again_tells_its_gap() -> None:
    cache = Cache(32)
    cache.serve([1] * 8 + [9] * 5)
    assert only(cache.residency.reuse_gap)
    cache.now += 3
    cache.serve([1] * 8 + [2] * 5)  # parts the edge: its upper half is used, and gets another child
    assert only(cache.residency.reuse_gap, 3.0)
    cache.now += 20
    cache.serve([1] * 8 + [2] * 5)
    assert only(cache.residency.reuse_gap, 3.0, 20.0, 20.0)


def test_what_is_wanted_after_its_eviction_tells_how_long_it_was_gone() -> None:
    cache = Cache(32)
    cache.serve([1] * 9)
    cache.manager.evict(1000)
    cache.now += 42
    cache.serve([1] * 9)
    assert only(cache.residency.wanted_gap, 42.0)
    assert cache.manager.stats().evicted_then_wanted == 1
    cache.serve([1] * 9)  # a hit now, and no ghost any more
    assert only(cache.residency.wanted_gap, 42.0)


def test_a_resumed_sequence_is_no_reuse() -> None:
    cache = Cache(32)
    sequence = Sequence(100, encode_tokens([1] * 9), SPACE, block_size=SIZE)
    cache.manager.admit(sequence)
    cache.manager.commit(sequence, 9, 0)
    cache.manager.preempt(sequence)
    cache.now += 5
    assert cache.manager.try_admit(sequence, resumed=True) is not None
    assert sequence.computed == 8
    assert only(cache.residency.reuse_gap)
    cache.manager.finish(sequence)


def test_what_is_forgotten_or_bad_is_not_evicted() -> None:
    cache = Cache(32)
    cache.serve([1] * 9)
    cache.now += 5
    cache.manager.forget(SPACE, encode_tokens([1] * 8))
    assert only(cache.residency.lifetime)
    assert cache.manager.stats().evictions == {"forget": 2}


def test_no_block_is_counted_twice_or_left_out_under_pressure() -> None:
    cache = Cache(16)
    for number in range(60):
        cache.now += 1
        cache.serve([number % 7] * 5 + [number % 11] * 9)
    evicted = sum(cache.manager.stats().evictions.values())
    assert evicted > 0
    states: Iterator[HistogramState] = (h.state() for h in (cache.residency.lifetime, cache.residency.idle))
    assert [state.observations for state in states] == [evicted, evicted]
    assert cache.residency.wanted_gap.state().observations == cache.manager.stats().evicted_then_wanted
    assert cache.residency.wanted_gap.state().sum == cache.manager.stats().evicted_then_wanted_seconds


class Scribbler(Lru):
    """Writes nonsense where policies are shown numbers."""

    def __init__(self, capacity: int, nonsense: object) -> None:
        super().__init__(capacity)
        self._nonsense = nonsense

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        entry.insert_time = entry.last_use = self._nonsense  # type: ignore[assignment]  # as a faulty plug-in might


@pytest.mark.parametrize("nonsense", ["yesterday", None, float("nan"), 1e9])
def test_a_policy_that_scribbles_over_times_breaks_neither_eviction_nor_the_sums(nonsense: object) -> None:
    cache = Cache(32, Scribbler(32, nonsense))
    cache.serve([1] * 9)
    cache.serve([1] * 9)
    assert cache.manager.evict(1000) == 2
    for histogram in (cache.residency.lifetime, cache.residency.idle, cache.residency.reuse_gap):
        assert histogram.state().sum == 0
        assert histogram.state().observations > 0
