"""Host: one engine with its whole HTTP app, from its start to its end. What a replica is, without Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Self

import anyio

from ....errors import EngineClosed, OctavoError, ReplicaLost, describe
from ....policies.routing.base import ReplicaId
from ....policies.routing.status import ReplicaStatus
from ....telemetry.logging import get_logger
from ...server.endpoints.health import examined
from ..base import AnswerHead, HttpRequest, Scheme, WholeAnswer
from .spec import ReplicaSpec
from .starting import Parts, started


class Host:
    """A replica in this event loop. Made by :meth:`opened`."""

    def __init__(self, replica: ReplicaId, spec: ReplicaSpec, parts: Parts, life: AsyncExitStack) -> None:
        """``life``: ends what ``parts`` are made of."""
        self.replica = replica
        """Its name in the fleet."""
        self._spec = spec
        self._parts = parts
        self._life = life
        self._logger = get_logger("octavo.fleet").bind(replica=replica)

    @classmethod
    async def opened(cls, spec: ReplicaSpec, replica: ReplicaId, *, address: str = "127.0.0.1") -> Self:
        """Load the model, take up what an earlier replica left, and serve. ``replica``: its name in the fleet, and the
        label ``replica`` of its metrics. ``address``: of this node, where routers find the news of the cache.

        :raises OctavoError: when the engine cannot be opened.
        """
        async with AsyncExitStack() as life:
            parts = await life.enter_async_context(started(spec, replica, address))
            return cls(replica, spec, parts, life.pop_all())

    # requests

    def answer(self, request: HttpRequest) -> AsyncGenerator[AnswerHead | bytes, None]:
        """Have the app answer; closing the iterator aborts the request in the engine.

        :raises ReplicaLost: when the answer breaks off.
        """
        return self._parts.app.answer(request)

    async def whole(self, request: HttpRequest) -> WholeAnswer:
        """The same, all at once.

        :raises ReplicaLost: as :meth:`answer`.
        """
        async with aclosing(self._parts.app.answer(request)) as pieces:
            head, *body = [piece async for piece in pieces]
        if not isinstance(head, AnswerHead):
            raise ReplicaLost("the answer has no head", self.replica)
        return WholeAnswer(head, b"".join(piece for piece in body if isinstance(piece, bytes)))

    # looking

    async def check(self) -> None:
        """As ``/health`` has it.

        :raises EngineClosed: when the engine has ended, its model is dead or a step hangs: it needs to be replaced.
        """
        found = await examined(self._parts.service)
        if found.status not in ("ok", "loading"):
            raise EngineClosed(f"replica {self.replica}: {found.status}, {found.detail}")

    async def status(self) -> ReplicaStatus:
        """What routers should know, cheap enough for once a second."""
        board, service, news = self._parts.board, self._parts.service, self._parts.news
        status = await board.status()
        if news is not None:
            status = status._replace(kv_events=news.endpoint, kv_replay=news.replay_endpoint)
        return status._replace(is_draining=status.is_draining or service.is_draining)

    @property
    def scheme(self) -> Scheme:
        """How it names blocks."""
        engine = self._parts.engine
        return Scheme(engine.identity, engine.config.block_size)

    # the end

    async def close(self) -> None:
        """Let what runs finish, for ``drain_timeout`` at most, leave the cache for another replica, and close."""
        self._parts.service.is_draining = True
        with anyio.CancelScope(shield=True):
            await self._parts.engine.drain(self._spec.drain_timeout)
            with anyio.move_on_after(self._spec.save_timeout):
                await self._save()
            await self._life.aclose()

    async def _save(self) -> None:
        engine, place = self._parts.engine, self._parts.snapshot
        if place is None or not engine.stats().cache.idle:  # nothing is better than what may lie there
            return
        try:
            report = await engine.snapshot(place)
        except OctavoError as error:
            self._logger.error("snapshot_failed", error=describe(error))
        else:
            self._logger.info("snapshot_saved", blocks=report.blocks)
