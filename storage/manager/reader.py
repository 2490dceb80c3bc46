"""TierReader: finds blocks in tiers and reads them, checked, falling to the next tier where one has failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import anyio
import anyio.abc
import anyio.to_thread

from ...errors import StorageError
from ..base import Stored
from ..naming import BlockName, Shelf
from ..record import Opened, RecordCodec
from .loads import Coverage, Deliver, Fetched, Found, Loaded, LoadOutcome, LoadReason
from .mount import Mount, Surroundings
from .reach import Reach
from .verification import clean_meta, open_records
from .write_queue import Item


@dataclass(slots=True)
class _Ahead:
    """A batch that is being read."""

    names: Sequence[BlockName]
    done: anyio.Event = field(default_factory=anyio.Event)
    blocks: list[Found] = field(default_factory=list)
    reason: LoadReason = "complete"


class TierReader:
    """Reads for a :class:`~octavo.storage.manager.tier_manager.TierManager`. Holds nothing between calls."""

    def __init__(self, mounts: Sequence[Mount], codec: RecordCodec, around: Surroundings) -> None:
        self._mounts = mounts
        self._codec = codec
        self._around = around
        self._limiter = anyio.CapacityLimiter(2)

    def coverage(self, shelf: Shelf, names: Sequence[BlockName]) -> Coverage:
        """From memory alone."""
        reaches = [(i, Reach(mount, shelf, names)) for i, mount in enumerate(self._mounts) if mount.readable()]
        tiers: list[int] = []
        for at in range(len(names)):
            fastest = next((i for i, reach in reaches if reach.covers(at)), None)
            if fastest is None:
                break
            tiers.append(fastest)
        return Coverage(tuple(tiers))

    async def load(
        self, shelf: Shelf, names: Sequence[BlockName], deliver: Deliver, deadline: float | None
    ) -> LoadOutcome:
        """See :meth:`TierManager.load`."""
        until = inf if deadline is None else anyio.current_time() + deadline
        outcome, failure = LoadOutcome(0, "complete"), None
        async with anyio.create_task_group() as group:
            try:
                outcome = await self._in_order(group, shelf, names, deliver, until)
            except Exception as error:  # noqa: BLE001  # raised below, where it does not become a group of errors
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return outcome

    async def _in_order(
        self,
        group: anyio.abc.TaskGroup,
        shelf: Shelf,
        names: Sequence[BlockName],
        deliver: Deliver,
        until: float,
    ) -> LoadOutcome:
        settings, delivered = self._around.settings, 0
        batches = _batches(names, settings.batch_blocks)
        window: deque[_Ahead] = deque()
        self._read_ahead(group, shelf, window, batches, max(settings.read_ahead, 1))
        while window:
            batch = window.popleft()
            if not await _in_time(batch.done, until):
                return LoadOutcome(delivered, "deadline")
            if batch.reason == "complete":
                self._read_ahead(group, shelf, window, batches, settings.read_ahead)
            if batch.blocks:
                await deliver([block.loaded for block in batch.blocks])
                delivered += len(batch.blocks)
            if batch.reason != "complete":
                return LoadOutcome(delivered, batch.reason)
            self._read_ahead(group, shelf, window, batches, max(settings.read_ahead, 1))
        return LoadOutcome(delivered, "complete")

    def _read_ahead(
        self,
        group: anyio.abc.TaskGroup,
        shelf: Shelf,
        window: deque[_Ahead],
        batches: Iterator[Sequence[BlockName]],
        width: int,
    ) -> None:
        while len(window) < width and (names := next(batches, None)):
            window.append(_Ahead(names))
            group.start_soon(self._read, shelf, window[-1])

    async def _read(self, shelf: Shelf, ahead: _Ahead) -> None:
        try:
            asking = any(mount.asks for mount in self._mounts)
            reach = len(ahead.names) if asking else len(self.coverage(shelf, ahead.names).tiers)
            fetched = await self.fetch(shelf, ahead.names[:reach])
            ahead.blocks = fetched.leading(len(ahead.names))
            if len(ahead.blocks) < len(ahead.names):
                ahead.reason = fetched.why.get(len(ahead.blocks), "missing")
        finally:
            ahead.done.set()

    async def fetch(self, shelf: Shelf, names: Sequence[BlockName]) -> Fetched:
        """Read one batch: each block from the fastest tier that has it, then from the next ones."""
        fetched, tried = Fetched(), set[tuple[Mount, int]]()
        for mount, sure in self._sources():
            reach = Reach(mount, shelf, names)
            wanted = {
                at: name
                for at, name in enumerate(names)
                if at not in fetched.found and (mount, at) not in tried and (not sure or reach.covers(at))
            }
            tried.update((mount, at) for at in wanted)
            if wanted:
                await self._take(mount, shelf, wanted, fetched)
        return fetched

    def _sources(self) -> Iterator[tuple[Mount, bool]]:
        """Who is asked in which order, and whether only for what it is known to have. A tier that cannot tell without
        being asked is tried last for what the others could not give.
        """
        for mount in self._mounts:
            if mount.readable():
                yield mount, True
        for mount in self._mounts:
            if mount.asks and mount.readable():
                yield mount, False

    async def _take(self, mount: Mount, shelf: Shelf, wanted: Mapping[int, BlockName], fetched: Fetched) -> None:
        absent = self._from_queue(mount, shelf, wanted, fetched)
        records, seconds = self._sealed_in_queue(mount, shelf, absent), 0.0
        absent = {at: name for at, name in absent.items() if at not in records}
        if absent:
            try:
                stored, seconds = await mount.get(shelf, list(absent.values()))
            except StorageError:
                fetched.why.update(dict.fromkeys(absent, "failed"))
            else:
                records |= {at: found for at, found in zip(absent, stored, strict=True) if found is not None}
        if records:
            await self._check(mount, shelf, {at: wanted[at] for at in records}, records, seconds, fetched)

    def _from_queue(
        self, mount: Mount, shelf: Shelf, wanted: Mapping[int, BlockName], fetched: Fetched
    ) -> dict[int, BlockName]:
        """Take what was exported and is not written yet; returns what is left."""
        rest = {}
        for at, name in wanted.items():
            item = mount.queue.find(shelf, name)
            payload = item.payload(self._codec.header_bytes) if item else None
            if item is None or payload is None:
                rest[at] = name
            else:
                loaded = Loaded(item.head, payload, item.meta, mount.name, own=True)
                self._count(mount, fetched, at, Found(loaded, replace(item, pass_on=False)))
        return rest

    def _sealed_in_queue(self, mount: Mount, shelf: Shelf, wanted: Mapping[int, BlockName]) -> dict[int, Stored]:
        waiting = {at: mount.queue.find(shelf, name) for at, name in wanted.items()}
        stored = {at: item.stored() for at, item in waiting.items() if item is not None}
        return {at: record for at, record in stored.items() if record is not None}

    async def _check(
        self,
        mount: Mount,
        shelf: Shelf,
        names: Mapping[int, BlockName],
        records: Mapping[int, Stored],
        seconds: float,
        fetched: Fetched,
    ) -> None:
        data = [records[at].data for at in names]
        work = partial(open_records, self._codec, shelf, list(names.values()), data, self._around.clock)
        opened, checking = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        mount.counters.loaded_seconds += seconds + checking
        mount.rate.note(len(records), seconds + checking)
        wrong: dict[BlockName, str] = {}
        for (at, name), block in zip(names.items(), opened, strict=True):
            if isinstance(block, Opened):
                meta = clean_meta(records[at].meta)
                loaded = Loaded(block.head, block.payload, meta, mount.name, block.own)
                item = Item(shelf, block.head, meta, records[at].data)
                self._count(mount, fetched, at, Found(loaded, item))
            else:
                fetched.why[at] = "corrupt"
                wrong[name] = block
        if wrong:
            await self._discard(mount, shelf, wrong)

    def _count(self, mount: Mount, fetched: Fetched, at: int, found: Found) -> None:
        fetched.found[at] = found
        mount.counters.loaded_blocks += 1
        mount.counters.loaded_bytes += self._codec.record_bytes
        mount.counters.foreign_blocks += not found.loaded.own

    async def _discard(self, mount: Mount, shelf: Shelf, wrong: Mapping[BlockName, str]) -> None:
        """Drop blocks whose bytes are wrong. A tier keeps what it has: the right ones could never take their place."""
        mount.counters.corrupt += len(wrong)
        reason = next(iter(wrong.values()))
        self._around.limited.log(
            self._around.logger.warning,
            "stored_block_corrupt",
            key=f"{mount.name}/corrupt",
            tier=mount.name,
            blocks=len(wrong),
            reason=reason,
        )
        mount.queue.remove(lambda item: item.shelf == shelf and item.head.name in wrong)
        with suppress(StorageError):
            await mount.delete(shelf, list(wrong))


def _batches(names: Sequence[BlockName], size: int) -> Iterator[Sequence[BlockName]]:
    for at in range(0, len(names), size):
        yield names[at : at + size]


async def _in_time(done: anyio.Event, until: float) -> bool:
    """Wait for ``done``; False when ``until`` (of the event loop's clock) is there first."""
    if anyio.current_time() >= until:
        return False
    with anyio.CancelScope(deadline=until):
        await done.wait()
    return done.is_set()
