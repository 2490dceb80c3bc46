"""LocalFleet: several engines in one process, each with its own server's app. For several devices, and for tests."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Final, NamedTuple, Self

import anyio

from ...errors import InvalidRequest, ReplicaLost
from ...policies.routing.base import ReplicaId, RoutingPolicy
from ...policies.routing.fleet_view import FleetView, Placement
from ...policies.routing.status import ReplicaStatus
from ..async_engine import AsyncEngine
from ..server.access_log import AccessLog
from ..server.app import app_of
from ..server.endpoints.health import vital_signs
from ..server.service import Service
from ..server.settings import ServerSettings
from .base import LOOKING, AnswerHead, HttpRequest, Routed, Scheme, Wanted, WholeAnswer
from .containment import ContainedRouter
from .forwarding import head_of, silent, whole_of
from .in_process import Replica
from .naming import TextReader
from .news import FleetNews
from .routing import made_router

ASK_SECONDS: Final = 4.0
"""What one question to all replicas may take: one that hangs must not keep back what the others answer to a balancer,
who waits for some seconds at most."""
LOOK_SECONDS: Final = 1.0
"""Between two looks at how the engines are: they take some time themselves."""


class _Member(NamedTuple):
    """One of the fleet."""

    service: Service
    replica: Replica

    @property
    def is_leaving(self) -> bool:
        """Whether it takes nothing new: it is draining, or its engine has ended."""
        engine = self.service.known_engine
        return self.service.is_draining or engine is None or not engine.is_open or engine.is_draining


class LocalFleet:
    """A :class:`~octavo.engine.fleet.base.Fleet` of engines that are open in this event loop.

    ::

        async with AsyncEngine.open(name, on_gpu_0) as a, AsyncEngine.open(name, on_gpu_1) as b:
            async with LocalFleet({"a": a, "b": b}) as fleet:
                gateway = Gateway(fleet, fleet.reader())

    The engines are the caller's, and are closed by who opened them, after the fleet. What each has cached is known by
    its KV events.
    """

    def __init__(
        self,
        members: Mapping[ReplicaId, AsyncEngine | Service],
        policy: RoutingPolicy | None = None,
        *,
        settings: ServerSettings | None = None,
        ask_timeout: float = ASK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``members``: engines of the same model by name, or services around them. ``policy``: ``None`` is the default
        one, ``prefix``; one that fails costs no request. ``settings``: of the apps around engines; services have their
        own. ``ask_timeout``: seconds that a replica has for a question to all of them. ``clock``: seconds, monotonic.
        """
        self.view = FleetView(clock=clock)
        """The books by which the policy chooses."""
        self._policy = ContainedRouter(policy or made_router(), clock=clock)
        self._news = FleetNews(self.view)
        self._ask_timeout = ask_timeout
        self._clock = clock
        self._look_at = clock()
        self._sick: set[ReplicaId] = set()
        """Those whose model was dead, or hung, when it was looked at."""
        self._members = {
            replica: _member(
                replica, each if isinstance(each, Service) else Service(settings or ServerSettings(), each)
            )
            for replica, each in members.items()
        }

    async def __aenter__(self) -> Self:
        """:raises InvalidRequest: when its engines are not alike: what one has cached, or would answer, is nothing to
        another then.
        """
        if len({member.service.engine.identity for member in self._members.values()}) > 1:
            raise InvalidRequest("the engines of a fleet must have the same model, dtype and block size")
        for replica, member in self._members.items():
            self.view.join(replica)
            await member.service.engine.name_cache()
            self._news.follow(replica, member.service.engine.kv_events)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        members = list(self._members.values())
        for replica in list(self._members):
            self.lose(replica)
        await self._news.aclose()
        with anyio.CancelScope(shield=True):
            for member in members:
                await member.replica.wait_quiet()

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """Those that are not lost."""
        return tuple(self._members)

    @property
    def scheme(self) -> Scheme | None:
        """How its replicas name blocks."""
        engine = self._engine()
        return None if engine is None else Scheme(engine.identity, engine.config.block_size)

    def reader(self) -> TextReader:
        """Works out the tokens of prompts, for a gateway. It does not need the engines, once it is made.

        :raises ReplicaLost: when no engine is open.
        """
        engine = self._engine()
        if engine is None:
            raise ReplicaLost("there is no engine whose tokenizer could be used")
        return TextReader(engine.model, engine.codec, engine.config)

    def lose(self, replica: ReplicaId) -> None:
        """As if its process had been killed: what it answers breaks off, and it is there no more. What it was computing
        is aborted in its engine, which stays open. Nothing happens for one that is not there.
        """
        member = self._members.pop(replica, None)
        if member is not None:
            self._news.left(replica)
            self.view.leave(replica)
            member.replica.lose()

    async def send(self, request: HttpRequest, wanted: Wanted) -> AsyncGenerator[AnswerHead | bytes, None]:
        """As :meth:`~octavo.engine.fleet.base.Fleet.send`."""
        replica, routed = self._choose(wanted)
        placement: Placement = self.view.placed(wanted.request, replica.id, routed.matched)
        try:
            async with aclosing(replica.answer(request)) as parts:
                async for part in parts:
                    yield part._replace(routed=routed) if isinstance(part, AnswerHead) else part
        finally:
            self.view.finished(placement)

    async def ask_all(self, request: HttpRequest) -> Mapping[ReplicaId, WholeAnswer]:
        """As :meth:`~octavo.engine.fleet.base.Fleet.ask_all`, in the order of the replicas. What only looks has
        ``ask_timeout``; what changes something has the time it takes.
        """
        found = {replica: silent(replica, "gave no answer in time") for replica in self._members}
        timeout = self._ask_timeout if request.method in LOOKING else math.inf

        async def ask(replica: Replica) -> None:
            pieces = replica.answer(request)
            try:
                with anyio.move_on_after(timeout):
                    found[replica.id] = await whole_of(await head_of(pieces), pieces)
            except ReplicaLost:
                found[replica.id] = silent(replica.id, "was lost before it answered")

        async with anyio.create_task_group() as tasks:
            for member in self._members.values():
                tasks.start_soon(ask, member.replica)
        return found

    def _choose(self, wanted: Wanted) -> tuple[Replica, Routed]:
        request = wanted.request
        if wanted.only is not None:
            if wanted.only not in self._members:
                raise ReplicaLost(f"the replica {wanted.only} is not there", wanted.only)
            matched = self.view.matched(request.names).get(wanted.only, 0)
            return self._members[wanted.only].replica, Routed(None, matched, self.view.load(wanted.only))
        if not self._members:
            raise ReplicaLost("there is no replica")
        self._note_who_leaves()
        choice = self._policy.choose(request, self.view)
        chosen = choice.replicas[0]
        return self._members[chosen].replica, Routed(choice.reason, choice.matched, self.view.load(chosen))

    def _note_who_leaves(self) -> None:
        """Those that take nothing, and those that can do nothing: they answer fast, and would be given everything."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK_SECONDS
            signs = {replica: vital_signs(member.service).status for replica, member in self._members.items()}
            self._sick = {replica for replica, sign in signs.items() if sign != "ok"}
        for replica, member in self._members.items():
            known, leaves = self.view.status(replica), member.is_leaving or replica in self._sick
            if leaves is not (known is not None and known.is_draining):
                self.view.report(replica, ReplicaStatus(is_draining=leaves))

    def _engine(self) -> AsyncEngine | None:
        """One that is open."""
        engines = (member.service.known_engine for member in self._members.values())
        return next((engine for engine in engines if engine is not None and engine.is_open), None)


def _member(replica: ReplicaId, service: Service) -> _Member:
    return _Member(service, Replica(replica, AccessLog(app_of(service), service)))
