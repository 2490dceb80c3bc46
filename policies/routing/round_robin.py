"""One after the other."""

from __future__ import annotations

import numpy as np

from .base import Choice, Reason, RoutedRequest, RoutingPolicy
from .fleet_view import FleetView
from .ranking import choice, ranked, standing


class RoundRobin(RoutingPolicy):
    """The replicas in turn, in the order in which they joined."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        ranks = standing(request, fleet)
        allowed = ranks == ranks.min()
        turns = (np.cumsum(allowed) - 1 - self._turn) % np.count_nonzero(allowed)
        self._turn += 1
        return choice(request, fleet, Reason.TURN, ranked(ranks, turns))
