"""Desk: which replica gets a request, and the books about it. What the router does, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from ....policies.routing.base import Choice, Reason, ReplicaId, RoutedRequest
from ....policies.routing.fleet_view import FleetView, Placement
from ..base import Routed, Scheme, Wanted
from ..containment import ContainedRouter
from ..routing import made_router
from .seams import Assignment, Pending, Result
from .ticket import Ticket

UNKNOWN: Final = RoutedRequest((), 0, 0, 0)
"""Of a call that brought no ticket."""


class CallLater(Protocol):
    """As of an event loop."""

    def __call__(self, delay: float, callback: Callable[[], None], /) -> object: ...


@dataclass(slots=True)
class _Assigned:
    """A request on its way to a replica, or there."""

    placement: Placement
    ticket: Ticket
    result: Result | None = None
    """Once it is there."""


class Desk:
    """Ranks replicas for requests and keeps their placements. All calls from one thread."""

    def __init__(
        self, policy: str, options: Mapping[str, object], *, half_life: float, clock: Callable[[], float]
    ) -> None:
        """As for :meth:`~octavo.engine.fleet.ray.router.Router.initialize_state`.

        :raises PluginError: when there is no such policy.
        """
        self.view = FleetView(clock=clock, half_life=half_life)
        self._policy = ContainedRouter(made_router(policy, options), clock=clock)
        self._assigned: dict[str, _Assigned] = {}
        """By Ray's id of the request."""

    def rank(self, pending: Pending) -> Sequence[ReplicaId]:
        """Replicas for a request, best first; the first one counts as chosen. None: it is refused, or nobody is known.

        What it found goes into the request's ticket.
        """
        ticket = ticket_of(pending)
        if not self.view.replicas or self._is_refused(pending, ticket.wanted):
            return ()
        choice = self._choice(ticket.wanted)
        self._place(pending, choice)
        return choice.replicas

    def _is_refused(self, pending: Pending, wanted: Wanted) -> bool:
        if wanted.only is None or wanted.only in self.view:
            return False
        ticket_of(pending).problem = f"the replica {wanted.only} is not there any more"
        pending.future.cancel()
        return True

    def _choice(self, wanted: Wanted) -> Choice:
        if wanted.only is not None:
            return Choice((wanted.only,), self._matched(wanted.request, wanted.only), Reason.TURN)
        return self._policy.choose(wanted.request, self.view)

    def _matched(self, request: RoutedRequest, replica: ReplicaId) -> int:
        return self.view.matched(request.names).get(replica, 0)

    def _scheme(self, replica: ReplicaId) -> Scheme | None:
        status = self.view.status(replica)
        return Scheme(status.namespace, status.block_tokens) if status is not None and status.namespace else None

    def _place(self, pending: Pending, choice: Choice) -> None:
        request, ticket, replica = pending.metadata.internal_request_id, ticket_of(pending), choice.replicas[0]
        self._end(request)
        reason = choice.reason if ticket.wanted.only is None else None
        ticket.routed = Routed(reason, choice.matched, self.view.load(replica))
        ticket.scheme = self._scheme(replica)
        placement = self.view.placed(ticket.wanted.request, replica, choice.matched)
        self._assigned[request] = mine = _Assigned(placement, ticket)

        def resolved(future: Assignment) -> None:
            if future.cancelled() and self._assigned.get(request) is mine:  # no replica got it, so none will end it
                self._end(request)

        pending.future.add_done_callback(resolved)

    def taken(self, pending: Pending, replica: ReplicaId, result: Result) -> None:
        """``replica`` has it."""
        request = pending.metadata.internal_request_id
        if request not in self._assigned:  # it is over already: Ray tells of a short one's end before its beginning
            return
        if self._assigned[request].placement.replica != replica:  # those before it in the ranking were full
            if replica not in self.view:
                self._end(request)
                return
            matched = self._matched(ticket_of(pending).wanted.request, replica)
            self._place(pending, Choice((replica,), matched, Reason.OVERLOAD))
        self._assigned[request].result = result

    def completed(self, request: str, replica: ReplicaId) -> None:
        """However it ended there. It may be elsewhere by now."""
        assigned = self._assigned.get(request)
        if assigned is not None and assigned.placement.replica == replica:
            self._end(request)

    def retire(self, replica: ReplicaId, patience: float, call_later: CallLater) -> None:
        """It is to end: cancel what it still has in hand after ``patience`` seconds."""
        for request, assigned in self._assigned.items():
            if assigned.placement.replica == replica:
                call_later(patience, partial(self._cut_off, request, assigned))

    def sweep(self) -> None:
        """Forget what is over for those who asked: Ray does not tell of a request that was cancelled just when it had a
        replica.
        """
        for request in [each for each, assigned in self._assigned.items() if assigned.ticket.is_over]:
            self._end(request)

    def in_flight(self, replica: ReplicaId) -> int:
        """Requests of our own there."""
        return sum(each.placement.replica == replica for each in self._assigned.values())

    def _cut_off(self, request: str, assigned: _Assigned) -> None:
        if assigned.placement.replica in self.view:  # it was only away: Ray had lost sight of it for a while
            return
        if self._assigned.get(request) is assigned and assigned.result is not None:
            assigned.result.cancel()

    def _end(self, request: str) -> None:
        assigned = self._assigned.pop(request, None)
        if assigned is not None:
            self.view.finished(assigned.placement)


def ticket_of(pending: Pending) -> Ticket:
    """The one that came with it, or one that asks for nothing: not all calls of a handle are requests of ours."""
    return next((each for each in pending.args if isinstance(each, Ticket)), Ticket(Wanted(UNKNOWN)))
