"""Retention of a request's token ranges, through the engine: what is dear survives churn, for as long as it was to."""

from __future__ import annotations

import pytest

from octavo import AsyncEngine, Retention
from octavo.errors import InvalidRequest
from octavo.storage.testing.contract import MemoryStore
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import ONE, B, EngineOf, ask, cool, lasting, memory, prompt, settled

POLICIES = (
    "octavo.policies.eviction.lru:Lru",
    "octavo.policies.eviction.lfu:Lfu",
    "octavo.policies.eviction.cost_aware:CostAware",
)


async def churn(engine: AsyncEngine, start: int = 100, count: int = 20) -> None:
    for number in range(start, start + count):
        await ask(engine, prompt(number), ONE)


async def left(engine: AsyncEngine, ids: list[int]) -> int:
    return (await engine.explain(ids)).device_tokens // B * B


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", POLICIES)
async def test_what_is_dear_survives_until_its_time_is_over(policy: str, engine_of: EngineOf, clock: FakeClock) -> None:
    async with engine_of(num_blocks=16, eviction_policy=policy, clock=clock) as engine:
        await ask(engine, prompt(1), ONE, retention=[Retention(0, None, 3, ttl=60.0)])
        await churn(engine)
        assert await left(engine, prompt(1)) == 16
        clock.now += 59
        await churn(engine, 200)
        assert await left(engine, prompt(1)) == 16
        clock.now += 2
        await churn(engine, 300)
        assert await left(engine, prompt(1)) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("start", "end", "kept"), [(0, 8, 8), (0, 5, 8), (0, 4, 4), (0, None, 16)])
async def test_only_the_range_that_was_named_and_whole_blocks(
    start: int, end: int | None, kept: int, engine_of: EngineOf
) -> None:
    async with engine_of(num_blocks=16) as engine:
        await ask(engine, prompt(1), ONE, retention=[Retention(start, end, 3)])
        await churn(engine)
        assert await left(engine, prompt(1)) == kept


@pytest.mark.asyncio
async def test_what_is_cheap_goes_before_all_others(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=16) as engine:
        await ask(engine, prompt(1), ONE)
        await ask(engine, prompt(2), ONE, retention=[Retention(8, None, -1)])
        await engine._loop.at_edge(lambda: engine._loop.cache.evict(2))
        assert (await left(engine, prompt(1)), await left(engine, prompt(2))) == (16, 8)


@pytest.mark.asyncio
async def test_a_second_request_raises_and_prolongs_but_never_lowers(engine_of: EngineOf, clock: FakeClock) -> None:
    async with engine_of(num_blocks=16, clock=clock) as engine:
        await ask(engine, prompt(1), ONE, retention=[Retention(0, None, 3, ttl=60.0)])
        clock.now += 50
        await ask(engine, prompt(1), ONE, retention=[Retention(0, None, 1, ttl=500.0)])
        await ask(engine, prompt(1), ONE, retention=[Retention(0, None, 3, ttl=60.0)])
        clock.now += 50
        await churn(engine)
        assert await left(engine, prompt(1)) == 16
        clock.now += 20
        await churn(engine, 200)
        assert await left(engine, prompt(1)) == 0


@pytest.mark.asyncio
async def test_even_dear_blocks_give_way_to_a_request_that_needs_them(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=16) as engine:
        for number in range(3):
            await ask(engine, prompt(number), ONE, retention=[Retention(0, None, 100)])
        assert len((await ask(engine, prompt(9, 60), ONE)).token_ids) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("restart", [False, True])
async def test_it_goes_down_with_the_blocks_and_comes_up_again(
    restart: bool, engine_of: EngineOf, clock: FakeClock
) -> None:
    """With the time that is left of it, whatever the clocks of the two runs say."""
    store, wall = MemoryStore(), FakeClock()
    config: dict[str, object] = {"num_blocks": 16, "clock": clock, "wall": wall}
    async with engine_of(mounts={"m": lasting(store)}, **config) as engine:
        await ask(engine, prompt(1), ONE, retention=[Retention(0, None, 3, ttl=60.0)])
        await cool(engine)
        if not restart:
            clock.now += 40
            wall.now += 40
            await self_check(engine, clock)
            return
    wall.now += 40
    config["clock"] = clock = FakeClock()
    clock.now = 5.0
    async with engine_of(mounts={"m": lasting(store)}, **config) as engine:
        await self_check(engine, clock)


async def self_check(engine: AsyncEngine, clock: FakeClock) -> None:
    """Twenty seconds are left."""
    await ask(engine, prompt(1), ONE)
    clock.now += 19
    await churn(engine)
    assert await left(engine, prompt(1)) == 16
    clock.now += 2
    await churn(engine, 200)
    assert await left(engine, prompt(1)) == 0


@pytest.mark.asyncio
async def test_all_samples_and_forks_keep_what_the_request_asked_for(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=24, mounts={"m": memory()}) as engine:
        params = ONE.__class__(max_tokens=6, n=3, seed=1)
        await engine.complete(prompt(1), params, retention=[Retention(0, 16, 3)])
        await churn(engine)
        assert await left(engine, prompt(1)) == 16
        await settled(engine)


@pytest.mark.asyncio
@pytest.mark.parametrize("retention", [5, ["x"], [None], [(0, 4, 1)], "abc"])
async def test_what_is_no_retention_is_refused(retention: object, engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest, match="retention"):
            await ask(engine, prompt(1), ONE, retention=retention)
        assert engine.stats().submitted == 0
