"""Pins and soft pins through the engine: what is kept stays, for as long as was asked, and never takes everything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from octavo import AsyncEngine, RequestOutput
from octavo.engine.pins import NOT_HELD
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest, NeverFits, OutOfBlocks
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import GREEDY, ONE, B, EngineOf, ask, memory, prompt, settled, tokens

Alone = Callable[..., Awaitable[list[RequestOutput]]]


async def churn(engine: AsyncEngine, count: int = 20, start: int = 100) -> None:
    for number in range(start, start + count):
        await ask(engine, prompt(number), ONE)


async def on_device(engine: AsyncEngine, ids: list[int], tenant: str | None = None) -> int:
    return (await engine.explain(ids, tenant=tenant)).device_tokens // B * B


@pytest.mark.asyncio
async def test_what_is_pinned_survives_everything_until_it_is_unpinned(engine_of: EngineOf, alone: Alone) -> None:
    async with engine_of(num_blocks=16) as engine:
        pin = await engine.pin(prompt(1))
        assert (pin.tokens, pin.expires, pin.tenant) == (16, None, None)
        await churn(engine)
        assert engine.stats().pins == 1
        assert engine.stats().cache.pinned == 4
        output = await ask(engine, prompt(1))
        assert output.cached_tokens >= 16
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        assert await engine.unpin(pin)
        assert not await engine.unpin(pin)
        await churn(engine)
        assert await on_device(engine, prompt(1)) == 0
        assert engine.stats().cache.pinned == 0


@pytest.mark.asyncio
async def test_a_prefix_that_is_not_cached_is_computed_first(engine_of: EngineOf) -> None:
    runner = FakeRunner()
    async with engine_of(runner=runner) as engine:
        await engine.pin(prompt(1), tenant="t")
        assert runner.tokens_computed == 18
        await engine.pin(prompt(1)[:9], tenant="t")
        assert runner.tokens_computed == 18, "it was there"
        assert await on_device(engine, prompt(1)) == 0, "another tenant's"
        await engine.erase("t")


@pytest.mark.asyncio
async def test_a_prefix_in_a_tier_is_loaded_not_computed(engine_of: EngineOf) -> None:
    runner = FakeRunner()
    async with engine_of(runner=runner, mounts={"m": memory()}, num_blocks=16) as engine:
        await ask(engine, prompt(1), ONE)
        await churn(engine)
        before = runner.tokens_computed
        pin = await engine.pin(prompt(1))
        assert runner.tokens_computed - before == 2
        await engine.unpin(pin)


@pytest.mark.asyncio
async def test_a_pin_ends_with_its_time(engine_of: EngineOf, clock: FakeClock) -> None:
    async with engine_of(num_blocks=16, clock=clock) as engine:
        pin = await engine.pin(prompt(1), ttl=10.0)
        assert pin.expires == clock.now + 10
        clock.now += 9.9
        await churn(engine)
        assert await on_device(engine, prompt(1)) == 16
        clock.now += 0.2
        await churn(engine)
        assert await on_device(engine, prompt(1)) == 0
        assert engine.stats().pins == 0
        assert not await engine.unpin(pin), "it is over"


@pytest.mark.asyncio
async def test_pins_take_half_of_the_pool_at_most(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=16) as engine:
        first = await engine.pin(prompt(1))
        second = await engine.pin(prompt(2))
        with pytest.raises(OutOfBlocks, match="at most 8"):
            await engine.pin(prompt(3))
        assert engine.stats().pins == 2
        overlapping = await engine.pin(prompt(1)[:8])
        assert engine.stats().cache.pinned == 8, "a block that two pins hold counts once"
        await churn(engine)
        await engine.unpin(first)
        assert await on_device(engine, prompt(1)) == 16
        third = await engine.pin([9, 9, 9, 9, 1])
        for pin in (second, third, overlapping):
            await engine.unpin(pin)


@pytest.mark.asyncio
async def test_with_a_priority_it_goes_last_but_it_can_go(engine_of: EngineOf, clock: FakeClock) -> None:
    async with engine_of(num_blocks=16, clock=clock) as engine:
        kept = await engine.pin(prompt(1), priority=5, ttl=100.0)
        assert (kept.pin_id, kept.tokens, kept.expires) == (NOT_HELD, 16, clock.now + 100)
        assert engine.stats().pins == 0
        await churn(engine)
        assert await on_device(engine, prompt(1)) == 16
        await ask(engine, prompt(2, 62), ONE)  # needs the whole pool
        assert await on_device(engine, prompt(1)) == 0
        await engine.pin(prompt(1), priority=5, ttl=100.0)
        clock.now += 101
        await churn(engine)
        assert await on_device(engine, prompt(1)) == 0, "its time is over"


@pytest.mark.asyncio
@pytest.mark.parametrize("ttl", [0, -1.0, float("nan"), "5", True])
async def test_a_time_that_is_none_is_refused(ttl: object, engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest, match="ttl"):
            await engine.pin(prompt(1), ttl=ttl)  # type: ignore[arg-type]  # what is tested


@pytest.mark.asyncio
async def test_what_cannot_be_pinned_is_refused(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=16) as engine:
        with pytest.raises(InvalidRequest, match="at least 4 tokens"):
            await engine.pin([1, 2, 3])
        with pytest.raises(NeverFits):
            await engine.pin(prompt(1, 100))
        with pytest.raises(InvalidRequest):
            await engine.pin(prompt(1), tenant=5)  # type: ignore[arg-type]  # what is tested
        assert engine.stats().pins == 0


@pytest.mark.asyncio
async def test_erasing_a_tenant_releases_its_pins_alone(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await engine.pin(prompt(1), tenant="a")
        other = await engine.pin(prompt(1), tenant="b")
        assert await engine.erase("a") == 4
        assert engine.stats().pins == 1
        assert await on_device(engine, prompt(1), "a") == 0
        assert await on_device(engine, prompt(1), "b") == 16
        await engine.unpin(other)


@pytest.mark.asyncio
async def test_requests_run_beside_pins_on_a_pool_that_they_half_fill(engine_of: EngineOf, alone: Alone) -> None:
    async with engine_of(num_blocks=16, mounts={"m": memory()}) as engine:
        pins = [await engine.pin(prompt(number)) for number in (1, 2)]
        outputs = await asyncio.gather(*(engine.complete(prompt(number), GREEDY) for number in range(8)))
        for number, output in enumerate(outputs):
            assert tokens(output) == tokens(await alone(prompt(number), GREEDY))
        for pin in pins:
            await engine.unpin(pin)
        await settled(engine)


@pytest.mark.asyncio
async def test_pins_do_not_outlive_the_engine_and_do_not_hold_it_up(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=16) as engine:
        await engine.pin(prompt(1), ttl=5.0)
        engine._loop._pins.expire(float("inf"))
        assert engine.census().held == 0
