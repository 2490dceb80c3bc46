"""The door for other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from octavo.engine.blocking import BlockingEngine
from octavo.engine.testing import FakeRunner
from octavo.errors import EngineClosed, InvalidRequest

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LONG = SamplingParams(max_tokens=900, temperature=0.0)


@asynccontextmanager
async def opened() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(num_blocks=512, block_size=4, check_every_step=True, max_running=8)
    runner = FakeRunner(step_seconds=0.002)  # LONG outlasts a thread that is late
    async with AsyncEngine(runner=runner, config=config) as engine, asyncio.timeout(60):
        yield engine
        if engine.is_open:
            await engine._loop.wait_idle()
            assert engine.census().held == 0


async def in_thread(work: Callable[[], object]) -> object:
    return await asyncio.to_thread(work)


@pytest.mark.asyncio
async def test_every_call_says_what_its_asynchronous_twin_says() -> None:
    async with opened() as engine:
        expected = (await engine.complete([1, 2, 3], GREEDY))[0].token_ids

        def work() -> None:
            with engine.blocking() as blocking:
                assert blocking.complete([1, 2, 3], GREEDY)[0].token_ids == expected
                outputs = list(blocking.generate([1, 2, 3], GREEDY, request_id="a", tenant="t", priority=2))
                assert outputs[-1].token_ids == expected
                assert outputs[-1].request_id == "a"
                assert not blocking.abort("nobody")
                assert blocking.stats().finished == {"length": 3}
                with pytest.raises(InvalidRequest):
                    blocking.complete([], GREEDY)
                with pytest.raises(InvalidRequest):
                    next(iter(blocking.generate("no tokenizer", GREEDY)))

        await in_thread(work)


@pytest.mark.asyncio
async def test_leaving_an_iteration_early_aborts_the_request() -> None:
    async with opened() as engine:
        blocking = engine.blocking()

        def leave() -> None:
            for output in blocking.generate([1, 2, 3], LONG):
                if len(output.token_ids) > 2:
                    break

        await in_thread(leave)
        await engine._loop.wait_idle()
        assert engine.stats().finished == {"abort": 1}
        iterators = [blocking.generate([1, 2, 3], LONG)]
        await in_thread(lambda: next(iterators[0]))
        iterators.clear()  # collected in the thread of the event loop, which must not call itself
        await engine._loop.wait_idle()
        assert engine.stats().finished == {"abort": 2}


@pytest.mark.asyncio
async def test_another_thread_aborts() -> None:
    async with opened() as engine:
        blocking = engine.blocking()
        running = threading.Event()

        def read() -> list[FinishReason | None]:
            reasons = []
            for output in blocking.generate([1, 2, 3], LONG, request_id="x"):
                running.set()
                reasons.append(output.finish_reason)
            return reasons

        def abort() -> bool:
            running.wait()
            return blocking.abort("x")

        reasons, aborted = await asyncio.gather(asyncio.to_thread(read), asyncio.to_thread(abort))
        assert aborted
        assert reasons[-1] is FinishReason.ABORT


@pytest.mark.asyncio
async def test_sixteen_threads_at_once() -> None:
    async with opened() as engine:
        expected = {k: (await engine.complete([k, 2, 3], GREEDY))[0].token_ids for k in range(16)}

        def work(k: int) -> None:
            blocking = engine.blocking()
            for turn in range(6):
                kind = (k + turn) % 4
                if kind == 0:
                    assert blocking.complete([k, 2, 3], GREEDY)[0].token_ids == expected[k]
                elif kind == 1:
                    assert list(blocking.generate([k, 2, 3], GREEDY))[-1].token_ids == expected[k]
                elif kind == 2:
                    next(iter(blocking.generate([k, 2, 3], LONG)))
                else:
                    stream = blocking.generate([k, 2, 3], LONG, request_id=f"{k}-{turn}")
                    next(stream)
                    blocking.abort(f"{k}-{turn}")
                    assert [output.finish_reason for output in stream][-1] is FinishReason.ABORT

        with ThreadPoolExecutor(16) as pool:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(pool, work, k) for k in range(16)))
        await engine._loop.wait_idle()
        stats = engine.stats()
        assert stats.submitted == sum(stats.finished.values()) == 16 + 16 * 6


@pytest.mark.asyncio
async def test_a_closed_engine_says_so_to_threads_before_during_and_after() -> None:
    blockings: list[BlockingEngine] = []
    async with opened() as engine:
        blocking = engine.blocking()
        blockings.append(blocking)
        running = threading.Barrier(9)

        def stream() -> str:
            reason: FinishReason | None = None
            try:
                for number, output in enumerate(blocking.generate([1, 2, 3], LONG)):
                    reason = output.finish_reason
                    if number == 0:
                        running.wait()
            except EngineClosed:
                return "closed"
            return str(reason)

        def again() -> str:
            running.wait()
            try:
                while True:
                    blocking.complete([4, 5], GREEDY)
            except EngineClosed:
                return "closed"

        with ThreadPoolExecutor(9) as pool:
            loop = asyncio.get_running_loop()
            work = [loop.run_in_executor(pool, stream) for _ in range(4)]
            work += [loop.run_in_executor(pool, again) for _ in range(4)]
            await loop.run_in_executor(pool, running.wait)
            await engine.close()
            results = await asyncio.gather(*work)
        assert results[4:] == ["closed"] * 4
        assert set(results[:4]) <= {"abort", "closed"}
    for call in (
        lambda: blockings[0].complete([1], GREEDY),
        lambda: next(iter(blockings[0].generate([1], GREEDY))),
        lambda: blockings[0].abort("x"),
        blockings[0].stats,
    ):
        with pytest.raises(EngineClosed):
            await in_thread(call)


@pytest.mark.asyncio
async def test_the_thread_of_the_event_loop_is_told_that_it_may_not() -> None:
    async with opened() as engine:
        with pytest.raises(RuntimeError, match="event loop thread"):
            engine.blocking().complete([1], GREEDY)
