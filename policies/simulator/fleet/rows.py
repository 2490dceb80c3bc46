"""FleetRow: one line of what a simulation of fleets found. Its field names are stable."""

from __future__ import annotations

from typing import NamedTuple


class FleetRow(NamedTuple):
    """One fleet. ``None``: there are no results; see ``error``."""

    trace: str
    routing: str
    eviction: str
    replicas: int
    capacity: int
    """Blocks of each replica."""
    capacity_share: float
    """Of the different blocks of the trace, one replica."""
    block_tokens: int
    requests: int
    answered: int | None = None
    refused: int | None = None
    """Larger than the pool of a replica; all their blocks count as missed."""
    unanswered: int | None = None
    """No replica was left for them."""
    sent_again: int | None = None
    """Times that a request went to another replica because one had died."""
    input_tokens: int | None = None
    hit_tokens: int | None = None
    tier_hit_tokens: int | None = None
    hit_ratio: float | None = None
    """Prompt tokens in the cache of the replica, of all."""
    hit_ratio_with_tier: float | None = None
    """Prompt tokens there or in the shared tier, of all."""
    work_balance: float | None = None
    """Tokens computed by the busiest replica over the mean."""
    window_balance: float | None = None
    """The same in windows, weighted by the work in each."""
    request_balance: float | None = None
    """Requests of the replica that got most over the mean."""
    evicted: int | None = None
    """Blocks."""
    waits: int | None = None
    """Requests that were not begun with as they came: there was no room, or the replica died."""
    wait_p50: float | None = None
    """Seconds, as all times."""
    wait_p99: float | None = None
    ttft_p50: float | None = None
    """From arrival to the first token."""
    ttft_p99: float | None = None
    blocks_up: int | None = None
    """Written into the shared tier."""
    blocks_down: int | None = None
    """Loaded from it."""
    bytes_up: int | None = None
    bytes_down: int | None = None
    end: float | None = None
    """When the last request was answered, in seconds of the trace."""
    error: str | None = None
    """Why there are no results: a policy raised or broke its contract."""
