"""Layout: how many replicas there are, what each of them gets, and how requests find them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from ....errors import InvalidRequest
from .spec import ReplicaSpec

PACKAGE = __package__
SPARE_REQUESTS = 64
"""At a replica, beside those that generate: questions of operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Settings of a deployment that are not those of its replicas.

    :raises InvalidRequest: when a value is out of range; the message names the field.
    """

    replicas: int = 2
    """At the start, and always unless ``most`` is more."""
    most: int | None = None
    """Replicas at most; more than ``replicas``: there are as many as the tokens that wait ask for, ``replicas`` at
    least."""
    waiting_tokens: float = 8192.0
    """Tokens of prompts that may wait at each replica before another one is started. Divided by the tokens that a
    replica computes in a second it is the seconds that a newcomer waits."""
    upscale_delay: float = 10.0
    """Seconds for which more replicas must be wanted until they are started ..."""
    downscale_delay: float = 300.0
    """... and for which fewer must do until one ends: a cache goes with it."""
    look_back: float = 30.0
    """Seconds over which what waits is averaged; more than 10, as that is how often replicas report it."""
    gateways: int = 1
    """Processes in front of the replicas."""
    cpus: float = 1.0
    """Of each replica."""
    gpus: float = 0.0
    """Of each replica."""
    gateway_cpus: float = 0.5
    routing: str = "prefix"
    """Who chooses the replica: a name in ``octavo.routing_policies`` or ``package.module:Class``, or ``ray``: Ray's own
    power of two choices."""
    routing_options: Mapping[str, object] = field(default_factory=dict)
    report_interval: float = 2.0
    """Seconds between two reports of a replica to the routers."""
    health_interval: float = 5.0
    """Seconds between two looks whether a replica is alive."""

    def __post_init__(self) -> None:
        for name in ("replicas", "gateways"):
            self._require(name, isinstance(getattr(self, name), int) and getattr(self, name) > 0, "must be above 0")
        for name in ("waiting_tokens", "look_back", "report_interval", "health_interval"):
            value = getattr(self, name)
            self._require(name, 0 < value < math.inf, "must be a number above 0")
        for name in ("cpus", "gpus", "gateway_cpus", "upscale_delay", "downscale_delay"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "must not be negative")
        self._require("most", self.most is None or self.most >= self.replicas, "must be at least replicas")

    def _require(self, name: str, holds: bool, message: str) -> None:
        if not holds:
            raise InvalidRequest(f"Layout: {name} {message}, not {getattr(self, name)!r:.80}")


def replica_options(spec: ReplicaSpec, layout: Layout) -> dict[str, object]:
    """For ``serve.deployment`` of a :class:`~octavo.engine.fleet.ray.replica.Replica`."""
    config = spec.engine
    number = {"num_replicas": layout.replicas} if layout.most in (None, layout.replicas) else _scaling(spec, layout)
    return {
        **number,
        "ray_actor_options": {"num_cpus": layout.cpus, "num_gpus": layout.gpus},
        "max_ongoing_requests": config.max_running + config.max_waiting + SPARE_REQUESTS,
        "graceful_shutdown_timeout_s": spec.drain_timeout + spec.save_timeout + config.close_budget,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": layout.health_interval,
        "health_check_timeout_s": max(30.0, layout.health_interval),
        "request_router_config": _routing(spec, layout),
    }


def _routing(spec: ReplicaSpec, layout: Layout) -> RequestRouterConfig:
    period = {"request_routing_stats_period_s": layout.report_interval}
    if layout.routing == "ray":
        return RequestRouterConfig(**period)
    settings = {
        "policy": layout.routing,
        "options": dict(layout.routing_options),
        "drain_timeout": spec.drain_timeout,
    }
    return RequestRouterConfig(
        request_router_class=f"{PACKAGE}.router:Router", request_router_kwargs=settings, **period
    )


def _scaling(spec: ReplicaSpec, layout: Layout) -> dict[str, object]:
    wanted = {"tokens": layout.waiting_tokens, "requests": float(spec.engine.max_running)}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=layout.replicas,
            max_replicas=layout.most,
            upscale_delay_s=layout.upscale_delay,
            downscale_delay_s=layout.downscale_delay,
            look_back_period_s=layout.look_back,
            policy=AutoscalingPolicy(policy_function=f"{PACKAGE}.scaling:WaitingTokens", policy_kwargs=wanted),
        )
    }
