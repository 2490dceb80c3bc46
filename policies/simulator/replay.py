"""Replay: a trace through a policy, which gets the events that it would get in the engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat

from ...errors import InvalidRequest
from ..eviction.base import NAME_BYTES, EvictionPolicy
from ..eviction.priority_ttl import PriorityTtl
from ..replica import Lease, Replica
from .results import Outcome
from .service import DEFAULT, Service
from .timeline import Demand, demands, run
from .trace import Request, Trace


def replay(
    trace: Trace,
    policy: EvictionPolicy,
    capacity: int,
    service: Service = DEFAULT,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Send a trace through ``policy``, fresh and made for ``capacity``, in a pool of so many blocks.

    The blocks of a prompt are in the cache from its admission on, for the engine lets one that asks for a prefix in the
    making wait for it; they stay until the request is over at the least. ``on_progress(requests so far)`` is called now
    and then. Where the trace has priorities, they are kept as the engine keeps them, whatever the policy.

    :raises InvalidRequest: when ``capacity`` is below 1, or a rate not above 0.
    :raises TraceError: when the trace cannot be read.
    :raises ContractBroken: when the policy names what cannot go, or nothing. What it raises itself passes through.
    """
    if capacity < 1:
        raise InvalidRequest(f"the capacity is {capacity}; a pool has a block at least")
    if trace.has_priorities and not isinstance(policy, PriorityTtl):
        policy = _keeping_priorities(policy, capacity)
    block_tokens = trace.info.block_tokens
    pool = _ReplicaPool(capacity, policy, block_tokens, service.checked())
    return run(demands(trace), pool, block_tokens, service, on_progress)


class _ReplicaPool:
    """The engine's cache without contents."""

    def __init__(self, capacity: int, policy: EvictionPolicy, block_tokens: int, service: Service) -> None:
        self.capacity = capacity
        self._replica = Replica(capacity, policy, block_tokens=block_tokens)
        self._block_seconds = block_tokens / service.prefill_tokens_per_second  # 0, unknown, where it takes no time

    @property
    def evicted(self) -> int:
        return self._replica.evicted

    @property
    def wanted_again(self) -> int:
        return self._replica.wanted_again

    def admit(self, request: Request, demand: Demand, now: float) -> tuple[Lease, int] | None:
        priority, tenant = request.priority, request.tenant
        lease = self._replica.admit(request.names, demand.private, now, priority=priority, tenant=tenant)
        if lease is None:
            return None
        self._replica.publish(lease, demand.blocks, now, self._block_seconds)
        lease.names += request.published
        return lease, lease.found

    def finish(self, held: Lease, now: float) -> None:
        self._replica.publish(held, len(held.names) // NAME_BYTES, now, self._block_seconds)
        self._replica.finish(held, now)


def _keeping_priorities(policy: EvictionPolicy, capacity: int) -> PriorityTtl:
    """``policy`` keeps one level of priority, and others of its class the rest."""
    policies = chain([policy], (type(policy)(capacity) for _ in repeat(None)))
    return PriorityTtl(capacity, lambda _: next(policies))
