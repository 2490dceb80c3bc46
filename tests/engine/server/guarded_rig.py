"""A server with tight bounds, and what must hold when its clients have done their worst."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from octavo import AsyncEngine
from octavo.engine.server.running import Address, serving
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec
from octavo.tests.engine.server.socket_rig import EngineOf, alive, until

HASTY = ServerSettings(
    header_timeout=0.2,
    body_timeout=0.2,
    stall_timeout=0.3,
    keep_alive_timeout=1.0,
    max_body_bytes=200_000,
    max_connections=20,
)
"""Every deadline comes soon."""
PATIENT = ServerSettings(max_body_bytes=200_000)
"""No deadline comes within a test."""


class Rig(NamedTuple):
    address: Address
    engine: AsyncEngine


@asynccontextmanager
async def rig_of(engine_of: EngineOf, settings: ServerSettings, **config: object) -> AsyncIterator[Rig]:
    """A server; in the end nothing of its clients is left, and others are served."""
    options = {"codec": FakeCodec(), "check_every_step": False, **config}
    async with engine_of(**options) as engine:
        tasks = len(asyncio.all_tasks())
        async with serving(engine, settings=settings) as address:
            yield Rig(address, engine)
            await alive(address)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)


def endless(piece: bytes) -> AsyncIterator[bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield piece

    return pieces()
