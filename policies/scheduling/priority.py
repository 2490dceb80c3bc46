"""Strict priorities with ageing."""

from __future__ import annotations

from ...errors import InvalidRequest
from .base import Job, SchedulingPolicy


class Priority(SchedulingPolicy):
    """The higher priority first; equal ones in order of arrival.

    A request gains one level for every ``seconds_per_level`` since its arrival, so a low one is not starved for ever.
    A waiting request displaces a running one only when its own, unaged priority is higher by ``margin`` at least:
    ageing decides who is next, it interrupts nobody. A wide margin spares work for small differences.
    """

    def __init__(self, seconds_per_level: float = 30.0, margin: int = 1) -> None:
        """:raises InvalidRequest: when a value is not positive."""
        if not seconds_per_level > 0 or not margin > 0:
            raise InvalidRequest(
                f"priority: seconds_per_level {seconds_per_level} and margin {margin} must be positive"
            )
        self._seconds_per_level = seconds_per_level
        self._margin = margin

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (-(job.priority + (now - job.arrival) // self._seconds_per_level), job.order)

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        return waiting.priority - running.priority >= self._margin
