"""Calls: foreign coroutines under a deadline that holds even when they do not let themselves be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio

from ...errors import StorageError, describe

T = TypeVar("T")

GRACE = 0.1
"""Seconds that a cancelled call gets to tidy up before it is left behind."""


class Overdue(TimeoutError):
    """A call did not end within its deadline."""


class Calls:
    """Runs calls of one tier, each in a task of its own.

    A cancel scope alone would not do: a tier that waits for a thread, or swallows its cancellation, would hold its
    caller for as long as it likes. Such a call is left behind here; it still counts until it ends, and what it returns
    or raises then is dropped.
    """

    def __init__(self) -> None:
        self._left: set[asyncio.Task[object]] = set()

    @property
    def abandoned(self) -> int:
        """Calls that were left behind and still run."""
        return len(self._left)

    async def run(
        self, invoke: Callable[[], Awaitable[object]], seconds: float, late: Callable[[], None] | None = None
    ) -> object:
        """What ``invoke()`` returns. When the caller is cancelled, so is the call. ``late`` is called when a call that
        was left behind ends at last.

        :raises Overdue: when it takes longer than ``seconds``.
        :raises Exception: whatever the call raises.
        """
        task = asyncio.ensure_future(_contained(invoke))
        overdue = True
        try:
            await asyncio.wait((task,), timeout=seconds)
            overdue = not task.done()
        finally:
            if not task.done():
                await self._end(task, late)
        if overdue:
            raise Overdue(f"no answer within {seconds:g} s")
        return task.result()

    async def _end(self, task: asyncio.Task[object], late: Callable[[], None] | None) -> None:
        task.add_done_callback(partial(self._ended, late))
        self._left.add(task)
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((task,), timeout=GRACE)

    def _ended(self, late: Callable[[], None] | None, task: asyncio.Task[object]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # fetched, so that asyncio does not complain that nobody did
        if late is not None:
            late()


async def _contained(invoke: Callable[[], Awaitable[object]]) -> object:
    """A task that raised SystemExit would end the event loop, one that is cancelled from within its caller."""
    try:
        return await invoke()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StorageError("the call cancelled itself") from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise StorageError(f"the call raised {describe(error)}") from error
