"""BlockingEngine: the engine for threads other than that of its event loop."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import CancelledError
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from anyio.from_thread import BlockingPortal

from ..errors import EngineClosed
from ..telemetry.tracing import Headers
from .counters import EngineStats
from .generation import Generation
from .kv import Retention
from .request import Prompt, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from .async_engine import AsyncEngine


class BlockingEngine:
    """Calls into the event loop and waits. Any number of threads may share one; the loop's own thread may not use it.

    Every method raises ``EngineClosed`` once the engine is closed, and otherwise what its asynchronous twin raises.
    """

    def __init__(self, engine: AsyncEngine, portal: BlockingPortal) -> None:
        self._engine = engine
        self._portal = portal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to do: the engine stays open, and other threads may go on."""

    def complete(
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
        """As :meth:`AsyncEngine.complete`."""

        async def complete() -> list[RequestOutput]:
            return await self._engine.complete(
                prompt,
                params,
                request_id=request_id,
                priority=priority,
                tenant=tenant,
                retention=retention,
                trace_headers=trace_headers,
            )

        with _closed_as_error(self._engine):
            return self._portal.call(complete)

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
    ) -> Iterator[RequestOutput]:
        """As :meth:`AsyncEngine.generate`, an ordinary iterator. Leaving the loop early aborts the request."""

        async def start() -> Generation:
            generation = self._engine.generate(
                prompt,
                params,
                request_id=request_id,
                priority=priority,
                tenant=tenant,
                retention=retention,
                trace_headers=trace_headers,
            )
            return await generation.start()

        async def step(generation: Generation) -> RequestOutput | None:
            return await anext(generation, None)

        with _closed_as_error(self._engine):
            generation = self._portal.call(start)
        try:
            while True:
                with _closed_as_error(self._engine):
                    output = self._portal.call(step, generation)
                if output is None:
                    return
                yield output
        finally:
            self._close(generation)

    def abort(self, request_id: str) -> bool:
        """As :meth:`AsyncEngine.abort`."""
        with _closed_as_error(self._engine):
            return self._portal.call(self._engine.abort, request_id)

    def set_eviction_policy(self, spec: str) -> str:
        """As :meth:`AsyncEngine.set_eviction_policy`."""
        with _closed_as_error(self._engine):
            return self._portal.call(self._engine.set_eviction_policy, spec)

    def stats(self) -> EngineStats:
        """As :meth:`AsyncEngine.stats`."""
        with _closed_as_error(self._engine):
            return self._portal.call(self._engine.stats)

    def _close(self, generation: Generation) -> None:
        try:
            self._portal.call(generation.close)
        except (RuntimeError, CancelledError):  # the engine was closed, which has aborted it
            return


@contextmanager
def _closed_as_error(engine: AsyncEngine) -> Iterator[None]:
    """Turns what the portal raises when it was stopped, before or during a call, into our error."""
    try:
        yield
    except (RuntimeError, CancelledError) as error:
        if engine.is_open:
            raise
        raise EngineClosed("the engine is closed") from error
