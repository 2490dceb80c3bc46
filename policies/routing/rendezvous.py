"""By hash of the first blocks of the prompt, whatever is cached and whatever there is to do."""

from __future__ import annotations

from ...errors import InvalidRequest
from .base import Choice, Reason, RoutedRequest, RoutingPolicy
from .fleet_view import FleetView
from .ranking import choice, ranked, rendezvous, standing


class Rendezvous(RoutingPolicy):
    """Prompts with the same ``first_blocks`` first blocks go to the same replica; those without a whole block to the
    least loaded one. It needs no news, and a replica that joins or leaves moves as few prompts as can be.
    """

    def __init__(self, first_blocks: int = 4) -> None:
        """:raises InvalidRequest: when ``first_blocks`` is below 1."""
        if first_blocks < 1:
            raise InvalidRequest(f"rendezvous: first_blocks must be 1 or more, not {first_blocks}")
        self._first_blocks = first_blocks

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        ranks, first = standing(request, fleet), request.names[: self._first_blocks]
        if not first:
            return choice(request, fleet, Reason.LOAD, ranked(ranks, fleet.loads))
        return choice(request, fleet, Reason.UNSEEN, ranked(ranks, rendezvous(first[-1], fleet)))
