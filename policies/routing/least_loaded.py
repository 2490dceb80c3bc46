"""To who has the least to do."""

from __future__ import annotations

from .base import Choice, Reason, RoutedRequest, RoutingPolicy
from .fleet_view import FleetView
from .ranking import choice, ranked, standing


class LeastLoaded(RoutingPolicy):
    """The replica with the lowest load in tokens; of several the one that joined first."""

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        return choice(request, fleet, Reason.LOAD, ranked(standing(request, fleet), fleet.loads))
