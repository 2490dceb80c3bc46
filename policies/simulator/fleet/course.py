"""The simulation: a trace through a fleet, event by event.

Requests arrive, a router gives each to a replica, replicas admit and answer them, some die. The router is the live one:
the same books, the same policies, and it hears of what the caches hold as late as it is told to. Only of answers it
knows more: how long they will be, where a live one guesses.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from ....errors import ContractBroken
from ...routing.base import RoutedRequest
from ...routing.fleet_view import FleetView
from ..timeline import demand_of
from ..trace import Request, Trace
from .flight import Flight
from .machine import Machine, Started, World
from .names import split
from .news import News
from .outcome import FleetOutcome, Tally
from .setting import FleetSetting
from .tier import SharedTier

_EVERY = 256  # requests between two words on progress


def simulate(trace: Trace, setting: FleetSetting, *, on_progress: Callable[[int], None] | None = None) -> FleetOutcome:
    """Send a trace through a fleet. Deterministic, as far as the policies are.

    The blocks of a prompt are in the cache of its replica from its admission on, generated ones when it is answered, as
    in :func:`~octavo.policies.simulator.replay.replay`: one replica with everything else off does what that does.
    ``on_progress(requests so far)`` is called now and then, and at the end.

    Held in memory: the caches, about 200 bytes for each block of the shared tier, what the router knows, and 16 bytes
    for each request.

    :raises InvalidRequest: when the setting is wrong.
    :raises TraceError: when the trace cannot be read.
    :raises ContractBroken: when a policy names what cannot be. What it raises itself passes through.
    """
    course = _Course(trace, setting.checked())
    count = 0
    for count, request in enumerate(trace, 1):
        course.arrive(request)
        if on_progress is not None and not count % _EVERY:
            on_progress(count)
    if on_progress is not None:
        on_progress(count)
    return course.close()


class _Kind(IntEnum):
    """Of an event. Of those of one moment the lower ones come first."""

    PROGRESS = 0
    BACK = 1
    DEATH = 2


class _Event(NamedTuple):
    at: float
    kind: _Kind
    number: int
    replica: int


class _Course:
    """The clock, what is going to happen, and everybody whom it concerns."""

    def __init__(self, trace: Trace, setting: FleetSetting) -> None:
        self._setting = setting
        self._block_tokens = trace.info.block_tokens
        self._now = 0.0
        self._events: list[_Event] = []
        self._tally = Tally(setting.replicas, self._block_tokens, setting.window)
        self._evicted = self._wanted_again = 0
        self._stranded: deque[Flight] = deque()
        self._policy = setting.routing()
        self._view = FleetView(clock=lambda: self._now, half_life=setting.half_life)
        self._news = News(self._view, setting.news_delay)
        self._tier = None if setting.tier is None else SharedTier(setting.tier, self._block_tokens)
        world = World(setting, self._block_tokens, trace.has_priorities, self._news, self._tier, self)
        self._machines = [Machine(index, world) for index in range(setting.replicas)]
        self._alive = {machine.name: machine for machine in self._machines}
        for name in self._alive:
            self._view.join(name)
        for number, kill in enumerate(setting.kills):
            self._plan(kill.at, _Kind.DEATH, number, kill.replica)

    # what happens

    def arrive(self, request: Request) -> None:
        """The next request of the trace."""
        self._run_until(request.arrival)
        self._now = max(self._now, request.arrival)
        demand = demand_of(request, self._tally.requests, self._block_tokens)
        self._tally.requests += 1
        if demand.blocks + demand.private > self._setting.capacity:
            self._tally.refuse(request, demand.blocks)
        else:
            self._route(Flight(request, demand))

    def close(self) -> FleetOutcome:
        """Let everything come to its end."""
        self._run_until(math.inf)
        self._tally.unanswered = len(self._stranded)
        for machine in self._machines:
            self._count_cache(machine)
        up, down = (0, 0) if self._tier is None else (self._tier.blocks_up, self._tier.blocks_down)
        size = 0 if self._tier is None else self._tier.block_bytes
        return self._tally.outcome(
            evicted=self._evicted, wanted_again=self._wanted_again, blocks_up=up, blocks_down=down, block_bytes=size
        )

    def started(self, machine: Machine, flight: Flight, did: Started) -> None:
        """A replica has admitted a request."""
        self._plan(did.end, _Kind.PROGRESS, flight.demand.number, machine.index)
        self._tally.start(machine.index, flight, did)

    def finished(self, machine: Machine, flight: Flight, now: float) -> None:
        """A replica has answered a request."""
        self._strike(flight)
        self._tally.answer(flight, now)

    # inside

    def _plan(self, at: float, kind: _Kind, number: int, replica: int) -> None:
        heapq.heappush(self._events, _Event(at, kind, number, replica))

    def _run_until(self, now: float) -> None:
        while self._events and self._events[0].at <= now:
            event = heapq.heappop(self._events)
            self._now = max(self._now, event.at)
            self._happen(event, self._machines[event.replica])

    def _happen(self, event: _Event, machine: Machine) -> None:
        if event.kind is _Kind.PROGRESS:
            machine.advance(event.at)
        elif event.kind is _Kind.DEATH:
            self._kill(event, machine)
        elif machine.name not in self._alive:
            self._alive[machine.name] = machine
            self._view.join(machine.name)
            waiting, self._stranded = self._stranded, deque()
            for flight in waiting:
                self._route(flight)

    def _kill(self, event: _Event, machine: Machine) -> None:
        if machine.name not in self._alive:
            return
        self._count_cache(machine)
        lost = machine.die()
        for flight in lost:
            self._strike(flight)
        del self._alive[machine.name]
        self._view.leave(machine.name)
        self._news.forget(machine.name)
        back_at = self._now + self._setting.kills[event.number].back_after
        if back_at < math.inf:
            self._plan(back_at, _Kind.BACK, event.number, event.replica)
        for flight in lost:
            self._send_again(flight, machine)

    def _send_again(self, flight: Flight, machine: Machine) -> None:
        if flight.first_token is not None and flight.first_token > self._now:
            flight.first_token = None  # the client never saw it
        flight.avoid |= {machine.name}
        flight.lease = None
        self._tally.sent_again += 1
        self._route(flight)

    def _route(self, flight: Flight) -> None:
        if not self._alive:
            self._stranded.append(flight)
            return
        self._news.deliver(self._now)
        asked = flight.request
        request = RoutedRequest(
            split(asked.names), asked.input_tokens, asked.output_tokens, self._block_tokens, flight.avoid
        )
        choice = self._policy.choose(request, self._view)
        chosen = self._alive.get(choice.replicas[0]) if choice.replicas else None
        if chosen is None:
            raise ContractBroken(f"{type(self._policy).__name__} chose {choice.replicas!r}, and there is none of these")
        flight.placement = self._view.placed(request, chosen.name, choice.matched)
        chosen.take(flight, self._now)

    def _strike(self, flight: Flight) -> None:
        """Off the router's books."""
        if flight.placement is not None:
            self._view.finished(flight.placement)
            flight.placement = None

    def _count_cache(self, machine: Machine) -> None:
        self._evicted += machine.cache.evicted
        self._wanted_again += machine.cache.wanted_again
