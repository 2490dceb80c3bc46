"""Checkpoints: what the persistent tiers lack is brought to them, most valuable first, while the engine runs and before
it closes. So a restart, or a crash, costs what came after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import anyio

from ..storage.base import Meta
from ..storage.manager.tier_manager import TierManager
from ..storage.naming import BlockName, Shelf
from ..telemetry import names
from .edges import Edges
from .enlisting import SLICE_BLOCKS, Enlistment
from .exports import EXPORT_BLOCKS, Export, Exports, TierSink, heads_of
from .kv import CacheManager, ImageRun
from .kv.image import most_valuable
from .learned import Learned
from .surroundings import Surroundings

POLL = 0.02
"""Seconds between two looks at what is left to export."""

Touches = dict[Shelf, dict[BlockName, Meta]]


class Checkpoint:
    """Makes checkpoints of one engine."""

    def __init__(
        self,
        cache: CacheManager,
        exports: Exports,
        manager: TierManager,
        learned: Learned,
        outside: Surroundings,
    ) -> None:
        self.made = 0
        self.made_at: float | None = None
        """When the newest one was complete, on the engine's clock."""
        self._cache = cache
        self._exports = exports
        self._manager = manager
        self.learned = learned
        self._notes: bytes | None = None
        """Of the policy, as of the checkpoint under way."""
        self._sink = TierSink(manager, "persistent")
        self._clock, self._wall, _, self._tracing = outside
        self._last = self._clock()

    async def make(self, loop: Edges, patience: float) -> None:
        """One checkpoint beside the running loop. ``patience``: seconds for what lies in other tiers."""
        touches: Touches = {}
        with self._shown():
            with closing(await loop.at_edge(lambda: self._begin(touches), Enlistment.close)) as enlistment:
                while await loop.at_edge(enlistment.advance):
                    await self._settle(loop, SLICE_BLOCKS)
            await self._settle(loop, 0)
            await self._note(touches)
            await self._manager.persist(patience)
        self._done()

    async def make_last(self, patience: float) -> None:
        """One when the loop has ended: nobody else uses the model's thread now."""
        touches: Touches = {}
        with self._shown():
            with closing(self._begin(touches)) as enlistment:
                while enlistment.advance():
                    await self._settle_alone(SLICE_BLOCKS)
            await self._settle_alone(0)
            await self._note(touches)
            await self._manager.persist(patience)
        self._done()

    def _done(self) -> None:
        self.made += 1
        self.made_at = self._clock()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """A span of the whole; the writes it leads to have their own."""
        before = self._exports.blocks
        with self._tracing.acting(names.PERSIST) as shown:
            shown[names.KIND] = "checkpoint"
            yield
            shown[names.BLOCKS] = self._exports.blocks - before  # with what was evicted meanwhile

    async def _settle(self, loop: Edges, left: int) -> None:
        """Until no more than ``left`` blocks are still to be exported: a few lists of them at a time are enough."""
        while self._exports.outstanding(self._sink) > left:
            await anyio.sleep(POLL)
            loop.wake()  # a queue may have room again

    async def _settle_alone(self, left: int) -> None:
        while self._exports.outstanding(self._sink) > left:
            if not await self._exports.run(EXPORT_BLOCKS):
                await anyio.sleep(POLL)

    def _begin(self, touches: Touches) -> Enlistment:
        """See that what is missing below is exported, the most valuable first; what is there has its news put into
        ``touches``. At a step edge.
        """
        since, self._last = self._clock() - self._last, self._clock()
        image, journal = self._cache.image(self._wall()), self._tracing.background
        self._notes = self.learned.dump()  # after the image, which names all blocks

        def exported(run: ImageRun, indices: Sequence[int]) -> list[Export]:
            shelf, wanted = run.namespace.shelf(), [run.names[index] for index in indices]
            absent = self._manager.absent(shelf, wanted, to="persistent")
            if run.meta.idle <= since or run.meta.priority:
                there = set(wanted).difference(wanted[at] for at in absent)
                touches.setdefault(shelf, {}).update(dict.fromkeys(there, run.meta))
            heads = heads_of(run) if absent else []
            return [
                Export(run.ids[indices[at]], shelf, heads[indices[at]], run.meta, self._sink, journal) for at in absent
            ]

        return Enlistment([image[index] for index in most_valuable(image)], self._exports, exported)

    async def _note(self, touches: Touches) -> None:
        for shelf, metas in touches.items():
            await self._manager.touch(shelf, metas)
        if self._notes is not None:
            await self._manager.note(self._notes)
