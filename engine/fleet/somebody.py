"""What one replica answers: generating, what is stored on one of them, and what any of them knows."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from opentelemetry.trace import Span
from starlette.types import ASGIApp

from ...policies.routing.base import ReplicaId, RoutedRequest
from ..server.call import Call
from ..server.errors import ApiError
from .base import Fleet, HttpRequest, Wanted
from .forwarding import Forwarding, below
from .naming import RESPONSES, PromptNaming
from .owners import Birth, Owners, is_response_id
from .passing import Passing, passed_on

LIGHT: Final = RoutedRequest((), 1, 0, 1)
"""What costs a replica next to nothing."""


class Somebody:
    """The handlers of requests that one replica answers."""

    def __init__(self, fleet: Fleet, forwarding: Forwarding, naming: PromptNaming, most_owners: int) -> None:
        """``most_owners``: stored responses whose replica is remembered."""
        self._fleet = fleet
        self._forwarding = forwarding
        self._naming = naming
        self._owners = Owners(max(most_owners, 1))

    async def generate(self, call: Call) -> ASGIApp:
        """Where most of its prompt is cached. What a key may have under way it may have in the whole fleet: each
        replica sees only its own.
        """
        call.take_place()
        return await self.prompted(call)

    async def prompted(self, call: Call) -> ASGIApp:
        """Where most of its prompt is cached, as far as the policy likes."""
        request = request_of(call)
        with self._forwarding.routing(call) as span:
            began = self._forwarding.clock()
            reading = await self._naming.read(request.path, request.body, call.caller, self._fleet.scheme)
            self._forwarding.measures.read(self._forwarding.clock() - began)
            if reading.follows is None:
                return await self._passed(request, Wanted(reading.request), span)
            return await self._where_it_is(call, reading.follows, reading.request, span)

    async def stored(self, call: Call) -> ASGIApp:
        """The replica that has a response. One that nobody has is asked for all the same: a replica has the words."""
        with self._forwarding.routing(call) as span:
            return await self._where_it_is(call, call.path_params["response_id"], LIGHT, span)

    async def any(self, call: Call) -> ASGIApp:
        """Whoever has the least to do."""
        with self._forwarding.routing(call) as span:
            return await self._passed(request_of(call), Wanted(LIGHT), span)

    async def _where_it_is(self, call: Call, response_id: str, known: RoutedRequest, span: Span) -> ASGIApp:
        """Sent where a stored response lies, and nowhere else. If that replica is gone, so is the response."""
        only = await self._owner(call, response_id, span)
        try:
            return await self._passed(request_of(call), Wanted(known, only), span)
        except ApiError:
            self._owners.forget(response_id)
            raise

    async def _passed(self, request: HttpRequest, wanted: Wanted, span: Span) -> ASGIApp:
        head, pieces = await self._forwarding.begin(request, wanted, span)
        birth = (
            Birth(self._owners, head.replica) if request.path == RESPONSES and head.status == HTTPStatus.OK else None
        )
        return Passing(
            head,
            pieces,
            request.path,
            on_loss=self._forwarding.lost,
            on_piece=None if birth is None else birth.note,
        )

    async def _owner(self, call: Call, response_id: str, span: Span) -> ReplicaId | None:
        """Who has a response: remembered, or else found by asking everybody."""
        known = self._owners.find(response_id)
        if known is not None or not is_response_id(response_id):
            return known
        request = below(span, request_of(call))
        path, headers = f"{RESPONSES}/{response_id}", without_body(request)
        answers = await self._fleet.ask_all(HttpRequest("GET", path, b"", headers, b""))
        found = next((each for each, answer in answers.items() if answer.head.status == HTTPStatus.OK), None)
        if found is not None:
            self._owners.note(response_id, found)
        return found


def request_of(call: Call) -> HttpRequest:
    """What a replica is to see of ``call``."""
    scope = call.scope
    headers = tuple((bytes(name), bytes(value)) for name, value in passed_on(scope["headers"]))
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))  # where it is mounted is nothing to a replica
    return HttpRequest(scope["method"], path, scope.get("query_string", b""), headers, call.body)


def without_body(request: HttpRequest) -> tuple[tuple[bytes, bytes], ...]:
    """Its headers, but for those that describe a body."""
    return tuple((name, value) for name, value in request.headers if not name.lower().startswith(b"content-"))
