"""AsyncEngine: the public face. Opens the model, owns the loop, and turns calls into posts to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from ..errors import ContractBroken, EngineClosed, InvalidRequest, QueueFull, RequestRejected, describe
from ..plugins import PluginGroup
from ..policies.eviction.base import EvictionPolicy
from ..policies.scheduling.base import SchedulingPolicy
from ..telemetry.logging import RateLimited, get_logger
from .blocking import BlockingEngine
from .config import EngineConfig
from .counters import Counters, EngineStats
from .execution import StepExecutor
from .generation import Generation
from .intake import Intake
from .kv import CacheManager, Census
from .loop import StepLoop
from .model.runner import ModelInfo, ModelRunner
from .model.text import TextCodec
from .model_thread import ModelThread
from .request import Prompt, RequestOutput, SamplingParams
from .scheduler import Scheduler
from .sequence import SequenceGroup

EVICTION_POLICIES = PluginGroup("octavo.eviction_policies", EvictionPolicy)
SCHEDULING_POLICIES = PluginGroup("octavo.scheduling_policies", SchedulingPolicy)
T = TypeVar("T")
CLOSE_TIMEOUT = 10.0
"""Seconds that ``close`` gives the model step under way before it leaves the model thread behind."""

Progress = Callable[[str, float], None]
Loaded = tuple[ModelRunner, TextCodec | None]
Load = Callable[[], Loaded]


class AsyncEngine:
    """A decoding engine inside the caller's event loop.

    ``async with AsyncEngine.open("smollm2") as engine`` loads, runs and closes it. All methods belong to the event
    loop in which it was entered; other threads use :meth:`blocking`.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner | None = None,
        codec: TextCodec | None = None,
        load: Load | None = None,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An engine around a ready ``runner``, or one that ``load`` makes in the model thread when it is entered.

        ``codec=None``: token ids in, token ids out, no text. ``clock``: seconds, monotonic; tests pass their own.

        :raises InvalidRequest: when neither or both of ``runner`` and ``load`` are given.
        """
        if load is not None and runner is None:
            self._load = load
        elif runner is not None and load is None:
            ready = runner, codec
            self._load = lambda: ready
        else:
            raise InvalidRequest("an engine needs a runner or a function that loads one, not both")
        self.config = config or EngineConfig()
        self._clock = clock
        self._logger = get_logger("octavo.engine")
        self._counters = Counters()
        self._ids = itertools.count()
        self._draining = False
        self._entered = False
        self._patience = CLOSE_TIMEOUT
        self._home: asyncio.AbstractEventLoop | None = None  # the event loop it was entered in, while it is open
        self._life: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, model: str, config: EngineConfig | None = None, *, progress: Progress | None = None) -> Self:
        """An engine for ``model``: a directory of safetensors, a hub id, a ``.gguf`` file, or ``smollm2``.

        The model is loaded when the engine is entered. ``progress(what, share)`` is called from the loading thread with
        ``share`` from 0 to 1. Entering raises ``ModelError`` when it cannot be loaded and ``UnsupportedModel`` when it
        cannot run on a paged cache.
        """
        settings = config or EngineConfig()

        def load() -> Loaded:
            from .model.loader import load as load_model  # noqa: PLC0415  # torch only when a model is wanted

            return load_model(
                model,
                device=settings.device,
                dtype=settings.dtype,
                attention_backend=settings.attention_backend,
                progress=progress,
            )

        return cls(load=load, config=settings)

    # life

    async def __aenter__(self) -> Self:
        """Load the model and start the loop.

        :raises EngineClosed: when it was entered before; make a new engine.
        """
        if self._entered:
            raise EngineClosed("an engine can be entered once; make a new one")
        self._entered = True
        self._opened, self._closing, self._stopped = anyio.Event(), anyio.Event(), anyio.Event()
        life = self._life = asyncio.create_task(self._live(), name="octavo-engine")
        life.add_done_callback(lambda _: self._opened.set())
        try:
            await self._opened.wait()
        except BaseException:
            self._closing.set()
            if not self._opened.is_set():
                life.cancel()
            await _ended(life)
            raise
        if life.done():
            await life  # raises why it did not open
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what runs, end the loop, free the model. Idempotent, from any task of the engine's event loop.

        Returns even when a step hangs, after ``CLOSE_TIMEOUT``. A cancellation that comes meanwhile takes effect then.

        :raises EngineClosed: when the engine is open in another event loop.
        """
        if self._life is None:
            return
        if not self._life.done():
            if self._life.get_loop() is not asyncio.get_running_loop():
                raise EngineClosed("the engine belongs to another event loop, which has to close it")
            self._home = None
            self._closing.set()
            await _ended(self._life)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until those under way are done; after ``timeout`` seconds abort the rest.

        Returns whether all were done in time. The engine stays open for reading until :meth:`close`.
        """
        self._require_open()
        self._draining = True
        with anyio.move_on_after(timeout):
            await self._loop.wait_idle()
            return True
        for group in list(self._loop.groups.values()):
            self._loop.abort(group)
        with anyio.move_on_after(CLOSE_TIMEOUT):  # a step that hangs must not hold up the shutdown
            await self._loop.wait_idle()
        return False

    # requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
    ) -> Generation:
        """Continue ``prompt``: text, token ids, or chat messages. Iterate over the result for the outputs.

        ``tenant``: requests share cached prefixes only with requests of the same tenant. ``priority``: higher is more
        urgent under the ``priority`` scheduling policy. The iteration raises ``RequestRejected`` (nothing has happened
        then), ``ModelError`` or ``EngineClosed``.
        """
        wanted = params if params is not None else SamplingParams()

        async def submit() -> SequenceGroup:
            try:
                self._require_room(request_id)
                group = await self._intake.prepare(
                    prompt, wanted, request_id=request_id, priority=priority, tenant=tenant
                )
                self._require_room(group.request_id)  # once more: preparing may have waited
            except RequestRejected:
                self._counters.rejected += 1
                raise
            self._loop.submit(group)
            return group

        return Generation(submit, self._abort_group)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
    ) -> list[RequestOutput]:
        """Generate to the end; the last output of each sample, in order of ``index``."""
        last: dict[int, RequestOutput] = {}
        async for output in self.generate(prompt, params, request_id=request_id, priority=priority, tenant=tenant):
            last[output.index] = output
        return [last[index] for index in sorted(last)]

    def abort(self, request_id: str) -> bool:
        """End a request at the next step edge; its stream closes with ``finish_reason`` ``abort``. False: no such
        one.
        """
        self._require_open()
        group = self._loop.groups.get(request_id)
        if group is not None:
            self._loop.abort(group)
        return group is not None

    async def fork(
        self, request_id: str, params: SamplingParams | None = None, *, new_id: str | None = None
    ) -> Generation:
        """A second request that goes on from where a running one stands, on the same blocks.

        The fork has the same prompt and the tokens so far; ``params`` (by default the source's) rule what follows.

        :raises InvalidRequest: when no such request runs, or it is a beam search.
        """
        self._require_room(new_id)
        source = self._loop.groups.get(request_id)
        if source is None:
            raise InvalidRequest(f"no request {request_id!r:.80} is under way")
        child = self._intake.continuation(source, params if params is not None else source.params, new_id)
        self._loop.fork(source, child, self._intake.sequence)

        async def submitted() -> SequenceGroup:
            return child

        return await Generation(submitted, self._abort_group).start()

    def blocking(self) -> BlockingEngine:
        """The engine for other threads: ``with engine.blocking() as b: b.complete(...)``; any number may share one."""
        self._require_open()
        return BlockingEngine(self, self._portal)

    # looking

    @property
    def is_open(self) -> bool:
        """Whether it was entered and neither closed nor ended otherwise. From any thread."""
        return self._home is not None

    @property
    def model(self) -> ModelInfo:
        """What was loaded."""
        self._require_open()
        return self._runner.info

    @property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer, if it came with one."""
        self._require_open()
        return self._codec

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges; cheap."""
        self._require_open()
        return self._loop.stats()

    def census(self) -> Census:
        """Check the cache's books now and count its blocks. O(pool).

        :raises CensusFailed: when they are wrong.
        """
        self._require_open()
        return self._loop.cache.census()

    # inside

    def _build(self, thread: ModelThread) -> None:
        config, clock = self.config, self._clock
        limited = RateLimited(10.0, clock)

        def fault(where: str, error: BaseException | str) -> None:
            shown = error if isinstance(error, str) else describe(error)
            limited.log(self._logger.warning, "a policy broke its contract", key=where, where=where, error=shown)

        def scheduling_fault(where: str, error: BaseException | str) -> None:
            self._counters.policy_faults += 1
            fault(where, error)

        cache = CacheManager(
            config.num_blocks,
            config.block_size,
            _made(
                partial(EVICTION_POLICIES.resolve(config.eviction_policy), config.num_blocks), config.eviction_policy
            ),
            clock=clock,
            on_fault=fault,
            sharing=config.enable_prefix_caching,
        )
        scheduling = _made(SCHEDULING_POLICIES.resolve(config.scheduling_policy), config.scheduling_policy)
        scheduler = Scheduler(cache, scheduling, config, on_fault=scheduling_fault)
        new_id = self._ids.__next__
        self._intake = Intake(self._runner.info, self._codec, config, clock=clock, new_id=new_id)
        self._loop = StepLoop(
            cache=cache,
            scheduler=scheduler,
            executor=StepExecutor(self._runner, thread),
            config=config,
            counters=self._counters,
            clock=clock,
            new_id=new_id,
            logger=self._logger,
        )

    async def _live(self) -> None:
        """The life of the engine from loading to the end of its thread.

        A task of its own: the engine can be entered, closed and left from different tasks, closing it cancels nobody,
        and a caller that is cancelled while it opens or closes leaves nothing behind.
        """
        EVICTION_POLICIES.find(self.config.eviction_policy)  # a wrong name is told before the model is loaded
        SCHEDULING_POLICIES.find(self.config.scheduling_policy)
        thread = ModelThread()
        try:
            self._runner, self._codec = await thread.call(self._load)
            try:
                await thread.call(self._runner.allocate, self.config.num_blocks, self.config.block_size)
                self._build(thread)
                await self._serve()
            finally:
                await self._free(thread, self._runner)
        finally:
            self._home = None
            with anyio.CancelScope(shield=True):
                ended = await thread.close(self._patience)
            if not ended:
                self._logger.error("the model does not return; its thread is left behind")

    async def _serve(self) -> None:
        """Run the loop, its watchdog and the portal for threads until ``close``."""
        async with anyio.create_task_group() as background:
            background.start_soon(self._loop.watch)
            async with BlockingPortal() as self._portal, anyio.create_task_group() as work:
                work.start_soon(self._run)
                self._home = asyncio.get_running_loop()
                self._opened.set()
                await self._wait_for_end()
                work.cancel_scope.cancel()
            background.cancel_scope.cancel()

    async def _wait_for_end(self) -> None:
        try:
            await self._closing.wait()
        except BaseException:
            self._logger.warning("the engine was not closed; its event loop is being shut down")
            raise
        self._loop.stop()
        with anyio.move_on_after(CLOSE_TIMEOUT):
            await self._stopped.wait()
            return
        self._patience = 0.0  # it was shown already

    async def _run(self) -> None:
        try:
            await self._loop.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._logger.error("the engine ended by a fault", exc_info=error)
            raise
        finally:
            self._home = None
            self._stopped.set()
            self._closing.set()

    async def _free(self, thread: ModelThread, runner: ModelRunner) -> None:
        """Close the runner: now, or behind a step that hangs, whenever that returns."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._patience):
            try:
                await thread.call(runner.close)
            except Exception as error:  # noqa: BLE001  # the engine ends all the same
                self._logger.error("the model could not be closed", error=repr(error))

    def _abort_group(self, group: SequenceGroup) -> None:
        """From any thread, since a generation that is dropped may be collected in any."""
        home = self._home
        if home is None:  # what still runs is being aborted
            return
        try:
            is_home = asyncio.get_running_loop() is home
        except RuntimeError:
            is_home = False
        if is_home:
            self._loop.abort(group)
        else:
            with contextlib.suppress(RuntimeError):  # the event loop was closed, and all went with it
                home.call_soon_threadsafe(self._loop.abort, group)

    def _require_open(self) -> asyncio.AbstractEventLoop:
        if self._home is None:
            raise EngineClosed("the engine is not open; use it inside `async with`")
        return self._home

    def _require_room(self, request_id: str | None) -> None:
        """
        :raises EngineClosed: not open, draining, or entered in another event loop. :raises QueueFull: too many wait.
        :raises InvalidRequest: the id is in use.
        """
        if self._require_open() is not asyncio.get_running_loop():
            raise EngineClosed("the engine belongs to another event loop; use engine.blocking() or a new engine")
        if self._draining:
            raise EngineClosed("the engine is shutting down and takes no new requests")
        if request_id is not None and request_id in self._loop.groups:
            raise InvalidRequest(f"request_id {request_id!r:.80} is in use")
        if self._loop.queued >= self.config.max_waiting:
            raise QueueFull(f"{self._loop.queued} requests wait already; try again later or raise max_waiting")


def _made(make: Callable[[], T], name: str) -> T:
    """:raises ContractBroken: when the plug-in's constructor raises."""
    try:
        return make()
    except Exception as error:
        raise ContractBroken(f"plug-in {name!r} could not be made: {describe(error)}") from error


async def _ended(life: asyncio.Task[None]) -> None:
    """Wait until ``life`` is over, whatever comes of it; a cancellation of the waiting task takes effect then."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not life.done():
            try:
                await asyncio.wait({life})
            except asyncio.CancelledError as error:
                cancelled = error
    if not life.cancelled():
        life.exception()  # seen: it was logged or raised
    if cancelled is not None:
        raise cancelled
