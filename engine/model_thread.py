"""ModelThread: the one thread in which the model runs, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

import anyio

from ..errors import EngineClosed, ModelError, caused, describe

P = ParamSpec("P")
T = TypeVar("T")
Job = Callable[[], None]
MODEL_THREAD = "octavo-model"
"""Its name."""
HEAD_START = 0.0002
"""Seconds that a call has the interpreter to itself before other work is done beside it."""
CLOSE_POLL = 0.002
"""Seconds between two looks whether the thread has ended."""
NICENESS = 5
"""How much nicer a polite thread is than the process: a third of the weight."""


class ModelThread:
    """Runs calls one after the other in a thread of its own.

    Its own, because libraries below the model keep per-thread worker pools; a daemon, because a call that never
    returns must not keep the process from ending.

    :param is_polite: on Linux, the thread and those that libraries start from it leave a processor to the event loop
        as soon as that wants one. With every processor computing, an equal of theirs that has just run waits for the
        next tick of the system's scheduler, some milliseconds.
    """

    def __init__(self, name: str = MODEL_THREAD, *, is_polite: bool = False) -> None:
        self._is_polite = is_polite
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in the thread and return what it returns or raise what it raises.

        Cancelling the caller does not stop the function; its result is dropped then.

        :raises EngineClosed: when the thread was closed.
        """
        if self._closed:
            raise EngineClosed("the model thread is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                deliver = partial(_set_result, future, function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # it belongs to the caller, not to this thread
                deliver = partial(_set_exception, future, _deliverable(error))
            _hand_over(loop, deliver)

        self._jobs.put(job)
        return await future

    async def call_beside(
        self, meanwhile: Callable[[], bool] | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As ``call``; ``meanwhile`` is called in the event loop while the function runs, unless that is over before.

        Not at once: both need the interpreter, and what begins here would hold up what is to begin there. It is called
        again, after whatever else the event loop has to do, as long as it returns True.
        """
        beside = None if meanwhile is None else _Beside(meanwhile)
        try:
            return await self.call(function, *args, **kwargs)
        finally:
            if beside is not None:
                beside.end()

    async def close(self, timeout: float) -> bool:
        """End the thread once its calls have ended. Idempotent.

        False: they have not within ``timeout`` seconds, and the thread is left behind.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        with anyio.move_on_after(timeout):
            while self._thread.is_alive():  # noqa: ASYNC110  # it ends by itself and tells nobody
                await anyio.sleep(CLOSE_POLL)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._is_polite:
            _give_way()
        while (job := self._jobs.get()) is not None:
            job()


class _Beside:
    """Work in the event loop, piece by piece."""

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle = self._loop.call_later(HEAD_START, self._go_on)

    def end(self) -> None:
        """No more of it."""
        self._next.cancel()

    def _go_on(self) -> None:
        if self._work():
            self._next = self._loop.call_soon(self._go_on)


def _give_way() -> None:
    """Elsewhere a niceness belongs to the whole process, which has the event loop in it."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it: then it stays as it is
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _deliverable(error: BaseException) -> Exception:
    """What would end or cancel the event loop that takes it (SystemExit, a panic of native code) becomes ordinary.

    So do StopIteration, which no future carries, and EngineClosed, which only ``call`` itself may say.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | EngineClosed):
        return error
    return caused(ModelError(f"the model raised {describe(error)}"), error)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _hand_over(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Run ``action`` in the event loop; nobody is left to take a result when that loop is closed."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        if not loop.is_closed():
            raise
