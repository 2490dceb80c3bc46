"""RayFleet: replicas of a Ray Serve deployment behind one handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Final

import anyio
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ....errors import ReplicaLost, describe
from ....policies.routing.base import ReplicaId
from ..base import LOOKING, AnswerHead, HttpRequest, Scheme, Wanted, WholeAnswer
from ..forwarding import silent
from .seams import Handle, OneAnswer, Stream
from .ticket import Ticket

PATIENCE: Final = 60.0
"""Seconds that a request waits for a replica that can take it: one may be starting."""
LOOK_SECONDS: Final = 5.0
"""What a look at all replicas may take, less than the time that those who watch them have. Who hangs is missing."""
ACT_SECONDS: Final = 600.0
"""What an operation on all replicas may take, such as a snapshot."""
MEETING_INTERVAL: Final = 1.0
"""Seconds between two attempts to learn of a replica how it names blocks."""


class RayFleet:
    """A :class:`~octavo.engine.fleet.base.Fleet` over a handle. In one event loop."""

    def __init__(self, handle: Handle, *, patience: float = PATIENCE) -> None:
        """``handle``: of a deployment of :class:`~octavo.engine.fleet.ray.replica.Replica`, routed by
        :class:`~octavo.engine.fleet.ray.router.Router`. ``patience``: seconds until a request that no replica has
        taken is given up.
        """
        self._handle = handle
        self._answering = handle.options(stream=True)
        self._patience = patience
        self._scheme: Scheme | None = None

    @property
    def scheme(self) -> Scheme | None:
        return self._scheme

    async def meet(self) -> None:
        """Wait for the first replica, and ask it how blocks are named: until then requests go by load."""
        while self._scheme is None:
            try:
                self._scheme = await self._handle.scheme.remote()
            except (RayError, RayServeException):  # it went as it was asked
                await anyio.sleep(MEETING_INTERVAL)

    async def send(self, request: HttpRequest, wanted: Wanted) -> AsyncGenerator[AnswerHead | bytes, None]:
        sending = _Sending(Ticket(wanted))
        stream = self._answering.answer.remote(request, sending.ticket)
        expiry = asyncio.get_running_loop().call_later(self._patience, sending.expire, stream)
        try:
            async for piece in stream:
                if isinstance(piece, str):  # the replica has it
                    expiry.cancel()
                    sending.replica = piece
                else:
                    yield piece._replace(routed=sending.ticket.routed) if isinstance(piece, AnswerHead) else piece
            sending.is_done = True
        except asyncio.CancelledError as cancelled:
            if _is_cancelled():
                raise
            raise sending.lost("its request was cancelled") from cancelled
        except (RayError, RayServeException) as error:
            raise sending.lost(describe(error)) from error
        finally:
            expiry.cancel()
            sending.ticket.is_over = True
            self._scheme = sending.ticket.scheme or self._scheme
            if not sending.is_done:
                stream.cancel()

    async def ask_all(self, request: HttpRequest) -> Mapping[ReplicaId, WholeAnswer]:
        acts = request.method not in LOOKING
        seconds = ACT_SECONDS if acts else LOOK_SECONDS
        found: dict[ReplicaId, WholeAnswer] = {}

        async def wait(number: int, asked: OneAnswer) -> None:
            with suppress(Exception), anyio.fail_after(seconds):  # whatever it is, the others have their answers
                answer = await asked.get_async()
                if isinstance(answer, WholeAnswer):
                    found[answer.head.replica] = answer
                    return
            if acts:  # where it was not done is to be known, though Ray does not tell whom it has asked
                found[f"unknown-{number}"] = silent(f"unknown-{number}", "gave no answer")

        try:
            with anyio.fail_after(self._patience):
                everybody = await self._handle.broadcast("whole", request, seconds)._fetch_replica_results_async()  # noqa: SLF001  # see Broadcast
        except (RayError, RayServeException, TimeoutError):
            return {}
        async with anyio.create_task_group() as tasks:
            for number, each in enumerate(everybody, 1):
                tasks.start_soon(wait, number, each)
        return found


class _Sending:
    """One request, as far as this side knows."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.replica: ReplicaId | None = None
        """Who has it; ``None``: nobody yet."""
        self.is_done = False
        self._has_waited = False

    def expire(self, stream: Stream) -> None:
        """Nobody has taken it for too long."""
        self._has_waited = True
        self.ticket.problem = "no replica could take the request in time"
        stream.cancel()

    def lost(self, what: str) -> ReplicaLost:
        """The error to raise."""
        if self.ticket.problem is not None:
            return ReplicaLost(self.ticket.problem, self.ticket.wanted.only, has_waited=self._has_waited)
        if self.replica is None:
            return ReplicaLost(f"no replica has taken the request: {what}", self.ticket.wanted.only)
        return ReplicaLost(f"replica {self.replica}: {what}", self.replica)


def _is_cancelled() -> bool:
    """Whether the task that iterates is. Ray raises the same error when the request was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
