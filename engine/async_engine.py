"""AsyncEngine: the public face. Opens the model, owns the loop, and turns calls into posts to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio

from ..errors import EngineClosed, InvalidRequest, QueueFull, RequestRejected
from ..telemetry.logging import get_logger
from .blocking import BlockingEngine
from .config import EngineConfig
from .counters import EngineStats
from .generation import Generation
from .kv import Census
from .life import CLOSE_TIMEOUT, EngineLife, Load, Loaded
from .loop import StepLoop
from .model.runner import ModelInfo, ModelRunner
from .model.text import TextCodec
from .request import Prompt, RequestOutput, SamplingParams
from .sequence import SequenceGroup

Progress = Callable[[str, float], None]


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
        if runner is not None and load is None:
            ready = runner, codec
            load = lambda: ready  # noqa: E731  # the same, loaded already
        elif load is None or runner is not None:
            raise InvalidRequest("an engine needs a runner or a function that loads one, not both")
        self.config = config or EngineConfig()
        self._draining = False
        self._life = EngineLife(load, self.config, clock=clock, logger=get_logger("octavo.engine"))

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
        await self._life.open()
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
        await self._life.close()

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
                group = await self._life.parts.intake.prepare(
                    prompt, wanted, request_id=request_id, priority=priority, tenant=tenant
                )
                self._require_room(group.request_id)  # once more: preparing may have waited
            except RequestRejected:
                self._life.parts.counters.rejected += 1
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

        The fork has the prompt, the tokens so far, the tenant and the priority of the source's first sample that runs;
        ``params`` (by default the source's) rule what follows. ``max_tokens`` counts the tokens so far, and the fork's
        first output brings them as its delta. With the source's own seed it repeats the source: give another.

        :raises InvalidRequest: when no such request runs, it is a beam search, or ``params`` ask for several samples or
            for log-probabilities that the source did not keep.
        """
        self._require_room(new_id)
        source = self._loop.groups.get(request_id)
        if source is None:
            raise InvalidRequest(f"no request {request_id!r:.80} is under way")
        child = self._life.parts.intake.continuation(source, params if params is not None else source.params, new_id)
        self._loop.fork(source, child, self._life.parts.intake.sequence)

        async def submitted() -> SequenceGroup:
            return child

        return await Generation(submitted, self._abort_group).start()

    def blocking(self) -> BlockingEngine:
        """The engine for other threads: ``with engine.blocking() as b: b.complete(...)``; any number may share one."""
        self._require_open()
        return BlockingEngine(self, self._life.portal)

    # looking

    @property
    def is_open(self) -> bool:
        """Whether it was entered and neither closed nor ended otherwise. From any thread."""
        return self._life.home is not None

    @property
    def model(self) -> ModelInfo:
        """What was loaded."""
        self._require_open()
        return self._life.parts.runner.info

    @property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer, if it came with one."""
        self._require_open()
        return self._life.parts.codec

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

    @property
    def _loop(self) -> StepLoop:
        return self._life.parts.loop

    def _abort_group(self, group: SequenceGroup) -> None:
        """From any thread, since a generation that is dropped may be collected in any."""
        home = self._life.home
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
        home = self._life.home
        if home is None:
            raise EngineClosed("the engine is not open; use it inside `async with`")
        return home

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
