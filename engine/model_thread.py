"""ModelThread: the one thread in which the model runs, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from ..errors import EngineClosed

P = ParamSpec("P")
T = TypeVar("T")
JOIN_INTERVAL = 0.005
Job = Callable[[], None]


class ModelThread:
    """Runs calls one after the other in a thread of its own.

    Its own, because libraries below the model keep per-thread worker pools; a daemon, because a call that never returns must
    not keep the process from ending.
    """

    def __init__(self, name: str = "octavo-model") -> None:
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
                result = function(*args, **kwargs)
            except BaseException as error:
                _deliver(loop, lambda error=error: future.done() or future.set_exception(error))  # type: ignore[misc]
            else:
                _deliver(loop, lambda: future.done() or future.set_result(result))

        self._jobs.put(job)
        return await future

    async def close(self, timeout: float) -> bool:
        """End the thread once its calls have ended; False when it still runs after ``timeout`` seconds and is abandoned."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        deadline = asyncio.get_running_loop().time() + timeout
        while self._thread.is_alive() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(JOIN_INTERVAL)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _deliver(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    """Hand a result to the event loop; nobody is left to take it when that loop is closed."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        if not loop.is_closed():
            raise
