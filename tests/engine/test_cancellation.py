"""Cancellation at every await of a request's life and of the engine's own: nothing leaks, nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine import life
from octavo.engine.generation import Generation
from octavo.engine.model.runner import StepInput
from octavo.engine.testing import FakeCodec, FakeRunner

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Request = tuple[list[int], SamplingParams]

CANARY: Request = ([9, 8, 7, 6, 5, 4, 3], SamplingParams(max_tokens=9, temperature=0.0))
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
KINDS = {
    "greedy": SamplingParams(max_tokens=6, temperature=0.0),
    "n=4": SamplingParams(max_tokens=5, n=4, seed=3),
    "best_of": SamplingParams(max_tokens=5, n=2, best_of=4, seed=3),
    "beams": SamplingParams(max_tokens=5, beam_width=3, n=2),
    "prompt scores": SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1, seed=1),
    "stop": SamplingParams(max_tokens=8, stop=["3", "7k"], seed=5),
    "nothing": SamplingParams(max_tokens=0),
}


async def cancelled_after(loop_steps: int, task: asyncio.Task[object]) -> bool:
    """Cancel ``task`` after so many turns of the event loop; whether it was still there to be cancelled."""
    for _ in range(loop_steps):
        await asyncio.sleep(0)
    was_running = task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return was_running


async def iterate(engine: AsyncEngine, params: SamplingParams) -> object:
    async for _ in engine.generate(PROMPT, params):
        pass
    return None


async def complete(engine: AsyncEngine, params: SamplingParams) -> object:
    return await engine.complete(PROMPT, params)


async def slow(engine: AsyncEngine, params: SamplingParams) -> object:
    async for _ in engine.generate(PROMPT, params):
        for _ in range(3):
            await asyncio.sleep(0)
    return None


@pytest.mark.asyncio
@pytest.mark.parametrize("consume", [iterate, complete, slow])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_consumer_is_cancelled_at_any_moment(
    kind: str,
    consume: Callable[[AsyncEngine, SamplingParams], Awaitable[object]],
    engine_of: EngineOf,
    alone: Alone,
) -> None:
    """At the k-th turn of the event loop for every k. A canary beside it and one after it say what they always say."""
    expected = (await alone(*CANARY))[0].token_ids
    async with engine_of(codec=FakeCodec(), num_blocks=32, max_batch_tokens=8) as engine:
        loop_steps = 0
        while True:
            canary = asyncio.create_task(engine.complete(*CANARY))
            consumer = asyncio.ensure_future(consume(engine, KINDS[kind]))
            was_running = await cancelled_after(loop_steps, consumer)
            assert (await canary)[0].token_ids == expected
            await engine._loop.wait_idle()
            census = engine.census()
            assert (census.held, census.in_transfer) == (0, 0)
            if not was_running:
                break
            loop_steps += 1
        assert loop_steps > 2
        stats = engine.stats()
        assert stats.submitted == sum(stats.finished.values())
        assert stats.finished.get("abort", 0) > 0 or kind == "nothing"


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["abort", "close", "scope"])
@pytest.mark.parametrize("kind", ["greedy", "n=4", "beams"])
async def test_every_way_to_give_up_at_any_moment(kind: str, how: str, engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec(), num_blocks=32, max_batch_tokens=8) as engine:
        for loop_steps in range(60):
            with anyio.CancelScope() as scope:
                generation = engine.generate(PROMPT, KINDS[kind], request_id="x")
                reader = asyncio.create_task(_read(generation))
                for _ in range(loop_steps):
                    await asyncio.sleep(0)
                if how == "abort":
                    engine.abort("x")
                elif how == "close":
                    generation.close()
                else:
                    reader.cancel()
                    scope.cancel()
                await asyncio.wait({reader})
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            await engine._loop.wait_idle()
            assert engine.census().held == 0


async def _read(generation: Generation) -> list[RequestOutput]:
    return [output async for output in generation]


@pytest.mark.asyncio
@pytest.mark.parametrize("stops_by", ["length", "stop token"])
async def test_a_cancel_during_the_only_step_is_an_abort(stops_by: str, engine_of: EngineOf, alone: Alone) -> None:
    """LEAK-04: the step under way would have finished the request; the cancel came first and wins."""
    first = (await alone(PROMPT, SamplingParams(max_tokens=1, temperature=0.0)))[0].token_ids[0]
    params = SamplingParams(
        max_tokens=1 if stops_by == "length" else 5,
        temperature=0.0,
        stop_token_ids=(first,) if stops_by == "stop token" else (),
    )
    engines: list[AsyncEngine] = []

    async def on_step(number: int) -> None:
        assert engines[0].abort("x")

    async with engine_of(on_step=on_step) as engine:
        engines.append(engine)
        outputs = await engine.complete(PROMPT, params, request_id="x")
        assert [(output.finish_reason, output.token_ids) for output in outputs] == [(FinishReason.ABORT, ())]
        assert engine.stats().finished == {"abort": 1}
        assert not engine.abort("x")


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", ["before prefill", "in prefill", "two have ended", "all but the last have ended"])
async def test_parallel_samples_are_cancelled_together(moment: str, engine_of: EngineOf) -> None:
    """COW-04: no table keeps the parent or a child, and the caller hears of the end once for each sample."""
    params = SamplingParams(max_tokens=12, n=4, seed=11, stop_token_ids=tuple(range(0, 64, 9)))
    cancel_at = {"two have ended": 2, "all but the last have ended": 3}.get(moment, 0)
    seen = False
    for seed in range(12):
        async with engine_of(max_batch_tokens=4) as engine:
            generation = engine.generate(PROMPT, _with_seed(params, seed), request_id="x")
            await generation.start()
            if moment == "in prefill":
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            ended: set[int] = set()
            reasons: list[FinishReason] = []
            if not cancel_at:
                engine.abort("x")
            async for output in generation:
                if output.finish_reason is not None:
                    assert output.index not in ended
                    ended.add(output.index)
                    reasons.append(output.finish_reason)
                if cancel_at and len(ended) == cancel_at:
                    seen = engine.abort("x") or seen
            assert reasons
            assert len(ended) == (4 if cancel_at else 1)
    assert seen or not cancel_at


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=params.max_tokens, n=params.n, seed=seed, stop_token_ids=params.stop_token_ids)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["leave", "close"])
async def test_the_task_that_holds_the_engine_is_cancelled_at_any_moment(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first await of entering to the last of leaving: no task stays, the runner and its thread are closed."""
    threads: list[InlineThread] = []

    def new_thread(**_: bool) -> InlineThread:
        threads.append(InlineThread())
        return threads[-1]

    monkeypatch.setattr(life, "ModelThread", new_thread)
    loop_steps, was_running = 0, True
    while was_running:
        runner = FakeRunner()
        was_running = await cancelled_after(loop_steps, asyncio.create_task(_whole_life(runner, end)))
        assert asyncio.all_tasks() == {asyncio.current_task()}, f"after {loop_steps} turns"
        assert all(thread.is_closed for thread in threads), f"after {loop_steps} turns"
        assert runner.is_closed or loop_steps < 5, f"after {loop_steps} turns"
        loop_steps += 1
    assert loop_steps > 15


@pytest.mark.asyncio
async def test_no_thread_stays_when_the_task_that_holds_the_engine_is_cancelled() -> None:
    for loop_steps in range(0, 200, 7):
        await cancelled_after(loop_steps, asyncio.create_task(_whole_life(FakeRunner(), "leave")))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not _model_threads()


class InlineThread:
    """Stands in for the model thread: calls run in the event loop, so that its turns can be counted."""

    def __init__(self, **_: bool) -> None:
        self.is_closed = False

    async def call(self, function: Callable[..., object], *args: object) -> object:
        await asyncio.sleep(0)
        return function(*args)

    async def call_beside(
        self, meanwhile: Callable[[], object] | None, function: Callable[..., object], *args: object
    ) -> object:
        if meanwhile is not None:
            meanwhile()
        return await self.call(function, *args)

    async def close(self, timeout: float) -> bool:
        await asyncio.sleep(0)
        self.is_closed = True
        return True


async def _whole_life(runner: FakeRunner, end: str) -> object:
    async with AsyncEngine(runner=runner, config=EngineConfig(num_blocks=16, block_size=4)) as engine:
        running = asyncio.create_task(engine.complete(PROMPT, SamplingParams(max_tokens=40)))
        try:
            await engine.complete(PROMPT, SamplingParams(max_tokens=2))
            if end == "close":
                await engine.close()
                await asyncio.sleep(0)
        finally:
            running.cancel()
    return None


def _model_threads() -> list[threading.Thread]:
    """Those that do not end: one that has done its last call may need a moment."""
    threads = [thread for thread in threading.enumerate() if thread.name == "octavo-model"]
    for thread in threads:
        thread.join(5.0)
    return [thread for thread in threads if thread.is_alive()]


@pytest.mark.asyncio
async def test_a_second_cancel_while_leaving_changes_nothing() -> None:
    """CONC-01: who is cancelled again and again while the engine closes still ends, and leaves a closed engine."""
    for gap in range(8):
        gate, entered = threading.Event(), threading.Event()

        def before_step(step: StepInput, gate: threading.Event = gate, entered: threading.Event = entered) -> None:
            entered.set()
            gate.wait()

        runner = FakeRunner(before_step=before_step)
        task = asyncio.create_task(_whole_life(runner, "leave"))
        while not entered.is_set():  # noqa: ASYNC110  # it is another thread that sets it
            await asyncio.sleep(0)
        for _ in range(5):
            task.cancel()
            for _ in range(gap):
                await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.is_closed
        assert not _model_threads()
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_a_failed_load_and_a_cancelled_one_leave_no_thread() -> None:
    class Refusing(FakeRunner):
        def allocate(self, num_blocks: int, block_size: int) -> None:
            raise MemoryError("no room")

    runner = Refusing()
    with pytest.raises(MemoryError, match="no room"):
        await AsyncEngine(runner=runner).__aenter__()
    assert runner.is_closed
    assert not _model_threads()
    gate, entered = threading.Event(), threading.Event()

    class Slow(FakeRunner):
        def allocate(self, num_blocks: int, block_size: int) -> None:
            entered.set()
            gate.wait()

    slow_runner = Slow()
    opening = asyncio.create_task(AsyncEngine(runner=slow_runner).__aenter__())
    while not entered.is_set():  # noqa: ASYNC110  # it is another thread that sets it
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert slow_runner.is_closed
    assert not _model_threads()


@pytest.mark.asyncio
async def test_closing_while_the_prompt_is_being_encoded_submits_nothing(engine_of: EngineOf) -> None:
    gate = threading.Event()

    class SlowCodec(FakeCodec):
        def encode(self, text: str) -> list[int]:
            gate.wait()
            return super().encode(text)

    async with engine_of(codec=SlowCodec(), num_blocks=1024) as engine:
        generation = engine.generate("1" * 2100, SamplingParams(max_tokens=2))
        reader = asyncio.create_task(_read(generation))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        generation.close()
        gate.set()
        assert await reader == []
        assert engine.stats().generated_tokens == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["aclose elsewhere", "drop", "cancel the first reader", "drop in a thread"])
async def test_a_stream_is_given_up_in_another_task(
    way: str, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    """CONC-09 and TRACE-01: begun in one task and ended in another, or by nobody."""
    async with engine_of(num_blocks=512) as engine:
        generations = [engine.generate(PROMPT, SamplingParams(max_tokens=1000), request_id="x")]
        first = asyncio.create_task(_two(generations[0]))
        assert len(await first) == 2
        if way == "aclose elsewhere":
            await asyncio.create_task(generations[0].aclose())
        elif way == "cancel the first reader":
            second = asyncio.create_task(_read(generations[0]))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            assert not second.done()
            second.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await second
        else:
            del first
            thread = threading.Thread(target=generations.clear)
            if way == "drop":
                generations.clear()
                gc.collect()
            else:
                thread.start()
                thread.join()
        await engine._loop.wait_idle()
        assert engine.stats().finished == {"abort": 1}
    assert not caplog.get_records("call")


async def _two(generation: Generation) -> list[RequestOutput]:
    return [await anext(generation), await anext(generation)]


@pytest.mark.asyncio
async def test_closing_a_stream_that_another_task_waits_on_wakes_that_task(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=512) as engine:
        generation = engine.generate(PROMPT, SamplingParams(max_tokens=1000))
        reader = asyncio.create_task(_read(generation))
        for _ in range(20):
            await asyncio.sleep(0)
        await generation.aclose()
        await generation.aclose()
        outputs = await reader
        assert all(output.finish_reason is None for output in outputs[:-1])
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
        assert engine.stats().finished == {"abort": 1}


@pytest.mark.asyncio
async def test_two_readers_of_one_stream_do_not_hang(engine_of: EngineOf) -> None:
    """It is said not to do this; who does it all the same gets every token in one of the two."""
    async with engine_of() as engine:
        generation = engine.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0.0))
        await generation.start()
        parts = await asyncio.gather(_read(generation), _read(generation))
        tokens = [token for part in parts for output in part for token in output.new_token_ids]
        assert len(tokens) == 20


@pytest.mark.asyncio
async def test_a_place_in_the_queue_that_is_given_up_is_free_at_once_for_others(engine_of: EngineOf) -> None:
    """CONC-03: who is cancelled while waiting takes no wake-up with it."""
    async with engine_of(max_running=1, max_waiting=64, num_blocks=64) as engine:
        for seed in range(10):
            tasks = [asyncio.create_task(engine.complete(PROMPT, KINDS["greedy"])) for _ in range(10)]
            for _ in range(2 * seed):
                await asyncio.sleep(0)
            for task in tasks[seed % 10 :: 3]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            finished = [result for result in results if isinstance(result, list)]
            assert len(finished) >= 10 - len(tasks[seed % 10 :: 3])
            assert len({tuple(result[0].token_ids) for result in finished}) <= 1


@pytest.mark.asyncio
async def test_a_model_that_nobody_waits_for_any_more_is_closed_when_it_is_there() -> None:
    gate, entered, runner = threading.Event(), threading.Event(), FakeRunner()

    def load() -> tuple[FakeRunner, None]:
        entered.set()
        gate.wait()
        return runner, None

    opening = asyncio.create_task(AsyncEngine(load=load).__aenter__())
    while not entered.is_set():  # noqa: ASYNC110  # it is another thread that sets it
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert runner.is_closed
    assert not _model_threads()
