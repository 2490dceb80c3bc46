"""StatusBoard: what a replica says of itself now and then, for routers and autoscalers."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Final

import anyio

from ...policies.routing.digest import DigestBuilder
from ...policies.routing.status import ReplicaStatus
from ...telemetry.events.log import DEVICE, EventBatch, Subscription
from ..async_engine import AsyncEngine
from ..counters import EngineStats
from .holdings import Holdings

MOST_NAMES: Final = 65_536
"""Names that a digest is made for: in its 64 KiB, 2 % of those that are not there look as if they were."""
REST_SECONDS: Final = 60.0
"""After so long without a question the cache is watched no more."""


class StatusBoard:
    """Of one engine. Its cache is watched from the first question on, and costs nothing before. All calls from the
    engine's event loop.

    The digest covers what is on the device and, as far as there is room, in tiers of the engine's own, whoever's the
    blocks are.
    """

    def __init__(self, engine: AsyncEngine, *, every: float = 1.0, rest: float = REST_SECONDS) -> None:
        """``every``: seconds for which a digest is good. ``rest``: seconds without a question after which nothing is
        watched.
        """
        self._engine = engine
        self._every = every
        self._rest = rest
        self._asking = anyio.Lock()
        self._watched: _Watched | None = None
        self._leaving: asyncio.TimerHandle | None = None

    @property
    def is_watching(self) -> bool:
        """Whether the engine makes events for it."""
        return self._watched is not None

    async def status(self) -> ReplicaStatus:
        """How the engine stands now; cheap enough for once a second. The first time its tiers are listed.

        :raises EngineClosed: when it is not open.
        """
        async with self._asking:
            digest = await self._digest()
        stats = self._engine.stats()
        return ReplicaStatus(
            free_blocks=stats.cache.free + stats.cache.idle,
            total_blocks=stats.cache.total,
            running=stats.running + stats.loading,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            digest=digest,
            block_tokens=self._engine.config.block_size,
            namespace=self._engine.identity,
            is_draining=self._engine.is_draining,
        )

    def close(self) -> None:
        """Watch no more. The next question begins anew. Idempotent."""
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.batches.close()
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    async def _digest(self) -> bytes:
        if self._watched is None:
            await self._engine.name_cache()
        watched = self._watched = self._watched or _Watched(self._engine.kv_events(), _room(self._engine.stats()))
        if self._leaving is not None:
            self._leaving.cancel()
        self._leaving = asyncio.get_running_loop().call_later(self._rest, self.close)
        return await watched.digest(self._engine.now(), self._every)


class _Watched:
    """The names of the blocks that there are, by the engine's events, read when somebody wants to know."""

    def __init__(self, batches: Subscription, room: dict[str, int]) -> None:
        self.batches = batches
        self._builder = DigestBuilder(sum(room.values()))
        self._holdings = Holdings(room, self._builder)
        self._made = b""
        self._made_at = -inf

    async def digest(self, now: float, every: float) -> bytes:
        """Made anew when the last one is older than ``every`` seconds."""
        if now - self._made_at >= every:
            while (batch := await self._next()) is not None:
                await self._holdings.take(batch.events)
            self._made, self._made_at = self._builder.to_bytes(), now
        return self._made

    async def _next(self) -> EventBatch | None:
        await self.batches.survey()
        return self.batches.next_nowait()


def _room(stats: EngineStats) -> dict[str, int]:
    """How many names of each place there is room for in a digest: the device comes first."""
    device = min(stats.cache.total, MOST_NAMES)
    near = [tier.name for tier in stats.tiers if not tier.shared]
    return {DEVICE: device, **dict.fromkeys(near, (MOST_NAMES - device) // max(len(near), 1))}
