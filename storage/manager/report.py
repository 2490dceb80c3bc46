"""TierReport: what a manager has to say about one of its tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...telemetry.metrics.histogram import HistogramState
from ..base import TierStats
from .breaker import BreakerState


class TierReport(NamedTuple):
    """One tier at one moment; counters since the manager was made."""

    name: str
    tier: TierStats
    """As the tier says itself."""
    opened: bool
    shared: bool
    """Whether other engines read and write it too."""
    breaker: BreakerState
    """For reading."""
    write_breaker: BreakerState
    gets: int
    """Batches asked for."""
    hits: int
    """Blocks that were there, with right bytes or wrong ones."""
    loaded_blocks: int
    """Blocks that came out right, from the tier or from its queue."""
    loaded_bytes: int
    loaded_seconds: float
    """Reading and checking them."""
    foreign_blocks: int
    """Those of them that an earlier run or another engine had stored."""
    corrupt: int
    """Blocks with wrong bytes."""
    puts: int
    """Batches."""
    put_blocks: int
    """Blocks that the tier keeps."""
    put_bytes: int
    put_seconds: float
    spilled: int
    """Blocks handed down to the next tier to make room."""
    queued_blocks: int
    queued_bytes: int
    dropped: int
    """Blocks that were meant for this tier and went nowhere: no room in its queue, declined, failed, out of time."""
    timeouts: int
    """Calls that missed their deadline; they are among the failures."""
    failures: int
    abandoned: int
    """Calls that missed their deadline and still run."""
    seconds_per_block: float | None
    """Measured; ``None``: nothing was loaded yet."""
    read_seconds: HistogramState
    """Of the batches that were read; those that failed are among the failures."""
    write_seconds: HistogramState
    """Of the batches that were written."""


@dataclass(slots=True)
class Counters:
    """The counters of a :class:`TierReport`, while they grow."""

    gets: int = 0
    hits: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    foreign_blocks: int = 0
    corrupt: int = 0
    puts: int = 0
    put_blocks: int = 0
    put_bytes: int = 0
    put_seconds: float = 0.0
    spilled: int = 0
    dropped: int = 0
    timeouts: int = 0
    failures: int = 0
