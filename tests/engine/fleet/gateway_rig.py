"""What tests of the gateway share: a fleet of engines with the fake model, and a door in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import httpx

from octavo import AsyncEngine
from octavo.engine.fleet.gateway import Gateway
from octavo.engine.fleet.local import LocalFleet
from octavo.engine.server.service import Service
from octavo.policies.routing.base import Choice, Reason, ReplicaId, RoutedRequest, RoutingPolicy
from octavo.policies.routing.fleet_view import FleetView
from octavo.tests.engine.server.http_rig import PATIENCE, Exchange, Json

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ADMIN = "a token for admins"
PROMPT = "0123456789abcdefghijklmno"
FORM: Mapping[str, object] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


class Longest(RoutingPolicy):
    """Who has most of the prompt, and of those who has the least to do: no judgement, so that it is foreseen."""

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        """Those to be avoided, and those that drain, last."""
        matches, loads = fleet.matched(request.names), dict(zip(fleet.replicas, fleet.loads, strict=True))
        drains = dict(zip(fleet.replicas, fleet.draining, strict=True))
        ranked = sorted(
            fleet.replicas, key=lambda each: (each in request.avoid, drains[each], -matches.get(each, 0), loads[each])
        )
        matched = matches.get(ranked[0], 0)
        return Choice(ranked, matched, Reason.PREFIX if matched else Reason.LOAD)


class Ordered(RoutingPolicy):
    """The first one that is there, and all others after it."""

    def __init__(self) -> None:
        self.asked: list[RoutedRequest] = []

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        """In the order in which they joined; those to be avoided last."""
        self.asked.append(request)
        ranked = sorted(fleet.replicas, key=lambda each: each in request.avoid)
        return Choice(ranked, fleet.matched(request.names).get(ranked[0], 0), Reason.TURN)


@dataclass
class Door:
    """A gateway, and what is behind it."""

    fleet: LocalFleet
    gateway: Gateway
    services: Mapping[ReplicaId, Service]
    client: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def engines(self) -> Mapping[ReplicaId, AsyncEngine]:
        return {replica: service.engine for replica, service in self.services.items()}

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, json=body, headers=self.headers)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers={**self.headers, **headers})

    def open(self, path: str, body: Mapping[str, object], *, window: int = 0) -> Exchange:
        """A request to be driven by hand."""
        return Exchange(self.gateway.app, path, body, headers=self.headers, window=window)

    def running(self) -> ReplicaId | None:
        """The replica that has something to do."""
        return next(self.busy(), None)

    def busy(self) -> Iterator[ReplicaId]:
        """All that have something to do."""
        return (each for each, engine in self.engines.items() if engine.stats().running)

    async def quiet(self) -> None:
        """Until no engine has anything to do."""
        for engine in self.engines.values():
            await engine._loop.wait_idle()
            assert engine.census().held == 0


DoorOf = Callable[..., AbstractAsyncContextManager[Door]]
"""``async with door_of(count=, settings=, policy=, gateway=, **config) as door``: see the fixture."""
PATIENT = PATIENCE


def replica_of(answer: httpx.Response | Exchange) -> ReplicaId:
    """Who answered."""
    return str(answer.headers["x-octavo-replica"])


def steady(value: object) -> object:
    """JSON without what differs each time."""
    changing = {"id", "created", "created_at", "completed_at", "item_id"}
    if isinstance(value, dict):
        return {name: steady(each) for name, each in value.items() if name not in changing}
    return [steady(each) for each in value] if isinstance(value, list) else value


async def turns(count: int) -> None:
    """So many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def the(answer: httpx.Response) -> Json:
    """The JSON of an answer that must be a success."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found
