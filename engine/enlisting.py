"""Enlisting: the blocks of an image get into the exports, a slice at each step edge.

The image of a large cache is taken in milliseconds. To look up which of its blocks are missing below, and to list
those, takes longer than streams should wait, so it is done in slices. What leaves the cache before its turn is seen to
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .exports import Export, Exports
from .kv import ImageRun

SLICE_BLOCKS = 1024
"""Blocks that are enlisted at one step edge; takes some milliseconds."""

Exported = Callable[[ImageRun, Sequence[int]], Iterable[Export]]
"""Which exports are to be made of the blocks of a run at some of its indices, in order."""


class Enlistment:
    """One image on its way into the exports. Close it when it is not wanted any more. All calls at step edges."""

    def __init__(self, runs: Sequence[ImageRun], exports: Exports, exported: Exported) -> None:
        """``runs``: as the cache is now; those whose blocks are to be copied first come first."""
        self._runs = runs
        self._exports = exports
        self._exported = exported
        self._at = (0, 0)
        """Run and index in it where the next slice begins."""
        self._left: dict[int, int] = {}
        """Blocks that were not enlisted yet -> their run."""
        for number, run in enumerate(runs):
            self._left.update(dict.fromkeys(run.ids, number))
        exports.watch(self)

    def advance(self) -> bool:
        """Enlist the next slice; returns whether there is more to do."""
        room = SLICE_BLOCKS
        while room > 0 and self._at[0] < len(self._runs):
            number, first = self._at
            run = self._runs[number]
            stop = min(first + room, len(run.ids))
            room -= stop - first
            self._enlist(run, [index for index in range(first, stop) if run.ids[index] in self._left])
            self._at = (number, stop) if stop < len(run.ids) else (number + 1, 0)
        return self._at[0] < len(self._runs)

    def close(self) -> None:
        """Forget the rest. Idempotent."""
        self._left.clear()
        self._runs = ()
        self._exports.unwatch(self)

    # from the exports

    def evicted(self, blocks: Iterable[int]) -> None:
        """These blocks are about to be overwritten: enlist those that have not had their turn."""
        gone: dict[int, set[int]] = {}
        for block in blocks:
            if (number := self._left.get(block)) is not None:
                gone.setdefault(number, set()).add(block)
        for number, ids in gone.items():
            run = self._runs[number]
            self._enlist(run, [index for index, block in enumerate(run.ids) if block in ids])

    def dropped(self, blocks: Iterable[int]) -> None:
        """The contents of these are not wanted any more."""
        for block in blocks:
            self._left.pop(block, None)

    def _enlist(self, run: ImageRun, indices: list[int]) -> None:
        for index in indices:
            del self._left[run.ids[index]]
        if indices:
            self._exports.later(self._exported(run, indices))
