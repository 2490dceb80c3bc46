"""The loop's own rules: step edges, what it does when nothing can be computed, and how loud it is about trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from octavo.engine.model.runner import StepInput
from octavo.engine.plan import StepPlan
from octavo.engine.scheduler import Scheduler
from octavo.engine.testing import FakeRunner
from octavo.errors import ModelError, OutOfBlocks

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LONG = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.mark.asyncio
async def test_what_is_aborted_before_the_next_step_edge_is_never_computed(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        generation = await engine.generate([1, 2, 3], LONG, request_id="x").start()
        assert engine.stats().waiting == 1
        assert engine.abort("x")
        assert engine.abort("x")
        outputs = [output async for output in generation]
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
        assert outputs[0].metrics.scheduled is None
        assert engine.stats().steps == 0


@pytest.mark.asyncio
async def test_a_request_of_no_tokens_needs_no_step(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        outputs = await engine.complete([1, 2, 3], SamplingParams(max_tokens=0))
        assert [(output.finish_reason, output.token_ids) for output in outputs] == [(FinishReason.LENGTH, ())]
        assert engine.stats().steps == 0


@pytest.mark.asyncio
async def test_an_idle_loop_makes_no_steps_and_does_not_spin(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of() as engine:
        await engine.complete([1, 2, 3], GREEDY)
        await asyncio.sleep(0)
        plans: list[float] = []
        original = Scheduler.plan

        def counted(self: Scheduler, now: float) -> StepPlan:
            plans.append(now)
            return original(self, now)

        monkeypatch.setattr(Scheduler, "plan", counted)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(plans) <= 1


@pytest.mark.asyncio
async def test_who_waits_for_blocks_that_can_never_come_is_told_so(engine_of: EngineOf) -> None:
    """Blocks that nobody accounts for (a leak, a stuck transfer elsewhere): an error, not an endless wait."""
    async with engine_of(num_blocks=16) as engine:
        cache = engine._loop.cache
        lost = cache.pool.allocate(14)
        engine._loop._check = lambda: None  # type: ignore[method-assign]  # the books are wrong on purpose
        with pytest.raises(OutOfBlocks):
            await engine.complete(list(range(1, 20)), GREEDY)
        assert (await engine.complete([1, 2], SamplingParams(max_tokens=2)))[0].finish_reason is FinishReason.LENGTH
        cache.pool.release(lost)
        assert (await engine.complete(list(range(1, 20)), GREEDY))[0].finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_who_waits_for_blocks_in_transfer_gets_them_when_they_arrive(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=16) as engine:
        pool = engine._loop.cache.pool
        moving = pool.allocate(14)
        for block in moving:
            pool.pin(block)
        pool.release(moving)
        task = asyncio.create_task(engine.complete(list(range(1, 20)), GREEDY))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        assert engine.stats().waiting == 1
        assert engine.stats().waiting_reasons == {"blocks": 1}
        for block in moving:
            pool.unpin(block)
        assert (await task)[0].finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_a_plan_that_stays_empty_ends_the_request_with_an_error(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It should not happen; if it does, nobody waits for ever."""
    async with engine_of() as engine:
        generation = engine.generate([1, 2, 3], LONG)
        await anext(generation)
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "plan", lambda _self, _now: StepPlan(0))

            async def read() -> None:
                async for _ in generation:
                    pass

            with pytest.raises(OutOfBlocks):
                await read()
        assert (await engine.complete([1, 2, 3], GREEDY))[0].finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_no_step_has_more_sequences_or_tokens_than_configured() -> None:
    rows, sizes = [], []

    def before_step(step: StepInput) -> None:
        rows.append(len(step.rows))
        sizes.append(len(step.tokens))

    config = EngineConfig(num_blocks=256, block_size=4, max_running=5, max_batch_tokens=24, check_every_step=True)
    async with AsyncEngine(runner=FakeRunner(before_step=before_step), config=config) as engine:
        wide = SamplingParams(max_tokens=5, n=4, seed=1)
        await asyncio.gather(*(engine.complete([k, *range(1, 30)], wide if k % 3 else GREEDY) for k in range(1, 20)))
    assert max(rows) == 5
    assert max(sizes) == 24


@pytest.mark.asyncio
async def test_a_failed_self_check_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(num_blocks=16, block_size=4, check_every_step=True)
    async with AsyncEngine(runner=FakeRunner(), config=config) as engine:
        lost = engine._loop.cache.pool.allocate(1)
        assert (await engine.complete([1, 2, 3], GREEDY))[0].finish_reason is FinishReason.LENGTH
        assert "self-check failed" in caplog.text
        engine._loop.cache.pool.release(lost)
        engine.census()


@pytest.mark.asyncio
async def test_blocks_are_freed_ahead_of_need(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=20, evict_below=0.3, evict_until=0.5) as engine:
        for k in range(12):
            await engine.complete([k, *range(1, 12)], GREEDY)
            assert engine.stats().cache.free >= 6
        assert engine.stats().cache.evictions["watermark"] > 0


@pytest.mark.asyncio
async def test_trouble_that_repeats_is_logged_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(self: Scheduler, now: float) -> None:
        raise ZeroDivisionError("always")

    config = EngineConfig(num_blocks=16, block_size=4)
    async with AsyncEngine(runner=FakeRunner(), config=config, clock=lambda: 5.0) as engine:
        monkeypatch.setattr(Scheduler, "plan", plan)
        for _ in range(5):
            with pytest.raises(ModelError, match="always"):
                await engine.complete([1, 2, 3], GREEDY)
    assert caplog.text.count("the engine loop failed") == 1
