"""ZmqPublisher: sends KV events over ZeroMQ to cache-aware routers. Needs ``pip install 'octavo[zmq]'``.

Messages have three frames: topic, number (8 bytes, big-endian) and payload (:mod:`.wire`). Numbers begin at 0 and
have no gaps; the first messages clear everything and tell what is stored. A reader that missed some asks at the replay
endpoint, with the number to begin with, and gets what is kept from there on, each with an empty frame in front, and at
the end the number -1 with an empty payload. What was before something that clears everything is not kept. When what is
asked for is not kept any more, nor anything that clears everything, all readers are told anew what is stored.

The messages hold the tokens of prompts, since most routers compute with them, unless the form is ``names``: whoever can
connect reads along. ZeroMQ does not ask who that is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Protocol, Self, TypeVarTuple, Unpack

import anyio
import anyio.lowlevel
import anyio.to_thread
import zmq
import zmq.asyncio

from ...errors import TelemetryError, describe
from ..logging import Logger, get_logger
from .log import Cleared, EventBatch, Subscription
from .wire import Form, is_partial, payload

LINGER_SECONDS: Final = 0.5
"""How long closing waits for readers to take what was sent."""
Ts = TypeVarTuple("Ts")
_END: Final = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES: Final = 8
_BREATH: Final = 64  # messages of a replay between two looks at what else is to be done


class Subscribable(Protocol):
    """An engine, as far as its events go."""

    def kv_events(self, *, replay_from: int | None = None) -> Subscription:
        """See ``AsyncEngine.kv_events``."""


class _Sent(NamedTuple):
    number: bytes
    payload: bytes
    begins: bool
    """Whether it clears everything first, so that a mirror is right with it and what follows."""


class ZmqPublisher:
    """Publishes the events of one engine.

    .. code-block:: python

        async with AsyncEngine.open("smollm2") as engine, ZmqPublisher("tcp://*:5557").serving(engine):
            ...

    A reader that is slow or dead loses messages, sees it by their numbers, and holds nobody up. Used once.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        form: Form = "array",
        rank: int = 0,
        binds: bool = True,
        most: int = 10_000,
    ) -> None:
        """``endpoint``: where readers subscribe; with ``binds=False``, where one reader has bound its socket, to which
        this one connects. ``replay_endpoint``: where they ask for what they missed; always bound. ``topic``: llm-d
        reads ``kv@<endpoint>@<model>``. ``form``: ``names`` for routers that need no tokens, such as Octavo's own; see
        :mod:`.wire`. ``rank``: which data-parallel replica this is. ``most``: messages that are kept
        for replay, and that may wait for one reader.
        """
        self.published = 0
        """Messages so far."""
        self._endpoints = _Endpoints(endpoint, replay_endpoint, binds, most)
        self._topic = topic.encode()
        self._form: Form = form
        self._rank = rank
        self._since = 0.0
        self._sent: deque[_Sent] = deque(maxlen=most)
        self._sockets: _Sockets | None = None
        self._logger: Logger = get_logger("octavo.kv_events")

    @property
    def endpoint(self) -> str:
        """Where readers subscribe, with the port that was taken for ``*``.

        :raises TelemetryError: while it is not serving.
        """
        return _address(self._opened().news)

    @property
    def replay_endpoint(self) -> str | None:
        """The same for replays; ``None`` when there are none.

        :raises TelemetryError: while it is not serving.
        """
        replay = self._opened().replay
        return None if replay is None else _address(replay)

    @asynccontextmanager
    async def serving(self, engine: Subscribable) -> AsyncIterator[Self]:
        """Publish until the context is left. It may be left before the engine is closed, or after.

        :raises TelemetryError: when an endpoint cannot be used, or it has served before.
        :raises EngineClosed: when the engine is not open.
        """
        if self._sockets is not None or self.published:
            raise TelemetryError("a publisher serves once; make a new one")
        self._sockets = sockets = _open(self._endpoints)
        try:
            async with engine.kv_events() as batches:
                tasks = [asyncio.create_task(self._lasting(self._publish, batches, sockets.news))]
                if sockets.replay is not None:
                    tasks.append(asyncio.create_task(self._lasting(self._answer, sockets.replay, batches)))
                try:
                    yield self
                finally:
                    await _ended(tasks)
                    while (batch := batches.next_nowait()) is not None:  # what has happened and was not read yet
                        self._publish_one(batch, batches, sockets.news)
        finally:
            self._sockets = None
            with anyio.CancelScope(shield=True):
                sockets.close(LINGER_SECONDS)
                await anyio.to_thread.run_sync(sockets.context.term)

    async def _lasting(self, work: Callable[[Unpack[Ts]], Awaitable[None]], *args: *Ts) -> None:
        try:
            await work(*args)
        except Exception as error:  # noqa: BLE001  # the engine, and whoever serves, go on without
            self._logger.error("KV events are published no longer", error=describe(error))

    async def _publish(self, batches: Subscription, news: zmq.Socket[bytes]) -> None:
        async for batch in batches:
            self._publish_one(batch, batches, news)

    def _publish_one(self, batch: EventBatch, batches: Subscription, news: zmq.Socket[bytes]) -> None:
        if any(map(is_partial, batch.events)):
            batches.restart()  # clears everything and tells what is left, with the rest of this batch
            return
        if not self.published:
            self._since = batch.time
        message = payload(batch, rank=self._rank, form=self._form, since=self._since)
        number = self.published.to_bytes(_NUMBER_BYTES, "big")
        self.published += 1
        begins = Cleared() in batch.events[:1]
        if begins:  # nobody needs what was before; a beginning is large, and there may be many
            self._sent.clear()
        self._sent.append(_Sent(number, message, begins))
        news.send_multipart((self._topic, number, message), zmq.DONTWAIT)  # such a socket drops rather than wait

    async def _answer(self, replay: zmq.asyncio.Socket, batches: Subscription) -> None:
        while True:
            envelope, number = _question(await replay.recv_multipart())
            if number is None:
                continue
            wanted = [sent for sent in self._sent if sent.number >= number]
            for count, sent in enumerate(wanted):
                await replay.send_multipart((*envelope, self._topic, sent.number, sent.payload))
                if count % _BREATH == _BREATH - 1:
                    await anyio.lowlevel.checkpoint()
            await replay.send_multipart((*envelope, b"", _END, b""))
            if self._sent and number < self._sent[0].number and not self._sent[0].begins:
                batches.restart()

    def _opened(self) -> _Sockets:
        if self._sockets is None:
            raise TelemetryError("the publisher has no address while it is not serving")
        return self._sockets


class _Endpoints(NamedTuple):
    news: str
    replay: str | None
    binds: bool
    most: int


class _Sockets(NamedTuple):
    context: zmq.Context[zmq.Socket[bytes]]
    news: zmq.Socket[bytes]
    replay: zmq.asyncio.Socket | None

    def close(self, linger: float) -> None:
        """``linger``: seconds that the library goes on sending. Ending the context waits for that."""
        for socket in (self.news, self.replay):
            if socket is not None:
                socket.close(linger=int(linger * 1000))


def _open(endpoints: _Endpoints) -> _Sockets:
    context = zmq.Context[zmq.Socket[bytes]]()
    replay = None if endpoints.replay is None else zmq.asyncio.Socket(context, zmq.ROUTER)
    sockets = _Sockets(context, context.socket(zmq.PUB), replay)
    place = endpoints.news
    try:
        sockets.news.set_hwm(endpoints.most)
        (sockets.news.bind if endpoints.binds else sockets.news.connect)(place)
        if replay is not None and endpoints.replay is not None:
            place = endpoints.replay
            replay.set_hwm(endpoints.most + 1)  # one whole replay: what does not fit is dropped
            replay.bind(place)
    except zmq.ZMQError as error:
        sockets.close(linger=0.0)
        context.term()
        raise TelemetryError(f"the endpoint {place} cannot be used: {describe(error)}") from error
    return sockets


def _question(frames: list[bytes]) -> tuple[list[bytes], bytes | None]:
    """Where the answer goes, and the number from which on; ``None`` for what is no question."""
    *envelope, number = frames
    return envelope, number if len(number) == _NUMBER_BYTES and len(envelope) in (1, 2) else None


def _address(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> str:
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait(tasks)
