"""The public face under load: slow readers, long steps, counters and gauges."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine.model.runner import StepInput
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ModelError

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LONG = SamplingParams(max_tokens=200, temperature=0.0)


@pytest.mark.asyncio
async def test_slow_readers_hold_up_nobody_and_miss_nothing(engine_of: EngineOf, alone: Alone) -> None:
    """FLOW-01: two hundred of them, and one that never reads."""
    params = SamplingParams(max_tokens=40, temperature=0.0)
    expected = (await alone([1, 2, 3], params, codec=FakeCodec()))[0]
    async with engine_of(codec=FakeCodec(), num_blocks=1024, max_running=210, check_every_step=False) as engine:
        never = await engine.generate([1, 2, 3], params).start()

        async def read_slowly(pause: int) -> int:
            text, tokens, outputs = "", 0, 0
            async for output in engine.generate([1, 2, 3], params):
                text += output.text_delta
                tokens += len(output.new_token_ids)
                outputs += 1
                for _ in range(pause):
                    await asyncio.sleep(0)
            assert (text, tokens) == (expected.text, 40)
            return outputs

        counts = await asyncio.gather(*(read_slowly(pause) for pause in range(200)))
        assert counts[0] > 20
        assert counts[199] < 10
        assert engine.census().held == 0  # not even for the one that has not read
        last = [output async for output in never]
        assert [output.token_ids for output in last] == [expected.token_ids]


@pytest.mark.asyncio
async def test_the_event_loop_is_free_while_a_step_runs() -> None:
    """FLOW-04: other tasks get turn after turn, and a cancel returns at once and takes effect at the step's edge."""
    gate, entered = threading.Event(), threading.Event()

    def before_step(step: StepInput) -> None:
        entered.set()
        gate.wait()

    config = EngineConfig(num_blocks=64, block_size=4, check_every_step=True)
    async with AsyncEngine(runner=FakeRunner(before_step=before_step), config=config) as engine:
        task = asyncio.create_task(engine.complete([1, 2, 3], GREEDY, request_id="x"))
        other = asyncio.create_task(engine.complete([4, 5, 6], GREEDY))
        while not entered.is_set():  # noqa: ASYNC110  # it is another thread that sets it
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert engine.abort("x")
        assert not task.done()
        assert engine.stats().running == 2
        gate.set()
        assert (await task)[0].finish_reason is FinishReason.ABORT
        assert (await task)[0].token_ids == ()
        assert (await other)[0].finish_reason is FinishReason.LENGTH
        assert engine.stats().finished == {"abort": 1, "length": 1}


@pytest.mark.asyncio
async def test_the_consumer_of_a_flood_that_sleeps_and_leaves(engine_of: EngineOf) -> None:
    """FLOW-06: what was not fetched is merged, not queued; who leaves stops the production."""
    async with engine_of(num_blocks=1024) as engine:
        generation = engine.generate([1, 2, 3], SamplingParams(max_tokens=3000, temperature=0.0))
        await anext(generation)
        for _ in range(200):
            await asyncio.sleep(0)
        merged = await anext(generation)
        assert len(merged.new_token_ids) > 20
        generation.close()
        await engine._loop.wait_idle()
        steps = engine.stats().steps
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.stats().steps == steps


@pytest.mark.asyncio
async def test_gauges_fall_to_zero_without_a_new_request(engine_of: EngineOf) -> None:
    """METRICS-11: after all are cancelled at once, and after the last has ended by itself."""
    async with engine_of(num_blocks=256, max_running=12) as engine:
        tasks = [asyncio.create_task(engine.complete([k, 2, 3], LONG)) for k in range(1, 31)]
        while engine.stats().generated_tokens < 12:  # noqa: ASYNC110  # a gauge has no event
            await asyncio.sleep(0)
        busy = engine.stats()
        assert busy.waiting == 18
        assert busy.waiting_reasons == {"slots": 1}
        assert busy.cache.utilization > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine._loop.wait_idle()
        await asyncio.sleep(0)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.waiting_reasons, stats.cache.utilization) == (0, 0, {}, 0)
        assert stats.finished == {"abort": 30}
        await engine.complete([1, 2, 3], GREEDY)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.cache.utilization) == (0, 0, 0)


@pytest.mark.asyncio
async def test_counters_add_up(engine_of: EngineOf) -> None:
    """METRICS-01: hits and queries are two sums, so a tiny request without a hit does not wipe out the rate."""
    async with engine_of(num_blocks=256) as engine:
        common = list(range(1, 37))
        before = engine.stats()
        for k in range(11):
            await engine.complete([*common, 40 + k, 1, 2, 3], GREEDY)
        await engine.complete([63, 62], GREEDY)
        stats = engine.stats()
        assert stats.cache.prefix_query_tokens == 11 * 40 + 2
        assert stats.cache.prefix_hit_tokens == 10 * 36
        assert stats.cache.prefix_hits == 10
        assert stats.generated_tokens == 12 * 6
        assert stats.prefill_tokens == 40 + 10 * 4 + 2
        assert stats.batch_tokens == stats.prefill_tokens + 12 * 5
        assert (stats.submitted, stats.rejected, stats.finished) == (12, 0, {"length": 12})
        assert stats.steps > before.steps


@pytest.mark.asyncio
async def test_counters_of_every_way_to_end(engine_of: EngineOf) -> None:
    def before_step(step: StepInput) -> None:
        if 61 in step.tokens:
            raise RuntimeError("no")

    async with engine_of(runner=FakeRunner(before_step=before_step, eos_token_ids=frozenset(range(60)))) as engine:
        assert (await engine.complete([1], LONG))[0].finish_reason is FinishReason.STOP
        await engine.complete([1], SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={61: -100}))
        with pytest.raises(ModelError):
            await engine.complete([61], GREEDY)
        generation = engine.generate([1], SamplingParams(max_tokens=99, ignore_eos=True, logit_bias={61: -100}))
        await anext(generation)
        generation.close()
        await engine._loop.wait_idle()
        assert engine.stats().finished == {"stop": 1, "length": 1, "error": 1, "abort": 1}
        assert engine.stats().failed_rows == 1


@pytest.mark.asyncio
async def test_many_engines_in_one_event_loop_know_nothing_of_each_other(engine_of: EngineOf) -> None:
    async with engine_of() as one, engine_of() as two:
        first, second = await asyncio.gather(
            one.complete([1, 2, 3], GREEDY, request_id="x"), two.complete([1, 2, 3], GREEDY, request_id="x")
        )
        assert first[0].token_ids == second[0].token_ids
        assert not two.abort("x")
        assert (one.stats().submitted, two.stats().submitted) == (1, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
async def test_steady_mixed_load_drifts_nowhere(count: int) -> None:
    """LEAK-07: an idle check after every hundred."""
    rng = random.Random(7)  # noqa: S311  # a test's
    config = EngineConfig(num_blocks=96, block_size=16)
    async with AsyncEngine(runner=FakeRunner(), codec=FakeCodec(), config=config) as engine:

        async def one() -> None:
            params = SamplingParams(
                max_tokens=rng.randint(1, 30),
                n=2 if rng.random() < 0.1 else 1,
                stop=["7", "ab"] if rng.random() < 0.1 else (),
                seed=rng.randrange(100),
            )
            prompt = [rng.randrange(4) for _ in range(rng.randint(1, 100))]
            leave_after = rng.randint(0, 40) if rng.random() < 0.2 else None
            task = asyncio.create_task(engine.complete(prompt, params))
            if leave_after is not None:
                for _ in range(leave_after):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() or all(output.finish_reason for output in task.result())

        for _ in range(count // 100):
            await asyncio.gather(*(one() for _ in range(100)))
            await engine._loop.wait_idle()
            census = engine.census()
            assert (census.held, census.in_transfer, census.free + census.idle) == (0, 0, 96)
        assert 0.9 * count < engine.stats().submitted <= count  # some were cancelled before they began
