"""Applications for ``serve run``: replicas, their router, and a gateway with the OpenAI routes in front."""

from __future__ import annotations

from typing import Final, TypeAlias

from ray import serve

from .fleet import PATIENCE
from .ingress import Ingress
from .layout import Layout, replica_options
from .replica import Replica
from .spec import ReplicaSpec

Application: TypeAlias = object
"""``ray.serve.Application``."""
MOST_REQUESTS: Final = 10_000
"""At one gateway at the same time; more wait in Ray's proxies."""


def application(spec: ReplicaSpec, layout: Layout | None = None, *, patience: float = PATIENCE) -> Application:
    """What ``serve.run`` runs. ``patience``: seconds that a request waits for a replica that can take it."""
    chosen = layout or Layout()
    gateway = serve.deployment(
        serve.ingress()(Ingress),
        name="Gateway",
        num_replicas=chosen.gateways,
        ray_actor_options={"num_cpus": chosen.gateway_cpus},
        max_ongoing_requests=MOST_REQUESTS,
    )
    bound: Application = gateway.bind(replicas_of(spec, chosen), spec, patience)
    return bound


def replicas_of(spec: ReplicaSpec, layout: Layout) -> Application:
    """The replicas alone, for a gateway of your own around a :class:`~octavo.engine.fleet.ray.fleet.RayFleet`: the
    handle that ``serve.run`` returns is the one it wants.
    """
    bound: Application = serve.deployment(Replica, name="Replica", **replica_options(spec, layout)).bind(spec)
    return bound
