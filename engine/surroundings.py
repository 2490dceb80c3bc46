"""Surroundings: what an engine takes from outside, so that tests can hand in their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..telemetry.logging import Logger
from ..telemetry.tracing import Tracing


class Surroundings(NamedTuple):
    """Clocks, log and trace of one engine."""

    clock: Callable[[], float]
    """Seconds, monotonic: all intervals."""
    wall: Callable[[], float]
    """Seconds since the epoch: only for what outlives the process."""
    logger: Logger
    tracing: Tracing
