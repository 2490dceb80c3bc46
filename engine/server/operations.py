"""From what the engine tells its operator to the forms of the admin routes."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from ...storage.manager.tier_manager import TierReport
from ..counters import EngineStats
from ..explanation import Explanation
from ..insight.cache_view import CacheView, NodeView
from ..pins import Pin
from ..request import Chat, Prompt
from .errors import invalid
from .wire import admin, operations

_RUNS: Final = re.compile(rb"(.)\1*")


def prompt_of(form: operations.Prefix, *, opens_turn: bool = False) -> Prompt:
    """The prompt that a form gives. ``opens_turn``: the assistant's turn follows on messages, as in a request; without
    it they are the beginning of a conversation.

    :raises ApiError: 400 when it gives none, or two.
    """
    if (form.prompt is None) == (form.messages is None):
        raise invalid("give a prompt, or messages", "prompt" if form.messages is None else "messages")
    if form.messages is not None:
        return Chat(form.messages, form.tools or (), opens_turn=opens_turn)
    return form.prompt if form.prompt is not None else ""


def has_prompt(form: operations.Prefix) -> bool:
    """Whether a form gives any."""
    return form.prompt is not None or form.messages is not None


def own_explained(found: Explanation) -> operations.OwnExplained:
    """What a client is told: nothing of what others have stored, not even within its own tenant."""
    tiers = [operations.TierTokens(hit.tier, hit.tokens) for hit in found.tier_tokens]
    return operations.OwnExplained(found.prompt_tokens, found.cached_tokens, found.device_tokens, tiers, found.reason)


def explained(found: Explanation) -> operations.Explained:
    """What an operator is told."""
    own, device = own_explained(found), found.device
    nearest, evicted = device.relative, device.evicted
    return operations.Explained(
        **msgspec.structs.asdict(own),
        missing_from=device.missing_from,
        evicted=None if evicted is None else operations.EvictedBefore(*evicted),
        nearest=None if nearest is None else operations.Nearest(nearest.position, nearest.start, list(nearest.stored)),
        other_has_more=device.other_salt,
    )


def run_length(states: bytes) -> str:
    """``b"iiihff"`` as ``i3hf2``."""
    return "".join(
        run.group(1).decode("ascii") + (str(run.end() - run.start()) if run.end() - run.start() > 1 else "")
        for run in _RUNS.finditer(states)
    )


def shown(view: CacheView, *, takes_snapshots: bool) -> admin.CacheView:
    """The cache view as the page gets it. ``takes_snapshots``: whether the server has a folder for them."""
    stats = view.stats
    cache, pool = stats.cache, view.pool
    return admin.CacheView(
        time=view.wall,
        block_size=view.block_size,
        eviction_policy=cache.policy,
        pool=admin.PoolMap(run_length(pool.map), *pool[1:]),
        tree_blocks=view.tree_blocks,
        nodes=[_node(node) for node in view.nodes],
        tiers=[_tier(report) for report in stats.tiers],
        evictions=[
            admin.EvictedRun(max(view.when - each.when, 0.0), each.blocks, each.reason, each.policy)
            for each in view.evictions
        ],
        counters=admin.CacheCounters(
            prefix_hit_tokens=cache.prefix_hit_tokens,
            prefix_query_tokens=cache.prefix_query_tokens,
            prefix_hits=cache.prefix_hits,
            tier_hit_tokens=cache.tier_hit_tokens,
            evicted_blocks=sum(cache.evictions.values()),
            evicted_then_wanted=cache.evicted_then_wanted,
            computed_tokens=stats.batch_tokens,
            generated_tokens=stats.generated_tokens,
        ),
        requests=admin.RequestCounts(stats.running, stats.waiting, stats.loading, stats.preemptions),
        takes_snapshots=takes_snapshots,
    )


def stats(found: EngineStats) -> admin.Stats:
    """All counters, by the names that they have in the engine."""
    return msgspec.convert(_plain(found), admin.Stats)


def pin_state(pin: Pin, now: float) -> operations.PinState:
    """``now``: on the engine's monotonic clock."""
    left = None if pin.expires is None else max(pin.expires - now, 0.0)
    return operations.PinState(pin.pin_id, pin.tokens, left, pin.tenant)


def _node(node: NodeView) -> admin.TreeNode:
    return admin.TreeNode(**{**node._asdict(), "first_blocks": list(node.first_blocks)})


def _tier(report: TierReport) -> admin.TierState:
    tier = report.tier
    return admin.TierState(
        name=report.name,
        blocks=tier.blocks,
        bytes=tier.bytes,
        capacity=tier.capacity,
        hits=report.hits,
        evicted=tier.evicted,
        queued_bytes=report.queued_bytes,
        healthy=report.opened and tier.healthy,
        problem=tier.problem,
    )


def _plain(value: object) -> object:
    """Named tuples as mappings, so that their fields keep their names in JSON."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value
