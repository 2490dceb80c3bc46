"""Row: one line of what a simulation found, the same for tables, JSON and plots. Its field names are stable."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a row is about."""

    POLICY = "policy"
    OPTIMUM = "optimum"
    """Offline: it knows the future. Under the same pins and the same timeline as the policies."""
    BOUND = "bound"
    """What no policy and no timing can exceed with the requests in this order."""
    LIMIT = "limit"
    """Nothing is ever evicted."""


class Row(NamedTuple):
    """A policy at a capacity. ``None``: unknown, or without meaning for this kind of row."""

    trace: str
    kind: Kind
    policy: str
    """Its name, or that of the kind."""
    capacity: int
    """Blocks in the pool. With ``LIMIT``: as many as the trace has different ones."""
    capacity_share: float
    """Of the different blocks of the trace."""
    block_tokens: int
    requests: int
    refused: int | None = None
    """Requests that are larger than the pool; all their blocks count as missed."""
    uses: int | None = None
    """Blocks that requests asked for."""
    hits: int | None = None
    """Blocks that they found."""
    hit_ratio: float | None = None
    """``hits / uses``."""
    hit_tokens: int | None = None
    input_tokens: int | None = None
    saved_seconds: float | None = None
    """Prefill seconds that hits saved, at the prefill rate."""
    saved_flops: float | None = None
    """Floating-point operations that hits saved, in the cost model's geometry."""
    evicted: int | None = None
    """Blocks."""
    evicted_then_wanted: int | None = None
    """Evicted runs that a request asked for while they were remembered."""
    waits: int | None = None
    """Requests that found no room when they came."""
    wait_seconds: float | None = None
    """Of all requests together, from arrival to admission."""
    gap_closed: float | None = None
    """Share of the way from ``lru`` to the optimum, at this capacity: 0 is no better than ``lru``."""
    error: str | None = None
    """Why there are no results: the policy raised or broke its contract."""
