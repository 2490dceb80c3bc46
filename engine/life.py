"""EngineLife: from loading the model to the end of its thread, in a task of its own.

Of its own, so that an engine can be entered, closed and left from different tasks, closing it cancels nobody, and a
caller that is cancelled while it opens or closes leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
from anyio.from_thread import BlockingPortal

from ..errors import EngineClosed, describe
from ..telemetry.logging import fault_fields
from .assembly import Parts, assemble, check_plugins
from .config import EngineConfig
from .insight.lag import watch_lag
from .insight.metrics import EngineMetrics
from .model.runner import ModelRunner
from .model.text import TextCodec
from .model_thread import ModelThread
from .recording import Recorder
from .surroundings import Surroundings

CLOSE_TIMEOUT = 10.0
"""Seconds that closing gives the model step under way before it leaves the model thread behind."""

Loaded = tuple[ModelRunner, TextCodec | None]
Load = Callable[[], Loaded]


class EngineLife:
    """Opens once, closes once."""

    def __init__(
        self,
        load: Load,
        config: EngineConfig,
        restore: str | None,
        outside: Surroundings,
        metrics: EngineMetrics,
        record: str | None = None,
    ) -> None:
        self._load = load
        self._config = config
        self._restore = restore
        self._outside = outside
        self._metrics = metrics
        self._record = record
        self._recorder: Recorder | None = None
        self._logger = outside.logger
        self._task: asyncio.Task[None] | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._parts: Parts | None = None
        self._portal: BlockingPortal | None = None
        self._patience = CLOSE_TIMEOUT

    @property
    def home(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of an engine that is open; ``None`` before and after. From any thread."""
        return self._home

    @property
    def parts(self) -> Parts:
        """:raises EngineClosed: before the engine was opened."""
        if self._parts is None:
            raise EngineClosed("the engine is not open; use it inside `async with`")
        return self._parts

    @property
    def portal(self) -> BlockingPortal:
        """The way in for other threads.

        :raises EngineClosed: before the engine was opened.
        """
        if self._portal is None:
            raise EngineClosed("the engine is not open; use it inside `async with`")
        return self._portal

    async def open(self) -> None:
        """Load the model and start the loop. A second call raises ``EngineClosed``; what keeps it from opening is
        raised.
        """
        if self._task is not None:
            raise EngineClosed("an engine can be entered once; make a new one")
        self._opened, self._closing, self._stopped = anyio.Event(), anyio.Event(), anyio.Event()
        task = self._task = asyncio.create_task(self._live(), name="octavo-engine")
        task.add_done_callback(lambda _: self._opened.set())
        try:
            await self._opened.wait()
        except BaseException:
            self._closing.set()
            if not self._opened.is_set():
                task.cancel()
            await _ended(task)
            raise
        if task.done():
            await task  # raises why it did not open

    async def close(self) -> None:
        """End it, from any task of its event loop. Idempotent; returns even when a step hangs.

        :raises EngineClosed: when it is open in another event loop.
        """
        if self._task is None or self._task.done():
            return
        if self._task.get_loop() is not asyncio.get_running_loop():
            raise EngineClosed("the engine belongs to another event loop, which has to close it")
        self._home = None
        self._closing.set()
        await _ended(self._task)

    async def _live(self) -> None:
        check_plugins(self._config)
        if self._record is not None:
            self._recorder = await Recorder.create(self._record, self._config, self._outside)
        try:
            await self._live_recorded()
        finally:
            if self._recorder is not None:
                with anyio.CancelScope(shield=True):
                    await (self._recorder.close() if self._parts is not None else self._recorder.discard())

    async def _live_recorded(self) -> None:
        self._metrics.enter()
        thread = ModelThread(is_polite=self._config.acceleration.polite)
        try:
            runner, codec = await self._loaded(thread)
            try:
                await thread.call(runner.allocate, self._config.num_blocks, self._config.block_size)
                parts = await assemble(runner, codec, thread, self._config, self._restore, self._outside, self._metrics)
                if self._recorder is not None:
                    self._recorder.follow(parts.loop.cache, parts.measures)
                try:
                    await parts.tiering.open()
                    self._parts = parts
                    await self._serve(parts)
                finally:
                    with anyio.CancelScope(shield=True):
                        await parts.tiering.abandon()
                    parts.kv_events.close()
                    self._outside.tracing.flush()
            finally:
                await self._free(thread, runner)
        finally:
            self._home = None
            self._metrics.end()
            with anyio.CancelScope(shield=True):
                ended = await thread.close(self._patience)
            if not ended:
                self._logger.error("the model does not return; its thread is left behind")

    async def _serve(self, parts: Parts) -> None:
        """Run the loop, its watchdog and the portal for threads until ``close``."""
        async with anyio.create_task_group() as background:
            background.start_soon(parts.loop.watch)
            background.start_soon(watch_lag, parts.measures.lag, self._outside.clock)
            await background.start(parts.tiering.run, parts.loop)
            if self._recorder is not None:
                background.start_soon(self._recorder.run)
            async with BlockingPortal() as self._portal, anyio.create_task_group() as work:
                work.start_soon(self._run, parts)
                self._home = asyncio.get_running_loop()
                self._metrics.follow(parts.observe)
                self._opened.set()
                await self._wait_for_end(parts)
                work.cancel_scope.cancel()
            if self._patience:  # otherwise the model's thread hangs, and nothing can be copied off the device
                await parts.tiering.close()
            background.cancel_scope.cancel()

    async def _wait_for_end(self, parts: Parts) -> None:
        try:
            await self._closing.wait()
        except BaseException:
            self._logger.warning("the engine was not closed; its event loop is being shut down")
            raise
        parts.loop.stop()
        with anyio.move_on_after(CLOSE_TIMEOUT):
            await self._stopped.wait()
            return
        self._patience = 0.0  # it was shown already

    async def _run(self, parts: Parts) -> None:
        try:
            await parts.loop.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._logger.error("the engine ended by a fault", **fault_fields(error))
            raise
        finally:
            self._home = None
            self._stopped.set()
            self._closing.set()

    async def _loaded(self, thread: ModelThread) -> Loaded:
        """The model; if it comes when nobody waits for it any more, it is closed at once: others may wait for it."""
        found: list[Loaded] = []

        def close() -> None:
            for runner, _ in found:
                runner.close()

        try:
            await thread.call(lambda: found.append(self._load()))
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True), anyio.move_on_after(0):
                await thread.call(close)
            raise
        return found[0]

    async def _free(self, thread: ModelThread, runner: ModelRunner) -> None:
        """Close the runner: now, or behind a step that hangs, whenever that returns."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._patience):
            try:
                await thread.call(runner.close)
            except Exception as error:  # noqa: BLE001  # the engine ends all the same
                self._logger.error("the model could not be closed", error=describe(error))


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait until ``task`` is over, whatever comes of it; a cancellation of the waiting task takes effect then."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if not task.cancelled():
        task.exception()  # seen: it was logged or raised
    if cancelled is not None:
        raise cancelled
