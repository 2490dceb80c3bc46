"""Running the app: :func:`serving` for tests, notebooks and hosts, on the event loop that is there."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import uvicorn
from starlette.types import ASGIApp

from ...errors import InvalidRequest, describe
from ..async_engine import AsyncEngine
from .access_log import AccessLog
from .app import app_of
from .service import Service
from .settings import ServerSettings
from .transport import GuardedConfig, GuardedProtocol

LAST_WORDS: Final = 2.0
"""Seconds that answers which are complete get to go out when the server ends."""
BACKLOG: Final = 1024
"""Connections that may wait to be accepted."""
SEND_BUFFER: Final = 64 * 1024
"""Bytes that the system keeps for a client that does not read them, about. Left alone, it takes megabytes for each."""
CLOSE_POLL: Final = 0.005


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    path: str | None = None
    """Of a Unix socket; then there is no host and no port."""

    @property
    def url(self) -> str:
        """What clients put before ``/v1/...``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}" if self.path is None else f"unix:{self.path}"


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers and its polling: it ends when :meth:`end` says so, and at once."""

    def __init__(self, service: Service, *, app: ASGIApp | None = None, root_path: str = "") -> None:
        """``app``: what is served with the settings of ``service``; ``None``: the app around its engine."""
        self.traffic = AccessLog(app or app_of(service), service)
        super().__init__(GuardedConfig(self.traffic, service, root_path=root_path))
        settings = service.settings
        self._interval = min(1.0, settings.header_timeout / 4, settings.stall_timeout / 4)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Let ``serve`` stop listening and return when what is answered has gone out. What runs on is cut off."""
        self._ending.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the host."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio has asked for as few as it accepts at once

    async def main_loop(self) -> None:
        """Look after the connections until the end."""
        while not self._ending.is_set():
            await self.on_tick(0)
            self._check(asyncio.get_running_loop().time())
            with anyio.move_on_after(self._interval):
                await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let complete answers go out, end the rest."""
        for server in self.servers:
            server.close()
        for connection in self._connections():
            connection.shutdown()
        with anyio.move_on_after(LAST_WORDS):
            await self._last_words()
        for connection in self._connections():
            connection.transport.abort()
        await self._end_tasks()
        for server in self.servers:
            await server.wait_closed()

    def _check(self, now: float) -> None:
        for connection in self._connections():
            connection.check(now)

    async def _last_words(self) -> None:
        """Wait while answers that are complete are still on their way."""
        while any(not each.is_answering for each in self._connections()):  # noqa: ASYNC110  # they tell nobody
            await anyio.sleep(CLOSE_POLL)

    async def _end_tasks(self) -> None:
        """They end by themselves once their connections are gone; one that does not is cancelled."""
        if tasks := set(self.server_state.tasks):
            _, late = await asyncio.wait(tasks, timeout=LAST_WORDS)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)

    def _connections(self) -> list[GuardedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, GuardedProtocol)]


@asynccontextmanager
async def serving(
    served: Service | AsyncEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    settings: ServerSettings | None = None,
) -> AsyncIterator[Address]:
    """Serve an engine over HTTP, beside what else runs in this event loop.

    ::

        async with AsyncEngine.open("smollm2") as engine, serving(engine) as address:
            client = openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="none")

    ``port`` 0: one that is free. ``settings``: of the app around an engine; a :class:`Service` has its own. The engine
    stays open and the caller's. On leaving, requests that are still answered are cut off, and aborted in the engine.

    :raises InvalidRequest: when it cannot listen there.
    """
    service = served if isinstance(served, Service) else Service(settings or ServerSettings(), served)
    async with serving_app(app_of(service), service, host=host, port=port) as address:
        yield address


@asynccontextmanager
async def serving_app(
    app: ASGIApp, service: Service, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Address]:
    """As :func:`serving`, for an ``app`` that has more in it than the engine of ``service``, or none."""
    with listening(host, port) as (listener, address):
        server = HttpServer(service, app=app)
        # a task of its own and no task group: it may be entered and left in different tasks, as fixtures are
        task = asyncio.create_task(server.serve([listener]), name="octavo-http")
        try:
            yield address
        finally:
            server.end()
            with anyio.CancelScope(shield=True):
                await task


@contextmanager
def listening(host: str, port: int, path: str | None = None) -> Iterator[tuple[socket.socket, Address]]:
    """A socket that listens, at ``path`` if that is given.

    :raises InvalidRequest: when that is not possible.
    """
    where = f"{host}:{port}" if path is None else path
    try:
        listener = _tcp(host, port) if path is None else _unix(path)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(f"cannot listen on {where}: {describe(error)}") from error
    try:
        name = listener.getsockname()
        yield listener, Address(host, name[1]) if path is None else Address("", 0, path)
    finally:
        listener.close()
        if path is not None:
            with suppress(OSError):
                Path(path).unlink()


def _tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
    return listener


def _unix(path: str) -> socket.socket:
    """Who may connect follows from the permissions of the folder and the umask."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not _is_answered(path):
            os.unlink(path)  # noqa: PTH108  # left behind by a process that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0
