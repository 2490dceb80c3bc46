"""TierWriter: takes blocks into queues and writes them into tiers, one writer per tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import anyio

from ...errors import StorageError, describe
from ..base import Record
from ..naming import Shelf
from ..record import RecordCodec
from .mount import Mount, Surroundings
from .write_queue import Batch, Item, Offer, seal_items

Target: TypeAlias = Literal["first", "all", "persistent"]
"""Where an offer goes: the first usable tier that has room, every tier, or every tier that outlives the process."""

_REVOKE_AGAIN = 5.0
"""Seconds until a deletion that failed is tried again."""
FULL = 0.9
"""Share of its capacity above which a tier gives its coldest blocks to the next one."""


class TierWriter:
    """Writes for a :class:`~octavo.storage.manager.tier_manager.TierManager`; what is lost is counted as dropped."""

    def __init__(
        self, mounts: Sequence[Mount], codec: RecordCodec, around: Surroundings, wall: Callable[[], float]
    ) -> None:
        self._mounts = mounts
        self._codec = codec
        self._around = around
        self._wall = wall
        self._limiter = anyio.CapacityLimiter(2)
        self.forgotten = 0
        """How often something was forgotten; what was read before must not be written after."""
        self._stopped = False
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()

    def targets(self, to: Target) -> list[Mount]:
        """The tiers that an offer would go to, or try one after the other."""
        return [mount for mount in self._mounts if mount.writable() and (to != "persistent" or mount.persistent)]

    def offer(self, batch: Batch, to: Target) -> set[int]:
        """Queue what there is room for; returns the indices of what was taken."""
        offer = Offer(batch, pass_on=to == "first")
        taken: set[int] = set()
        for mount in self.targets(to):
            wanted = [at for at in range(len(batch.blocks)) if to != "first" or at not in taken]
            there = offer.to(mount.queue, wanted)
            mount.counters.dropped += len(wanted) - len(there) if to != "first" else 0
            taken |= there
        if to == "first" and self._mounts:
            self._mounts[0].counters.dropped += len(batch.blocks) - len(taken)
        return taken

    async def run(self) -> None:
        """Write until ``stop``."""
        if self._stopped:
            return
        self._ended = anyio.Event()
        try:
            async with anyio.create_task_group() as group:
                self._scope = group.cancel_scope
                for mount in self._mounts:
                    group.start_soon(self._keep_writing, mount)
        finally:
            self._scope = None
            self._ended.set()

    async def stop(self) -> None:
        """End ``run``, also one that is yet to begin. What is being written counts as dropped."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()
            await self._ended.wait()

    async def drain(self) -> None:
        """Write everything that waits, beside the writers or instead of them. Upper tiers first: they hand down."""
        for mount in self._mounts:
            if mount.revoked and not mount.queue.blocks:
                await self.write_next(mount)
            while mount.queue.blocks:
                await self.write_next(mount)

    async def settle(self) -> None:
        """Write what waits now, and let what is being written end; what comes meanwhile may wait on. Upper tiers first:
        they hand down.
        """
        for mount in self._mounts:
            left = mount.queue.blocks
            while left > 0 and mount.queue.blocks:
                left -= max(await self.write_next(mount), 1)

    async def _keep_writing(self, mount: Mount) -> None:
        while True:
            due = len(mount.revoked)
            if mount.queue.waiting or due:
                await self.write_next(mount)
            if not mount.queue.waiting and len(mount.revoked) >= due:
                with anyio.move_on_after(_REVOKE_AGAIN if mount.revoked else None):
                    await mount.queue.work.wait()

    async def write_next(self, mount: Mount) -> int:
        """Write one batch, after whatever is being written now; returns how many blocks it had."""
        async with mount.writing:
            await self._revoke(mount)
            items = mount.queue.take(self._around.settings.batch_blocks)
            lost: Sequence[Item] = items
            try:
                lost = await self._write_or_lose(mount, items)
            finally:
                mount.queue.done(items)
                self._give_up(mount, lost)
        if not mount.writable():
            self._give_up(mount, mount.queue.clear())
        return len(items)

    async def store(self, mount: Mount, items: Sequence[Item], forgotten: int) -> int:
        """Write at once what was read elsewhere, past the queue; returns how many are there then. Nothing is written
        when something was forgotten since ``forgotten``.
        """
        async with mount.writing:
            if forgotten != self.forgotten:
                return 0
            return len(items) - len(await self._write_or_lose(mount, items))

    async def _write_or_lose(self, mount: Mount, items: Sequence[Item]) -> Sequence[Item]:
        try:
            return await self._write(mount, items) if items else []
        except Exception as error:  # whatever it is, the other blocks shall be written
            self._around.logger.exception("tier_writer_failed", tier=mount.name, error=describe(error))
            return items

    async def _revoke(self, mount: Mount) -> None:
        """Delete what a late call may have put after it was forgotten."""
        while mount.revoked:
            shelf, names, erased = mount.revoked[0]
            try:
                await (mount.erase(shelf.tenant) if erased else mount.delete(shelf, names))
            except StorageError:
                return  # stays due: it is tried again before each batch
            del mount.revoked[0]

    async def _write(self, mount: Mount, items: Sequence[Item]) -> list[Item]:
        """Returns those that the tier did not take."""
        shelf = items[0].shelf
        known = [item for item in items if mount.keeps(shelf, item.head.name)]
        fresh = [item for item in items if item not in known]
        if known:
            await mount.touch(shelf, {item.head.name: item.meta for item in known})
        if not fresh:
            return []
        await self._make_room(mount, len(fresh))
        records = await seal_items(fresh, self._codec, self._wall(), self._limiter)
        kept = await self._put(mount, shelf, records)
        return [item for item, there in zip(fresh, kept, strict=True) if not there]

    async def _put(self, mount: Mount, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        try:
            return await mount.put(shelf, records)
        except StorageError:
            return [False] * len(records)

    async def _make_room(self, mount: Mount, count: int) -> None:
        """Move the coldest blocks of a tier that is nearly full to the next one, as many as its queue has room for."""
        below = next((lower for lower in self._below(mount) if lower.writable()), None)
        used, capacity = mount.fill()
        if below is None or capacity is None:
            return
        excess = used + count * self._codec.record_bytes - FULL * capacity
        blocks = min(-int(-excess // self._codec.record_bytes), 2 * self._around.settings.batch_blocks)
        if blocks > 0:
            await self._spill(mount, below, blocks)

    async def _spill(self, mount: Mount, below: Mount, count: int) -> None:
        reserved = below.queue.reserve(count)
        try:
            spilled = await mount.spill(reserved) if reserved else []
        finally:
            below.queue.release(reserved)
        items = [
            Item(shelf, record.head, record.meta, record.data, pass_on=True)
            for shelf, record in spilled
            if not below.keeps(shelf, record.head.name)
        ]
        below.queue.add(items)
        below.counters.dropped += sum(below.queue.find(item.shelf, item.head.name) is None for item in items)

    def _give_up(self, mount: Mount, items: Iterable[Item]) -> None:
        """What a tier did not take goes to the next one that has room, if it may, or nowhere."""
        for item in items:
            lower = (below for below in self._below(mount) if below.writable() and below.queue.room())
            target = next(lower, None) if item.pass_on else None
            if target is None:
                mount.counters.dropped += 1
            else:
                target.queue.add([item])

    def _below(self, mount: Mount) -> Sequence[Mount]:
        return self._mounts[self._mounts.index(mount) + 1 :]
