"""Requests, traces and routing policies for tests of simulated fleets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from octavo.policies.eviction.base import NAME_BYTES
from octavo.policies.routing.base import Choice, Reason, RoutedRequest, RoutingPolicy
from octavo.policies.routing.fleet_view import FleetView
from octavo.policies.simulator import ListTrace, Request, TraceInfo

BLOCK = 4
INFO = TraceInfo("test", BLOCK)
Word = tuple[int, ...]


class InTurn(RoutingPolicy):
    """One after another, whatever they hold."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        self._turn += 1
        first = self._turn % len(fleet.replicas)
        return Choice((*fleet.replicas[first:], *fleet.replicas[:first]), 0, Reason.TURN)


class ToFirst(RoutingPolicy):
    """Always the one that has been there longest, unless it failed the request."""

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        ranked = sorted(fleet.replicas, key=lambda replica: replica in request.avoid)
        return Choice(ranked, 0, Reason.TURN)


class ToHolder(RoutingPolicy):
    """Who has most of the prompt, as far as the router knows; of equals, who has been there longest."""

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        matched = fleet.matched(request.names)
        ranked = sorted(fleet.replicas, key=lambda replica: -matched.get(replica, 0))
        return Choice(ranked, matched.get(ranked[0], 0), Reason.PREFIX)


class ToNobody(RoutingPolicy):
    """It breaks the contract."""

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        return Choice(("stranger",), 0, Reason.TURN)


def names(word: Word) -> bytes:
    """A block for each letter; the name stands for all letters so far."""
    prefixes = [word[: end + 1] for end in range(len(word))]
    return b"".join(
        sum((letter + 1) * 4**place for place, letter in enumerate(prefix)).to_bytes(NAME_BYTES, "little")
        for prefix in prefixes
    )


class Ask(NamedTuple):
    word: Word
    tail: int = 0
    """Tokens beyond its whole blocks."""
    output: int = 0
    arrival: float = 0.0

    @property
    def own(self) -> int:
        return math.ceil((self.tail + self.output) / BLOCK)

    @property
    def tokens(self) -> int:
        return len(self.word) * BLOCK + self.tail

    def request(self) -> Request:
        return Request(self.arrival, self.tokens, self.output, names(self.word))


def trace_of(asks: Iterable[Ask]) -> ListTrace:
    return ListTrace(INFO, [ask.request() for ask in asks])
