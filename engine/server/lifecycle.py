"""From the start of a server to its end: HTTP first, the engine meanwhile, and an end in order.

The end begins with a signal. What is new is refused, with 503 and ``Retry-After``, on sockets that still accept; what
runs may finish within ``drain_timeout``, then it is aborted and its clients are told; then the cache is saved, the
engine closed, and only then the sockets. A second signal cuts the waiting short, never the order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import anyio

from ...errors import EngineClosed, OctavoError, describe
from ...telemetry.logging import fault_fields
from ..async_engine import AsyncEngine
from .access_log import AccessLog
from .running import LAST_WORDS, HttpServer
from .service import Service

MakeEngine = Callable[[Callable[[str, float], None]], AsyncEngine]
"""Makes an engine that is not open yet; is given where to tell its progress."""

LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks whether the engine still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a server ends."""

    drain_timeout: float = 20.0
    """Seconds that running requests get to finish. Supervisors kill what has not ended 30 seconds after their signal,
    and the snapshot takes its time, too."""
    snapshot: str | os.PathLike[str] | None = None
    """Where the cache is saved at the end."""
    failure_shown: float = 2.0
    """Seconds for which ``/health`` tells that the model could not be loaded, before the server ends."""


class Stop:
    """Two steps to the end."""

    def __init__(self) -> None:
        self.gently = anyio.Event()
        self.now = anyio.Event()

    def ask(self) -> None:
        """The first time: come to an end. From the second time on: at once."""
        (self.now if self.gently.is_set() else self.gently).set()


@contextmanager
def heeding_signals() -> Iterator[Stop]:
    """A stop that SIGTERM and SIGINT ask for, in the main thread."""
    stop = Stop()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task = asyncio.create_task(_heed(signals, stop))
        try:
            yield stop
        finally:
            task.cancel()


async def serve(
    service: Service,
    make_engine: MakeEngine,
    listener: socket.socket,
    ending: Ending,
    stop: Stop,
    *,
    root_path: str = "",
    on_open: Callable[[], None] = lambda: None,
) -> bool:
    """Serve on ``listener`` until ``stop``, see :func:`heeding_signals`. ``on_open``: called when the engine is open.

    Returns whether all went well: the model was loaded, the engine did not end by itself, and the cache was saved. What
    went wrong is in the log.
    """
    server = HttpServer(service, root_path=root_path)
    task = asyncio.create_task(server.serve([listener]), name="octavo-http")
    try:
        return await _Host(service, server.traffic, ending, stop).run(make_engine, on_open)
    finally:
        server.end()
        with anyio.CancelScope(shield=True):
            await task


class _Host:
    """Opens the engine, waits, and closes it."""

    def __init__(self, service: Service, traffic: AccessLog, ending: Ending, stop: Stop) -> None:
        self._service = service
        self._traffic = traffic
        self._ending = ending
        self._stop = stop
        self._logger = service.logger

    async def run(self, make_engine: MakeEngine, on_open: Callable[[], None]) -> bool:
        engine = await self._opened(make_engine)
        if engine is None:
            return self._service.failure is None
        try:
            on_open()
            self._service.attach(engine)
            self._logger.info("serving", model=engine.model.name)
            await self._wait(engine)
            return await self._end(engine)
        except EngineClosed:  # by a fault of its own, which it has logged
            return False
        finally:
            await engine.close()
            self._logger.info("stopped")

    async def _opened(self, make_engine: MakeEngine) -> AsyncEngine | None:
        """``None``: it could not be opened, or is not wanted any more."""
        opened: AsyncEngine | None = None
        with _until(self._stop.gently):
            try:
                engine = make_engine(self._service.note_progress)
                await engine.__aenter__()
                opened = engine
            except Exception as error:  # noqa: BLE001  # whatever it is, it is told
                self._tell_failure(error)
                await anyio.sleep(self._ending.failure_shown)
        return opened

    def _tell_failure(self, error: Exception) -> None:
        self._service.failure = describe(error)
        if isinstance(error, OctavoError):
            self._logger.error("model_not_loaded", error=describe(error))
        else:
            self._logger.error("model_not_loaded", **fault_fields(error))

    async def _wait(self, engine: AsyncEngine) -> None:
        """Until the end is asked for, or the engine has ended by itself."""
        while engine.is_open and not self._stop.gently.is_set():
            with anyio.move_on_after(LOOK_INTERVAL):
                await self._stop.gently.wait()

    async def _end(self, engine: AsyncEngine) -> bool:
        self._service.is_draining = True
        self._logger.info("draining", requests=self._traffic.under_way, timeout=self._ending.drain_timeout)
        saved = False
        with _until(self._stop.now):
            await self._drain(engine, self._ending.drain_timeout)
            saved = await self._save(engine)
        if self._stop.now.is_set():
            await self._drain(engine, 0.0)
            return True  # as it was asked to
        return saved

    async def _drain(self, engine: AsyncEngine, timeout: float) -> None:
        """Let requests finish, then abort them; either way their clients get to read the end."""
        clock = asyncio.get_running_loop().time
        end = clock() + timeout
        finished = await engine.drain(timeout)
        left = max(end - clock(), LAST_WORDS) if finished else LAST_WORDS
        with anyio.move_on_after(left):
            await self._traffic.wait_quiet()

    async def _save(self, engine: AsyncEngine) -> bool:
        if self._ending.snapshot is None:
            return True
        try:
            report = await engine.snapshot(self._ending.snapshot)
        except OctavoError as error:
            self._logger.error("snapshot_failed", error=describe(error))
            return False
        self._logger.info("snapshot_saved", blocks=report.blocks)
        return True


@contextmanager
def _until(event: anyio.Event) -> Iterator[None]:
    """What is done inside ends when ``event`` comes."""
    with anyio.CancelScope() as scope:
        watcher = asyncio.create_task(_cancel_after(event, scope))
        try:
            yield
        finally:
            watcher.cancel()


async def _cancel_after(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def _heed(signals: AsyncIterator[signal.Signals], stop: Stop) -> None:
    async for _ in signals:
        stop.ask()
