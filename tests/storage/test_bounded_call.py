from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from octavo.errors import StorageError
from octavo.storage.manager.bounded_call import Calls, Overdue
from octavo.tests.storage.manager_rig import HANG, settle, until


async def answer() -> int:
    await anyio.lowlevel.checkpoint()
    return 7


@pytest.mark.asyncio
async def test_returns_and_raises_what_the_call_does() -> None:
    async def broken() -> int:
        raise KeyError("x")

    calls = Calls()
    assert await calls.run(answer, 5.0) == 7
    with pytest.raises(KeyError):
        await calls.run(broken, 5.0)
    assert calls.abandoned == 0


@pytest.mark.asyncio
async def test_what_is_no_coroutine_or_raises_at_once_is_an_error_of_the_call() -> None:
    calls = Calls()
    with pytest.raises(TypeError):
        await calls.run(lambda: 3, 5.0)  # type: ignore[arg-type,return-value]  # the fault that is tested
    with pytest.raises(ZeroDivisionError):
        await calls.run(lambda: 1 // 0, 5.0)  # type: ignore[arg-type,return-value]  # as above


@pytest.mark.asyncio
async def test_a_hanging_call_is_cancelled_and_nothing_stays() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("yes")

    calls = Calls()
    before = asyncio.all_tasks()
    with pytest.raises(Overdue):
        await calls.run(hang, HANG)
    assert ended == ["yes"]
    assert calls.abandoned == 0
    assert asyncio.all_tasks() == before


@pytest.mark.asyncio
async def test_a_call_that_ignores_its_cancellation_is_left_behind_and_ends_unheard() -> None:
    gate = asyncio.Event()
    late: list[str] = []

    async def stubborn() -> None:
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:  # what must not be done
                continue
        raise RuntimeError("nobody wants to hear of it")

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    calls = Calls()
    with pytest.raises(Overdue):
        await calls.run(stubborn, HANG, lambda: late.append("ended"))
    assert calls.abandoned == 1
    assert not late
    gate.set()
    await until(lambda: calls.abandoned == 0)
    assert late == ["ended"]
    gc.collect()
    await settle()
    assert not complaints


@pytest.mark.asyncio
@pytest.mark.parametrize("by_scope", [True, False])
async def test_cancelling_the_caller_cancels_the_call(by_scope: bool) -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("yes")

    calls = Calls()
    if by_scope:
        with anyio.move_on_after(HANG) as scope:
            await calls.run(hang, 60.0)
        assert scope.cancelled_caught
    else:
        task = asyncio.ensure_future(calls.run(hang, 60.0))
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended == ["yes"]
    assert calls.abandoned == 0


async def _exit() -> None:
    raise SystemExit(1)


async def _cancel_myself() -> None:
    task = asyncio.current_task()
    assert task is not None
    raise asyncio.CancelledError


@pytest.mark.asyncio
@pytest.mark.parametrize("call", [_exit, _cancel_myself])
async def test_what_would_end_the_loop_or_its_caller_becomes_an_ordinary_error(call: Callable[[], object]) -> None:
    with pytest.raises(StorageError):
        await Calls().run(call, 5.0)  # type: ignore[arg-type]  # both are coroutine functions
