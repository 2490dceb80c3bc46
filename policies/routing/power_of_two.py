"""Two at random, and of these the one with less to do.

M. Mitzenmacher, "The power of two choices in randomized load balancing", 2001; the router that Ray Serve has by default
does the same.
"""

from __future__ import annotations

import numpy as np

from .base import Choice, Reason, RoutedRequest, RoutingPolicy
from .fleet_view import FleetView
from .ranking import choice, standing


class PowerOfTwo(RoutingPolicy):
    """Of two replicas drawn at random the one with fewer requests in flight."""

    def __init__(self, seed: int = 0) -> None:
        """``seed``: of what is drawn."""
        self._random = np.random.default_rng(seed)

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        ranks = standing(request, fleet)
        order = self._random.permutation(len(fleet))
        order = order[np.argsort(ranks[order], kind="stable")]
        pair, requests = order[:2], fleet.requests
        if len(pair) == 2 and ranks[pair[0]] == ranks[pair[1]] and requests[pair[1]] < requests[pair[0]]:
            order[:2] = pair[::-1].copy()
        return choice(request, fleet, Reason.LOAD, order)
