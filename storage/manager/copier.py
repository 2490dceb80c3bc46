"""TierCopier: moves copies of blocks between tiers, up before they are asked for and down before the process ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial

import anyio
import anyio.to_thread

from ...errors import StorageError
from ..base import Listed, Meta
from ..naming import BlockName, Shelf
from .mount import Mount, Surroundings
from .mount_listing import listing_of
from .reader import TierReader
from .writer import TierWriter


class TierCopier:
    """Copies for a :class:`~octavo.storage.manager.tier_manager.TierManager`. Best effort."""

    def __init__(
        self,
        mounts: Sequence[Mount],
        reader: TierReader,
        writer: TierWriter,
        around: Surroundings,
        wall: Callable[[], float],
    ) -> None:
        self._mounts = mounts
        self._reader = reader
        self._writer = writer
        self._batch = around.settings.batch_blocks
        self._wall = wall

    async def prefetch(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """See :meth:`TierManager.prefetch`."""
        first, queued, forgotten = self._mounts[0], 0, self._writer.forgotten
        tiers = self._reader.coverage(shelf, names).tiers
        lower = [name for name, tier in zip(names, tiers, strict=False) if tier > 0]
        for at in range(0, len(lower), self._batch):
            wanted = lower[at : at + self._batch][: first.queue.room()]
            if not (wanted and first.writable()):
                break
            blocks = (await self._reader.fetch(shelf, wanted)).leading(len(wanted))
            if forgotten != self._writer.forgotten:
                break
            queued += first.queue.add(block.item for block in blocks)
            if len(blocks) < len(wanted):
                break
        return queued

    async def persist(self, deadline: float) -> int:
        """See :meth:`TierManager.persist`."""
        copied = 0
        target = next(iter(self._writer.targets("persistent")), None)
        if target is None:
            return copied
        with anyio.move_on_after(deadline), suppress(StorageError):
            await self._writer.settle()  # what waits for a tier is in none yet
            for shelf, names in _batches(await self._missing(target), self._batch):
                forgotten = self._writer.forgotten
                found = (await self._reader.fetch(shelf, names)).found
                copied += await self._writer.store(target, [found[at].item for at in sorted(found)], forgotten)
            await target.flush(deadline)
        return copied

    async def _missing(self, target: Mount) -> list[Listed]:
        """What volatile tiers have and ``target`` lacks, the most valuable first."""
        volatile: dict[tuple[Shelf, BlockName], Listed] = {}
        for mount in self._mounts:
            if not (mount.tier.persistent or mount.tier.shared):
                async with aclosing(listing_of(mount, None)) as blocks:
                    volatile |= {(listed.shelf, listed.head.name): listed async for listed in blocks}
        if target.asks:
            with suppress(StorageError):  # what it does not say is put again, which costs little
                for shelf, names in _batches(volatile.values(), self._batch):
                    await target.ask(shelf, names)
        missing = [listed for (shelf, name), listed in volatile.items() if not target.holds(shelf, name)]
        return await anyio.to_thread.run_sync(partial(most_valuable_first, missing, self._wall()))


def most_valuable_first(blocks: Iterable[Listed], now: float) -> list[Listed]:
    """``blocks`` by priority, then hits, then how lately they were used, but each after its ancestors: without them it
    could not be found. ``now``: wall clock.
    """
    waiting = {(listed.shelf, listed.head.name): listed for listed in blocks}
    order: list[Listed] = []
    for listed in sorted(waiting.values(), key=lambda listed: _value(listed.meta, now), reverse=True):
        path: list[Listed] = []
        above: Listed | None = waiting.pop((listed.shelf, listed.head.name), None)
        while above is not None:
            path.append(above)
            above = waiting.pop((above.shelf, above.head.parent), None)
        order += reversed(path)
    return order


def _value(meta: Meta, now: float) -> tuple[int, int, float]:
    aged = meta.aged(now)
    holds = aged.ttl is None or aged.ttl > 0
    return aged.priority if holds else min(aged.priority, 0), aged.hits, -aged.idle


def _batches(blocks: Iterable[Listed], size: int) -> Iterator[tuple[Shelf, list[BlockName]]]:
    """Neighbours of one shelf, up to ``size`` together."""
    shelf, names = None, list[BlockName]()
    for listed in blocks:
        if shelf is not None and (listed.shelf != shelf or len(names) == size):
            yield shelf, names
            names = []
        shelf = listed.shelf
        names.append(listed.head.name)
    if shelf is not None:
        yield shelf, names
