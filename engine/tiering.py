"""Tiering: what the engine does with the tiers below the device, in one place.

Down: what the cache evicts is copied out before it can be overwritten and offered to the tiers; by configuration also
what a request leaves behind when it is done. Up: a request that is admitted looks below for the rest of its prefix
(:mod:`.loading`). Sideways: checkpoints bring what persistent tiers lack to them, most valuable first, now and then
and before the engine closes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVarTuple, Unpack

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from ..errors import describe
from ..storage.manager.tier_manager import TierManager
from ..storage.naming import TOKEN_BYTES, BlockName, Namespace, names_after
from ..telemetry import names
from ..telemetry.logging import FaultFields, fault_fields
from .checkpoint import Checkpoint
from .config import EngineConfig
from .counters import RestoreStats, TransferStats
from .edges import Edges
from .exports import Export, Exports, TierSink, heads_of
from .kv import CacheManager, EvictedRun, Sequence
from .kv.image import meta_of
from .loading import Loads
from .surroundings import Surroundings
from .warming import Warming

SPARE_BLOCKS = 16
"""Blocks that can wait and are exported beside a step."""
IDLE_BLOCKS = 256
"""The same when no step is waiting."""
NAMES_IN_LOOP = 64
"""Names that are computed in the event loop; longer chains are computed in a thread."""

Ts = TypeVarTuple("Ts")


class Tiering:
    """See the module. Built by ``assemble``, also without tiers: then there is nothing to do. All calls from the loop,
    unless said otherwise."""

    def __init__(
        self,
        manager: TierManager,
        cache: CacheManager,
        exports: Exports,
        loads: Loads,
        checkpoint: Checkpoint,
        warming: Warming,
        config: EngineConfig,
        outside: Surroundings,
    ) -> None:
        self.manager = manager
        self.exports = exports
        self.loads = loads
        self.checkpoint = checkpoint
        self.warming = warming
        self.learned = checkpoint.learned
        self._cache = cache
        self._config = config
        self._clock, self._wall, self._logger, self._tracing = outside
        self._evicted = TierSink(manager, "first")
        self._completed = TierSink(manager, "all")
        self._looking: set[int] = set()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._is_open = False

    # life; in tasks of the engine

    async def open(self) -> None:
        """Open the tiers.

        :raises StorageError: when one cannot be used and ``strict_tiers`` is set, or when what it holds is to be
            forgotten (``restore_from_disk``) and is not.
        """
        self._is_open = True
        if not self.manager.names:
            return
        with self._tracing.acting(names.RESTORE) as shown:
            await self.manager.open()
            if not self._config.restore_from_disk:
                await self.manager.clear()
            self.warming.stored_blocks = self.manager.stored_blocks
            shown |= {names.KIND: "open", names.TIER: ",".join(self.manager.names)}
            shown[names.BLOCKS] = self.manager.stored_blocks
            if self.warming.refused is not None:
                shown[names.REASON] = self.warming.refused

    async def run(self, loop: Edges, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """The tasks of the tiers: writers, loads, checkpoints, warming. Until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks, self._loop = tasks, loop
            self.loads.start(tasks, loop)
            self._spawn(self.manager.run)
            self._spawn(self._come_back, loop)
            if self._config.checkpoint_interval > 0 and self.manager.has_persistent:
                self._spawn(self._checkpoint_now_and_then)
            task_status.started()
            await anyio.sleep_forever()

    async def close(self) -> None:
        """Save what persistent tiers lack within the budget, then close them all. After the loop has ended, while
        ``run`` still runs.
        """
        began, budget = self._clock(), self._config.close_budget
        self._is_open = False
        if self.manager.has_persistent:
            with anyio.move_on_after(budget):
                await self.checkpoint.make_last(budget)
        lost = await self.manager.close(max(budget - (self._clock() - began), 0.0))
        if lost:
            self._logger.warning("blocks were not saved in the time for closing", blocks=lost, seconds=budget)

    async def abandon(self) -> None:
        """Close the tiers without saving anything, if ``close`` was not reached."""
        if self._is_open:
            self._is_open = False
            await self.manager.close(0.0)

    # the cache's hook

    def evicted(self, run: EvictedRun) -> None:
        """Blocks left the tree and are free: see that what is worth it is copied out before the next step."""
        promised = self.exports.evicted(run.blocks, self._completed)
        if not self.manager.names:
            return
        if self._config.demotion == "selective" and not run.entry.hits:
            return
        shelf = run.namespace.shelf()
        missing = self.manager.absent(shelf, run.names, to="first")
        if not missing:
            return
        heads, meta = heads_of(run), meta_of(run.entry, self._clock(), self._wall())
        self.exports.now(
            Export(run.blocks[i], shelf, heads[i], meta, self._evicted, run.cause)
            for i in missing
            if run.blocks[i] not in promised
        )

    def dropped(self, run: EvictedRun) -> None:
        """The contents of these blocks must not get into any tier."""
        self.exports.dropped(run.blocks)

    # from the scheduler

    def arrived(self, sequence: Sequence) -> None:
        """A request came: ask the tiers that cannot tell at once, and bring what lies low up to the first tier."""
        if not (self.manager.must_ask() or self.manager.can_prefetch):
            return
        if self.manager.must_ask() and self._config.promotion != "best_effort":  # which waits for nothing
            self._looking.add(sequence.seq_id)
        self._spawn(self._look, sequence)

    def is_looking(self, sequence: Sequence) -> bool:
        """Whether a tier is still being asked what it has for this sequence; bounded by the tiers' deadlines."""
        return sequence.seq_id in self._looking

    def completed(self, sequence: Sequence) -> None:
        """An admitted sequence is about to give its blocks back: by configuration, write them through."""
        if self._config.demotion == "write_back":
            return
        self._write_through(sequence, second_use=self._config.demotion == "selective")

    def distrusted(self, namespace: Namespace, gone: list[BlockName]) -> None:
        """These blocks may be bad: tiers must not bring them back."""
        if gone:
            self._spawn(self.manager.forget, namespace.shelf(), gone)

    def preempted(self, sequence: Sequence) -> None:
        """The same for one that has to make room and comes back: what it computed is wanted again for certain."""
        if self._config.demotion != "write_back":  # what is evicted goes down anyhow
            self._write_through(sequence, second_use=False)

    def seconds_to_come_back(self, seconds: float) -> float:
        """What a preempted block costs that takes ``seconds`` to compute: the first tier may be faster."""
        reload = self.manager.reload_seconds(0) if self.manager.names else None
        return seconds if reload is None else min(seconds, reload)

    # from the loop

    async def bring_in(self) -> None:
        """Copy some of what was loaded to the device. Before the plan; what was evicted since the last step goes out
        first, since its blocks may be the ones that are written.
        """
        await self.exports.run(0)
        await self.loads.bring_in()

    async def save(self, *, is_idle: bool) -> None:
        """Make the copies that cannot wait, and some that can. Between plan and step."""
        await self.exports.run(IDLE_BLOCKS if is_idle else SPARE_BLOCKS)

    @property
    def is_due(self) -> bool:
        """Whether ``bring_in`` or ``save`` would have something to copy, which takes a while."""
        return self.exports.is_due or self.loads.has_arrived or self.exports.has_ready

    @property
    def has_work(self) -> bool:
        """Whether blocks wait to be exported when there is time."""
        return self.exports.has_ready

    @property
    def waits_for_room(self) -> bool:
        """Whether blocks wait until a tier takes them. Nobody tells when it does."""
        return self.exports.has_waiting

    # looking

    def transfers(self) -> TransferStats:
        return TransferStats(
            exported_blocks=self.exports.blocks,
            failed_exports=self.exports.failed,
            loads=dict(self.loads.outcomes),
            loaded_tokens=dict(self.loads.loaded_tokens),
            checkpoints=self.checkpoint.made,
        )

    def restored(self) -> RestoreStats:
        return RestoreStats(
            readiness=self.warming.readiness.value,
            stored_blocks=self.warming.stored_blocks,
            planned_blocks=self.warming.planned_blocks,
            warmed_blocks=self.warming.warmed_blocks,
            saved_tokens=self.loads.restored_tokens,
            refused=self.warming.refused,
            learned=self.learned.is_back,
        )

    # inside

    async def _come_back(self, loop: Edges) -> None:
        """Warm what is to be warmed; then let the eviction policy take over what it had learned of it."""
        try:
            await self.warming.run(loop)
        finally:
            found = await self.manager.notes()
            if found:
                await loop.at_edge(lambda: self.learned.load(found))

    async def _look(self, sequence: Sequence) -> None:
        shelf = sequence.namespace.shelf()
        try:
            tokens = sequence.tokens[:-1].tobytes()
            size = self._cache.block_size
            if len(tokens) > NAMES_IN_LOOP * size * TOKEN_BYTES:
                whole = await anyio.to_thread.run_sync(names_after, shelf.namespace, tokens, size)
            else:
                whole = names_after(shelf.namespace, tokens, size)
            async with anyio.create_task_group() as asking:
                if self._config.promotion == "timeout":
                    asking.start_soon(self._wait_no_longer, sequence)
                await self.manager.ask(shelf, whole)
                asking.cancel_scope.cancel()
        finally:
            self._looking.discard(sequence.seq_id)
            self._loop.wake()
        await anyio.lowlevel.checkpoint()
        if sequence.is_outside:  # it has to wait: use the time
            await self.manager.prefetch(shelf, whole)

    async def _wait_no_longer(self, sequence: Sequence) -> None:
        """The tiers may go on answering, and the breakers hear of it when they do not."""
        await anyio.sleep(self._config.promotion_timeout)
        self._looking.discard(sequence.seq_id)
        self._loop.wake()

    async def _checkpoint_now_and_then(self) -> None:
        while True:
            await anyio.sleep(self._config.checkpoint_interval)
            await self._kept_alive(self.checkpoint.make, self._loop, self._config.checkpoint_interval)

    def _spawn(self, work: Callable[[Unpack[Ts]], Awaitable[object]], *args: *Ts) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._kept_alive, work, *args)

    async def _kept_alive(self, work: Callable[[Unpack[Ts]], Awaitable[object]], *args: *Ts) -> None:
        """Run ``work``; what it raises is told, and costs nobody else anything."""
        try:
            await work(*args)
        except Exception as error:  # noqa: BLE001  # a fault of the tiers must never end the engine
            shown: FaultFields = {**fault_fields(error), "error": describe(error)}  # tiers never see a text
            self._logger.error("work on the tiers failed", work=work.__qualname__, **shown)

    def _write_through(self, sequence: Sequence, *, second_use: bool) -> None:
        node = sequence.node
        if node is None:
            return
        shelf = sequence.namespace.shelf()
        for run in self._cache.runs_above(node):
            missing = self.manager.absent(shelf, run.names, to="all")
            if not missing:
                return  # what lies above is there too
            if second_use and not run.entry.hits:
                continue
            heads, meta = heads_of(run), meta_of(run.entry, self._clock(), self._wall())
            self.exports.later(
                Export(run.blocks[i], shelf, heads[i], meta, self._completed, sequence.track) for i in missing
            )
