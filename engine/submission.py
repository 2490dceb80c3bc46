"""Submission: from what a caller wants to a request under way, or to a refusal, which is counted and traced."""

from __future__ import annotations

import asyncio
import contextlib

from ..errors import EngineClosed, InvalidRequest, QueueFull, RequestRejected
from ..telemetry import names
from ..telemetry.record import NO_TRACE, RequestTrace
from ..telemetry.tracing import Context, Headers, Tracing, parent_of
from .generation import Generation
from .insight.request_trace import asked, input_text, operation_of
from .intake import RequestOptions
from .life import EngineLife
from .request import Prompt, SamplingParams
from .sequence import SequenceGroup


class Submission:
    """The way in for requests of one engine."""

    def __init__(self, life: EngineLife, tracing: Tracing, *, max_waiting: int) -> None:
        self.is_draining = False
        """Whether no new request is taken any more."""
        self._life = life
        self._tracing = tracing
        self._max_waiting = max_waiting

    def generation(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        headers: Headers | None,
        *,
        streams: bool,
    ) -> Generation:
        """A request that is submitted when its iteration starts. It is traced below the caller of this method, or below
        the ``traceparent`` in ``headers``.
        """
        parent = parent_of(headers) if self._tracing.is_on else None
        wanted = SamplingParams() if params is None else params

        async def submit() -> SequenceGroup:
            trace = NO_TRACE if parent is None else self._begin_trace(parent, prompt)
            try:
                return await self._submit(prompt, wanted, options, trace, streams=streams)
            except BaseException as error:
                self._note_refusal(trace, error)
                raise

        return Generation(submit, self.abort)

    def fork(self, source_id: str, params: SamplingParams | None, new_id: str | None) -> Generation:
        """A request that goes on from where another one stands; it is submitted already."""
        self.require_open()
        trace = self._begin_fork_trace(self._life.parts.loop.groups.get(source_id))
        try:
            child = self._submit_fork(source_id, params, new_id, trace)
        except BaseException as error:
            self._note_refusal(trace, error)
            raise

        async def submitted() -> SequenceGroup:
            return child

        return Generation(submitted, self.abort)

    def abort(self, group: SequenceGroup) -> None:
        """From any thread, since a generation that is dropped may be collected in any."""
        home = self._life.home
        if home is None:  # what still runs is being aborted
            return
        loop = self._life.parts.loop
        try:
            is_home = asyncio.get_running_loop() is home
        except RuntimeError:
            is_home = False
        if is_home:
            loop.abort(group)
        else:
            with contextlib.suppress(RuntimeError):  # the event loop was closed, and all went with it
                home.call_soon_threadsafe(loop.abort, group)

    def require_open(self) -> asyncio.AbstractEventLoop:
        """The engine's event loop.

        :raises EngineClosed: when it is not open.
        """
        home = self._life.home
        if home is None:
            raise EngineClosed("the engine is not open; use it inside `async with`")
        return home

    def require_room(self, request_id: str | None) -> None:
        """
        :raises EngineClosed: not open, draining, or entered in another event loop. :raises QueueFull: too many wait.
        :raises InvalidRequest: the id is in use.
        """
        if self.require_open() is not asyncio.get_running_loop():
            raise EngineClosed("the engine belongs to another event loop; use engine.blocking() or a new engine")
        if self.is_draining:
            raise EngineClosed("the engine is shutting down and takes no new requests")
        loop = self._life.parts.loop
        if request_id is not None and request_id in loop.groups:
            raise InvalidRequest(f"request_id {request_id!r:.80} is in use")
        if loop.queued >= self._max_waiting:
            raise QueueFull(f"{loop.queued} requests wait already; try again later or raise max_waiting")

    # inside

    async def _submit(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, trace: RequestTrace, *, streams: bool
    ) -> SequenceGroup:
        self.require_room(options.request_id)
        group = await self._life.parts.intake.prepare(prompt, params, options, trace)
        group.operation, group.is_streamed = operation_of(prompt), streams
        self.require_room(group.request_id)  # once more: preparing may have waited
        if trace.is_on:
            trace.describe(asked(group, streams=streams))
        if trace.shows_text:
            trace.describe(input_text(prompt, params))
        self._life.parts.loop.submit(group)
        return group

    def _submit_fork(
        self, source_id: str, params: SamplingParams | None, new_id: str | None, trace: RequestTrace
    ) -> SequenceGroup:
        self.require_room(new_id)
        parts = self._life.parts
        source = parts.loop.groups.get(source_id)
        if source is None:
            raise InvalidRequest(f"no request {source_id!r:.80} is under way")
        child = parts.intake.continuation(source, source.params if params is None else params, new_id, trace)
        child.operation = source.operation
        if trace.is_on:
            trace.describe(asked(child, streams=True))
        parts.loop.fork(source, child, parts.intake.sequence)
        return child

    def _begin_trace(self, parent: Context, prompt: Prompt) -> RequestTrace:
        self.require_open()
        return self._tracing.begin(parent, operation_of(prompt), self._life.parts.runner.info.name)

    def _begin_fork_trace(self, source: SequenceGroup | None) -> RequestTrace:
        if not self._tracing.is_on:
            return NO_TRACE
        operation = names.OPERATION_COMPLETION if source is None else source.operation
        origin = None if source is None else source.trace.origin
        return self._tracing.begin(parent_of(None), operation, self._life.parts.runner.info.name, origin)

    def _note_refusal(self, trace: RequestTrace, error: BaseException) -> None:
        if isinstance(error, RequestRejected):
            self._life.parts.counters.rejected += 1
        trace.finish(type(error).__name__, "the request was not accepted")
