"""A request under way through a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from ...replica import Lease
from ...routing.base import ReplicaId
from ...routing.fleet_view import Placement
from ..timeline import Demand
from ..trace import Request


@dataclass(slots=True, eq=False)
class Flight:
    """From its arrival to its answer, over all replicas that try it."""

    request: Request
    demand: Demand
    placement: Placement | None = None
    """What the router has on its books for it."""
    avoid: frozenset[ReplicaId] = frozenset()
    """Replicas that died under it."""
    lease: Lease | None = None
    """What it holds; ``None``: it waits."""
    admitted: float = 0.0
    """When a replica last began with it."""
    first_token: float | None = None
    """When the client had the first token, as far as that is known."""
