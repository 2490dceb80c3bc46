"""Fixtures for tests of fleets: engines with the fake model behind a gateway, without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import httpx
import pytest

from octavo import AsyncEngine
from octavo.engine.fleet.gateway import Gateway
from octavo.engine.fleet.local import LocalFleet
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec
from octavo.policies.routing.base import RoutingPolicy
from octavo.tests.engine.fleet.gateway_rig import Door, DoorOf, Longest
from octavo.tests.engine.server.http_rig import PATIENCE

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]


@pytest.fixture
def door_of(engine_of: EngineOf) -> DoorOf:
    """``async with door_of(count=2, settings=, policy=, gateway=, fleet=, each=, **config) as door``.

    ``each``: more options for the engine of a replica, by its name. ``gateway``, ``fleet``: more options for these.
    On leaving no engine may hold anything. Replicas are called "r0", "r1", ...
    """

    @asynccontextmanager
    async def opened(
        *,
        count: int = 2,
        settings: ServerSettings | None = None,
        policy: RoutingPolicy | None = None,
        gateway: Mapping[str, object] | None = None,
        fleet: Mapping[str, object] | None = None,
        each: Callable[[str], Mapping[str, object]] | None = None,
        **options: object,
    ) -> AsyncIterator[Door]:
        used = settings or ServerSettings()
        async with AsyncExitStack() as stack:
            services = {}
            for replica in (f"r{number}" for number in range(count)):
                own = {} if each is None else each(replica)
                labels = {"metric_labels": {"replica": replica}}
                defaults = {"codec": FakeCodec(), "check_every_step": False, **labels}
                engine = await stack.enter_async_context(engine_of(**{**defaults, **options, **own}))
                services[replica] = Service(used, engine)
            behind = LocalFleet(services, policy or Longest(), **(fleet or {}))  # type: ignore[arg-type]  # as below
            await stack.enter_async_context(behind)
            made = Gateway(behind, behind.reader(), used, **(gateway or {}))  # type: ignore[arg-type]  # as the test has it
            transport = httpx.ASGITransport(app=made.app)
            client = httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=PATIENCE)
            yield Door(behind, made, services, await stack.enter_async_context(client))

    return opened
