"""Fixtures for tests of the server: the app over an engine with the fake model, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from octavo import AsyncEngine
from octavo.engine.server.app import create_app
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec
from octavo.tests.engine.server.http_rig import PATIENCE, Server, ServerOf

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]


@pytest.fixture
def server_of(engine_of: EngineOf) -> ServerOf:
    """``async with server_of(settings=, runner=, codec=, on_step=, **config) as server``.

    All but ``settings`` is for ``engine_of``: the steps run in the event loop, and on leaving nothing may be held. The
    books are checked then, and at every step with ``check_every_step=True``.
    """

    @asynccontextmanager
    async def opened(*, settings: ServerSettings | None = None, **options: object) -> AsyncIterator[Server]:
        async with engine_of(**{"codec": FakeCodec(), "check_every_step": False, **options}) as engine:
            app = create_app(engine, settings)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=PATIENCE) as client:
                yield Server(engine, app, client)

    return opened
