"""Checkpoints: what the persistent tiers lack is brought to them, most valuable first, while the engine runs and before
it closes. So a restart, or a crash, costs what came after the last one.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from ..storage.base import Meta
from ..storage.naming import BlockName, Shelf
from ..storage.tier_manager import TierManager
from .exports import EXPORT_BLOCKS, Export, Exports, TierSink, heads_of
from .kv import CacheManager, ImageRun
from .kv.image import most_valuable
from .surroundings import Surroundings

POLL = 0.02
"""Seconds between two looks at what is left to export."""
NEWS = 1.0
"""What was used less than so many intervals ago has its statistics noted again."""

Post = Callable[[Callable[[], None]], None]
Touches = dict[Shelf, dict[BlockName, Meta]]


class Checkpoint:
    """Makes checkpoints of one engine."""

    def __init__(
        self,
        cache: CacheManager,
        exports: Exports,
        manager: TierManager,
        outside: Surroundings,
    ) -> None:
        self.made = 0
        self._cache = cache
        self._exports = exports
        self._manager = manager
        self._sink = TierSink(manager, "persistent")
        self._clock, self._wall, _ = outside
        self._last = self._clock()

    async def make(self, post: Post, patience: float) -> None:
        """One checkpoint beside the running loop. ``patience``: seconds for what lies in other tiers."""
        enlisted = anyio.Event()
        touches: Touches = {}

        def enlist() -> None:
            touches.update(self._enlist())
            enlisted.set()

        post(enlist)
        await enlisted.wait()
        while self._exports.outstanding(self._sink):
            await anyio.sleep(POLL)
            post(_nothing)  # an idle loop does not see by itself that a queue has room again
        await self._note(touches)
        await self._manager.persist(patience)
        self.made += 1

    async def make_last(self, patience: float) -> None:
        """One when the loop has ended: nobody else uses the model's thread now."""
        touches = self._enlist()
        while self._exports.outstanding(self._sink):
            if not await self._exports.run(EXPORT_BLOCKS):
                await anyio.sleep(POLL)
        await self._note(touches)
        await self._manager.persist(patience)
        self.made += 1

    def _enlist(self) -> Touches:
        """See that what is missing below is exported, the most valuable first; what is there gets its news noted."""
        touches: Touches = {}
        since = self._clock() - self._last
        self._last = self._clock()
        image = self._cache.image(self._wall())
        for run in (image[index] for index in most_valuable(image)):
            shelf = run.namespace.shelf()
            missing = self._manager.absent(shelf, run.names, to="persistent")
            if missing:
                self._exports.later(self._exported(run, shelf, missing))
            if len(missing) < len(run.names) and run.meta.idle <= since * NEWS:
                absent = set(missing)
                touches.setdefault(shelf, {}).update(
                    (name, run.meta) for i, name in enumerate(run.names) if i not in absent
                )
        return touches

    def _exported(self, run: ImageRun, shelf: Shelf, missing: list[int]) -> list[Export]:
        heads = heads_of(run)
        return [Export(run.ids[i], shelf, heads[i], run.meta, self._sink) for i in missing]

    async def _note(self, touches: Touches) -> None:
        for shelf, metas in touches.items():
            await self._manager.touch(shelf, metas)


def _nothing() -> None:
    """A change that only wakes the loop."""
