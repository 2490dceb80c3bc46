"""KvEvents: turns what cache and tiers tell into the events of :mod:`octavo.telemetry.events.log`.

Every change of the cache is one synchronous call of the loop's task, and what it tells is noted within that call. So at
any moment at which other code of the event loop runs, a snapshot and what follows it fit together without a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import anyio.lowlevel

from ...storage.base import Head, Listed
from ...storage.manager.tier_manager import TierManager
from ...storage.naming import BlockName, Shelf, tenant_digest
from ...telemetry.events.log import DEVICE, Cleared, EventLog, KvEvent, Removed, Stored, Subscription
from ..kv import CachedRun, CacheManager, EvictedRun


class KvEvents:
    """Of one engine. Hears of nothing, and has nothing named, while nobody subscribes. All calls from the loop."""

    def __init__(self, cache: CacheManager, manager: TierManager, *, most: int, wall: Callable[[], float]) -> None:
        """``most``: batches that are kept for those who read late. ``wall``: seconds since the epoch."""
        self.log = EventLog(self, most=most, wall=wall, soon=_soon)
        self._cache = cache
        self._manager = manager
        self._nobody = tenant_digest(None)

    def subscribe(self, replay_from: int | None = None) -> Subscription:
        """See :class:`~octavo.telemetry.events.log.Subscription`."""
        return self.log.subscribe(replay_from)

    async def prepare(self) -> None:
        """Name all that is cached, a part at a time, so that a subscription that follows at once need not."""
        for _ in self._cache.naming():
            await anyio.lowlevel.checkpoint()

    def close(self) -> None:
        """The engine ends: nothing can be had from it any more. Idempotent."""
        if self.log.is_on:
            self.log.note(Cleared())
        self.log.close()

    # what the log asks

    @property
    def places(self) -> Sequence[str]:
        return self._manager.names

    def turn(self, *, on: bool) -> None:
        self._cache.unwatch(self)
        self._cache.unwatch_publication(self)
        self._manager.watch(self if on else None)
        if on:
            self._cache.watch(self)
            self._cache.watch_publication(self)

    def standing(self) -> list[KvEvent]:
        return [self._cached(run) for run in self._cache.runs()]

    async def survey(self, tier: str, note: Callable[[Sequence[KvEvent]], None]) -> None:
        def taken(listed: list[Listed]) -> None:
            heads: dict[Shelf, list[Head]] = {}
            for each in listed:
                heads.setdefault(each.shelf, []).append(each.head)
            note([event for shelf, found in heads.items() for event in self._kept(tier, shelf, found)])

        await self._manager.survey(tier, taken)

    # what the cache tells

    def published(self, runs: Sequence[CachedRun]) -> None:
        for run in runs:
            self.log.note(self._cached(run))

    def evicted(self, run: EvictedRun) -> None:
        self.log.note(Removed(run.names, DEVICE, run.namespace.shelf().namespace))

    def dropped(self, run: EvictedRun) -> None:
        self.evicted(run)

    # what the tiers tell

    def stored(self, tier: str, shelf: Shelf, heads: Sequence[Head]) -> None:
        for event in self._kept(tier, shelf, heads):
            self.log.note(event)

    def removed(self, tier: str, shelf: Shelf, names: Sequence[BlockName]) -> None:
        if names:
            self.log.note(Removed(tuple(names), tier, shelf.namespace))

    def erased(self, tier: str, tenant: bytes) -> None:
        self.log.note(Cleared(tier, tenant))

    # inside

    def _cached(self, run: CachedRun) -> Stored:
        shelf = run.namespace.shelf()
        return Stored(
            names=run.names,
            parent=run.parent if run.start else None,
            tokens=run.tokens,
            block_size=self._cache.block_size,
            tier=DEVICE,
            namespace=shelf.namespace,
            tenant=shelf.tenant,
            is_private=run.namespace.salt is not None,
            adapter=run.namespace.adapter,
        )

    def _kept(self, tier: str, shelf: Shelf, heads: Sequence[Head]) -> Iterator[Stored]:
        """One event for each chain."""
        for chain in _chains(heads):
            yield Stored(
                names=tuple(head.name for head in chain),
                parent=chain[0].parent if chain[0].start else None,
                tokens=b"".join(head.tokens for head in chain),
                block_size=self._cache.block_size,
                tier=tier,
                namespace=shelf.namespace,
                tenant=shelf.tenant,
                is_private=shelf.tenant != self._nobody,
            )


def _chains(heads: Sequence[Head]) -> Iterator[list[Head]]:
    """Neighbours that follow each other."""
    chain: list[Head] = []
    for head in heads:
        if chain and chain[-1].name != head.parent:
            yield chain
            chain = []
        chain.append(head)
    if chain:
        yield chain


def _soon(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)
