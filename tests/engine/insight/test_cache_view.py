"""The cache view shows what is there, bounded, and nothing else."""

from __future__ import annotations

from array import array
from random import Random

import anyio
import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.engine.insight.cache_view import (
    MOST_EVICTIONS,
    SAME_MOMENT,
    CacheView,
    RecentEvictions,
    last_used,
)
from octavo.engine.kv import EvictedRun, Namespace, PrefixTree, encode_tokens
from octavo.engine.kv.node import Node, Traits
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import EngineClosed, InvalidRequest
from octavo.policies.eviction.base import Entry
from octavo.policies.eviction.lru import Lru
from octavo.tests.engine.conftest import EngineOf, FakeClock

ONE = SamplingParams(max_tokens=1, temperature=0.0)
BLOCK = 4


def check(view: CacheView, engine: AsyncEngine) -> None:
    """What holds of every view."""
    pool, census = view.pool, engine.census()
    assert (pool.free, pool.idle, pool.held + pool.pinned, pool.in_transfer, pool.total) == census[:5]
    assert len(pool.map) == pool.total
    ids = [node.id for node in view.nodes]
    assert len(set(ids)) == len(ids)
    for number, node in enumerate(view.nodes):
        assert node.parent is None or node.parent in ids[:number]
        assert node.first_blocks[0] == node.id
        assert node.tokens == node.blocks * view.block_size <= node.depth


@pytest.mark.asyncio
async def test_it_shows_blocks_edges_and_counters(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        await engine.complete("0123456789AB", ONE, tenant="a")
        await engine.complete("01234567CDEF", ONE, tenant="a")
        await engine.complete("zzzzzzzz".replace("z", "n"), ONE)
        view = await engine.cache_view(text=True)
        check(view, engine)
        assert view.tree_blocks == view.pool.idle == sum(node.blocks for node in view.nodes)
        found = {(node.text, node.tenant): node for node in view.nodes}
        stem = found["01234567", "a"]
        assert (stem.depth, stem.hits, stem.children, stem.parent, stem.locks) == (8, 1, 2, None, 0)
        branch = found["CDEF", "a"]
        assert (branch.parent, branch.depth, branch.tokens, branch.children) == (stem.id, 12, 4, 0)
        assert found["nnnnnnnn", None].hits == 0
        assert view.stats.cache.prefix_hit_tokens == 8


@pytest.mark.asyncio
async def test_text_is_shown_to_those_only_who_ask(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        await engine.complete("0123" * 20, ONE)
        assert [node.text for node in (await engine.cache_view()).nodes] == [None]
        (node,) = (await engine.cache_view(text=True)).nodes
        assert node.text == ("0123" * 20)[:24]


@pytest.mark.asyncio
async def test_an_engine_without_a_tokenizer_shows_no_text(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await engine.complete([1] * 8, ONE)
        assert [node.text for node in (await engine.cache_view(text=True)).nodes] == [None]


@pytest.mark.asyncio
async def test_what_runs_is_held_and_what_is_pinned_is_pinned(engine_of: EngineOf) -> None:
    views: list[CacheView] = []

    async def look(step: int) -> None:
        if step > 2:  # the pin was computed by the step before
            views.append(await engine.cache_view())
            check(views[-1], engine)

    async with engine_of(on_step=look) as engine:
        await engine.pin([7] * 8)
        await engine.complete([1] * 10, SamplingParams(max_tokens=3, temperature=0.0))
        after = await engine.cache_view()
        for pin in engine.pins():
            await engine.unpin(pin)
    assert views
    assert {(view.pool.pinned, view.pool.held, view.stats.running) for view in views[1:]} == {(2, 3, 1)}
    assert (after.pool.pinned, after.pool.held) == (2, 0)


@pytest.mark.asyncio
async def test_what_left_is_told_with_its_reason(engine_of: EngineOf) -> None:
    clock = FakeClock()
    async with engine_of(clock=clock, num_blocks=8) as engine:
        await engine.complete([1] * 16, ONE)
        await engine.evict([1] * 16)
        clock.now += 5.0
        await engine.complete([2] * 16, ONE)
        await engine.complete([3] * 28, ONE)
        newest, oldest = (await engine.cache_view()).evictions
        assert (oldest.reason, oldest.blocks, oldest.policy) == ("forget", 4, "Lru")
        assert (newest.reason, newest.when - oldest.when) == ("allocate", 5.0)
        assert newest.blocks + oldest.blocks == sum(engine.stats().cache.evictions.values())


def test_the_last_evictions_are_remembered_and_what_goes_together_is_one() -> None:
    clock = FakeClock()
    recent = RecentEvictions(lambda: "lru", clock, most=3)

    def leave(blocks: int, reason: str) -> None:
        run = EvictedRun(Namespace("m"), 0, b"", (), b"", tuple(range(blocks)), Entry(blocks, 0, 0.0, 0.0), reason)
        recent.evicted(run)

    leave(2, "allocate")
    leave(3, "allocate")
    leave(1, "watermark")
    clock.now += SAME_MOMENT
    leave(4, "watermark")
    assert [(each.blocks, each.reason) for each in recent.newest_first()] == [
        (4, "watermark"),
        (1, "watermark"),
        (5, "allocate"),
    ]
    for _ in range(2 * MOST_EVICTIONS):
        clock.now += 1.0
        leave(1, "call")
    assert len(recent.newest_first()) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("most", [-1, True, 1.5, 10_001, "5", None])
async def test_a_bound_that_is_none_is_refused(most: object, engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest, match="max_nodes"):
            await engine.cache_view(max_nodes=most)  # type: ignore[arg-type]  # that is the point


@pytest.mark.asyncio
async def test_there_is_none_of_an_engine_that_is_closed() -> None:
    with pytest.raises(EngineClosed):
        await AsyncEngine(runner=FakeRunner()).cache_view()


@pytest.mark.asyncio
async def test_it_can_be_had_while_a_step_hangs(engine_of: EngineOf) -> None:
    """That is when somebody looks: the loop is not asked, so it need not answer."""
    hanging, go_on = anyio.Event(), anyio.Event()

    async def hang(step: int) -> None:
        if step == 1:
            hanging.set()
            await go_on.wait()

    async with engine_of(on_step=hang) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.complete, [1] * 8, ONE)
        await hanging.wait()
        view = await engine.cache_view()
        assert (view.pool.held, view.stats.running) == (2, 1)
        assert [request.state for request in engine.requests()] == ["running"]
        go_on.set()


# the choice of edges


def tree_of(rng: Random, prompts: int, clock: FakeClock) -> PrefixTree:
    tree = PrefixTree(BLOCK, Lru(64), clock)
    for number in range(prompts):
        clock.now += 1.0
        blocks = rng.randint(1, 5)
        tokens = encode_tokens([rng.randint(0, 2) for _ in range(blocks) for _ in range(BLOCK)])
        root = tree._root(Namespace("m", salt=str(number % 3)))
        node, _ = tree.publish(root, tokens.tobytes(), array("i", range(blocks)), Traits(0.0))
        tree.count_hit(node)
    return tree


@pytest.mark.parametrize("seed", range(10))
def test_the_edges_that_were_used_last_are_chosen_parents_first(seed: int) -> None:
    rng, clock = Random(seed), FakeClock()  # noqa: S311  # not for secrets
    tree = tree_of(rng, 60, clock)
    every = list(tree.nodes())
    for most in (0, 1, 7, len(every), 1000):
        chosen = list(last_used(tree, most))
        assert len(chosen) == min(most, len(every))
        seen: set[Node] = set()
        for node in chosen:
            assert node.parent is not None
            assert node.parent.parent is None or node.parent in seen
            seen.add(node)
        left_out = [node.used for node in every if node not in seen]
        assert not chosen or not left_out or min(node.used for node in chosen) >= max(left_out)


def test_of_a_very_wide_tree_the_newest_edges_are_shown() -> None:
    clock = FakeClock()
    tree = PrefixTree(BLOCK, Lru(64), clock)
    for number in range(2000):
        clock.now += 1.0
        tokens = encode_tokens([number % 64, number // 64, 1, 2])
        tree.publish(tree._root(Namespace("m")), tokens.tobytes(), array("i", [number]), Traits(0.0))
    assert [node.ids[0] for node in last_used(tree, 10)] == list(range(1999, 1989, -1))
