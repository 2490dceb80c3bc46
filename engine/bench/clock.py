"""Clock: time as a benchmark sees it, so that tests can tell it what time it is."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio


class Clock(NamedTuple):
    """Monotonic."""

    now: Callable[[], float]
    """Seconds since some moment."""
    sleep: Callable[[float], Awaitable[None]]

    async def sleep_until(self, moment: float) -> None:
        await self.sleep(max(0.0, moment - self.now()))


def running_clock() -> Clock:
    """The real one, from 0."""
    start = time.monotonic()
    return Clock(lambda: time.monotonic() - start, anyio.sleep)
