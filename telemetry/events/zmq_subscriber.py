"""ZmqSubscriber: reads what a :class:`~.zmq_publisher.ZmqPublisher`, or vLLM's, sends. Needs ``octavo[zmq]``.

Whoever applies the batches in order has a mirror of what is stored there. Numbers tell what was lost: it is asked for
at the replay endpoint, and where it cannot be had the next batch begins with a ``Cleared``, so that the mirror is never
wrong, only short. A publisher of ours that keeps no beginning any more tells all of it anew when it is asked; what
others have is known again as they go on.

A publisher that was started again counts from 0. The form ``names`` says so in each message; in the others it is seen
when the numbers fall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from types import TracebackType
from typing import Final, NamedTuple, Self

import anyio
import anyio.lowlevel
import zmq
import zmq.asyncio

from ...errors import TelemetryError, describe
from .log import Cleared, EventBatch
from .wire import Told, told

_NUMBER_BYTES: Final = 8
_END: Final = b"\xff" * _NUMBER_BYTES
_RECONNECT_MS: Final = (100, 5000)
"""Between two tries to connect: at first, and at most."""
_HEARTBEAT_MS: Final = 5000
"""A peer that is silent for so long, while it should answer, is connected to anew."""
_PATIENCE: Final = 10
"""How many times as long a replay that did not come is waited for again: news are not read meanwhile."""
_MOST_BYTES: Final = 1 << 27
"""Of a message; a peer that sends a longer one is disconnected."""


class _Message(NamedTuple):
    number: int
    told: Told

    @property
    def begins(self) -> bool:
        return self.told.events[:1] == (Cleared(),)


class ZmqSubscriber:
    """An asynchronous iterator over the batches of one publisher, for one task.

    .. code-block:: python

        async with ZmqSubscriber("tcp://replica:5557", "tcp://replica:5558") as batches:
            async for batch in batches:
                ...

    It never ends by itself, connects again for as long as it takes, and keeps no more than one replay. What is no
    message is counted and passed over. Used once.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        most: int = 10_000,
        wait: float = 2.0,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        """``topic``: only what begins with it. ``most``: messages that may wait to be read, and of a replay that are
        taken; what is beyond is lost, and found missing. ``wait``: seconds without an answer after which a replay is
        given up. It is asked for again later, and after ``wait`` while nothing is known at all. ``context``: to be
        shared by many subscribers, since each has threads and descriptors of its own; it stays the caller's. ``None``:
        one for this subscriber alone.
        """
        self.malformed = 0
        """Messages that could not be read."""
        self.gaps = 0
        """How often something was lost for good."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._most = most
        self._wait = wait
        self._context = context
        self._sockets: _Sockets | None = None
        self._ready: deque[EventBatch] = deque()
        self._next = 0
        self._newest = -1
        """The number of the last news. A publisher's only rise."""
        self._since = 0.0
        self._ask_at = inf if replay_endpoint is None else -inf
        """When all that is kept is to be asked for, on the event loop's clock."""

    async def __aenter__(self) -> Self:
        """Connect, in the background.

        :raises TelemetryError: when an endpoint is none, or it was used before.
        """
        if self._sockets is not None:
            raise TelemetryError("a subscriber is used once; make a new one")
        context = self._context or zmq.asyncio.Context()
        try:
            self._sockets = _Sockets(context, _news(context, self._endpoint, self._topic, self._most))
        except TelemetryError:
            self._leave(context)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context, news = self._opened()
        news.close(linger=0)
        self._leave(context)

    def _leave(self, context: zmq.asyncio.Context) -> None:
        if context is not self._context:
            context.destroy(linger=0)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        """:raises TelemetryError: when the replay endpoint is none, or it was not entered."""
        while not self._ready:
            if anyio.current_time() >= self._ask_at:
                await self._catch_up(0)
            if not self._ready and (message := await self._news()) is not None:
                await self._take(message)
        return self._ready.popleft()

    async def _news(self) -> _Message | None:
        """The next message; ``None``: it is no message, or it is time to ask again for what is missing."""
        with anyio.CancelScope(deadline=self._ask_at):
            return self._read(await _received(self._opened().news))
        return None

    async def _take(self, message: _Message) -> None:
        number, since = message.number, message.told.since
        if number <= self._newest or (self._since and since != self._since):
            self._next = -1  # another publisher: nothing goes on from what is known
        self._newest = number
        if number > self._next:
            await self._catch_up(max(self._next, 0))
        if number >= self._next or number == 0:
            self._accept(message)

    async def _catch_up(self, number: int) -> None:
        """Take what is kept from ``number`` on."""
        if self._replay_endpoint is None:
            return
        heard: deque[_Message] = deque(maxlen=self._most)
        async with self._asking(self._replay_endpoint) as replay:
            await replay.send_multipart((b"", number.to_bytes(_NUMBER_BYTES, "big")))
            is_whole = await self._replayed(replay, heard)
        pause = self._wait if self._newest < 0 else _PATIENCE * self._wait
        self._ask_at = inf if is_whole else anyio.current_time() + pause
        for message in heard if is_whole else ():
            self._accept(message)

    async def _replayed(self, replay: zmq.asyncio.Socket, heard: deque[_Message]) -> bool:
        """Whether all of it came."""
        while True:
            with anyio.move_on_after(self._wait) as waiting:
                _, *frames = await _received(replay)
            if waiting.cancelled_caught:
                return False
            if frames[1:2] == [_END]:
                return True
            if (message := self._read(frames)) is not None:
                heard.append(message)

    @asynccontextmanager
    async def _asking(self, endpoint: str) -> AsyncIterator[zmq.asyncio.Socket]:
        """A socket of its own for each question, so that no late answer is taken for that to the next one."""
        replay = self._opened().context.socket(zmq.DEALER)
        try:
            replay.set_hwm(self._most + 1)
            _connect(replay, endpoint)
            yield replay
        finally:
            replay.close(linger=0)

    def _read(self, frames: list[bytes]) -> _Message | None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self.malformed += 1
            return None
        try:
            return _Message(int.from_bytes(frames[1], "big"), told(frames[2]))
        except TelemetryError:
            self.malformed += 1
            return None

    def _accept(self, message: _Message) -> None:
        number, (time, events, since) = message
        is_gap = number != self._next and not message.begins
        if is_gap:
            self.gaps += 1
            events = (Cleared(), *events)
        self._ready.append(EventBatch(number, time, events, has_gap=is_gap))
        self._next, self._since = number + 1, since

    def _opened(self) -> _Sockets:
        if self._sockets is None:
            raise TelemetryError("a subscriber is entered before it is read")
        return self._sockets


def wide_context() -> zmq.asyncio.Context:
    """One that has room for the subscribers of thousands of publishers. Its owner destroys it."""
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


async def _received(socket: zmq.asyncio.Socket) -> list[bytes]:
    """The next message. The socket does not wait for one that is there: a peer that sends without end would have the
    event loop for itself.
    """
    await anyio.lowlevel.checkpoint()
    return await socket.recv_multipart()


class _Sockets(NamedTuple):
    context: zmq.asyncio.Context
    news: zmq.asyncio.Socket


def _news(context: zmq.asyncio.Context, endpoint: str, topic: str, most: int) -> zmq.asyncio.Socket:
    news = context.socket(zmq.SUB)
    news.set_hwm(most)
    news.subscribe(topic.encode())
    try:
        _connect(news, endpoint)
    except TelemetryError:
        news.close(linger=0)
        raise
    return news


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    first, most = _RECONNECT_MS
    socket.setsockopt(zmq.RECONNECT_IVL, first)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, most)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise TelemetryError(f"the endpoint {endpoint} cannot be used: {describe(error)}") from error
