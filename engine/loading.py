"""Loads: prefixes on their way from a tier to the device.

A sequence is admitted first, with all its blocks; then what a tier has of its prefix is read, checked and copied into
these blocks between steps, a few at a time, and published in the prefix tree as if it had been computed. Whatever
cannot be had in time is computed. Nobody else waits for a load, and one that never comes back holds nothing but the
blocks of its own request, until its deadline.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import anyio
import anyio.abc
import numpy as np

from ..errors import EngineClosed, ModelError, describe
from ..storage.base import Meta
from ..storage.manager.tier_manager import Loaded, LoadOutcome, TierManager
from ..storage.naming import BlockName
from ..telemetry import names
from ..telemetry.record import NOTHING, Attributes
from .config import EngineConfig
from .edges import Edges
from .kv import CacheManager, Sequence
from .model.runner import ModelRunner
from .model_thread import ModelThread
from .surroundings import Surroundings

IMPORT_BLOCKS = 64
"""Blocks copied to the device between two steps, about; so running streams go on during a load."""

WhenLoaded = Callable[[LoadOutcome], None]


class Chunk(NamedTuple):
    """Blocks that were read and wait for their turn on the device."""

    blocks: list[Loaded]
    taken: anyio.Event


class Load:
    """One prefix under way."""

    def __init__(self, sequence: Sequence, wanted: list[BlockName], when_loaded: WhenLoaded, *, is_use: bool) -> None:
        self.sequence = sequence
        self.is_use = is_use
        self.wanted = wanted
        self.when_loaded = when_loaded
        self.scope = anyio.CancelScope()
        self.arrived: deque[Chunk] = deque()
        self.is_over = False
        """Ended or given up: what still comes in is ignored."""


class Loads:
    """Begins, carries out and gives up loads. All calls from the loop, except the tasks that read."""

    def __init__(
        self,
        manager: TierManager,
        cache: CacheManager,
        runner: ModelRunner,
        thread: ModelThread,
        config: EngineConfig,
        outside: Surroundings,
        *,
        on_fault: Callable[[str, BaseException | str], None],
    ) -> None:
        self.loaded_tokens: Counter[str] = Counter()
        """By tier."""
        self.restored_tokens = 0
        """Those of them that an earlier run of the engine, or another engine, had computed."""
        self.outcomes: Counter[str] = Counter()
        """Loads by how they ended."""
        self._manager = manager
        self._cache = cache
        self._runner = runner
        self._thread = thread
        self._config = config
        self._clock, self._wall, _, _ = outside
        self._on_fault = on_fault
        self._loads: dict[int, Load] = {}
        self._tasks: anyio.abc.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._loads)

    def start(self, tasks: anyio.abc.TaskGroup, loop: Edges) -> None:
        """``tasks``: where reading happens."""
        self._tasks, self._loop = tasks, loop

    # from the scheduler

    def worthwhile(self, sequence: Sequence, *, whole: bool = False) -> list[BlockName]:
        """The names of the next blocks of an admitted sequence that should be loaded rather than computed, in order.

        At least one token is left to compute, unless ``whole``.
        """
        if not self._manager.names:
            return []
        size = self._cache.block_size
        end = len(sequence.tokens) - (0 if whole else 1)
        first = self._cache.names_beyond(sequence, min(end, (sequence.table.shared + 1) * size))
        shelf = sequence.namespace.shelf()
        if not first or not self._manager.peek(shelf, first).tiers:  # the common case costs one name
            return []
        wanted = self._cache.names_beyond(sequence, end)
        coverage = self._manager.peek(shelf, wanted)
        if self._config.promotion == "best_effort":
            at_hand = next((i for i, tier in enumerate(coverage.tiers) if tier > 0), len(coverage.tiers))
            coverage = coverage._replace(tiers=coverage.tiers[:at_hand])
        start = sequence.table.shared + 1
        seconds = [self._cache.cost.seconds((start + i) * size) for i in range(len(coverage.tiers))]
        return wanted[: self._manager.worth(coverage, seconds)]

    def begin(
        self, sequence: Sequence, wanted: list[BlockName], when_loaded: WhenLoaded, *, is_use: bool = True
    ) -> None:
        """Load ``wanted`` into the next blocks of ``sequence``; ``when_loaded`` is called at a step edge, once, unless
        the load is given up before. ``is_use``: for a request, which counts as a use of the blocks.
        """
        if self._tasks is None:
            raise EngineClosed("the tiers are not open")
        load = self._loads[sequence.seq_id] = Load(sequence, wanted, when_loaded, is_use=is_use)
        self._tasks.start_soon(self._read, load)

    def give_up(self, sequence: Sequence) -> None:
        """The sequence is not wanted any more: its blocks may be used for something else from now on."""
        load = self._loads.pop(sequence.seq_id, None)
        if load is not None:
            load.is_over = True
            load.scope.cancel()
            self.outcomes["given up"] += 1

    # from the loop

    @property
    def has_arrived(self) -> bool:
        """Whether ``bring_in`` has something to copy."""
        return any(load.arrived for load in self._loads.values())

    async def bring_in(self) -> None:
        """Copy some of what has arrived to the device and publish it. Between steps only."""
        left = IMPORT_BLOCKS
        for load in list(self._loads.values()):
            while load.arrived and left > 0:
                chunk = load.arrived.popleft()
                left -= len(chunk.blocks)
                try:
                    await self._import(load, chunk.blocks)
                finally:
                    chunk.taken.set()

    async def _import(self, load: Load, blocks: list[Loaded]) -> None:
        sequence = load.sequence
        start = sequence.table.shared
        ids = np.array(sequence.table.blocks[start : start + len(blocks)], dtype=np.int32)
        began = self._clock()
        try:
            await self._thread.call(self._runner.import_blocks, ids, [block.payload for block in blocks])
        except EngineClosed:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a runner raises, the blocks are computed instead
            self._on_fault("import", error)
            self._note(load, blocks, began, {names.ERROR_TYPE: type(error).__name__})
            self._end(load, LoadOutcome(0, "failed"))
            return
        self._note(load, blocks, began, NOTHING)
        self._publish(load, blocks)

    def _note(self, load: Load, blocks: list[Loaded], began: float, more: Attributes) -> None:
        track = load.sequence.track
        if track.is_on:
            for tier, count in Counter(block.tier for block in blocks).items():
                track.act(names.SWAP_IN, began, self._clock(), {names.BLOCKS: count, names.TIER: tier, **more})

    def _publish(self, load: Load, blocks: list[Loaded]) -> None:
        size, wall_now = self._cache.block_size, self._wall()
        for tier, run in groupby(blocks, key=lambda block: block.tier):
            metas: list[Meta] = []
            for block in run:
                metas.append(block.meta)
                self.loaded_tokens[tier] += size
                self.restored_tokens += 0 if block.own else size
            seconds = self._manager.reload_seconds(self._manager.names.index(tier))
            self._cache.loaded(load.sequence, metas, tier, seconds, wall_now=wall_now, used=load.is_use)

    # the task of a load

    async def _read(self, load: Load) -> None:
        outcome = LoadOutcome(0, "failed")
        with load.scope:
            try:
                deadline = self._config.promotion_timeout if self._config.promotion == "timeout" else None
                shelf = load.sequence.namespace.shelf()
                outcome = await self._manager.load(
                    shelf, load.wanted, lambda blocks: self._deliver(load, blocks), deadline=deadline
                )
            except Exception as error:  # noqa: BLE001  # the manager promises not to; the request must get on all the same
                self._on_fault("load", ModelError(describe(error)))
        if not load.is_over:
            self._loop.post(lambda: self._end(load, outcome))

    async def _deliver(self, load: Load, blocks: list[Loaded]) -> None:
        chunk = Chunk(blocks, anyio.Event())
        load.arrived.append(chunk)
        self._loop.wake()
        await chunk.taken.wait()

    def _end(self, load: Load, outcome: LoadOutcome) -> None:
        """At a step edge. What was delivered has been published by then."""
        if load.is_over:
            return
        load.is_over = True
        load.scope.cancel()
        for chunk in load.arrived:
            chunk.taken.set()
        load.arrived.clear()
        del self._loads[load.sequence.seq_id]
        self.outcomes[outcome.reason] += 1
        load.when_loaded(outcome)
