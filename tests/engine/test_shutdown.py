"""Drain and close: nobody waits for ever, nothing is left behind, and a clean end is a quiet one."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine import async_engine, life
from octavo.engine.generation import Generation
from octavo.engine.model.runner import StepInput
from octavo.engine.testing import FakeRunner
from octavo.errors import EngineClosed

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
CONFIG = EngineConfig(num_blocks=256, block_size=4)
SHORT = SamplingParams(max_tokens=5, temperature=0.0)
LONG = SamplingParams(max_tokens=900, temperature=0.0)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "CLOSE_TIMEOUT", 0.2)


def threads_left() -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if thread.name == "octavo-model"]
    for thread in threads:
        thread.join(5.0)
    return [thread for thread in threads if thread.is_alive()]


async def started(engine: AsyncEngine, count: int, params: SamplingParams) -> list[asyncio.Task[list[RequestOutput]]]:
    """So many streams, each of which has had a token."""
    generations = [engine.generate([k + 1, 2, 3], params) for k in range(count)]
    first = [await anext(generation) for generation in generations]

    async def rest(k: int) -> list[RequestOutput]:
        return [first[k], *[output async for output in generations[k]]]

    return [asyncio.create_task(rest(k)) for k in range(count)]


@pytest.mark.asyncio
async def test_drain_lets_what_runs_end_and_refuses_newcomers(engine_of: EngineOf, alone: Alone) -> None:
    """STOP-01, first case."""
    expected = (await alone([1, 2, 3], SHORT))[0].token_ids
    async with engine_of() as engine:
        streams = await started(engine, 5, SHORT)
        draining = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="shutting down"):
            await engine.complete([4], SHORT)
        with pytest.raises(EngineClosed, match="shutting down"):
            await engine.fork("x")
        assert await draining
        outputs = [(await stream)[-1] for stream in streams]
        assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 5
        assert outputs[0].token_ids == expected
        assert engine.stats().finished == {"length": 5}


@pytest.mark.asyncio
@pytest.mark.parametrize("timeout", [0.0, 0.02])
async def test_drain_aborts_what_does_not_end_in_time(timeout: float, engine_of: EngineOf) -> None:
    """STOP-01, second and third case: running, waiting and just submitted ones all get an end."""
    async with engine_of(max_running=2, num_blocks=600) as engine:
        streams = await started(engine, 2, LONG)
        streams += [asyncio.create_task(_read(engine, LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not await engine.drain(timeout)
        reasons = [(await stream)[-1].finish_reason for stream in streams]
        assert reasons == [FinishReason.ABORT] * 5
        assert await engine.drain(0)


async def _read(engine: AsyncEngine, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate([7, 8, 9], params)]


@pytest.mark.asyncio
async def test_two_drains_at_once_both_return(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        streams = await started(engine, 3, SHORT)
        async with asyncio.timeout(30):
            assert all(await asyncio.gather(engine.drain(), engine.drain(), engine.drain(60)))
        await asyncio.gather(*streams)


@pytest.mark.asyncio
async def test_drain_of_an_idle_engine_returns_at_once(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        assert await engine.drain(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("running", [0, 1, 10])
async def test_a_clean_close_is_quiet(running: int, caplog: pytest.LogCaptureFixture) -> None:
    """STOP-04: nothing at warning or above, no task and no thread left."""
    caplog.set_level(logging.WARNING)
    for turns in range(17):
        runner = FakeRunner()
        async with AsyncEngine(runner=runner, config=CONFIG) as engine:
            tasks = [asyncio.create_task(_read(engine, LONG)) for _ in range(running)]
            for _ in range(3 * turns):
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            closed = isinstance(outcome, EngineClosed) and turns == 0
            assert closed or (isinstance(outcome, list) and outcome[-1].finish_reason is FinishReason.ABORT)
        assert runner.is_closed
        assert not threads_left()
        assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    assert not caplog.records


@pytest.mark.asyncio
async def test_after_close_every_door_says_so() -> None:
    engine = AsyncEngine(runner=FakeRunner(), config=CONFIG)
    await engine.close()  # nothing was open
    with pytest.raises(EngineClosed):
        await engine.complete([1], SHORT)
    async with engine:
        opened = engine.is_open
        stream = engine.generate([1, 2], SHORT)
        await engine.close()
        assert (opened, engine.is_open) == (True, False)
        await engine.close()
        await asyncio.sleep(0)  # closing cancels nobody
    for call in (engine.stats, engine.census, engine.blocking, lambda: engine.model, lambda: engine.codec):
        with pytest.raises(EngineClosed):
            call()
    with pytest.raises(EngineClosed):
        engine.abort("x")
    with pytest.raises(EngineClosed):
        await engine.drain()
    with pytest.raises(EngineClosed):
        await anext(stream)
    with pytest.raises(EngineClosed, match="once"):
        await engine.__aenter__()


@pytest.mark.asyncio
async def test_entered_closed_and_left_in_three_tasks() -> None:
    """As fixtures of test runners, life-spans of servers and exit stacks do."""
    runner = FakeRunner()
    engine = AsyncEngine(runner=runner, config=CONFIG)
    await asyncio.create_task(engine.__aenter__())
    streams = await started(engine, 2, LONG)
    await asyncio.gather(*(asyncio.create_task(engine.close()) for _ in range(3)))
    assert [(await stream)[-1].finish_reason for stream in streams] == [FinishReason.ABORT] * 2
    await asyncio.create_task(engine.__aexit__(None, None, None))
    assert runner.is_closed
    assert not threads_left()


@pytest.mark.asyncio
async def test_close_during_drain_ends_the_drain() -> None:
    async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine:
        streams = await started(engine, 2, LONG)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        await engine.close()
        async with asyncio.timeout(30):
            await draining
            await asyncio.gather(*streams)


@pytest.mark.asyncio
async def test_an_error_in_the_body_comes_out_as_it_is() -> None:
    async def body() -> None:
        async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine:
            await engine.complete([1], SHORT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_closed_does_not_stop_the_closing(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(FakeRunner):
        def close(self) -> None:
            raise RuntimeError("stuck")

    async with AsyncEngine(runner=Sticky(), config=CONFIG) as engine:
        await engine.complete([1], SHORT)
    assert "stuck" in caplog.text
    assert not threads_left()


class Hanging:
    """A gate in which steps hang, from step number ``at`` on."""

    def __init__(self, at: int = 0) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self._left = at

    def __call__(self, step: StepInput) -> None:
        self._left -= 1
        if self._left < 0:
            self.entered.set()
            self.gate.wait(60)

    async def wait(self) -> None:
        while not self.entered.is_set():  # noqa: ASYNC110  # it is another thread that sets it
            await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.usefixtures("short_patience")
async def test_close_returns_though_a_step_hangs(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging(at=2)
    runner = FakeRunner(before_step=hanging)
    try:
        async with AsyncEngine(runner=runner, config=CONFIG) as engine:
            stream = asyncio.create_task(_read(engine, LONG))
            await hanging.wait()
            async with asyncio.timeout(30):
                await engine.close()
                assert (await stream)[-1].finish_reason is FinishReason.ABORT
        assert "thread is left behind" in caplog.text
        assert not runner.is_closed
    finally:
        hanging.gate.set()
    assert not threads_left()
    assert runner.is_closed  # as soon as the step came back


@pytest.mark.asyncio
async def test_drain_returns_though_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "CLOSE_TIMEOUT", 0.5)
    hanging = Hanging()
    async with AsyncEngine(runner=FakeRunner(before_step=hanging), config=CONFIG) as engine:
        stream = asyncio.create_task(_read(engine, LONG))
        await hanging.wait()
        async with asyncio.timeout(30):
            assert not await engine.drain(0.01)
        assert not stream.done()
        hanging.gate.set()
        assert (await stream)[-1].finish_reason is FinishReason.ABORT


@pytest.mark.asyncio
async def test_the_watchdog_reports_a_step_that_hangs_once(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging()
    config = EngineConfig(num_blocks=64, block_size=4, step_timeout=0.02)
    async with AsyncEngine(runner=FakeRunner(before_step=hanging), config=config) as engine:
        stream = asyncio.create_task(_read(engine, SHORT))
        async with asyncio.timeout(30):
            while "does not return" not in caplog.text:  # noqa: ASYNC110  # a log has no event
                await asyncio.sleep(0.001)
        assert engine.stats().stuck_seconds > 0
        await asyncio.sleep(0.1)  # many more looks of the watchdog
        assert caplog.text.count("does not return") == 1
        hanging.gate.set()
        await stream
        assert engine.stats().stuck_seconds == 0


# event loops that end


def run_without_close(end: str) -> tuple[AsyncEngine, FakeRunner]:
    runner = FakeRunner()
    engine = AsyncEngine(runner=runner, config=CONFIG)

    async def main() -> None:
        await engine.__aenter__()
        await engine.complete([1, 2, 3], SHORT)
        if end == "busy":
            await started(engine, 2, LONG)
        if end == "held":
            generations.append(engine.generate([1, 2, 3], LONG))
            await anext(generations[0])

    generations: list[Generation] = []
    asyncio.run(main())
    generations.clear()
    return engine, runner


@pytest.mark.parametrize("end", ["idle", "busy", "held"])
def test_asyncio_run_ends_without_close_and_with_a_warning(end: str, caplog: pytest.LogCaptureFixture) -> None:
    """CONC-06: the program ends, the model is freed, and the log says what was forgotten."""
    engine, runner = run_without_close(end)
    assert not threads_left()
    assert runner.is_closed
    assert "was not closed" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]

    async def second() -> None:
        with pytest.raises(EngineClosed):
            await engine.complete([1], SHORT)
        await engine.close()
        async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as fresh:
            assert len((await fresh.complete([1, 2], SHORT))[0].token_ids) == 5

    asyncio.run(second())


def test_an_engine_of_another_event_loop_is_refused() -> None:
    """CONC-06: in a second loop in another thread, while the first one still has it open."""

    async def first() -> None:
        async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine:

            async def second() -> None:
                with pytest.raises(EngineClosed, match="another event loop"):
                    await engine.complete([1], SHORT)
                with pytest.raises(EngineClosed, match="another event loop"):
                    await engine.close()

            await asyncio.to_thread(asyncio.run, second())
            assert len((await engine.complete([1, 2], SHORT))[0].token_ids) == 5

    asyncio.run(first())
    assert not threads_left()


def test_shutdown_asyncgens_and_a_wrapped_stream() -> None:
    """CONC-09: a host's own generator around the stream is finalised by the event loop."""

    async def wrapped(engine: AsyncEngine) -> AsyncIterator[RequestOutput]:
        generation = engine.generate([1, 2, 3], LONG)
        try:
            async for output in generation:
                yield output
        finally:
            await generation.aclose()

    async def main() -> None:
        async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine:
            outer = wrapped(engine)
            await anext(outer)
            await anext(outer)
            await asyncio.get_running_loop().shutdown_asyncgens()
            await engine._loop.wait_idle()
            assert engine.stats().finished == {"abort": 1}

    asyncio.run(main())


def test_a_stream_that_outlives_its_event_loop_is_dropped_in_silence() -> None:
    """Its finaliser has nobody to talk to any more."""
    generations = []

    async def main() -> None:
        async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine:
            generations.append(engine.generate([1, 2, 3], LONG))
            await anext(generations[0])

    asyncio.run(main())
    generations.clear()
    gc.collect()
