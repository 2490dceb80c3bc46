"""Explanation: how much of a prompt the cache would have, where, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .kv import DeviceExplanation


class TierHit(NamedTuple):
    """Tokens in a row that one tier has."""

    tier: str
    tokens: int


class Explanation(NamedTuple):
    """What a request would find now. Nothing was changed by asking."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens that need not be computed if everything is loaded; at least one always is."""
    device_tokens: int
    """Of them on the device."""
    tier_tokens: tuple[TierHit, ...]
    """What follows them in the tiers, in the order of the prompt."""
    reason: str
    """Why it is not more, in words; empty when nothing but the rest of a block is missing."""
    device: DeviceExplanation
    """What is known about the first block that the device lacks."""


def explained(prompt_tokens: int, device: DeviceExplanation, tiers: Sequence[str], block_size: int) -> Explanation:
    """Put what the device and what the tiers say together.

    ``tiers``: where each of the blocks lies that follow those on the device, as far as they lie anywhere.
    """
    below = tuple(TierHit(tier, len(list(run)) * block_size) for tier, run in groupby(tiers))
    whole = device.cached_tokens if device.missing_from is None else device.missing_from
    loaded = whole + len(tiers) * block_size
    cached = min(max(device.cached_tokens, loaded), prompt_tokens - 1)
    device_tokens = whole if below else device.cached_tokens
    is_whole = prompt_tokens - cached <= max(block_size - 1, 1)
    reason = "" if is_whole else _reason(device, cached, at_edge_of_device=not below)
    return Explanation(prompt_tokens, cached, device_tokens, below, reason, device)


def _reason(device: DeviceExplanation, cached: int, *, at_edge_of_device: bool) -> str:
    if not at_edge_of_device:
        return f"no tier has the block after token {cached}"
    reasons = []
    if device.evicted is not None:
        gone = device.evicted
        reasons.append(
            f"the block at token {device.missing_from} was evicted {gone.seconds_ago:.1f} s ago by {gone.policy} "
            f"({gone.reason}), and no tier has it"
        )
    if device.relative is not None:
        reasons.append(f"the nearest stored prefix differs at token {device.relative.position}")
    if device.other_salt:
        reasons.append("another namespace (tenant, adapter or model) has more of it, which is not shared")
    return "; ".join(reasons) or f"what comes after token {cached} was never seen here, or was forgotten"
