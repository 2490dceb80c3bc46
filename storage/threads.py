"""Blocking calls in threads, for callers that may give up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

_T = TypeVar("_T")


class Threads:
    """Runs blocking calls, a bounded number at a time.

    A caller that is cancelled is free at once. A call that had begun goes on to its end and keeps its place until then,
    so that a disk that hangs holds ``limit`` threads and not one more for each caller that gave up. One that had not
    begun never does.
    """

    def __init__(self, limit: int) -> None:
        self._places = anyio.CapacityLimiter(limit)
        self._unbounded = anyio.CapacityLimiter(math.inf)  # the places bound it; the default one belongs to the host

    async def run(self, work: Callable[[], _T]) -> _T:
        """The result of ``work()``; its errors come out."""
        borrower = object()
        await self._places.acquire_on_behalf_of(borrower)
        claim = threading.Lock()
        loop = asyncio.get_running_loop()

        def job() -> _T:
            if not claim.acquire(blocking=False):
                raise RuntimeError("given up before it began")  # nobody waits for this
            try:
                return work()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._places.release_on_behalf_of, borrower)

        try:
            return await anyio.to_thread.run_sync(job, abandon_on_cancel=True, limiter=self._unbounded)
        finally:
            if claim.acquire(blocking=False):
                self._places.release_on_behalf_of(borrower)
