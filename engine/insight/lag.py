"""Lag: how late the event loop wakes a task. Whatever blocks the loop, here or in the host, shows in it."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from ...telemetry.metrics.histogram import Histogram

PERIOD = 1.0
"""Seconds between two looks."""


async def watch_lag(lag: Histogram, clock: Callable[[], float], period: float = PERIOD) -> None:
    """Once in a ``period``, note by how many seconds of ``clock`` (monotonic) waking up was late. Until cancelled."""
    while True:
        due = clock() + period
        await anyio.sleep(period)
        lag.observe(max(clock() - due, 0.0))
