"""What a fleet is: how many replicas, what each can do, who routes, what is shared and what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from ....errors import InvalidRequest
from ...eviction.base import EvictionPolicy
from ...eviction.lru import Lru
from ...routing.base import RoutingPolicy
from ..service import DEFAULT, Service


class TierWrites(StrEnum):
    """When blocks go down into the shared tier."""

    BACK = "back"
    """When a replica evicts them."""
    THROUGH = "through"
    """As soon as they are computed."""


class TierSetting(NamedTuple):
    """A store that all replicas share: the least recently used blocks leave it first."""

    capacity: int | None = None
    """Blocks; ``None``: no bound."""
    writes: TierWrites = TierWrites.BACK
    token_bytes: int = 131_072
    """Of one token in all layers. The default is that of Llama 3 8B in 16 bits: 32 layers, 8 heads of 128, key and
    value."""
    bytes_per_second: float = math.inf
    """Of the link of each replica, on which loads come one after another. Writes go the other way and wait for none."""
    store_bytes_per_second: float = math.inf
    """Of the store, for all replicas and both ways together."""
    latency: float = 0.0
    """Seconds until the first byte of a load is there."""
    lost_at: float = math.inf
    """When the store is lost, in seconds of the trace: from then on it is empty and takes nothing."""


class Kill(NamedTuple):
    """A replica that dies. Its cache is gone; the router knows at once, and sends its requests again."""

    at: float
    """Seconds of the trace."""
    replica: int
    """From 0."""
    back_after: float = math.inf
    """Seconds until it is there again, empty; infinite: never."""


class FleetSetting(NamedTuple):
    """A fleet of equal replicas, and who routes to them."""

    replicas: int
    capacity: int
    """Blocks of each."""
    routing: Callable[[], RoutingPolicy]
    """Makes the policy. Goes to other processes: a class, or a function of a module."""
    eviction: Callable[[int], EvictionPolicy] = Lru
    """Makes the policy of one replica, for its capacity."""
    service: Service = DEFAULT
    max_running: int | None = None
    """Requests that a replica computes side by side; the others wait. ``None``: as many as find room."""
    shares_prefill: bool = False
    """Whether the prefills of one replica come one after another; otherwise each has the whole rate for itself. A
    load from the shared tier holds up nobody else's: the work after it counts from the admission of its request on."""
    news_delay: float | None = 0.0
    """Seconds until the router hears what a replica stored or evicted. ``None``: it never does, and knows only what it
    has placed itself."""
    half_life: float = 30.0
    """Seconds, of the work placed lately: see :class:`~octavo.policies.routing.fleet_view.FleetView`."""
    tier: TierSetting | None = None
    kills: Sequence[Kill] = ()
    window: float = 60.0
    """Seconds over which the load of replicas is compared."""

    def checked(self) -> FleetSetting:
        """This one.

        :raises InvalidRequest: naming what is wrong.
        """
        self.service.checked()
        for what, number in (
            ("replicas", self.replicas),
            ("capacity", self.capacity),
            ("max_running", self.max_running),
        ):
            if number is not None and number < 1:
                raise InvalidRequest(f"{what} is {number}; it must be 1 at least")
        for what, seconds in (("window", self.window), ("half_life", self.half_life)):
            if not 0 < seconds < math.inf:
                raise InvalidRequest(f"{what} is {seconds}; it must be seconds above 0")
        if self.news_delay is not None and not 0 <= self.news_delay < math.inf:
            raise InvalidRequest(f"news_delay is {self.news_delay}; it must be seconds, 0 or more, or none")
        if self.tier is not None:
            _check_tier(self.tier)
        for kill in self.kills:
            _check_kill(kill, self.replicas)
        return self


def _check_tier(tier: TierSetting) -> None:
    if tier.capacity is not None and tier.capacity < 1:
        raise InvalidRequest(f"the shared tier has {tier.capacity} blocks; it must have 1 at least")
    if tier.token_bytes < 1:
        raise InvalidRequest(f"token_bytes is {tier.token_bytes}; it must be 1 at least")
    if not (tier.bytes_per_second > 0 and tier.store_bytes_per_second > 0):
        raise InvalidRequest("the bandwidth of the shared tier must be above 0, and may be infinite")
    if not 0 <= tier.latency < math.inf or not tier.lost_at >= 0:
        raise InvalidRequest("latency and loss of the shared tier are seconds, 0 or more")


def _check_kill(kill: Kill, replicas: int) -> None:
    if not 0 <= kill.replica < replicas:
        raise InvalidRequest(f"there is no replica {kill.replica} to kill: they are 0 ... {replicas - 1}")
    if not 0 <= kill.at < math.inf or not kill.back_after > 0:
        raise InvalidRequest(f"a replica dies at a time of 0 or more and is back later, not at {kill.at}")
