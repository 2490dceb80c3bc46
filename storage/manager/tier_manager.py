"""TierManager: the tiers below device memory as one, whatever becomes of each of them.

It writes blocks down behind bounded queues, reads them back in order, and knows what reading costs. No fault of a tier
gets past it: what fails, hangs or lies is counted, logged at a bounded rate and becomes a miss, and after some failures
in a row the tier is left alone for a while. It knows no engine; all its methods belong to one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress

import anyio
import anyio.lowlevel

from ...errors import StorageError, describe
from ...telemetry.logging import Logger, RateLimited
from ...telemetry.record import NO_TRACK, Track
from ..base import Listed, Meta
from ..naming import BlockName, Shelf, name_after
from ..record import RecordCodec
from .copier import TierCopier
from .loads import Coverage, Deliver, Loaded, LoadOutcome, LoadReason
from .mount import Mount, Mounted, Surroundings
from .mount_listing import children_of, kept_in, listing_of
from .rates import best_prefix
from .reach import Reach
from .reader import TierReader
from .report import TierReport
from .settings import ManagerSettings
from .watching import TierWatcher
from .write_queue import USUAL_BATCH, Batch, Item, Outgoing
from .writer import Target, TierWriter

__all__ = [
    "Batch",
    "Coverage",
    "Deliver",
    "LoadOutcome",
    "LoadReason",
    "Loaded",
    "ManagerSettings",
    "Mounted",
    "Outgoing",
    "Target",
    "TierManager",
    "TierReport",
    "TierWatcher",
]

SURVEY_BLOCKS = 1024
"""Blocks of a tier that are told of in one go, so that the event loop does other things between."""
LOG_INTERVAL = 30.0
"""Seconds between two log lines of one kind about one tier."""
CLOSE_GRACE = 0.5
"""Seconds that tiers get to close when writing has used up the time."""
_FLUSH_SHARE = 0.8
"""Part of the time for closing in which writing goes on."""
_ASK_NAMES = 1024


class TierManager:
    """See the module. ``tiers``: fastest first."""

    def __init__(
        self,
        tiers: Sequence[Mounted],
        codec: RecordCodec,
        settings: ManagerSettings,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        logger: Logger,
        journal: Track = NO_TRACK,
    ) -> None:
        """``clock`` is monotonic, ``wall`` counts from the epoch; both in seconds. ``journal`` notes all writes."""
        limited = RateLimited(LOG_INTERVAL, clock)
        around = Surroundings(settings, codec.record_bytes, clock, logger, limited, journal)
        self._mounts = tuple(Mount(mounted, around) for mounted in tiers)
        self._settings = settings
        self._logger = logger
        self._reader = TierReader(self._mounts, codec, around)
        self._writer = TierWriter(self._mounts, codec, around, wall)
        self._copier = TierCopier(self._mounts, self._reader, self._writer, around, wall)
        self._closing = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tiers, in their order."""
        return tuple(mount.name for mount in self._mounts)

    @property
    def has_persistent(self) -> bool:
        """Whether some tier that takes blocks outlives the process."""
        return any(mount.persistent for mount in self._mounts)

    @property
    def takes_blocks(self) -> bool:
        """Whether some tier is no mere snapshot."""
        return any(not mount.tier.read_only for mount in self._mounts)

    @property
    def stored_blocks(self) -> int:
        """Blocks in all tiers that outlive the process, as far as they can tell."""
        return sum(mount.report().tier.blocks for mount in self._mounts if mount.opened and mount.tier.persistent)

    async def open(self) -> None:
        """Open all tiers at once. One that fails is left out for good, with one warning.

        :raises StorageError: when one fails and the settings are strict; the others are closed again.
        """
        errors: dict[str, StorageError] = {}
        async with anyio.create_task_group() as group:
            for mount in self._mounts:
                group.start_soon(_open, mount, errors)
        if errors and self._settings.strict:
            await self._close_tiers(self._settings.deadline)
            raise StorageError("; ".join(str(error) for error in errors.values())) from next(iter(errors.values()))
        for name, error in errors.items():
            self._logger.warning("tier_left_out", tier=name, error=describe(error))

    async def run(self) -> None:
        """The writers; ends after ``close``. ``flush`` and ``close`` can do without: they write what is left."""
        await self._writer.run()

    # watching

    def watch(self, watcher: TierWatcher | None) -> None:
        """From now on ``watcher`` hears of what enters and leaves the tiers; there is one at most."""
        for mount in self._mounts:
            mount.watch(watcher)

    async def survey(self, tier: str, note: Callable[[list[Listed]], None]) -> None:
        """Hand ``note`` everything that lies in one tier, a part at a time, while nothing is being written there: what
        a watcher hears afterwards comes on top. Nothing of a tier that other engines share, and less when it fails.

        Writing into the tier waits as long as the listing takes.
        """
        mount = next(mount for mount in self._mounts if mount.name == tier)
        if mount.tier.shared:
            return
        async with mount.writing, aclosing(kept_in(mount, None)) as blocks:
            part: list[Listed] = []
            async for listed in blocks:
                part.append(listed)
                if len(part) == SURVEY_BLOCKS:
                    self._surveyed(mount, part, note)
                    part = []
                    await anyio.lowlevel.checkpoint()
            self._surveyed(mount, part, note)

    def _surveyed(self, mount: Mount, there: list[Listed], note: Callable[[list[Listed]], None]) -> None:
        if mount.witness is not None:
            mount.witness.know((listed.shelf, listed.head.name) for listed in there)
        note(there)

    # looking

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> Coverage:
        """Where the leading ``names`` are, from memory: what tiers know at once, what others said when they were asked,
        and what waits to be written. A tier that is being left alone has nothing.
        """
        return Coverage(()) if self._closing else self._reader.coverage(shelf, names)

    def must_ask(self) -> bool:
        """Whether some usable tier does not answer ``peek`` from memory, so that ``ask`` may find more."""
        return any(mount.asks and mount.readable() for mount in self._mounts)

    async def ask(self, shelf: Shelf, names: Sequence[BlockName]) -> None:
        """Ask those tiers, all at once, for ``names`` that no faster way is known to; ``peek`` knows the answers then.
        A tier that fails has nothing.
        """
        beyond = names[len(self.peek(shelf, names).tiers) :]
        async with anyio.create_task_group() as group:
            for mount in self._mounts:
                if beyond and mount.asks and mount.readable():
                    group.start_soon(_ask, mount, shelf, beyond)

    def absent(self, shelf: Shelf, names: Sequence[BlockName], *, to: Target) -> list[int]:
        """The indices of the names that an offer with this ``to`` would have to write, as far as is known from memory.
        None when no tier would take them.
        """
        targets = self._writer.targets(to)
        reaches = [Reach(mount, shelf, names) for mount in (targets[:1] if to == "first" else targets)]
        return [at for at in range(len(names)) if not all(reach.covers(at) for reach in reaches)]

    def worth(self, coverage: Coverage, compute_seconds: Sequence[float]) -> int:
        """How many leading blocks to load so that most time is saved; 0: compute them all.

        :param compute_seconds: what computing each block takes; 0.0: not known, which does not speak against loading.
            Neither does a tier that was not measured, or not lately.
        """
        costs = [mount.rate.fresh() for mount in self._mounts]
        return best_prefix([costs[tier] for tier in coverage.tiers], compute_seconds)

    def reload_seconds(self, tier: int) -> float | None:
        """Measured seconds to load one block from the tier of this index; ``None``: nothing was loaded from it yet."""
        return self._mounts[tier].rate.seconds()

    # reading

    async def load(
        self, shelf: Shelf, names: Sequence[BlockName], deliver: Deliver, *, deadline: float | None
    ) -> LoadOutcome:
        """Read ``names`` in order and hand them to ``deliver``, batch after batch, reading ahead while it works. Stops
        at the first block that no tier can give. Payloads stay valid for as long as they are held.

        :param deadline: seconds after which no further batch is delivered; one that is being delivered is finished.

        Cancelling it ends everything it has begun. What ``deliver`` raises ends it too and is raised.
        """
        return await self._reader.load(shelf, names, deliver, deadline)

    async def prefetch(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Copy leading blocks that lie lower into the first tier, as far as its queue has room; returns how many are
        on their way. Best effort.
        """
        return 0 if self._closing or not self._mounts else await self._copier.prefetch(shelf, names)

    @property
    def can_prefetch(self) -> bool:
        """Whether there is a first tier to bring blocks up to."""
        return len(self._mounts) > 1 and self._mounts[0].writable()

    # writing

    def offer(self, batch: Batch, *, to: Target) -> int:
        """Queue blocks for the first usable tier that has room for them (what it declines goes further down), for all
        tiers, or for all persistent ones. Never waits: what finds no room is dropped. Returns how many blocks at least
        one tier is to get.

        :raises StorageError: when the batch has more blocks than rows.
        """
        return 0 if self._closing else len(self._writer.offer(batch, to))

    def targets(self, to: Target) -> list[str]:
        """The names of the tiers that an offer would go to now."""
        mounts = self._writer.targets(to)
        return [mount.name for mount in (mounts[:1] if to == "first" else mounts)]

    def room(self, to: Target) -> int:
        """How many blocks an offer may have of which none is to be lost; 0: it should be made later, when more has been
        written. A usual batch when no tier would take it, since waiting does not help then.
        """
        rooms = [mount.queue.ready_for() for mount in self._writer.targets(to)]
        return (max(rooms) if to == "first" else min(rooms)) if rooms else USUAL_BATCH

    async def persist(self, deadline: float) -> int:
        """Write what waits, copy what only volatile tiers hold into the first persistent one, and make it durable: the
        most valuable blocks first, and each after its ancestors. Ends after ``deadline`` seconds; returns how many
        blocks it copied.
        """
        return await self._copier.persist(deadline)

    async def flush(self, deadline: float) -> int:
        """Write everything that waits and make it durable, within ``deadline`` seconds; returns how many blocks were
        not written: too late, failed, or declined. They are dropped, but for those that are still being written.
        """
        before = self._dropped()
        with anyio.move_on_after(deadline):
            await self._writer.drain()
            async with anyio.create_task_group() as group:
                for mount in self._mounts:
                    if mount.persistent and not mount.closed:
                        group.start_soon(_attempt, mount.flush, deadline)
        for mount in self._mounts:
            mount.counters.dropped += len(mount.queue.clear())
        lost = self._dropped() - before + sum(mount.queue.blocks for mount in self._mounts)
        if lost:
            self._logger.warning("blocks_not_written", blocks=lost, seconds=deadline)
        return lost

    def _dropped(self) -> int:
        return sum(mount.counters.dropped for mount in self._mounts)

    async def close(self, deadline: float) -> int:
        """Flush, end the writers, then close the tiers whose memory they read; returns what ``flush`` does.

        Takes ``deadline`` seconds, and little more when a tier hangs. When it was cancelled it can be called again, and
        must be; otherwise a second call does nothing.
        """
        self._closing = True
        until = anyio.current_time() + deadline
        lost = await self.flush(deadline * _FLUSH_SHARE)
        await self._writer.stop()
        await self._close_tiers(max(until - anyio.current_time(), CLOSE_GRACE))
        return lost

    async def _close_tiers(self, seconds: float) -> None:
        async with anyio.create_task_group() as group:
            for mount in self._mounts:
                group.start_soon(mount.close, seconds)

    # control

    async def forget(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Delete blocks from all tiers and queues; returns how many copies there were. Best effort: a tier that fails
        may still have them.
        """
        gone = set(names)
        count, _ = await self._everywhere(
            lambda mount: mount.delete(shelf, names),
            lambda item: item.shelf == shelf and item.head.name in gone,
        )
        return count

    async def erase(self, tenant: bytes) -> int:
        """Delete all blocks of a tenant from all tiers and queues, with what is being written; returns how many copies
        there were. What is offered before it returns is erased as well.

        :raises StorageError: when a tier could not; the others have. Call it again then.
        """
        count, errors = await self._everywhere(
            lambda mount: mount.erase(tenant), lambda item: item.shelf.tenant == tenant
        )
        if errors:
            raise StorageError(f"not erased everywhere: {'; '.join(map(str, errors))}") from errors[0]
        return count

    async def _everywhere(
        self, delete: Callable[[Mount], Awaitable[int]], meant: Callable[[Item], bool]
    ) -> tuple[int, list[StorageError]]:
        """Under the locks of all writers, so that none carries a block past a tier that was done already. The queues
        come last: what was offered meanwhile goes as well.
        """
        self._writer.forgotten += 1
        count, errors = 0, list[StorageError]()
        async with AsyncExitStack() as stack:
            for mount in self._mounts:
                await stack.enter_async_context(mount.writing)
            for mount in self._mounts:
                try:
                    count += await delete(mount)
                except StorageError as error:
                    errors.append(error)
            for mount in self._mounts:
                count += mount.queue.remove(meant)
        return count, errors

    async def clear(self) -> None:
        """Delete everything that lies in the tiers which this engine alone writes.

        :raises StorageError: when one could not.
        """
        for mount in self._mounts:
            if mount.tier.shared or mount.tier.read_only:
                continue
            names: dict[Shelf, list[BlockName]] = {}
            async with aclosing(listing_of(mount, None)) as blocks:
                async for listed in blocks:
                    names.setdefault(listed.shelf, []).append(listed.head.name)
            for shelf, found in names.items():
                for at in range(0, len(found), _ASK_NAMES):
                    await mount.delete(shelf, found[at : at + _ASK_NAMES])
        await self.note(b"")

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        """The blocks right after ``parent``, each once, as far as tiers can tell."""
        found: dict[BlockName, Listed] = {}
        for mount in self._mounts:
            for listed in await children_of(mount, shelf, parent):
                head = listed.head
                if listed.shelf == shelf and head.parent == parent and head.name == name_after(parent, head.tokens):
                    found.setdefault(listed.head.name, listed)
        return list(found.values())

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Tell all tiers what policies know by now of blocks. Best effort."""
        async with anyio.create_task_group() as group:
            for mount in self._mounts:
                mount.queue.touch(shelf, metas)
                if mount.writable():
                    group.start_soon(mount.touch, shelf, metas)

    async def note(self, notes: bytes) -> None:
        """Keep ``notes`` in every tier that outlives the process and is this engine's own. Best effort."""
        async with anyio.create_task_group() as group:
            for mount in self._mounts:
                if mount.writable() and mount.persistent and not mount.tier.shared:
                    group.start_soon(mount.note, notes)

    async def notes(self) -> list[bytes]:
        """What was noted in the tiers that are not shared, the fastest one's first."""
        own = [mount for mount in self._mounts if mount.tier.persistent and not mount.tier.shared and mount.readable()]
        found = [await mount.notes() for mount in own]
        return [notes for notes in found if notes]

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """Every block in the tiers that are not shared with other engines, each once. Parents come before children
        within one tier only; ``head.start`` puts them in order over all.
        """
        seen: set[tuple[Shelf, BlockName]] = set()
        for mount in self._mounts:
            if mount.tier.shared:
                continue
            async with aclosing(listing_of(mount, shelf)) as blocks:
                async for listed in blocks:
                    key = listed.shelf, listed.head.name
                    if key not in seen and shelf in (None, listed.shelf):
                        seen.add(key)
                        yield listed

    def stats(self) -> tuple[TierReport, ...]:
        """One report per tier, in their order."""
        return tuple(mount.report() for mount in self._mounts)


async def _open(mount: Mount, errors: dict[str, StorageError]) -> None:
    try:
        await mount.open()
    except StorageError as error:
        errors[mount.name] = error


async def _ask(mount: Mount, shelf: Shelf, names: Sequence[BlockName]) -> None:
    with suppress(StorageError):
        for at in range(0, len(names), _ASK_NAMES):
            await mount.ask(shelf, names[at : at + _ASK_NAMES])


async def _attempt(call: Callable[[float], Awaitable[None]], seconds: float) -> None:
    with suppress(StorageError):
        await call(seconds)
