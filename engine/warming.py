"""Warming: after a restart, the hottest stored prefixes come back to the device before anybody asks for them.

In the background, within a budget, and only into blocks that are free: a request that comes meanwhile is never made to
wait for it or evicted for it. Tenants' prefixes are not warmed, since their salts are not stored anywhere; like all the
rest they come on demand.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from enum import StrEnum

import anyio
import anyio.to_thread

from ..storage.base import Listed
from ..storage.manager.tier_manager import LoadOutcome, TierManager
from ..storage.naming import BlockName, Namespace
from ..telemetry import names
from .edges import Edges
from .kv import CacheManager, Sequence
from .loading import Loads
from .surroundings import Surroundings


class Readiness(StrEnum):
    """Whether what was to be warmed is on the device."""

    WARMING = "warming"
    READY = "ready"


class Warming:
    """Warms one engine, once."""

    def __init__(
        self,
        manager: TierManager,
        cache: CacheManager,
        loads: Loads,
        *,
        namespace: Namespace,
        budget_blocks: int,
        new_id: Callable[[], int],
        refused: str | None,
        outside: Surroundings,
    ) -> None:
        self.readiness = Readiness.WARMING if budget_blocks >= 1 and manager.names else Readiness.READY
        self.stored_blocks = 0
        """Blocks that persistent tiers had when the engine opened."""
        self.refused = refused
        """Why a snapshot that was asked for is not used."""
        self.planned_blocks = 0
        self.warmed_blocks = 0
        self._manager = manager
        self._cache = cache
        self._loads = loads
        self._namespace = namespace
        self._budget = budget_blocks
        _, self._wall, _, self._tracing = outside
        self._new_id = new_id
        self._under_way: tuple[Sequence, anyio.Event] | None = None

    async def run(self, loop: Edges) -> None:
        """Warm as much as the budget and the free blocks allow."""
        try:
            if self._budget >= 1:
                await self._warm_hottest(loop)
        finally:
            self.readiness = Readiness.READY

    async def _warm_hottest(self, loop: Edges) -> None:
        listed = [each async for each in self._manager.listing(self._namespace.shelf())]
        listed = [each._replace(meta=each.meta.aged(self._wall())) for each in listed]
        most = min(self._budget, self._cache.pool.num_blocks)
        paths = await anyio.to_thread.run_sync(lambda: list(hottest_paths(listed, most)))
        if not paths:
            return
        self.planned_blocks = sum(new for _, new in paths)
        with self._shown():
            for path, _ in paths:
                if not await self._warm(path, loop):
                    break

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """A span of the whole; the copies have their own."""
        with self._tracing.acting(names.RESTORE) as shown:
            shown[names.KIND] = "warming"
            try:
                yield
            finally:  # closing the engine cuts it short
                shown[names.BLOCKS] = self.warmed_blocks

    def gives_way(self, needed: Sequence | None = None) -> bool:
        """Give up what is being warmed, because a request needs its blocks, or waits for the sequence ``needed``. False
        when nothing is, or ``needed`` is somebody else's. At a step edge.
        """
        if self._under_way is None or needed not in (None, self._under_way[0]):
            return False
        sequence, done = self._under_way
        self._under_way = None
        self._loads.give_up(sequence)
        self._cache.finish(sequence)
        done.set()
        return True

    async def _warm(self, path: SequenceOf[Listed], loop: Edges) -> bool:
        """Bring one path in; False when there is no free block left for it."""
        done = anyio.Event()
        if not await loop.at_edge(lambda: self._begin(path, done)):
            return False
        await done.wait()
        return True

    def _begin(self, path: SequenceOf[Listed], done: anyio.Event) -> bool:
        tokens = array("i", b"".join(each.head.tokens for each in path))
        sequence = Sequence(self._new_id(), tokens, self._namespace, block_size=self._cache.block_size)
        sequence.track = self._tracing.background
        if self._cache.pool.free < len(path):
            return False
        admission = self._cache.try_admit(sequence, resumed=True, used=False)
        if admission is None:
            return False
        self._cache.forgo_copy(sequence, admission.copies, used=False)

        def finished(outcome: LoadOutcome) -> None:
            self._under_way = None
            self.warmed_blocks += outcome.blocks
            self._cache.finish(sequence)
            done.set()

        wanted = self._loads.worthwhile(sequence, whole=True)
        if wanted:
            self._under_way = sequence, done
            self._loads.begin(sequence, wanted, finished, is_use=False)
        else:  # it is on the device already, or computing it is faster
            finished(LoadOutcome(0, "complete"))
        return True


def hottest_paths(listed: SequenceOf[Listed], budget: int) -> Iterator[tuple[list[Listed], int]]:
    """Paths from the start of a prompt, the one to the hottest block first, with how many blocks each adds to those
    before it; up to ``budget`` blocks in all. What lacks an ancestor is left out.
    """
    by_name = {each.head.name: each for each in listed}
    chosen: set[BlockName] = set()
    for each in sorted(listed, key=_heat, reverse=True):
        if len(chosen) >= budget:
            return
        if each.head.name in chosen:
            continue
        path = _path_to(each, by_name)
        new = [part for part in path if part.head.name not in chosen]
        if not path or len(chosen) + len(new) > budget:
            continue
        chosen.update(part.head.name for part in new)
        yield path, len(new)


def _heat(listed: Listed) -> tuple[int, int, float, int]:
    """Of equals, the deepest first: its path brings the others."""
    meta = listed.meta
    return 0 if meta.ttl == 0.0 else meta.priority, meta.hits, -meta.idle, listed.head.start


def _path_to(listed: Listed, by_name: dict[BlockName, Listed]) -> list[Listed]:
    path = [listed]
    while path[-1].head.start > 0:
        parent = by_name.get(path[-1].head.parent)
        if parent is None or parent.head.start >= path[-1].head.start:
            return []
        path.append(parent)
    return path[::-1]
