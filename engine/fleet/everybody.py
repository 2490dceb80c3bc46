"""What the whole fleet answers: how it is, what it measures, and what operators ask of all replicas."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Final

import anyio
import anyio.to_thread
import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from ...policies.routing.base import ReplicaId
from ...telemetry.metrics.exposition import Collector
from ...telemetry.metrics.fleet import FLEET_CATALOGUE
from ...telemetry.metrics.http import HTTP_CATALOGUE
from ..server.call import Call
from ..server.endpoint import json_response
from ..server.errors import NOT_FOUND, ApiError
from .base import Fleet, Wanted, WholeAnswer
from .forwarding import Forwarding, below, no_replica
from .merging import merged
from .passing import REPLICA_HEADER, Passing
from .somebody import LIGHT, request_of

TEXT_FORMAT: Final = "text/plain; version=0.0.4; charset=utf-8"
MOST_LOOKS: Final = 8
"""Questions how it is that are under way at a time: anybody may ask, and each asks all replicas."""


class Everybody:
    """The handlers of requests that all replicas answer."""

    def __init__(self, fleet: Fleet, forwarding: Forwarding) -> None:
        self._fleet = fleet
        self._forwarding = forwarding
        self._looks = anyio.CapacityLimiter(MOST_LOOKS)

    async def state(self, call: Call) -> ASGIApp:
        """How each replica is; 200 while one of them is well."""
        answers = await self._ask(call, self._looks)
        is_well = any(answer.head.status == HTTPStatus.OK for answer in answers.values())
        return json_response(_together(answers), HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)

    async def operate(self, call: Call) -> ASGIApp:
        """One replica, if the client has named it, or else all of them. One status for all of them: the worst, and no
        answer is bad; but that some have not what others have is well.
        """
        named = call.headers.get(REPLICA_HEADER.decode())
        if named is not None:
            return await self._one(call, named)
        with self._forwarding.routing(call) as span:
            answers = await self._fleet.ask_all(below(span, request_of(call)))
        if not answers:
            raise no_replica()
        statuses = {answer.head.status for answer in answers.values()}
        return json_response(_together(answers), max(statuses - {HTTPStatus.NOT_FOUND}, default=HTTPStatus.NOT_FOUND))

    async def metrics(self, call: Call) -> ASGIApp:
        """Those of all replicas and of the gateway, in the text format of Prometheus. The gateway's own of HTTP have no
        label ``replica``.
        """
        answers = await self._ask(call, call.service.scrapes)
        texts = {each: answer.body for each, answer in answers.items() if answer.head.status == HTTPStatus.OK}
        http, fleet = call.service.http.readings(), self._forwarding.measures.readings()
        own = [
            Collector(lambda: http, catalogue=HTTP_CATALOGUE),
            Collector(lambda: fleet, catalogue=FLEET_CATALOGUE),
        ]
        body = await anyio.to_thread.run_sync(partial(merged, texts, own), limiter=call.service.scrapes)
        return Response(body, headers={"Content-Type": TEXT_FORMAT})

    async def _ask(self, call: Call, few: anyio.CapacityLimiter) -> Mapping[ReplicaId, WholeAnswer]:
        request = request_of(call)
        plain = tuple((name, value) for name, value in request.headers if name.lower() != b"accept")
        async with few:
            return await self._fleet.ask_all(request._replace(headers=plain))

    async def _one(self, call: Call, replica: ReplicaId) -> ASGIApp:
        with self._forwarding.routing(call) as span:
            try:
                head, pieces = await self._forwarding.begin(request_of(call), Wanted(LIGHT, only=replica), span)
            except ApiError as error:
                if error.body.error.code not in ("no_replica", "replica_lost"):
                    raise
                message = f"there is no replica {replica!r:.80}"
                raise ApiError(HTTPStatus.NOT_FOUND, message, kind=NOT_FOUND, code="no_replica") from error
            return Passing(head, pieces, call.scope["path"], on_loss=self._forwarding.lost)


def _together(answers: Mapping[ReplicaId, WholeAnswer]) -> Mapping[str, Mapping[ReplicaId, object]]:
    return {"replicas": {replica: _said(answer.body) for replica, answer in answers.items()}}


def _said(body: bytes) -> object:
    """JSON as it is, anything else as a text."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode("utf-8", "replace")
    return msgspec.Raw(body)
