"""Surroundings: what an engine takes from outside, so that tests can hand in their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..telemetry.logging import Logger


class Surroundings(NamedTuple):
    """Clocks and log of one engine."""

    clock: Callable[[], float]
    """Seconds, monotonic: all intervals."""
    wall: Callable[[], float]
    """Seconds since the epoch: only for what outlives the process."""
    logger: Logger
