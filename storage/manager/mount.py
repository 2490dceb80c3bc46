"""Mount: one tier of a manager, with everything that keeps it from harming anybody: deadlines, breakers, checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import anyio

from ...errors import StorageError, describe
from ...telemetry import names
from ...telemetry.logging import Logger, RateLimited
from ...telemetry.metrics.catalogue import TIER_READ_SECONDS, TIER_WRITE_SECONDS
from ...telemetry.metrics.histogram import Histogram
from ...telemetry.record import NOTHING, Attributes, Track, Value
from ..base import Meta, Record, Stored, Tier, TierStats
from ..naming import NAME_BYTES, BlockName, Shelf
from .bounded_call import Calls, Overdue
from .breaker import Breaker
from .rates import Rate
from .remembered import Remembered
from .report import Counters, TierReport
from .settings import ManagerSettings
from .verification import as_count, as_flags, as_notes, as_nothing, as_spilled, as_stats, as_stored
from .watching import TierWatcher, Witness
from .write_queue import WriteQueue

T = TypeVar("T")

MOST_ABANDONED = 8
"""Calls that a tier may leave hanging; with more it is not called, whatever its breakers say."""
_NOBODY = Shelf(bytes(NAME_BYTES), bytes(NAME_BYTES))


class Mounted(NamedTuple):
    """A tier and what it is called in logs and statistics."""

    name: str
    """Another one for each tier of a manager."""
    tier: Tier
    is_open: bool = False
    """Whether it was opened already."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all mounts of a manager share."""

    settings: ManagerSettings
    record_bytes: int
    clock: Callable[[], float]
    logger: Logger
    limited: RateLimited
    journal: Track


class Answer(NamedTuple):
    """What ``get`` found."""

    stored: list[Stored | None]
    seconds: float


class Revoked(NamedTuple):
    """Blocks that a call which was left behind may have put after they were forgotten."""

    shelf: Shelf
    names: list[BlockName]
    erased: bool
    """Whether their whole tenant was."""


class Mount:
    """Calls a tier. Every fault of it comes out as a StorageError, after it was counted, logged and told to a breaker.

    Reading and writing have a breaker each: a tier that cannot be written to may still be read.
    """

    def __init__(self, mounted: Mounted, around: Surroundings) -> None:
        settings = around.settings
        self.name, self.tier, self.opened = mounted
        self.settings = settings
        self.reads = Breaker(settings.breaker_failures, settings.breaker_pause, around.clock)
        self.writes = Breaker(settings.breaker_failures, settings.breaker_pause, around.clock)
        self.rate = Rate(around.clock)
        self.queue = WriteQueue(settings.queue_bytes, around.record_bytes)
        self.remembered = Remembered()
        self.counters = Counters()
        self.read_seconds = Histogram(TIER_READ_SECONDS.bounds)
        self.write_seconds = Histogram(TIER_WRITE_SECONDS.bounds)
        self.witness: Witness | None = None
        self.writing = anyio.Lock()
        """Held while something is written or erased."""
        self.revoked: list[Revoked] = []
        self.closed = False
        self.asks = False
        """Whether it answers only to ``contains``, as far as was seen."""
        self.erasures = 0
        """How often something was forgotten here."""
        self._erased: set[bytes] = set()
        """Tenants erased while calls that were left behind still ran."""
        self._around = around
        self._calls = Calls()
        self._slots = anyio.Semaphore(settings.concurrent_reads)
        self._told = TierStats()
        self._traced = TierStats()

    # what it is good for

    def readable(self) -> bool:
        return self._alive() and self.reads.usable()

    def writable(self) -> bool:
        return self._alive() and self.writes.usable() and not self.tier.read_only

    @property
    def persistent(self) -> bool:
        """Whether what is written here outlives the process."""
        return self.opened and self.tier.persistent and not self.tier.read_only

    def _alive(self) -> bool:
        return self.opened and not self.closed and self._calls.abandoned < MOST_ABANDONED

    # looking

    def run_at(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """How many leading names can be had here, as far as is known without asking."""
        there = self._peek(shelf, names)
        if there is not None:
            return there
        return next((at for at, name in enumerate(names) if not self.remembered.has(shelf, name)), len(names))

    def holds(self, shelf: Shelf, name: BlockName) -> bool:
        """The same for one name, or whether it waits in the queue."""
        return self.queue.find(shelf, name) is not None or self.run_at(shelf, (name,)) > 0

    def keeps(self, shelf: Shelf, name: BlockName) -> bool:
        """Whether the tier itself says at once that it has it; what it said earlier does not count."""
        return bool(self._peek(shelf, (name,)))

    def watch(self, watcher: TierWatcher | None) -> None:
        """Tell ``watcher`` from now on what enters and leaves."""
        self.witness = None
        if watcher is not None:
            self.witness = Witness(self.name, watcher, has=self._has, asks=lambda: self.asks, stats=self._stats)

    def _has(self, shelf: Shelf, name: BlockName) -> bool | None:
        there = self._peek(shelf, (name,))
        return None if there is None else there > 0

    def _peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        try:
            answer = self.tier.peek(shelf, names)
            there = None if answer is None else as_count(answer)
        except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
            self._failed("peek", error)
            return 0
        self.asks = there is None
        return there if there is None else min(there, len(names))

    async def ask(self, shelf: Shelf, names: Sequence[BlockName]) -> None:
        """Ask which of ``names`` are there, and remember.

        :raises StorageError: when it does not say.
        """
        check = partial(as_flags, count=len(names))
        there = await self.call("contains", lambda: self.tier.contains(shelf, list(names)), check, gate=self.reads)
        self.remembered.note(shelf, names, there)

    # moving blocks

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> Answer:
        """:raises StorageError: when nothing comes."""
        check = partial(as_stored, count=len(names))
        async with self._slots:
            started = self._around.clock()
            self.counters.gets += 1
            stored = await self.call("get", lambda: self.tier.get(shelf, list(names)), check, gate=self.reads)
            seconds = self._around.clock() - started
        self.read_seconds.observe(seconds)
        there = [item is not None for item in stored]
        self.counters.hits += sum(there)
        if self.asks:
            self.remembered.note(shelf, names, there)
        if self.witness is not None and not all(there):
            missing = [name for name, found in zip(names, there, strict=True) if not found]
            self.witness.missed(shelf, missing)
        return Answer(stored, seconds)

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Which of ``records`` the tier keeps.

        :raises StorageError: when it keeps none because of a fault.
        """
        put = [record.head.name for record in records]
        late = partial(self._ended_late, self.erasures, shelf, put)
        started = self._around.clock()
        self.counters.puts += 1
        try:
            kept = await self.call(
                "put",
                lambda: self.tier.put(shelf, list(records)),
                self._kept(len(records)),
                gate=self.writes,
                late=late,
            )
        except StorageError as error:
            self._note_put(started, 0, {names.ERROR_TYPE: type(error.__cause__ or error).__name__})
            raise
        self._note_put(started, sum(kept), NOTHING)
        self._note_evicted(started)
        seconds = self._around.clock() - started
        self.write_seconds.observe(seconds)
        self.counters.put_seconds += seconds
        self.counters.put_blocks += sum(kept)
        self.counters.put_bytes += sum(kept) * self._around.record_bytes
        if self.asks:
            self.remembered.note(shelf, put, kept)
        if self.witness is not None and any(kept):
            heads = [record.head for record, there in zip(records, kept, strict=True) if there]
            self.witness.stored(shelf, heads)
        return kept

    def _note_put(self, began: float, blocks: int, more: Attributes) -> None:
        journal = self._around.journal
        if journal.is_on:
            size = blocks * self._around.record_bytes
            shown = {names.TIER: self.name, names.BLOCKS: blocks, names.BYTES: size, **more}
            journal.act(names.PERSIST, began, self._around.clock(), shown)

    def _note_evicted(self, began: float) -> None:
        """What was pushed out since it was noted last, and who chose it."""
        journal = self._around.journal
        if not journal.is_on:
            return
        stats, before = self._stats(), self._traced
        if not stats.policy or stats.evicted <= before.evicted:
            return
        self._traced = stats
        shown: dict[str, Value] = {names.REASON: "capacity", names.POLICY: stats.policy, names.TIER: self.name}
        shown[names.BLOCKS] = stats.evicted - before.evicted
        if stats.policy_faults > before.policy_faults:
            shown[names.POLICY_FAULT] = f"{stats.policy_faults - before.policy_faults} faults"
        journal.act(names.EVICT, began, self._around.clock(), shown)

    def _kept(self, count: int) -> Callable[[object], list[bool]]:
        def check(answer: object) -> list[bool]:
            kept = as_flags(answer, count)
            if not any(kept) and not (stats := self._stats()).healthy:  # it is not worth sealing blocks for it now
                raise StorageError(f"it takes no writes: {stats.problem}")
            return kept

        return check

    async def spill(self, count: int) -> list[tuple[Shelf, Record]]:
        """Up to ``count`` blocks that the tier gives away; none when it fails."""
        check = partial(as_spilled, record_bytes=self._around.record_bytes)
        with suppress(StorageError):
            spilled = (await self.call("spill", lambda: self.tier.spill(count), check, gate=self.writes))[:count]
            self.counters.spilled += len(spilled)
            if self.witness is not None:
                for shelf, record in spilled:
                    self.witness.removed(shelf, (record.head.name,))
            return spilled
        return []

    # forgetting

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """:raises StorageError: when the tier could not, or is not open."""
        self._check_open()
        self.remembered.forget(shelf, names)
        self.erasures += 1
        count = await self.call("delete", lambda: self.tier.delete(shelf, list(names)), as_count)
        if self.witness is not None:
            self.witness.removed(shelf, names)
        return count

    async def erase(self, tenant: bytes) -> int:
        """:raises StorageError: when the tier could not, or is not open."""
        self._check_open()
        self.remembered.erase(tenant)
        self.erasures += 1
        self._erased = {*self._erased, tenant} if self._calls.abandoned else set()
        seconds = self.settings.erase_deadline
        count = await self.call("erase", lambda: self.tier.erase(tenant), as_count, seconds=seconds)
        if self.witness is not None:
            self.witness.erased(tenant)
        return count

    def _check_open(self) -> None:
        if not self.opened or self.closed:
            raise StorageError(f"tier {self.name} is not open, and keeps what it has; erase again when it is")

    def _ended_late(self, erasures: int, shelf: Shelf, names: list[BlockName]) -> None:
        """A put that nobody waited for any more has ended: it may have brought back what was forgotten meanwhile."""
        if erasures != self.erasures and not self.closed:
            self.revoked.append(Revoked(shelf, names, shelf.tenant in self._erased))
            self.queue.work.ring()

    # the rest

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Best effort."""
        with suppress(StorageError):
            await self.call("touch", lambda: self.tier.touch(shelf, dict(metas)), as_nothing, gate=self.writes)

    async def note(self, notes: bytes) -> None:
        """Best effort."""
        with suppress(StorageError):
            await self.call("note", lambda: self.tier.note(notes), as_nothing, gate=self.writes)

    async def notes(self) -> bytes | None:
        """What was noted; ``None`` also when the tier fails."""
        with suppress(StorageError):
            return await self.call("notes", self.tier.notes, as_notes, gate=self.reads)
        return None

    async def open(self) -> None:
        """:raises StorageError: when the tier cannot be used."""
        try:
            if not self.opened:
                await self._calls.run(self.tier.open, self.settings.open_deadline)
        except BaseException as error:
            with anyio.CancelScope(shield=True), suppress(StorageError):
                await self.call("close", self.tier.close, as_nothing)  # half open, it may hold a lock
            if not isinstance(error, Exception):
                raise
            self.counters.failures += 1
            raise StorageError(f"tier {self.name} cannot be opened: {describe(error)}") from error
        self.opened = True
        self._peek(_NOBODY, ())  # whether it answers from memory

    async def flush(self, seconds: float) -> None:
        """:raises StorageError: when what was put may not be durable."""
        await self.call("flush", self.tier.flush, as_nothing, seconds=seconds)

    async def close(self, seconds: float) -> None:
        """Best effort. A second call does nothing."""
        if self.closed or not self.opened:
            return
        self._stats()  # the last ones: it may have none afterwards
        with suppress(StorageError):
            await self.call("close", self.tier.close, as_nothing, seconds=seconds)
        self.closed = True

    def report(self) -> TierReport:
        counters = self.counters
        return TierReport(
            name=self.name,
            tier=self._stats(),
            opened=self.opened,
            shared=self.tier.shared,
            breaker=self.reads.state,
            write_breaker=self.writes.state,
            gets=counters.gets,
            hits=counters.hits,
            loaded_blocks=counters.loaded_blocks,
            loaded_bytes=counters.loaded_bytes,
            loaded_seconds=counters.loaded_seconds,
            foreign_blocks=counters.foreign_blocks,
            corrupt=counters.corrupt,
            puts=counters.puts,
            put_blocks=counters.put_blocks,
            put_bytes=counters.put_bytes,
            put_seconds=counters.put_seconds,
            spilled=counters.spilled,
            queued_blocks=self.queue.blocks,
            queued_bytes=self.queue.bytes,
            dropped=counters.dropped,
            timeouts=counters.timeouts,
            failures=counters.failures,
            abandoned=self._calls.abandoned,
            seconds_per_block=self.rate.seconds(),
            read_seconds=self.read_seconds.state(),
            write_seconds=self.write_seconds.state(),
        )

    def _stats(self) -> TierStats:
        """What the tier tells of itself. Its counters never fall, also when it tells nothing or was closed."""
        if self.closed:
            return self._told._replace(healthy=False, problem="it is closed")
        self._told = as_stats(self._asked_for_stats(), self._told)
        return self._told

    def _asked_for_stats(self) -> object:
        if not self.opened:
            return TierStats(healthy=False, problem="it is not open")
        try:
            return self.tier.stats()
        except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
            self._log("stats", error)  # not counted: whoever looks would change what is seen
            return TierStats(healthy=False, problem=describe(error))

    def fill(self) -> tuple[int, int | None]:
        """(bytes, capacity) as the tier says."""
        used, capacity = self._stats()[1:3]
        if isinstance(used, int) and isinstance(capacity, int):
            return used, capacity
        return 0, None

    async def call(
        self,
        what: str,
        invoke: Callable[[], Awaitable[object]],
        check: Callable[[object], T],
        *,
        gate: Breaker | None = None,
        seconds: float | None = None,
        late: Callable[[], None] | None = None,
    ) -> T:
        """What ``check`` makes of the answer of ``invoke``, within ``seconds`` (by default the deadline of a batch).

        :raises StorageError: when the call fails, takes too long or is not made because ``gate`` is open.
        """
        era = 0 if gate is None else gate.admit() if self._alive() else None
        if era is None:
            raise StorageError(f"tier {self.name} is left alone for a while")
        success: bool | None = None
        try:
            answer = check(await self._calls.run(invoke, seconds or self.settings.deadline, late))
            success = True
            return answer
        except Exception as error:
            success = False
            self._failed(what, error)
            raise StorageError(f"tier {self.name} failed in {what}: {describe(error)}") from error
        finally:
            if gate:
                gate.report(era, success)

    def _failed(self, what: str, error: Exception) -> None:
        self.counters.failures += 1
        self.counters.timeouts += isinstance(error, Overdue)
        self._log(what, error)

    def _log(self, what: str, error: Exception) -> None:
        self._around.limited.log(
            self._around.logger.warning,
            "tier_failed",
            key=f"{self.name}/{what}",
            tier=self.name,
            call=what,
            error=describe(error),
        )
