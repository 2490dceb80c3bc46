"""AsyncEngine: the public face. Opens the model, owns the loop, and turns calls into posts to it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from importlib.metadata import version
from types import TracebackType
from typing import Self

import anyio
from opentelemetry.metrics import MeterProvider
from prometheus_client import CollectorRegistry

from ..errors import EngineClosed, InvalidRequest, OutOfBlocks
from ..telemetry.events.log import Subscription
from ..telemetry.logging import get_logger
from ..telemetry.tracing import Headers, TracerProvider, Tracing
from .blocking import BlockingEngine
from .config import EngineConfig
from .control import Evicted
from .counters import EngineStats
from .explanation import Explanation
from .generation import Generation
from .insight.cache_view import CacheView
from .insight.metrics import EngineMetrics
from .insight.shadows import ShadowReport
from .insight.under_way import RequestView
from .intake import RequestOptions
from .kv import Census, Retention
from .life import CLOSE_TIMEOUT, EngineLife, Load, Loaded
from .loop import StepLoop
from .model.runner import ModelInfo, ModelRunner
from .model.text import TextCodec
from .pins import Pin
from .request import Prompt, RequestOutput, SamplingParams
from .snapshotting import SnapshotReport
from .submission import Submission
from .surroundings import Surroundings

Progress = Callable[[str, float], None]
PIN_TRIES = 3
"""How often a prefix is computed before pinning it is given up."""


class AsyncEngine:
    """A decoding engine inside the caller's event loop.

    ``async with AsyncEngine.open("smollm2") as engine`` loads, runs and closes it. All methods belong to the event
    loop in which it was entered; other threads use :meth:`blocking`.
    """

    def __init__(  # noqa: PLR0913  # what a host hands in, each by its name
        self,
        *,
        runner: ModelRunner | None = None,
        codec: TextCodec | None = None,
        load: Load | None = None,
        config: EngineConfig | None = None,
        restore: str | os.PathLike[str] | None = None,
        record: str | os.PathLike[str] | None = None,
        tracer_provider: TracerProvider | None = None,
        registry: CollectorRegistry | None = None,
        meter_provider: MeterProvider | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """An engine around a ready ``runner``, or one that ``load`` makes in the model thread when it is entered.

        ``codec=None``: token ids in, token ids out, no text. ``restore``: a snapshot whose blocks are used wherever a
        prompt begins like them, if it is of the same model; otherwise the reason is logged, shown in
        ``stats().restore`` and the engine starts cold. ``record``: a file that does not exist yet, which gets what
        becomes of every block, for replays with other policies (``octavo simulate``); neither tokens nor text nor
        tenants. ``tracer_provider``: who takes the spans; by default the global
        one of OpenTelemetry, which takes none unless the host has set it. ``registry``: where metrics are shown
        while the engine is open; by default one of its own, see :attr:`registry`. ``meter_provider``: gets the
        histograms of the GenAI conventions, too. ``clock``: seconds, monotonic, and ``wall``: seconds since the epoch;
        tests pass their own.

        :raises InvalidRequest: when neither or both of ``runner`` and ``load`` are given.
        """
        if runner is not None and load is None:
            ready = runner, codec
            load = lambda: ready  # noqa: E731  # the same, loaded already
        elif load is None or runner is not None:
            raise InvalidRequest("an engine needs a runner or a function that loads one, not both")
        self.config = config or EngineConfig()
        self._clock = clock
        self._tracing = Tracing(
            tracer_provider, clock=clock, wall=wall, version=version("octavo"), shows_text=self.config.trace_text
        )
        outside = Surroundings(clock, wall, get_logger("octavo.engine"), self._tracing)
        self._metrics = EngineMetrics(registry, meter_provider, self.config.metric_labels)
        snapshot = None if restore is None else os.fspath(restore)
        recording = None if record is None else os.fspath(record)
        self._life = EngineLife(load, self.config, snapshot, outside, self._metrics, recording)
        self._submission = Submission(self._life, self._tracing, max_waiting=self.config.max_waiting)

    @classmethod
    def open(  # noqa: PLR0913  # what a host hands in, each by its name
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        restore: str | os.PathLike[str] | None = None,
        record: str | os.PathLike[str] | None = None,
        tracer_provider: TracerProvider | None = None,
        registry: CollectorRegistry | None = None,
        meter_provider: MeterProvider | None = None,
        progress: Progress | None = None,
        chat_template: str | None = None,
    ) -> Self:
        """An engine for ``model``: a directory of safetensors, a hub id, a ``.gguf`` file, or ``smollm2``.

        The model is loaded when the engine is entered. ``restore``: a snapshot to start from. ``record``: a file that
        gets what becomes of every block, as for the class itself. ``tracer_provider``: who
        takes the spans, by default the global one; ``registry``, ``meter_provider``: who takes the metrics, as for the
        class itself. ``progress(what, share)`` is called from the loading thread with ``share`` from 0 to 1.
        ``chat_template``: a Jinja template, as text, in place of the model's own. Entering raises ``ModelError`` when
        it cannot be loaded and ``UnsupportedModel`` when it cannot run on a paged cache.
        """
        settings = config or EngineConfig()

        def load() -> Loaded:
            from .model.loader import load as load_model  # noqa: PLC0415  # torch only when a model is wanted

            return load_model(
                model,
                device=settings.device,
                dtype=settings.dtype,
                attention_backend=settings.attention_backend,
                acceleration=settings.acceleration,
                progress=progress,
                chat_template=chat_template,
                tensor_parallel=settings.tensor_parallel,
            )

        return cls(
            load=load,
            config=settings,
            restore=restore,
            record=record,
            tracer_provider=tracer_provider,
            registry=registry,
            meter_provider=meter_provider,
        )

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
        """Abort what runs, end the loop, save what persistent tiers lack, free the model. Idempotent, from any task of
        the engine's event loop.

        Returns even when a step hangs, after ``CLOSE_TIMEOUT``, or a tier, after ``close_budget``. A cancellation that
        comes meanwhile takes effect then.

        :raises EngineClosed: when the engine is open in another event loop.
        """
        await self._life.close()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until those under way are done; after ``timeout`` seconds abort the rest.

        Returns whether all were done in time. The engine stays open for reading until :meth:`close`.
        """
        self._submission.require_open()
        self._submission.is_draining = True
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
        retention: SequenceOf[Retention] = (),
        trace_headers: Headers | None = None,
    ) -> Generation:
        """Continue ``prompt``: text, token ids, or chat messages. Iterate over the result for the outputs.

        ``tenant``: requests share cached prefixes only with requests of the same tenant. ``priority``: higher is more
        urgent under the ``priority`` scheduling policy. ``retention``: which ranges of its tokens are to stay cached
        longer, or shorter, than the rest. ``trace_headers``: HTTP headers with a ``traceparent`` below which the
        request is traced; by default, the span that is current at this call. The iteration raises ``RequestRejected``
        (nothing has happened then), ``ModelError`` or ``EngineClosed``.
        """
        options = RequestOptions(request_id, priority, tenant, retention)
        return self._submission.generation(prompt, params, options, trace_headers, streams=True)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
        retention: SequenceOf[Retention] = (),
        trace_headers: Headers | None = None,
    ) -> list[RequestOutput]:
        """Generate to the end; the last output of each sample, in order of ``index``."""
        options = RequestOptions(request_id, priority, tenant, retention)
        last: dict[int, RequestOutput] = {}
        async for output in self._submission.generation(prompt, params, options, trace_headers, streams=False):
            last[output.index] = output
        return [last[index] for index in sorted(last)]

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens that a prompt of any kind begins with; none for an empty text. :attr:`codec` turns them back.

        :raises InvalidRequest: when it is malformed, or needs a tokenizer that the model came without.
        :raises ContextExceeded: when it is a text with more than 128 characters for each token of the context.
        """
        self._submission.require_open()
        return await self._life.parts.intake.tokenize(prompt)

    def abort(self, request_id: str) -> bool:
        """End a request at the next step edge; its stream closes with ``finish_reason`` ``abort``. False: no such
        one.
        """
        self._submission.require_open()
        group = self._loop.groups.get(request_id)
        if group is None or group.is_over:
            return False
        self._loop.abort(group)
        return True

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
        return await self._submission.fork(request_id, params, new_id).start()

    def blocking(self) -> BlockingEngine:
        """The engine for other threads: ``with engine.blocking() as b: b.complete(...)``; any number may share one."""
        self._submission.require_open()
        return BlockingEngine(self, self._life.portal)

    # the cache

    async def pin(
        self, prefix: Prompt, *, ttl: float | None = None, priority: int | None = None, tenant: str | None = None
    ) -> Pin:
        """Keep the whole blocks of ``prefix`` on the device, computing them first if need be.

        Without ``priority`` they cannot be evicted until :meth:`unpin`, or for ``ttl`` seconds. With it they can, but
        what has a lower retention priority goes first; nothing is to be unpinned then. Pins do not outlive the engine;
        priorities do.

        :raises OutOfBlocks: when pinned prefixes would take more than half of the pool, or blocks are too short now.
        :raises RequestRejected: for a prefix that is malformed, shorter than a block, or never fits.
        """
        _check_ttl(ttl)
        if priority is not None:
            Retention(0, None, priority)  # checks it
        self._submission.require_room(None)
        if not self.config.enable_prefix_caching:
            raise InvalidRequest("nothing is kept without enable_prefix_caching: a prefix cannot be pinned")
        control, intake = self._life.parts.control, self._life.parts.intake
        ids, namespace = await intake.token_ids(prefix), intake.namespace(tenant)
        if len(ids) < self.config.block_size:
            raise InvalidRequest(f"a prefix must have at least {self.config.block_size} tokens, a block, to be kept")
        for _ in range(PIN_TRIES):
            if priority is not None and (kept := await control.keep(namespace, ids, ttl, priority)) is not None:
                return kept
            if priority is None and (pin := await control.try_pin(namespace, ids, ttl)) is not None:
                return pin
            await self.complete(ids, SamplingParams(max_tokens=1, temperature=0.0), tenant=tenant)
        raise OutOfBlocks("the prefix was evicted as soon as it was computed; the pool is too full to keep it")

    async def unpin(self, pin: Pin) -> bool:
        """Let a pinned prefix be evicted again; False when its time was over already."""
        self._submission.require_open()
        return await self._life.parts.control.unpin(pin)

    def now(self) -> float:
        """Seconds on the engine's monotonic clock, on which pins expire."""
        return self._clock()

    def pins(self) -> tuple[Pin, ...]:
        """What is pinned now, the oldest first."""
        self._submission.require_open()
        return self._loop.pins()

    async def evict(self, prefix: Prompt, *, tenant: str | None = None, tiers: bool = True) -> Evicted:
        """Forget ``prefix`` and everything that goes on from it, on the device and in the ``tiers``.

        What a request or a pin holds stays; of tiers that other engines share, only the prefix itself is forgotten.
        """
        self._submission.require_open()
        intake = self._life.parts.intake
        return await self._life.parts.control.evict(
            intake.namespace(tenant), await intake.token_ids(prefix), tiers=tiers
        )

    async def erase(self, tenant: str | None, *, snapshots: SequenceOf[str | os.PathLike[str]] = ()) -> int:
        """Abort the requests of ``tenant`` and forget all its blocks: on the device, in all tiers, whatever model wrote
        them, and in ``snapshots``, which are rewritten. Returns how many blocks there were.

        Other engines that share a tier keep what they hold themselves, and may write it there again: have each of them
        erase.

        :raises StorageError: when a tier or a snapshot could not be erased; the others are.
        """
        self._submission.require_open()
        parts = self._life.parts
        parts.intake.namespace(tenant)
        return await parts.control.erase(tenant, [os.fspath(location) for location in snapshots])

    async def explain(self, prompt: Prompt, *, tenant: str | None = None, others: bool = False) -> Explanation:
        """How much of ``prompt`` would be found, in which tier, and why not more.

        ``others``: tell also whether another tenant, adapter or model has more of it. For operators only: it says
        something about prompts that the caller may not know.
        """
        self._submission.require_open()
        intake = self._life.parts.intake
        return await self._life.parts.control.explain(
            intake.namespace(tenant), await intake.token_ids(prompt), others=others
        )

    async def set_eviction_policy(self, spec: str) -> str:
        """Let another eviction policy say what goes, from the next step edge on; returns the name of the one before.

        ``spec``: a name in ``octavo.eviction_policies`` or ``package.module:Class``; the class in charge, too, which
        starts afresh then. The cache stays as it is: the new policy hears of all that is in it, nothing is evicted, and
        requests go on. What was learned is not handed on.

        :raises PluginError: when it is unknown, cannot be imported, is no policy or cannot be made. Nothing has changed
            then.
        :raises InvalidRequest: when ``spec`` is no name.
        """
        self._submission.require_open()
        return await self._life.parts.control.set_eviction_policy(spec)

    def shadows(self) -> tuple[ShadowReport, ...]:
        """What the policies in ``shadow_policies`` and those of :meth:`add_shadow` would have found, beside what the
        engine's own cache has found for the same requests.
        """
        self._submission.require_open()
        return self._life.parts.shadows.reports()

    def add_shadow(self, spec: str) -> None:
        """Let one more eviction policy run beside the one that decides. It starts with an empty cache.

        :raises PluginError: when it is unknown, cannot be imported, is no policy or cannot be made.
        :raises InvalidRequest: when it runs as a shadow already.
        """
        self._submission.require_open()
        self._life.parts.shadows.add(spec)

    def remove_shadow(self, spec: str) -> bool:
        """End a shadow; whether there was one."""
        self._submission.require_open()
        return self._life.parts.shadows.remove(spec)

    async def snapshot(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: Prompt | None = None,
        tenant: str | None = None,
        tiers: bool = True,
    ) -> SnapshotReport:
        """Write the cache as it is now to ``path``, all at once or not at all, while requests go on.

        ``prefix``: only this prefix (a system prompt, a document) of ``tenant``. ``tiers``: also what lies in local
        tiers alone. Start from it with ``AsyncEngine(..., restore=path)``, or :meth:`import_snapshot` it elsewhere.

        :raises StorageError: when it cannot be written; what was there before is untouched.
        """
        self._submission.require_open()
        intake = self._life.parts.intake
        within = None if prefix is None else (intake.namespace(tenant), await intake.token_ids(prefix))
        return await self._life.parts.control.snapshot(os.fspath(path), within=within, tiers=tiers)

    async def import_snapshot(self, path: str | os.PathLike[str]) -> int:
        """Copy the blocks of a snapshot into the tiers of this engine; returns how many they took, with those that they
        had already.

        :raises FingerprintMismatch: when it is of another model, geometry or format; the message says what differs.
        :raises StorageError: when it cannot be read.
        :raises InvalidRequest: when this engine has no tier.
        """
        self._submission.require_open()
        return await self._life.parts.control.import_snapshot(os.fspath(path))

    # looking

    @property
    def is_open(self) -> bool:
        """Whether it was entered and neither closed nor ended otherwise. From any thread."""
        return self._life.home is not None

    @property
    def model(self) -> ModelInfo:
        """What was loaded."""
        self._submission.require_open()
        return self._life.parts.runner.info

    @property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer, if it came with one."""
        self._submission.require_open()
        return self._life.parts.codec

    @property
    def identity(self) -> str:
        """Digest of all that stored K and V depend on: weights, dtype, geometry, block size and more. Engines share
        blocks exactly when theirs are equal.
        """
        self._submission.require_open()
        return self._life.parts.intake.namespace(None).model

    @property
    def is_draining(self) -> bool:
        """Whether :meth:`drain` was called: it takes no new requests."""
        return self._submission.is_draining

    @property
    def registry(self) -> CollectorRegistry:
        """The engine's metrics, for prometheus_client or :func:`octavo.telemetry.metrics.endpoint.serve_metrics`.

        It can be scraped from any thread. One of the engine's own shows the last values after the engine was closed.
        """
        return self._metrics.registry

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges; cheap."""
        self._submission.require_open()
        return self._loop.stats()

    def requests(self) -> tuple[RequestView, ...]:
        """What is under way, the oldest first; its numbers, not its text."""
        self._submission.require_open()
        return self._loop.requests()

    def kv_events(self, *, replay_from: int | None = None) -> Subscription:
        """What is stored now on the device and in the tiers, then everything that enters and leaves them, in order:
        ``async with engine.kv_events() as batches: async for batch in batches: ...``.

        ``replay_from``: the number of the batch to go on with, after a break, if that is still kept; see
        :class:`~octavo.telemetry.events.log.Subscription` for what happens if not, and to readers that are slow. While
        nobody subscribes no event is made. The first subscriber lets the whole cache be named in one go, about 2
        microseconds a block, unless :meth:`name_cache` has seen to it.

        :raises EngineClosed: when the engine is not open, or open in another event loop.
        """
        self._require_own_loop()
        return self._life.parts.kv_events.subscribe(replay_from)

    async def name_cache(self) -> None:
        """Have all that is cached named, a part at a time while requests go on, for a :meth:`kv_events` that follows.

        :raises EngineClosed: when the engine is not open, or open in another event loop.
        """
        self._require_own_loop()
        await self._life.parts.kv_events.prepare()

    def _require_own_loop(self) -> None:
        if self._submission.require_open() is not asyncio.get_running_loop():
            raise EngineClosed("the engine belongs to another event loop; call it in that one")

    async def cache_view(self, *, max_nodes: int = 200, text: bool = False) -> CacheView:
        """The cache at this moment, for people: what each block is, the edges of the prefix tree that were used last,
        the last evictions, and the counters. Cheap enough for once a second, whatever the size of the cache.

        ``max_nodes``: edges to show. ``text``: decode how each of them begins, for operators only: these are prompts,
        of all tenants.

        :raises InvalidRequest: when ``max_nodes`` is no integer from 0 to 10,000.
        """
        self._submission.require_open()
        return await self._life.parts.views.view(max_nodes=max_nodes, text=text)

    def census(self) -> Census:
        """Check the cache's books now and count its blocks. O(pool).

        :raises CensusFailed: when they are wrong.
        """
        self._submission.require_open()
        return self._loop.cache.census()

    # inside

    @property
    def _loop(self) -> StepLoop:
        return self._life.parts.loop


def _check_ttl(ttl: float | None) -> None:
    if ttl is not None and not (isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl > 0):
        raise InvalidRequest(f"ttl must be a number of seconds above 0 or None, not {ttl!r:.40}")
