from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import anyio
import pytest
import pytest_asyncio

from octavo.storage.threads import Threads


class Hanging:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.ended = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.may_end.wait(30)
        self.ended.set()
        return "done"


@pytest_asyncio.fixture
async def hanging() -> AsyncIterator[Hanging]:
    work = Hanging()
    yield work
    work.may_end.set()


async def began(work: Hanging) -> None:
    await anyio.to_thread.run_sync(work.began.wait)


@pytest.mark.asyncio
async def test_results_and_errors_come_out() -> None:
    threads = Threads(1)
    assert await threads.run(lambda: 17) == 17
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 18) == 18


@pytest.mark.asyncio
async def test_the_loop_goes_on_meanwhile(hanging: Hanging) -> None:
    task = asyncio.ensure_future(Threads(1).run(hanging))
    await began(hanging)
    for _ in range(100):
        await anyio.lowlevel.checkpoint()
    assert not task.done()
    hanging.may_end.set()
    assert await task == "done"


@pytest.mark.asyncio
async def test_who_gives_up_is_free_and_the_place_is_not(hanging: Hanging) -> None:
    threads = Threads(1)
    task = asyncio.ensure_future(threads.run(hanging))
    await began(hanging)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ran = threading.Event()
    waiting = [asyncio.ensure_future(threads.run(ran.set)) for _ in range(3)]
    for _ in range(10):
        await anyio.lowlevel.checkpoint()
    assert not ran.is_set()
    for each in waiting[:2]:
        each.cancel()
    hanging.may_end.set()
    await waiting[2]
    assert hanging.ended.is_set()


@pytest.mark.asyncio
async def test_what_had_not_begun_never_does(hanging: Hanging) -> None:
    threads = Threads(1)
    first = asyncio.ensure_future(threads.run(hanging))
    await began(hanging)
    ran = threading.Event()
    second = asyncio.ensure_future(threads.run(ran.set))
    await anyio.lowlevel.checkpoint()
    second.cancel()
    hanging.may_end.set()
    await first
    await threads.run(lambda: None)
    assert not ran.is_set()


@pytest.mark.asyncio
@pytest.mark.parametrize("steps", range(6))
async def test_a_place_is_given_back_wherever_the_caller_is_cancelled(steps: int) -> None:
    threads = Threads(1)
    for _ in range(5):
        task = asyncio.ensure_future(threads.run(lambda: None))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    with anyio.fail_after(20):
        assert await threads.run(lambda: "free") == "free"
