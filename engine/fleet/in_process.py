"""In process: one HTTP request to an ASGI app of this process, and its answer as it comes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from starlette.types import ASGIApp, Message, Scope

from ...errors import ReplicaLost
from ...policies.routing.base import ReplicaId
from .base import AnswerHead, HttpRequest

WINDOW: Final = 16
"""Messages that an app may be ahead of who reads its answer."""
GRACE: Final = 30.0
"""Seconds that an app has to notice that its client has left; then it is cancelled."""


class Replica:
    """An app that answers as one in another process would, and that can be lost like one."""

    def __init__(self, replica: ReplicaId, app: ASGIApp, *, grace: float = GRACE) -> None:
        self.id = replica
        self.is_lost = False
        self._app = app
        self._grace = grace
        self._tasks: set[asyncio.Task[None]] = set()

    def lose(self) -> None:
        """All that it answers breaks off, and nothing is answered any more."""
        self.is_lost = True
        for task in self._tasks:
            task.cancel()

    async def wait_quiet(self) -> None:
        """Until the app is done with all that it was asked."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def answer(self, request: HttpRequest) -> AsyncGenerator[AnswerHead | bytes, None]:
        """The head, then the body as it comes, not much faster than it is read. Closing it disconnects and waits until
        the app is done with that.

        :raises ReplicaLost: when the answer breaks off.
        """
        if self.is_lost:
            raise ReplicaLost(f"the replica {self.id} is lost", self.id)
        sender, receiver = anyio.create_memory_object_stream[Message](WINDOW)
        client = _Client(request, sender)
        # a context of its own, as in another process: what goes on around the sender is nothing to the app
        task = asyncio.create_task(self._run(client), context=contextvars.Context(), name=f"octavo-replica-{self.id}")
        self._tasks.add(task)
        try:
            async for message in receiver:
                if message["type"] == "http.response.start":
                    yield AnswerHead(message["status"], tuple(message.get("headers", ())), self.id)
                elif body := message.get("body", b""):
                    yield bytes(body)
            if not client.is_answered:
                raise ReplicaLost(f"the replica {self.id} was lost before its answer was whole", self.id)
        finally:
            client.leave()
            receiver.close()
            with anyio.CancelScope(shield=True):
                await _end(task, self._grace)
            self._tasks.discard(task)

    async def _run(self, client: _Client) -> None:
        try:
            with suppress(Exception):  # an answer that is not whole says it all; the app has logged why
                await self._app(_scope(client.request), client.receive, client.send)
        finally:
            client.hang_up()


async def _end(task: asyncio.Task[None], grace: float) -> None:
    """Wait for ``task``, not longer than ``grace`` seconds of its own accord."""
    done, _ = await asyncio.wait({task}, timeout=grace)
    if not done:
        task.cancel()
        await asyncio.wait({task})


class _Client:
    """The client's side of one connection."""

    def __init__(self, request: HttpRequest, sender: MemoryObjectSendStream[Message]) -> None:
        self.request = request
        self.is_answered = False
        """Whether the end of the answer came."""
        self._sender = sender
        self._is_asked = False
        self._gone = anyio.Event()

    def leave(self) -> None:
        """The client has no use for more."""
        self._gone.set()

    def hang_up(self) -> None:
        """Nothing more comes."""
        self._sender.close()

    async def receive(self) -> Message:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._gone.is_set():  # as servers do: what is sent to nobody is dropped
            return
        with suppress(anyio.BrokenResourceError):
            await self._sender.send(message)
        self.is_answered = message["type"] == "http.response.body" and not message.get("more_body", False)


def _scope(request: HttpRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": None,
    }
