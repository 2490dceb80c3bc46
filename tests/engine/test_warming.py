"""Warming: after a restart the hottest stored prefixes come back by themselves, and never at anybody's cost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from octavo import RequestOutput, Retention
from octavo.engine.warming import hottest_paths
from octavo.storage.base import Head, Listed, Meta
from octavo.storage.naming import Namespace, name_after
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import (
    GREEDY,
    B,
    EngineOf,
    Faulty,
    ask,
    lasting,
    prompt,
    settled,
    threaded,
    tokens,
    until,
)

Alone = Callable[..., Awaitable[list[RequestOutput]]]
SHELF = Namespace("m").shelf()
PAYLOAD = 8 * B
"""Bytes of a block of the fake model."""


def block(number: int, parent: Listed | None = None, **meta: float) -> Listed:
    tokens = number.to_bytes(4 * B, "little")
    start = 0 if parent is None else parent.head.start + B
    above = SHELF.namespace if parent is None else parent.head.name
    return Listed(SHELF, Head(name_after(above, tokens), above, start, tokens), Meta(**meta))  # type: ignore[arg-type]  # fields by name


def shown(listed: list[Listed], budget: int) -> list[tuple[list[int], int]]:
    return [
        ([int.from_bytes(each.head.tokens, "little") for each in path], new)
        for path, new in hottest_paths(listed, budget)
    ]


def test_the_hottest_first_and_each_with_its_ancestors() -> None:
    a = block(1, hits=1)
    b = block(2, a, hits=1)
    c = block(3, b, hits=9)
    d = block(4, a, hits=5)
    e = block(5, hits=7)
    assert shown([a, b, c, d, e], 100) == [([1, 2, 3], 3), ([5], 1), ([1, 4], 1)]


def test_priority_before_hits_and_of_equals_the_latest() -> None:
    blocks = [block(1, hits=9), block(2, priority=1), block(3, idle=5.0), block(4, idle=1.0)]
    assert [path for path, _ in shown(blocks, 100)] == [[2], [1], [4], [3]]


def test_what_lacks_an_ancestor_is_left_out() -> None:
    a = block(1)
    b = block(2, a)
    c = block(3, b, hits=5)
    assert shown([a, c], 100) == [([1], 1)]


@pytest.mark.parametrize(("budget", "paths"), [(0, []), (1, [[4]]), (3, [[1, 2, 3]]), (4, [[1, 2, 3], [4]])])
def test_the_budget_is_kept(budget: int, paths: list[list[int]]) -> None:
    a = block(1)
    b = block(2, a)
    c = block(3, b, hits=5)
    assert [path for path, _ in shown([a, b, c, block(4, hits=1)], budget)] == paths


async def filled(engine_of: EngineOf) -> MemoryStore:
    """Prompt 1 was used five times, 2 once, 3 three times, 4 once with a priority; one of a tenant."""
    store, clock = MemoryStore(), FakeClock()
    async with engine_of(mounts={"m": lasting(store)}, clock=clock, wall=clock) as engine:
        for number, uses in ((1, 5), (2, 1), (3, 3)):
            for _ in range(uses):
                clock.now += 1
                await ask(engine, prompt(number))
        await ask(engine, prompt(4), retention=[Retention(0, None, 3)])
        await ask(engine, prompt(5), tenant="t")
    assert len(store.blocks) == 25
    return store


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("blocks", "warm"),
    [
        (4, {4}),
        (5, {4}),
        (12, {4, 1}),
        (15, {4, 1, 3}),
        (100, {4, 1, 3, 2}),
    ],
)
async def test_as_much_as_fits_comes_back_hottest_first(
    blocks: int, warm: set[int], engine_of: EngineOf, alone: Alone
) -> None:
    store = await filled(engine_of)
    async with engine_of(mounts={"m": lasting(store)}, warm_bytes=blocks * PAYLOAD) as engine:
        await until(lambda: engine.stats().restore.warmed_blocks == min(blocks, 20))
        await until(lambda: engine.stats().restore.readiness == "ready")
        await settled(engine)
        restore = engine.stats().restore
        assert (restore.planned_blocks, restore.stored_blocks, restore.readiness) == (min(blocks, 20), 25, "ready")
        there = {number for number in range(1, 5) if (await engine.explain(prompt(number))).device_tokens >= 16}
        assert there == warm
        assert (await engine.explain(prompt(5), tenant="t")).device_tokens == 0, "salts are not stored"
        for number in range(1, 5):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))


@pytest.mark.asyncio
async def test_recency_and_hits_come_back_with_the_blocks(engine_of: EngineOf) -> None:
    """Warming is no use: after it the order of eviction is what it was before the restart."""
    store = await filled(engine_of)
    async with engine_of(mounts={"m": lasting(store)}, warm_bytes=100 * PAYLOAD, clock=FakeClock()) as engine:
        await until(lambda: engine.stats().restore.warmed_blocks == 20)
        await settled(engine)
        assert engine.stats().cache.prefix_hits == 0
        gone: list[int] = []
        for _ in range(20):
            await engine._loop.at_edge(lambda: engine._loop.cache.evict(1))
            for number in range(1, 5):
                if number not in gone and (await engine.explain(prompt(number))).device_tokens < 16:
                    gone.append(number)
        assert gone == [1, 2, 3, 4], "least recently used first, the one with a priority last"


@pytest.mark.asyncio
async def test_only_free_blocks_are_used_and_nobody_is_evicted(engine_of: EngineOf) -> None:
    store = await filled(engine_of)
    async with engine_of(mounts={"m": lasting(store)}, warm_bytes=10**6, num_blocks=12) as engine:
        await until(lambda: engine.stats().restore.warmed_blocks > 0 and engine.stats().restore.readiness == "ready")
        await settled(engine)
        stats = engine.stats()
        assert stats.restore.warmed_blocks <= 12
        assert stats.cache.evictions == {}


@pytest.mark.asyncio
async def test_what_was_computed_meanwhile_is_not_evicted_for_it(engine_of: EngineOf) -> None:
    store = await filled(engine_of)
    faulty, gate = Faulty(lasting(store)), anyio.Event()
    faulty.prepare(Fault("get", "slow", gate=gate, times=1))
    async with engine_of(mounts={"m": faulty}, warm_bytes=10**6, num_blocks=16, tier_deadline=60.0) as engine:
        await until(lambda: faulty.tier.running["get"] == 1)
        for number in (10, 11):
            await ask(engine, prompt(number))
        gate.set()
        await until(lambda: engine.stats().restore.readiness == "ready")
        await settled(engine)
        assert engine.stats().cache.evictions == {}
        assert engine.stats().restore.warmed_blocks == 5


@pytest.mark.asyncio
async def test_requests_do_not_wait_for_warming(engine_of: EngineOf, alone: Alone) -> None:
    store = await filled(engine_of)
    faulty, gate = Faulty(lasting(store)), anyio.Event()
    faulty.prepare(Fault("get", "slow", gate=gate, times=1))
    async with engine_of(mounts={"m": faulty}, warm_bytes=10**6, tier_deadline=60.0) as engine:
        await until(lambda: faulty.tier.running["get"] == 1)
        assert engine.stats().restore.readiness == "warming"
        for number in range(10, 20):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))
        assert engine.stats().restore.readiness == "warming"
        gate.set()
        await until(lambda: engine.stats().restore.readiness == "ready")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["fail", "hang", "flip"])
async def test_a_tier_that_fails_meanwhile_leaves_the_engine_ready(
    kind: str, engine_of: EngineOf, alone: Alone
) -> None:
    store = await filled(engine_of)
    faulty = Faulty(lasting(store))
    faulty.prepare(Fault("get", kind))  # type: ignore[arg-type]  # one of the kinds
    async with engine_of(mounts={"m": faulty}, warm_bytes=10**6, tier_deadline=0.05, promotion_timeout=0.05) as engine:
        await until(lambda: faulty.tier.calls["get"] > 0 and engine.stats().restore.readiness == "ready")
        assert engine.stats().restore.warmed_blocks == 0
        output = await ask(engine, prompt(1))
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        await settled(engine)


@pytest.mark.asyncio
async def test_closing_while_it_warms(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await filled(engine_of)
    faulty = Faulty(lasting(store))
    faulty.prepare(Fault("get", "hang"))
    how = {"warm_bytes": 10**6, "tier_deadline": 60.0, "promotion": "wait", "close_budget": 0.2}
    async with threaded(monkeypatch, {"m": faulty}, **how) as engine:
        await until(lambda: faulty.tier.running["get"] == 1)
        with anyio.fail_after(10):
            await engine.close()
    assert len(asyncio.all_tasks()) == 1
    assert faulty.tier.running["get"] == 0
    assert len(store.blocks) == 25
