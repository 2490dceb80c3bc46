"""Replica: the class that Ray Serve runs, one instance in a process of its own."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import anyio
import ray
from ray import serve

from ....policies.routing.base import ReplicaId
from ..base import AnswerHead, HttpRequest, Scheme, WholeAnswer
from .host import Host
from .spec import ReplicaSpec
from .ticket import Ticket

WAITING_TOKENS: Final = "waiting_tokens"
"""What autoscaling goes by, see :class:`~octavo.engine.fleet.ray.scaling.WaitingTokens`."""


class Replica:
    """``serve.deployment(Replica).bind(spec)``, or better :func:`~octavo.engine.fleet.ray.build.application`.

    Ray calls ``__init__`` and ``__del__`` and awaits them: they are coroutines.
    """

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Ray awaits it
        context = serve.get_replica_context()
        address = str(ray.util.get_node_ip_address())
        self._host = await Host.opened(spec, str(context.replica_id.unique_id), address=address)
        gc.collect()
        gc.freeze()  # what was loaded stays: the collector need not look through it again and again

    async def answer(
        self, request: HttpRequest, ticket: Ticket | None
    ) -> AsyncGenerator[ReplicaId | AnswerHead | bytes, None]:
        """An answer as it comes: at once who gives it, then its head, then its body. Ray cancels it when who asked goes
        away. ``ticket``: for the router; it has stayed there.
        """
        yield self._host.replica
        async with aclosing(self._host.answer(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def whole(self, request: HttpRequest, seconds: float) -> WholeAnswer:
        """An answer all at once, for questions to all replicas. It may take so many ``seconds``."""
        with anyio.fail_after(seconds):
            return await self._host.whole(request)

    async def scheme(self) -> Scheme:
        """How it names blocks."""
        return self._host.scheme

    async def check_health(self) -> None:
        """Asked by Ray every ``health_check_period_s``.

        :raises EngineClosed: when this replica should be replaced.
        """
        await self._host.check()

    async def record_routing_stats(self) -> dict[str, object]:
        """For the routers; asked by Ray every ``request_routing_stats_period_s``."""
        return (await self._host.status()).to_dict()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaler."""
        return {WAITING_TOKENS: float((await self._host.status()).waiting_tokens)}

    async def __del__(self) -> None:
        await self._host.close()
