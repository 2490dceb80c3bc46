"""The caller's end of a request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing

import pytest

from octavo import AsyncEngine, FinishReason, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest, QueueFull

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LONG = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.mark.asyncio
async def test_nothing_happens_before_the_first_step_of_the_iteration(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        generation = engine.generate([1, 2, 3], GREEDY, request_id="x")
        await asyncio.sleep(0)
        assert [generation.request_id, engine.stats().submitted] == [None, 0]
        assert await generation.start() is generation
        assert await generation.start() is generation
        assert generation.request_id == "x"
        assert engine.stats().submitted == 1
        assert [output async for output in generation][-1].finish_reason is FinishReason.LENGTH
        assert [output async for output in generation] == []


@pytest.mark.asyncio
async def test_one_that_is_closed_or_dropped_unused_submits_nothing(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        generation = engine.generate([1, 2, 3], GREEDY)
        generation.close()
        assert [output async for output in generation] == []
        del generation
        engine.generate([1, 2, 3], GREEDY)
        gc.collect()
        assert engine.stats().submitted == 0


@pytest.mark.asyncio
async def test_leaving_aclosing_aborts(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        async with aclosing(engine.generate([1, 2, 3], LONG)) as generation:
            async for _ in generation:
                break
        await engine._loop.wait_idle()
        assert engine.stats().finished == {"abort": 1}


@pytest.mark.asyncio
async def test_a_refused_request_changes_nothing_and_is_counted(engine_of: EngineOf) -> None:
    async with engine_of(max_waiting=2) as engine:
        generation = engine.generate([], GREEDY)
        with pytest.raises(InvalidRequest):
            await anext(generation)
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
        held = [engine.generate([1, 2, 3], LONG, request_id=name) for name in "ab"]
        for waiting in held:
            await waiting.start()
        with pytest.raises(QueueFull):
            await anext(engine.generate([1], GREEDY))
        with pytest.raises(InvalidRequest, match="in use"):
            await anext(engine.generate([1], GREEDY, request_id="a"))
        for waiting in held:
            waiting.close()
        await engine._loop.wait_idle()
        stats = engine.stats()
        assert (stats.submitted, stats.rejected, stats.finished) == (2, 3, {"abort": 2})


@pytest.mark.asyncio
async def test_an_id_can_be_used_again_and_the_old_stream_has_no_hold_on_the_new_request(engine_of: EngineOf) -> None:
    """The usual consumer leaves at the last output; its stream is closed when another request has the id already."""
    async with engine_of() as engine:
        old = engine.generate([1, 2, 3], GREEDY, request_id="x")
        async for output in old:
            if output.finish_reason is not None:
                break
        new = engine.generate([1, 2, 3], GREEDY, request_id="x")
        await new.start()
        old.close()
        del old
        outputs = [output async for output in new]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert engine.stats().finished == {"length": 2}


@pytest.mark.asyncio
async def test_a_fork_of_a_fork_that_had_nothing_to_do_harms_nobody(engine_of: EngineOf) -> None:
    """The first child may have no more tokens than its source has already, so it ends before it begins."""
    async with engine_of(num_blocks=128) as engine:
        source = engine.generate([1, 2, 3], LONG, request_id="source")
        for _ in range(5):
            await anext(source)
        child = await engine.fork("source", SamplingParams(max_tokens=1), new_id="child")
        grandchild = await engine.fork("child", GREEDY, new_id="grandchild")
        for generation in (child, grandchild):
            async for output in generation:
                assert output.finish_reason is not FinishReason.ERROR
        assert [output async for output in source][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_a_block_ends_the_request_that_is_left_early() -> None:
    async with AsyncEngine(runner=FakeRunner()) as engine:
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=500)) as outputs:
            await anext(outputs)
        await engine._loop.wait_idle()
        assert engine.stats().finished == {"abort": 1}
        assert engine.census().held == 0
