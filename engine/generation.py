"""Generation: the caller's end of one request, an asynchronous iterator of outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

from .request import RequestOutput
from .sequence import SequenceGroup

Submit = Callable[[], Awaitable[SequenceGroup]]
Abort = Callable[[SequenceGroup], None]


class Generation(AsyncIterator[RequestOutput]):
    """Outputs of one request, as they come. The request is submitted when the iteration starts.

    The request ends with the iteration, when the task that iterates is cancelled, by :meth:`close`, or when the
    generation is dropped. One that is left early and still referenced runs on: close it, or use ``async with``::

        async with engine.generate(prompt) as outputs:
            async for output in outputs: ...

    Not an async generator on purpose: closing works from any task and always aborts the request once. Iterate from one
    task at a time. A request that fails delivers what it has, with ``finish_reason`` ``error``, then raises.
    """

    def __init__(self, submit: Submit, abort: Abort) -> None:
        self._submit: Submit | None = submit
        self._abort = abort
        self._group: SequenceGroup | None = None
        self._ended = False
        self._closed = False

    @property
    def request_id(self) -> str | None:
        """The id of the request, once it was submitted."""
        return self._group.request_id if self._group is not None else None

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def start(self) -> Self:
        """Submit now rather than at the first step of the iteration.

        :raises RequestRejected: when the request is refused; :raises EngineClosed: when the engine takes none.
        """
        if self._submit is not None:
            submit, self._submit = self._submit, None
            self._group = await submit()
            if self._closed:  # meanwhile, by another task
                self._ended = True
                self._abort(self._group)
        return self

    async def __anext__(self) -> RequestOutput:
        """
        :raises RequestRejected: at the first step, when the request is refused.
        :raises ModelError: when the model failed on it; what was generated before is delivered first.
        """
        try:
            await self.start()
            output = await self._group.stream.next() if self._group is not None and not self._ended else None
        except BaseException:  # cancellation above all: the request must not run on without a reader
            self.close()
            raise
        if output is None:
            self._ended = True
            raise StopAsyncIteration
        return output

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent; from any task of the engine's event loop."""
        self._submit = None
        self._closed = True
        if self._group is not None and not self._ended:
            self._ended = True
            self._abort(self._group)

    async def aclose(self) -> None:
        """:meth:`close`, under the name that ``contextlib.aclosing`` calls."""
        self.close()

    def __del__(self) -> None:
        self.close()
