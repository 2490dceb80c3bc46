from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from octavo import Acceleration, AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.model.runner import StepInput
from octavo.engine.model_thread import NICENESS, ModelThread
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import EngineClosed, ModelError


@pytest.mark.asyncio
async def test_calls_run_one_after_the_other_in_one_other_thread() -> None:
    thread = ModelThread("octavo-test")
    seen: list[tuple[int, str]] = []

    def record(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return number * 2

    assert await asyncio.gather(*(thread.call(record, number) for number in range(20))) == list(range(0, 40, 2))
    assert seen == [(number, "octavo-test") for number in range(20)]
    assert await thread.close(5.0)


class Own(Exception):
    pass


@pytest.mark.asyncio
async def test_errors_arrive_and_the_thread_goes_on() -> None:
    """CONC-08: also those that would end the event loop, or that a future refuses to carry."""
    thread = ModelThread()

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(Own):
        await thread.call(fail, Own())
    for error in (SystemExit(1), KeyboardInterrupt(), StopIteration(3), asyncio.CancelledError(), GeneratorExit()):
        with pytest.raises(ModelError, match=type(error).__name__) as raised:
            await thread.call(fail, error)
        assert raised.value.__cause__ is error

    class Silent(BaseException):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(ModelError, match="Silent"):
        await thread.call(fail, Silent())
    assert await thread.call(lambda: 7) == 7
    assert await thread.close(5.0)


@pytest.mark.asyncio
async def test_a_cancelled_caller_drops_the_result_and_the_next_call_comes_after_it() -> None:
    thread = ModelThread()
    gate = threading.Event()
    order: list[str] = []

    def slow() -> None:
        gate.wait()
        order.append("slow")

    waiting = asyncio.create_task(thread.call(slow))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    following = asyncio.create_task(thread.call(order.append, "next"))
    await asyncio.sleep(0)
    gate.set()
    await following
    assert order == ["slow", "next"]
    assert await thread.close(5.0)


@pytest.mark.asyncio
async def test_closing_waits_for_what_was_called_and_refuses_the_rest() -> None:
    thread = ModelThread()
    gate = threading.Event()
    waiting = asyncio.create_task(thread.call(gate.wait))
    await asyncio.sleep(0)
    assert not await thread.close(0.01)
    with pytest.raises(EngineClosed):
        await thread.call(lambda: None)
    gate.set()
    assert await waiting
    assert await thread.close(5.0)
    assert await thread.close(5.0)
    assert await thread.close(0.0) or not thread._thread.is_alive()


def test_a_call_that_ends_after_its_event_loop_is_dropped_in_silence() -> None:
    """FLOW-06: no "loop is closed" from the thread."""
    gate = threading.Event()
    threads: list[ModelThread] = []

    async def main() -> None:
        threads.append(ModelThread())
        task = asyncio.create_task(threads[0].call(gate.wait))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    gate.set()

    async def close() -> bool:
        return await threads[0].close(5.0)

    assert asyncio.run(close())
    threads[0]._thread.join(5.0)
    assert not threads[0]._thread.is_alive()


@pytest.mark.asyncio
async def test_work_beside_a_call_runs_while_it_runs() -> None:
    thread = ModelThread()
    gate, seen = threading.Event(), asyncio.Event()

    async def open_then() -> None:
        await seen.wait()  # the call is still under way, or else this would wait for ever
        gate.set()

    opening = asyncio.create_task(open_then())

    def see() -> bool:
        seen.set()
        return False

    assert await thread.call_beside(see, gate.wait, 30.0)
    await opening
    assert await thread.close(5.0)


@pytest.mark.asyncio
async def test_no_work_is_done_beside_a_call_that_is_over() -> None:
    """Neither late nor after a cancellation: who called does it then, or nobody."""
    thread = ModelThread()
    gate = threading.Event()
    done: list[str] = []
    assert await thread.call_beside(None, lambda: 7) == 7

    def note(what: str) -> bool:
        done.append(what)
        return False

    assert await thread.call_beside(lambda: note("short"), lambda: 8) == 8
    waiting = asyncio.create_task(thread.call_beside(lambda: note("cancelled"), gate.wait))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    before = list(done)
    await asyncio.sleep(0.01)
    assert done == before
    assert "cancelled" not in done
    gate.set()
    assert await thread.close(5.0)


@pytest.mark.asyncio
async def test_work_in_pieces_lets_others_in_between_them_and_ends_with_the_call() -> None:
    thread = ModelThread()
    gate, others = threading.Event(), asyncio.Event()
    pieces: list[int] = []
    seen_by_others: list[int] = []

    def piece() -> bool:
        pieces.append(len(pieces))
        if len(pieces) == 3:
            asyncio.get_running_loop().call_soon(others.set)
        if len(pieces) == 200:
            gate.set()
        return True  # there is always more

    async def look() -> None:
        await others.wait()
        seen_by_others.append(len(pieces))

    looking = asyncio.create_task(look())
    assert await thread.call_beside(piece, gate.wait, 30.0)
    count = len(pieces)
    await looking
    assert seen_by_others[0] < 200
    await asyncio.sleep(0.005)
    assert len(pieces) == count >= 200
    assert await thread.close(5.0)


@pytest.mark.asyncio
@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own elsewhere")
@pytest.mark.parametrize("is_polite", [True, False])
async def test_a_polite_thread_is_nicer_than_the_process_and_so_are_those_it_starts(is_polite: bool) -> None:
    thread = ModelThread(is_polite=is_polite)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def of_a_child() -> int:
        found: list[int] = []
        child = threading.Thread(target=lambda: found.append(niceness()))
        child.start()
        child.join()
        return found[0]

    expected = min(own + NICENESS, 19) if is_polite else own
    assert await thread.call(niceness) == await thread.call(of_a_child) == expected
    assert niceness() == own
    assert await thread.close(5.0)


@pytest.mark.asyncio
async def test_where_niceness_is_forbidden_the_thread_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    thread = ModelThread(is_polite=True)
    assert await thread.call(lambda: 7) == 7
    assert await thread.close(5.0)


@pytest.mark.asyncio
@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own elsewhere")
@pytest.mark.parametrize("is_polite", [True, False])
async def test_the_engine_says_whether_its_thread_is_polite(is_polite: bool) -> None:
    seen: set[int] = set()

    def look(_: StepInput) -> None:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    config = EngineConfig(num_blocks=16, block_size=4, acceleration=Acceleration(polite=is_polite))
    async with AsyncEngine(runner=FakeRunner(before_step=look), codec=FakeCodec(), config=config) as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=2))
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == {min(own + NICENESS, 19) if is_polite else own}
