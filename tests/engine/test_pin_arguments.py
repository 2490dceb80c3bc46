"""What a pin is asked for with: refused before anything happens, or kept, also over a restart."""

from __future__ import annotations

import pytest

from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest
from octavo.storage.testing.contract import MemoryStore
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import EngineOf, ask, lasting, prompt, tiering


@pytest.mark.asyncio
@pytest.mark.parametrize("priority", ["high", 1.5, True, 2**31, -(2**31)])
@pytest.mark.parametrize("is_cached", [False, True])
async def test_a_priority_that_is_none_is_refused_and_changes_nothing(
    priority: object, is_cached: bool, engine_of: EngineOf
) -> None:
    runner = FakeRunner()
    async with engine_of(runner=runner) as engine:
        if is_cached:
            await ask(engine, prompt(1))
        before = runner.tokens_computed
        with pytest.raises(InvalidRequest, match="priority"):
            await engine.pin(prompt(1), priority=priority)  # type: ignore[arg-type]  # that is the point
        assert runner.tokens_computed == before
        engine.census()


@pytest.mark.asyncio
@pytest.mark.parametrize("priority", [None, 1])
async def test_without_prefix_caching_nothing_can_be_pinned(priority: int | None, engine_of: EngineOf) -> None:
    runner = FakeRunner()
    async with engine_of(runner=runner, enable_prefix_caching=False) as engine:
        with pytest.raises(InvalidRequest, match="enable_prefix_caching"):
            await engine.pin(prompt(1), priority=priority)
    assert runner.tokens_computed == 0


@pytest.mark.asyncio
async def test_a_pin_whose_time_is_over_is_not_there_to_be_unpinned(engine_of: EngineOf, clock: FakeClock) -> None:
    """Also when no step came in between."""
    async with engine_of(clock=clock) as engine:
        pin = await engine.pin(prompt(1), ttl=1.0)
        clock.now += 2.0
        assert not await engine.unpin(pin)
        assert (engine.stats().pins, engine.stats().cache.pinned) == (0, 0)


@pytest.mark.asyncio
async def test_the_priority_of_what_lies_below_long_since_is_told_to_the_tier(
    engine_of: EngineOf, clock: FakeClock
) -> None:
    """No use is as old as the last checkpoint, which would be a reason to leave it out of the next."""
    store = MemoryStore()
    async with engine_of(mounts={"m": lasting(store)}, clock=clock, wall=clock, checkpoint_interval=60.0) as engine:
        await ask(engine, prompt(1))
        for seconds in (120.0, 30.0):
            await tiering(engine).checkpoint.make(engine._loop, 5.0)
            clock.now += seconds
        await engine.pin(prompt(1), priority=7)
    # the block after the prompt holds generated tokens
    assert [kept.meta.priority for kept in store.blocks.values()].count(7) == 4
