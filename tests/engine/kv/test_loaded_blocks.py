"""Blocks that come back from a tier: what is known of them, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.kv import CacheManager, Namespace, Retention, Sequence, encode_tokens, meta_of
from octavo.engine.kv.keep import PLAIN, Keep
from octavo.engine.kv.loads import TierCost, arrivals, runs
from octavo.errors import CacheMisuse
from octavo.policies.eviction import CostAware, EvictionPolicy, Lfu, Lru
from octavo.storage.base import Meta
from octavo.storage.naming import names_after

SPACE = Namespace("m")
BLOCK = 4
WALL = 1e9


class Cache:
    """A manager whose monotonic clock starts at ``now``; the wall clock shows ``WALL`` more."""

    def __init__(self, policy: EvictionPolicy | None = None, *, blocks: int = 32, now: float = 0.0) -> None:
        self.now = now
        self.faults: list[str] = []
        self.manager = CacheManager(
            blocks,
            BLOCK,
            policy or Lru(blocks),
            clock=lambda: self.now,
            on_fault=lambda where, error: self.faults.append(f"{where}: {error}"),
        )
        self._ids = 0

    def admit(self, tokens: list[int], *retention: Retention, resumed: bool = False) -> Sequence:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens(tokens), SPACE, block_size=BLOCK, retention=retention)
        admission = self.manager.try_admit(sequence, resumed=resumed)
        assert admission is not None
        self.manager.forgo_copy(sequence, admission.copies)
        return sequence

    def serve(self, tokens: list[int], *retention: Retention) -> None:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens(tokens), SPACE, block_size=BLOCK, retention=retention)
        self.manager.copied(self.manager.admit(sequence).copies)
        self.manager.measured(sequence, 0.01 * len(tokens))
        self.manager.commit(sequence, sequence.uncomputed, 0)
        self.manager.finish(sequence)

    def load(self, sequence: Sequence, metas: Iterable[Meta], *, used: bool = True, tier: str = "disk") -> None:
        self.manager.loaded(sequence, list(metas), tier, 0.25, wall_now=WALL + self.now, used=used)
        self.manager.census()

    def keeps(self, sequence: Sequence) -> list[Keep]:
        assert sequence.node is not None
        path = [part.keep for part in self.manager.tree.path(sequence.node) for _ in part.ids]
        return path[::-1]


METAS = st.builds(
    Meta,
    written=st.sampled_from((0.0, WALL - 5.0, WALL + 1e9)),
    idle=st.integers(0, 90).map(float),
    hits=st.integers(0, 4),
    priority=st.integers(-1, 1),
    ttl=st.sampled_from((None, 0.0, 2.0, 60.0)),
    recompute_seconds=st.sampled_from((0.0, 0.5)),
)


@given(st.lists(METAS, min_size=1, max_size=12), st.booleans())
def test_runs_part_where_retention_changes_and_nowhere_else(metas: list[Meta], used: bool) -> None:
    arrived = arrivals(metas, now=50.0, wall_now=WALL, used=used)
    found = list(runs(arrived, TierCost("disk", 0.25), 9.0))
    assert sum(run.blocks for run in found) == len(metas)
    at = 0
    for run in found:
        part = arrived[at : at + run.blocks]
        assert all(each.keep == run.traits.keep for each in part)
        assert run.traits.hits == max(each.meta.hits for each in part)
        assert run.traits.last_use == max(each.last_use for each in part) <= 50.0
        assert run.traits.recompute_seconds == (part[-1].meta.recompute_seconds or 9.0)
        assert at == 0 or arrived[at - 1].keep != run.traits.keep
        at += run.blocks
    for meta, each in zip(metas, arrived, strict=True):
        aged = meta.aged(WALL)
        is_over = not meta.priority or aged.ttl == 0.0
        assert each.keep == (PLAIN if is_over else Keep(meta.priority, None if aged.ttl is None else 50.0 + aged.ttl))
        assert each.meta.hits == meta.hits + used
        assert each.last_use == (50.0 if used else 50.0 - aged.idle)


def test_a_clock_that_was_wrong_makes_nothing_live_longer() -> None:
    """TIME-01: written ten years in the future is read as now; a day in the past has used up the time."""
    ahead = arrivals([Meta(WALL + 3e8, ttl=10.0, priority=1)], now=0.0, wall_now=WALL, used=False)
    behind = arrivals([Meta(WALL - 86400, ttl=10.0, priority=1)], now=0.0, wall_now=WALL, used=False)
    assert (ahead[0].keep, behind[0].keep) == (Keep(1, 10.0), PLAIN)


def test_names_beyond_are_those_of_the_whole_blocks_that_are_missing() -> None:
    cache = Cache()
    prompt = list(range(19))
    cache.serve(prompt[:8])
    sequence = cache.admit(prompt)
    names = names_after(SPACE.shelf().namespace, encode_tokens(prompt).tobytes(), BLOCK)
    assert cache.manager.names_beyond(sequence, 18) == names[2:4]
    assert cache.manager.names_beyond(sequence, 15) == names[2:3]
    assert cache.manager.names_beyond(sequence, 8) == cache.manager.names_beyond(sequence, 0) == []


def test_a_copy_that_is_forgone_leaves_no_trace() -> None:
    cache = Cache()
    cache.serve(list(range(12)))
    before = cache.manager.stats()
    sequence = Sequence(99, encode_tokens([*range(10), 77, 78, 79]), SPACE, block_size=BLOCK)
    admission = cache.manager.admit(sequence)
    assert (sequence.computed, len(admission.copies)) == (10, 1)
    cache.manager.forgo_copy(sequence, admission.copies)
    assert sequence.computed == 8
    assert not cache.manager.pool._pins
    stats = cache.manager.stats()
    assert (stats.partial_copies, stats.prefix_hits) == (before.partial_copies, before.prefix_hits + 1)
    assert stats.prefix_hit_tokens == before.prefix_hit_tokens + 8
    cache.manager.forgo_copy(sequence, ())
    assert sequence.computed == 8
    cache.manager.census()


def test_a_hit_that_was_only_a_forgone_copy_is_none() -> None:
    cache = Cache()
    cache.serve([1, 2, 3, 4])
    cache.admit([1, 2, 9, 9, 9])
    assert cache.manager.stats().prefix_hits == cache.manager.stats().prefix_hit_tokens == 0


def test_loaded_tokens_are_hits_and_are_told_from_those_on_the_device() -> None:
    cache = Cache()
    prompt = list(range(21))
    cache.serve(prompt[:8])
    sequence = cache.admit(prompt)
    cache.load(sequence, [Meta()] * 2)
    assert (sequence.computed, sequence.table.shared) == (16, 4)
    stats = cache.manager.stats()
    assert (stats.prefix_hit_tokens, stats.tier_hit_tokens, stats.prefix_hits) == (16, 8, 1)
    assert (stats.loaded_blocks, stats.loaded_tokens, stats.prefix_query_tokens) == (2, 8, 29)
    fresh = cache.admit([50] * 9)
    cache.load(fresh, [Meta()])
    cache.load(fresh, [Meta()])
    assert cache.manager.stats().prefix_hits == 2, "a request is one hit, in however many parts it is loaded"
    back = cache.admit([60] * 9, resumed=True)
    cache.load(back, [Meta()])
    stats = cache.manager.stats()
    assert (stats.tier_hit_tokens, stats.resume_hit_tokens, stats.loaded_tokens) == (16, 4, 20)
    restored = cache.admit([70] * 8, resumed=True)
    cache.load(restored, [Meta()] * 2, used=False)
    stats = cache.manager.stats()
    assert (stats.prefix_hit_tokens, stats.resume_hit_tokens, stats.loaded_tokens) == (24, 4, 28)


def test_what_a_request_loads_is_used_now() -> None:
    cache = Cache(now=1000.0)
    sequence = cache.admit([1] * 9)
    cache.load(sequence, [Meta(WALL, idle=500.0, hits=2, recompute_seconds=0.5)] * 2)
    (node,) = cache.manager.tree.nodes()
    assert (node.hits, node.last_use, node.recompute_seconds) == (3, 1000.0, 0.5)
    assert (node.reload_tier, node.reload_seconds) == ("disk", 0.25)


def test_a_prompt_that_comes_in_parts_is_one_edge_and_what_is_computed_is_another() -> None:
    cache = Cache(now=10.0)
    sequence = cache.admit([1] * 21)
    for wait in (0.0, 0.3, 0.3):
        cache.now += wait
        cache.load(sequence, [Meta(WALL + 10, priority=1, ttl=60.0)])
    cache.manager.commit(sequence, 9, 0)
    loaded, computed = sorted(cache.manager.tree.nodes(), key=lambda node: node.end)
    assert ([len(loaded.ids), loaded.keep], loaded.reload_tier) == ([3, Keep(1, 70.0)], "disk")
    assert ([len(computed.ids), computed.keep], computed.reload_tier) == ([2, PLAIN], None)


def test_a_request_keeps_what_it_loads_as_it_wants() -> None:
    cache = Cache()
    sequence = cache.admit([1] * 17, Retention(4, 12, 2, None))
    cache.load(sequence, [Meta(priority=3), Meta(priority=3), Meta(), Meta(priority=-1)])
    assert cache.keeps(sequence) == [Keep(3), Keep(3), Keep(2), Keep(-1)]


def test_what_somebody_else_published_meanwhile_is_shared_and_learns() -> None:
    cache = Cache(now=100.0)
    first, second = cache.admit([1] * 9), cache.admit([1] * 9)
    cache.manager.commit(first, 8)
    cache.now = 150.0
    cache.load(second, [Meta(WALL + 150.0, hits=4, priority=1)] * 2)
    assert second.table.blocks[:2] == first.table.blocks[:2]
    (node,) = cache.manager.tree.nodes()
    assert (node.hits, node.last_use, node.keep, node.reload_tier) == (5, 150.0, Keep(1), "disk")
    assert cache.manager.stats().duplicates_freed == 2


def test_a_misplaced_load_is_refused_and_changes_nothing() -> None:
    cache = Cache()
    sequence = cache.admit([1] * 10)
    with pytest.raises(CacheMisuse, match="3 loaded blocks"):
        cache.load(sequence, [Meta()] * 3)
    cache.load(sequence, [])
    cache.manager.commit(sequence, 3)
    with pytest.raises(CacheMisuse, match="loaded blocks"):
        cache.load(sequence, [Meta()])
    cache.manager.finish(sequence)
    with pytest.raises(CacheMisuse):
        cache.load(sequence, [Meta()])
    assert cache.manager.stats().loaded_blocks == 0
    off = CacheManager(8, BLOCK, Lru(8), clock=lambda: 0.0, on_fault=lambda *_: None, sharing=False)
    alone = Sequence(1, encode_tokens([1] * 9), SPACE, block_size=BLOCK)
    off.admit(alone)
    assert off.names_beyond(alone, 8) == []
    with pytest.raises(CacheMisuse, match="loaded blocks"):
        off.loaded(alone, [Meta()], "disk", None, wall_now=WALL)


@pytest.mark.parametrize("policy", [Lru, Lfu, CostAware])
def test_a_restored_cache_evicts_in_the_same_order(policy: type[EvictionPolicy]) -> None:
    """Recency, hits, priorities, what is left of their time and cost are those of the cache that was saved."""
    old = Cache(policy(64), blocks=64)
    prompts = [[number] * 8 for number in range(6)]
    for number, prompt in enumerate(prompts):
        old.now += 7.0
        old.serve(prompt, *([Retention(0, 4, 1, 1000.0)] if number % 3 == 0 else []))
    for number in (0, 3, 3, 4, 1, 1, 1):
        old.now += 5.0
        old.serve([*prompts[number], 9])
    image = old.manager.image(WALL + old.now)

    new = Cache(policy(64), blocks=64, now=3.0)
    down = 20.0
    wall = WALL + old.now + down
    texts = {run.names[-1]: run.tokens for run in image}
    for run in image:
        tokens = texts.get(run.parent, b"") + run.tokens
        sequence = new.admit(list(memoryview(tokens).cast("i")), resumed=True)
        new.manager.loaded(sequence, [run.meta] * len(run.names), "snapshot", 0.1, wall_now=wall, used=False)
        new.manager.finish(sequence)
    new.manager.census()

    again = {run.names: run.meta for run in new.manager.image(wall)}
    assert again.keys() == {run.names for run in image}
    for run in image:
        meta, before = again[run.names], run.meta.aged(wall)
        assert (meta.hits, meta.priority) == (before.hits, before.priority)
        assert meta.idle == pytest.approx(before.idle)
        assert meta.recompute_seconds == pytest.approx(before.recompute_seconds)
        assert (meta.ttl is None) == (before.ttl is None)
        assert meta.ttl is None or meta.ttl == pytest.approx(before.ttl)
    assert _order(new) == _order(old)
    assert old.faults == new.faults == []


def _order(cache: Cache) -> list[bytes]:
    """The tokens that go, block by block."""
    gone = []
    while cache.manager.tree.blocks:
        before = {run.names: run for run in cache.manager.image(0.0)}
        cache.manager.evict(1)
        after = {name for run in cache.manager.image(0.0) for name in run.names}
        gone += [
            run.tokens[:4] + bytes([index])
            for run in before.values()
            for index, name in enumerate(run.names)
            if name not in after
        ]
    return gone


def test_meta_goes_round() -> None:
    cache = Cache(now=40.0)
    sequence = cache.admit([1] * 9)
    meta = Meta(WALL + 40.0, 12.0, 3, 2, 30.0, 0.5)
    cache.load(sequence, [meta] * 2, used=False)
    assert sequence.node is not None
    assert meta_of(sequence.node, cache.now, WALL + cache.now) == meta
