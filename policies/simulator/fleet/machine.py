"""One replica of a fleet: its queue, what it computes side by side, and its cache."""

from __future__ import annotations

import heapq
import math
from collections import deque
from itertools import chain, repeat
from typing import NamedTuple, Protocol

from ....errors import ContractBroken
from ...eviction.base import NAME_BYTES, EvictionPolicy
from ...eviction.priority_ttl import PriorityTtl
from ...replica import Lease, Replica
from ...routing.base import ReplicaId
from .flight import Flight
from .names import split
from .news import News
from .setting import FleetSetting, TierWrites
from .tier import Line, SharedTier


class Started(NamedTuple):
    """What a replica does for a request that it has admitted."""

    found: int
    """Blocks of the prompt that were in its cache."""
    loaded: int
    """Blocks after these that the shared tier had."""
    computed: int
    """Tokens of the prompt that nobody had."""
    end: float
    """When the answer will be complete."""


class Watcher(Protocol):
    """Who hears what happens to requests."""

    def started(self, machine: Machine, flight: Flight, did: Started) -> None:
        """It was admitted."""

    def finished(self, machine: Machine, flight: Flight, now: float) -> None:
        """Its answer is complete."""


class World(NamedTuple):
    """What all machines of a fleet have in common."""

    setting: FleetSetting
    block_tokens: int
    has_priorities: bool
    news: News
    tier: SharedTier | None
    watcher: Watcher


class _Running(NamedTuple):
    """A heap item; ``number`` is unique among those that run, so flights are never compared."""

    end: float
    number: int
    flight: Flight


class Machine:
    """Admits requests in the order in which they came. One for which there is no room waits, and all behind it do."""

    def __init__(self, index: int, world: World) -> None:
        self.index = index
        self.name: ReplicaId = str(index)
        self.waiting: deque[Flight] = deque()
        self.cache = self._new_cache(world)
        self._link = _link_of(world)
        self._world = world
        self._running: list[_Running] = []
        self._most = world.setting.max_running
        self._prefill_free_at = 0.0
        self._now = 0.0

    def take(self, flight: Flight, now: float) -> None:
        """A request comes in."""
        self.waiting.append(flight)
        self.advance(now)

    def advance(self, now: float) -> None:
        """Finish what is over by ``now``, and admit what has room then."""
        while self.waiting:
            if self._admit(self.waiting[0], now):
                self.waiting.popleft()
                self._finish_until(now)
            elif self._running and self._running[0].end <= now:
                self._finish_first()
            else:
                return
        self._finish_until(now)

    def die(self) -> list[Flight]:
        """Everything is lost; returns the requests that it had, in the order in which they arrived."""
        lost = [item.flight for item in self._running] + list(self.waiting)
        self._running.clear()
        self.waiting.clear()
        self.cache = self._new_cache(self._world)
        self._link = _link_of(self._world)
        self._prefill_free_at = 0.0
        return sorted(lost, key=lambda flight: flight.demand.number)

    # inside

    def _admit(self, flight: Flight, now: float) -> bool:
        if self._most is not None and len(self._running) >= self._most:
            return False
        self._now = now
        request, demand = flight.request, flight.demand
        loadable = self._loadable(request.names, now)
        lease = self.cache.admit(request.names, demand.private, now, priority=request.priority, tenant=request.tenant)
        if lease is None:
            if not self._running:
                raise ContractBroken("nothing runs, and yet a request that fits into the pool found no room in it")
            return False
        flight.lease, flight.admitted = lease, now
        began = now
        if loadable and self._world.tier is not None:
            found = split(request.names)[lease.found : lease.found + loadable]
            began = self._world.tier.load(found, now, self._link)
        self._publish(lease, demand.blocks, now, in_tier=loadable)
        lease.names += request.published
        self._start(flight, lease.found, loadable, began)
        return True

    def _start(self, flight: Flight, found: int, loaded: int, began: float) -> None:
        """Its prefill begins at ``began`` at the earliest, when what is loaded is there."""
        request, service, block_tokens = flight.request, self._world.setting.service, self._world.block_tokens
        computed = request.input_tokens - min((found + loaded) * block_tokens, request.input_tokens)
        if self._world.setting.shares_prefill:
            queued_until = max(self._prefill_free_at, flight.admitted)
            began = max(began, queued_until)
            # from its admission on, not from `began`: others are computed while it is loaded
            self._prefill_free_at = queued_until + computed / service.prefill_tokens_per_second
        first_token = began + computed / service.prefill_tokens_per_second
        flight.first_token = first_token if flight.first_token is None else min(flight.first_token, first_token)
        end = began + service.seconds(computed, request.output_tokens)
        heapq.heappush(self._running, _Running(end, flight.demand.number, flight))
        self._world.watcher.started(self, flight, Started(found, loaded, computed, end))

    def _loadable(self, names: bytes, now: float) -> int:
        """Blocks that the shared tier has, after those of the cache."""
        tier = self._world.tier
        return 0 if tier is None else tier.leading(split(names[self.cache.match(names).blocks * NAME_BYTES :]), now)

    def _publish(self, lease: Lease, blocks: int, now: float, *, in_tier: int = 0) -> None:
        """Its first ``blocks`` blocks are in the cache now. ``in_tier``: of those that are new there, so many came from
        the shared tier."""
        new = split(lease.names[lease.published * NAME_BYTES : blocks * NAME_BYTES])
        world, rate = self._world, self._world.setting.service.prefill_tokens_per_second
        self.cache.publish(lease, blocks, now, world.block_tokens / rate)
        world.news.stored(self.name, new, now)
        if world.tier is not None and world.tier.setting.writes is TierWrites.THROUGH:
            world.tier.write(new[in_tier:], now)

    def _finish_until(self, now: float) -> None:
        while self._running and self._running[0].end <= now:
            self._finish_first()

    def _finish_first(self) -> None:
        now, _, flight = heapq.heappop(self._running)
        self._now = now
        lease = flight.lease
        if lease is None:
            raise ContractBroken("a request that runs holds nothing")
        self._publish(lease, len(lease.names) // NAME_BYTES, now)
        self.cache.finish(lease, now)
        self._world.watcher.finished(self, flight, now)

    def _evicted(self, names: bytes, depth: int) -> None:
        gone, tier = split(names), self._world.tier
        self._world.news.removed(self.name, gone, self._now)
        if tier is not None and tier.setting.writes is TierWrites.BACK:
            tier.write(gone, self._now)

    def _new_cache(self, world: World) -> Replica:
        setting = world.setting
        policy = setting.eviction(setting.capacity)
        if world.has_priorities and not isinstance(policy, PriorityTtl):
            policy = _keeping_priorities(setting, policy)
        return Replica(setting.capacity, policy, block_tokens=world.block_tokens, on_evicted=self._evicted)


def _link_of(world: World) -> Line:
    return Line(math.inf if world.tier is None else world.tier.setting.bytes_per_second)


def _keeping_priorities(setting: FleetSetting, first: EvictionPolicy) -> PriorityTtl:
    """``first`` keeps one level of priority, and others of its kind the rest."""
    policies = chain([first], (setting.eviction(setting.capacity) for _ in repeat(None)))
    return PriorityTtl(setting.capacity, lambda _: next(policies))
