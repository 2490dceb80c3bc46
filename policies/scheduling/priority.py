"""Strict priorities with ageing."""

from __future__ import annotations

from .base import Job, SchedulingPolicy


class Priority(SchedulingPolicy):
    """The higher priority first; equal ones in order of arrival.

    A request gains one level for every ``seconds_per_level`` since its arrival, so a low one is not starved for ever.
    A waiting request displaces a running one only when its own, unaged priority is strictly higher: ageing decides
    who is next, it interrupts nobody.
    """

    def __init__(self, seconds_per_level: float = 30.0) -> None:
        self._seconds_per_level = seconds_per_level

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (-(job.priority + (now - job.arrival) // self._seconds_per_level), job.order)

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        return waiting.priority > running.priority
