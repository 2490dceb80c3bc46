"""Counters: plain integers that the loop raises and telemetry reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from .kv import CacheStats


@dataclass(slots=True)
class Counters:
    """Sums since the engine was opened."""

    submitted: int = 0
    rejected: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by the reason of their end: ``stop``, ``length``, ``abort``, ``error``."""
    steps: int = 0
    failed_rows: int = 0
    step_seconds: float = 0.0
    batch_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens computed as part of a prompt or of a recomputation."""
    generated_tokens: int = 0
    policy_faults: int = 0
    """Breaches of contract by scheduling policies."""


class EngineStats(NamedTuple):
    """A plain snapshot of the engine."""

    running: int
    """Sequences that hold blocks."""
    waiting: int
    """Sequences without blocks: new, preempted, or submitted since the last step."""
    waiting_reasons: dict[str, int]
    """Why those at the head of the queue wait: ``blocks``, ``slots``, ``prefix``."""
    preemptions: int
    submitted: int
    rejected: int
    finished: dict[str, int]
    steps: int
    failed_rows: int
    step_seconds: float
    batch_tokens: int
    prefill_tokens: int
    generated_tokens: int
    policy_faults: int
    """Of scheduling policies; those of the eviction policy are in ``cache``."""
    stuck_seconds: float
    """How long the current step has been running beyond ``step_timeout``; 0 when all is well."""
    cache: CacheStats
