"""Counters: plain integers that the loop raises and telemetry reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ..storage.manager.tier_manager import TierReport
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
    failed_in_a_row: int = 0
    """Steps since the last one in which any row came out."""
    step_seconds: float = 0.0
    batch_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens computed as part of a prompt or of a recomputation."""
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Of requests that are over."""
    policy_faults: int = 0
    """Breaches of contract by scheduling policies."""
    snapshot_at: float | None = None
    """When the newest snapshot was complete, on the engine's clock."""
    snapshot_bytes: int | None = None


class TransferStats(NamedTuple):
    """What went between the device and the tiers since the start."""

    exported_blocks: int
    failed_exports: int
    """Blocks lost because the runner could not copy them."""
    loads: dict[str, int]
    """Loads by how they ended: ``complete``, ``missing``, ``corrupt``, ``failed``, ``deadline``, ``given up``."""
    loaded_tokens: dict[str, int]
    """By tier."""
    checkpoints: int


class RestoreStats(NamedTuple):
    """What a restart has kept."""

    readiness: str
    """``warming`` while stored blocks are brought to the device in the background, then ``ready``."""
    stored_blocks: int
    """Blocks that persistent tiers and the snapshot held when the engine opened."""
    planned_blocks: int
    """Of them to be warmed in the background."""
    warmed_blocks: int
    saved_tokens: int
    """Tokens loaded so far that an earlier run, or another engine, had computed."""
    refused: str | None
    """Why the snapshot that was asked for is not used."""
    learned: bool
    """Whether the eviction policy has taken over what an earlier run of the same one had learned."""


class SaveStats(NamedTuple):
    """What a restart would find."""

    age: float | None
    """Seconds since the newest snapshot or checkpoint was complete; ``None`` before the first."""
    snapshot_bytes: int | None
    """Records in the newest snapshot; ``None`` before the first."""


class EngineStats(NamedTuple):
    """A plain snapshot of the engine."""

    running: int
    """Sequences that hold blocks."""
    waiting: int
    """Sequences without blocks: new, preempted, or submitted since the last step."""
    loading: int
    """Samples whose prefix is on its way from a tier."""
    waiting_tokens: int
    """Prompt tokens that are still to be computed, of what runs, loads and waits."""
    waiting_reasons: dict[str, int]
    """Why those at the head of the queue wait: ``blocks``, ``slots``, ``prefix``, ``lookup``."""
    preemptions: int
    preemptions_by_kind: dict[str, int]
    """``swap``: a tier takes the blocks. ``recompute``: what is evicted meanwhile is computed again."""
    submitted: int
    rejected: int
    finished: dict[str, int]
    steps: int
    failed_rows: int
    step_seconds: float
    batch_tokens: int
    prefill_tokens: int
    generated_tokens: int
    prompt_tokens: int
    """Of requests that are over, each prompt once."""
    scheduling_policy: str
    """Its class."""
    policy_faults: int
    """Of scheduling policies; those of the eviction policy are in ``cache``."""
    stuck_seconds: float
    """How long the current step has been running beyond ``step_timeout``; 0 when all is well."""
    cache: CacheStats
    tiers: tuple[TierReport, ...]
    """The storage tiers, fastest first."""
    transfers: TransferStats
    restore: RestoreStats
    saved: SaveStats
    pins: int
    """Prefixes that are pinned."""
    failed_in_a_row: int
    """Steps since the last one in which the model did any row; more than a few: it is dead."""
    tenant_blocks: dict[str, int]
    """Blocks, cached or held, by tenant with a quota, ``"*"`` for all others; empty without quotas."""
