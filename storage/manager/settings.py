"""ManagerSettings: the knobs of the TierManager, frozen and checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSettings:
    """How much time and memory tiers get.

    :raises InvalidRequest: when a value is out of range; the message names the field.
    """

    deadline: float = 2.0
    """Seconds that a tier has for one batch (get, put, contains, ...); then it counts as failed."""
    open_deadline: float = 60.0
    """Seconds that a tier has to open; a large one may have to rebuild its index."""
    erase_deadline: float = 60.0
    """Seconds that a tier has to erase a tenant; it may have to look at everything it keeps."""
    batch_blocks: int = 32
    """Blocks in one get or put."""
    read_ahead: int = 2
    """Batches that may be read while one is being imported."""
    concurrent_reads: int = 4
    """Batches that are read from one tier at a time, over all loads. Others wait, and their waiting is not the
    tier's fault."""
    queue_bytes: int = 256 * 2**20
    """Bound of each tier's write queue."""
    breaker_failures: int = 3
    """Failures in a row after which a tier is left alone ..."""
    breaker_pause: float = 5.0
    """... for so many seconds, twice as many after each trial that fails, up to 60."""
    strict: bool = False
    """What a tier that cannot be opened is: a StorageError (True), or left out with one warning (False)."""

    def __post_init__(self) -> None:
        for name in ("deadline", "open_deadline", "erase_deadline", "breaker_pause"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name} must be above 0 and finite, not {value}")
        for name, least in (
            ("batch_blocks", 1),
            ("read_ahead", 0),
            ("concurrent_reads", 1),
            ("queue_bytes", 1),
            ("breaker_failures", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} must be at least {least}, not {getattr(self, name)}")
