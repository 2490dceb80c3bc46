"""FleetNews: keeps a FleetView up with what replicas tell of their caches, as it happens.

Where there are news, routing goes by what is there, not by what was there when a replica reported last. A replica that
tells none, or whose news end, is known by the digest in its reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import anyio

from ...errors import describe
from ...policies.routing.base import ReplicaId
from ...policies.routing.fleet_view import FleetView
from ...policies.routing.status import ReplicaStatus
from ...telemetry.events.log import DEVICE, EventBatch
from ...telemetry.logging import get_logger
from .holdings import Holdings

if TYPE_CHECKING:
    import zmq.asyncio

Source: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[EventBatch]]]
"""Opens the news of one replica: ``engine.kv_events`` in this process, :class:`Subscriptions` for those elsewhere."""

NEAR: Final = (DEVICE, "host", "disk", "snapshot")
"""Places that are a replica's own, so that what lies there speaks for it. What lies in a tier that all share does
not."""
MOST_NAMES: Final = 262_144
"""Names that are kept of each place of a replica."""


class _Told(NamedTuple):
    """A replica whose news are read."""

    task: asyncio.Task[None]
    where: tuple[str | None, str | None]
    """The endpoints, if its status named them."""


class FleetNews:
    """Reads the news of replicas, each in a task of its own, until they leave. All calls from one event loop, that of
    ``fleet``.
    """

    def __init__(self, fleet: FleetView, *, near: Iterable[str] = NEAR, most: int = MOST_NAMES) -> None:
        """``near``: the tiers that count, by the names under which replicas have mounted them. ``most``: names that are
        kept of each of them, for each replica.
        """
        self._fleet = fleet
        self._room = dict.fromkeys(near, most)
        self._elsewhere = Subscriptions()
        self._told: dict[ReplicaId, _Told] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._logger = get_logger("octavo.fleet")

    @property
    def following(self) -> frozenset[ReplicaId]:
        """The replicas whose news are read."""
        return frozenset(replica for replica, told in self._told.items() if not told.task.done())

    def reported(self, replica: ReplicaId, status: ReplicaStatus) -> None:
        """Read the news that ``status`` says there are, if they are not read already. ``replica`` has joined."""
        where = status.kv_events, status.kv_replay
        told = self._told.get(replica)
        if status.kv_events is None or (told is not None and told.where == where):
            return
        self._begin(replica, partial(self._elsewhere.opened, status.kv_events, status.kv_replay), where)

    def follow(self, replica: ReplicaId, source: Source) -> None:
        """Read the news of ``replica``, which has joined, from ``source``, and from no other."""
        self._begin(replica, source, (None, None))

    def left(self, replica: ReplicaId) -> None:
        """Read no more of it. Nobody need be known by that name."""
        told = self._told.pop(replica, None)
        if told is not None:
            told.task.cancel()
            self._fleet.silenced(replica)
            self._ending.add(told.task)
            told.task.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """Read no more of any, and wait until all has ended. Idempotent."""
        for replica in list(self._told):
            self.left(replica)
        with anyio.CancelScope(shield=True):
            if self._ending:
                await asyncio.wait(self._ending)

    def _begin(self, replica: ReplicaId, source: Source, where: tuple[str | None, str | None]) -> None:
        self.left(replica)
        self._told[replica] = _Told(asyncio.create_task(self._read(replica, source)), where)

    async def _read(self, replica: ReplicaId, source: Source) -> None:
        holdings = Holdings(self._room, _Teller(self._fleet, replica))
        try:
            async with source() as batches:
                async for batch in batches:
                    await holdings.take(batch.events)
        except Exception as error:  # noqa: BLE001  # a source may raise anything; the others are read on
            self._logger.warning("news_ended", replica=replica, error=describe(error))
        finally:
            told = self._told.get(replica)
            if told is not None and told.task is asyncio.current_task():  # it has ended by itself
                self._fleet.silenced(replica)


class _Teller:
    """Tells the view of one replica."""

    def __init__(self, fleet: FleetView, replica: ReplicaId) -> None:
        self._fleet = fleet
        self._replica = replica

    def add(self, names: Sequence[bytes], /) -> None:
        self._fleet.stored(self._replica, names)

    def remove(self, names: Sequence[bytes], /) -> None:
        self._fleet.removed(self._replica, names)

    def clear(self) -> None:
        self._fleet.cleared(self._replica)


class Subscriptions:
    """The news that :class:`~octavo.telemetry.events.zmq_publisher.ZmqPublisher` sends in the form ``names``. All over
    one ZeroMQ context, so that a thousand replicas do not take two thousand threads; it is there while any are read.
    """

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None
        self._readers = 0

    @asynccontextmanager
    async def opened(self, endpoint: str, replay_endpoint: str | None) -> AsyncIterator[AsyncIterator[EventBatch]]:
        """The news of one replica.

        :raises ImportError: without the extra ``zmq``.
        :raises TelemetryError: where there is no such endpoint.
        """
        from ...telemetry.events.zmq_subscriber import ZmqSubscriber, wide_context  # noqa: PLC0415  # of an extra

        context = self._context = self._context or wide_context()
        self._readers += 1
        try:
            async with ZmqSubscriber(endpoint, replay_endpoint, context=context) as batches:
                yield batches
        finally:
            self._readers -= 1
            if not self._readers:
                self._context = None
                context.destroy(linger=0)
