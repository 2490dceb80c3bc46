"""TierWatcher: who hears of blocks that enter and leave tiers, and Witness: what one tier is known to have told it.

A tier drops blocks by itself to make room and tells nobody which. While somebody watches, a witness remembers what was
told as stored, and when the tier's count of dropped blocks has grown it looks which of these are missing, the oldest
first, a bounded number at a time. So what was told is right, or soon will be, for tiers that answer from memory; for
the others, and for those that are shared with other engines, it is a hint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..base import Head, TierStats
from ..naming import BlockName, Shelf

_LOOKS_PER_DROP = 4
_LOOKS_AT_LEAST = 64


class TierWatcher(Protocol):
    """Hears of what becomes of blocks in tiers, once it has. No method may block or raise."""

    def stored(self, tier: str, shelf: Shelf, heads: Sequence[Head]) -> None:
        """The tier keeps these blocks; some may have been there before."""

    def removed(self, tier: str, shelf: Shelf, names: Sequence[BlockName]) -> None:
        """The tier does not have these any more; some it perhaps never had."""

    def erased(self, tier: str, tenant: bytes) -> None:
        """All blocks of a tenant (``Shelf.tenant``) are gone."""


class Witness:
    """Tells a watcher of one tier. Memory: one entry for each block that the tier has; none where it
    would have to be asked."""

    def __init__(
        self,
        tier: str,
        watcher: TierWatcher,
        *,
        has: Callable[[Shelf, BlockName], bool | None],
        asks: Callable[[], bool],
        stats: Callable[[], TierStats],
    ) -> None:
        """``has``: whether the tier has a block, as it says from memory; ``None``: it would have to be asked.
        ``asks``: whether that is so of all.
        """
        self._tier = tier
        self._watcher = watcher
        self._has = has
        self._asks = asks
        self._stats = stats
        self._told: OrderedDict[tuple[Shelf, BlockName], None] = OrderedDict()  # whom to look at first comes first
        self._dropped = self._drops()
        self._due = 0
        self._looked = 0

    def know(self, blocks: Iterable[tuple[Shelf, BlockName]]) -> None:
        """These were found in the tier. Of one that would have to be asked nobody learns what is gone: they would stay
        here for ever.
        """
        if not self._asks():
            self._told.update(dict.fromkeys(blocks))

    def stored(self, shelf: Shelf, heads: Sequence[Head]) -> None:
        """It keeps these; to do so, it may have dropped others."""
        self.know((shelf, head.name) for head in heads)
        self._watcher.stored(self._tier, shelf, heads)
        dropped = self._drops()
        self._due += max(dropped - self._dropped, 0)
        self._dropped = dropped
        if self._due:
            self._look()

    def removed(self, shelf: Shelf, names: Sequence[BlockName]) -> None:
        """It was made to forget these, or turned out not to have them."""
        for name in names:
            self._told.pop((shelf, name), None)
        self._watcher.removed(self._tier, shelf, names)

    def missed(self, shelf: Shelf, names: Sequence[BlockName]) -> None:
        """A read did not find these; what was stored again while it ran is there."""
        if gone := [name for name in names if not self._has(shelf, name)]:
            self.removed(shelf, gone)

    def erased(self, tenant: bytes) -> None:
        """It was made to forget a tenant. What was told is named; a tier that has to be asked may have had more."""
        gone: dict[Shelf, list[BlockName]] = {}
        for shelf, name in self._told:
            if shelf.tenant == tenant:
                gone.setdefault(shelf, []).append(name)
        for shelf, names in gone.items():
            self.removed(shelf, names)
        if self._asks():
            self._watcher.erased(self._tier, tenant)

    def _drops(self) -> int:
        stats = self._stats()
        drops = stats.evicted, stats.corrupt
        return sum(count for count in drops if isinstance(count, int))

    def _look(self) -> None:
        """For as many missing blocks as were dropped; once round at most, since some of those were never told."""
        missing: dict[Shelf, list[BlockName]] = {}
        for _ in range(_LOOKS_PER_DROP * self._due + _LOOKS_AT_LEAST):
            if not self._due or self._looked >= len(self._told):
                self._due = self._looked = 0
                break
            key, _ = self._told.popitem(last=False)
            if self._has(*key) is False:
                missing.setdefault(key[0], []).append(key[1])
                self._due -= 1
            else:
                self._told[key] = None
                self._looked += 1
        for shelf, names in missing.items():
            self._watcher.removed(self._tier, shelf, names)
