"""Ranking: in which order a tier lets go of its blocks.

A tier knows which blocks it has, what follows what, and which of them are being read. The ranking knows what they are
worth. So a tier tells it what happens, offers it the blocks that may go, and asks it which of those goes first. A block
is never offered while another one of the same tier follows it: that one would be of no use without it.

A ranking is used by one thread at a time. The tier sees to that, with a lock where it has several threads. It must not
block for long, since the tier may hold that lock, and it raises nothing.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import ClassVar, NamedTuple, Protocol

from ..errors import InvalidRequest
from .base import Head, Meta, TierGeometry
from .naming import Shelf

_SLACK = 64
"""Stale heap items that are tolerated whatever the number of blocks."""


class Ranked(Protocol):
    """A block of a tier, as far as rankings may look. Compared by identity."""

    @property
    def shelf(self) -> Shelf: ...

    @property
    def head(self) -> Head: ...

    @property
    def meta(self) -> Meta: ...

    @property
    def last_use(self) -> float:
        """On the tier's monotonic clock."""

    @property
    def expires(self) -> float | None:
        """When its priority falls to 0, on the same clock; ``None``: never."""


class Ranking(ABC):
    """Whom a tier lets go first. ``now`` is always of the tier's monotonic clock and never runs backwards.

    Each event comes after the tier has brought the block itself up to date.
    """

    follows: ClassVar[bool] = True
    """Whether the order depends on the events themselves. Otherwise it is a matter of what the blocks are by now, and a
    tier may offer them all together when it wants room for the first time."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What traces and statistics call it."""

    @property
    def faults(self) -> int:
        """How often what is behind it broke its contract, so that the least recently used went instead."""
        return 0

    @abstractmethod
    def added(self, block: Ranked, now: float) -> None:
        """The tier has got a block. It is not offered yet."""

    @abstractmethod
    def offered(self, block: Ranked, now: float) -> None:
        """A block that was added may go: nothing here follows it and nobody reads it."""

    @abstractmethod
    def withdrawn(self, block: Ranked) -> None:
        """A block that was offered must stay: somebody reads it, or another one is going to follow it."""

    @abstractmethod
    def used(self, block: Ranked, now: float) -> None:
        """A block was read, whether it is offered or not."""

    @abstractmethod
    def changed(self, block: Ranked, now: float) -> None:
        """Policies know something new of a block, offered or not: its ``meta`` is another one."""

    @abstractmethod
    def removed(self, block: Ranked, now: float, *, evicted: bool) -> None:
        """A block is gone, offered or not. ``evicted``: to make room, as :meth:`leaving` has named it. Otherwise it was
        deleted, damaged, or went with others."""

    @abstractmethod
    def forgotten(self, tenant: bytes) -> None:
        """A tenant was erased, and all its blocks removed: nothing may be remembered of them."""

    @abstractmethod
    def leaving(self, count: int, now: float) -> Generator[Ranked, None, None]:
        """Name offered blocks, the one to go first in front, to a caller who wants ``count`` of them.

        Between two of them the tier removes the block, as ``evicted``, which may be followed by an offer of the one
        before it; or it passes the block over, which stays then and is not named again. It closes the iterator when it
        has enough. A block of lower priority is named before all of higher ones.
        """


class Rankings(Protocol):
    """Where a tier gets a ranking by the name of a policy."""

    def __call__(self, policy: str, blocks: int) -> Callable[[], Ranking]:
        """Makes rankings, for a tier of about so many ``blocks``. Each call of the result gives a new one, raises
        nothing, and may come in any thread.

        :raises PluginError: when there is no such policy, or it cannot be used.
        """


def rankings(
    policy: str | None, default: Callable[[], Ranking], geometry: TierGeometry, *, blocks: int, what: str
) -> Callable[[], Ranking]:
    """What makes the rankings of a tier of ``blocks`` blocks: by ``policy``, or by ``default`` when none is named.
    ``what``: whose option it is, as in "host tier".

    :raises InvalidRequest: when a policy is named and nobody is there who knows policies.
    :raises PluginError: as :class:`Rankings`.
    """
    if policy is None:
        return default
    if geometry.rankings is None:
        raise InvalidRequest(f"option 'eviction_policy' of {what}: names of policies are known in an engine only")
    return geometry.rankings(policy, blocks)


def priority_of(block: Ranked, now: float) -> int:
    """The priority that holds at ``now``."""
    return block.meta.priority if block.expires is None or block.expires > now else 0


class _Place(NamedTuple):
    priority: int
    recency: float
    number: int
    """No two are equal, so that blocks are never compared."""
    block: Ranked


class _End(NamedTuple):
    at: float
    number: int
    """Of the place whose priority ends."""
    block: Ranked


class Recency(Ranking):
    """The lowest priority goes first, as long as it holds, and of equal ones the longest unused.

    O(log n) for each event of a block that is offered, O(1) otherwise; memory is bounded by the blocks that are
    offered. A binary heap with lazy deletion: an item that is not the valid place of its block is passed over.
    """

    follows = False

    def __init__(self, hit_seconds: float = 0.0) -> None:
        """``hit_seconds``: each doubling of a block's hits counts as if it had been used that much later."""
        self._hit_seconds = hit_seconds
        self._places: dict[Ranked, _Place] = {}
        self._heap: list[_Place] = []
        self._ends: list[_End] = []
        self._number = 0

    @property
    def name(self) -> str:
        return "Recency"

    @property
    def load(self) -> int:
        """Items that it keeps, stale ones included."""
        return len(self._heap) + len(self._ends)

    def added(self, block: Ranked, now: float) -> None:
        """Nothing: it counts once it is offered."""

    def offered(self, block: Ranked, now: float) -> None:
        self._number += 1
        priority = priority_of(block, now)
        place = _Place(priority, self._recency(block), self._number, block)
        self._places[block] = place
        heapq.heappush(self._heap, place)
        if priority and block.expires is not None:
            heapq.heappush(self._ends, _End(block.expires, place.number, block))
        self._compact()

    def withdrawn(self, block: Ranked) -> None:
        self._places.pop(block, None)

    def used(self, block: Ranked, now: float) -> None:
        self.changed(block, now)

    def changed(self, block: Ranked, now: float) -> None:
        if block in self._places:
            self.offered(block, now)

    def removed(self, block: Ranked, now: float, *, evicted: bool) -> None:
        self._places.pop(block, None)

    def forgotten(self, tenant: bytes) -> None:
        """Nothing: it remembers no block that was removed."""

    def leaving(self, count: int, now: float) -> Generator[Ranked, None, None]:
        self._expire(now)
        passed: list[_Place] = []
        try:
            while self._heap:
                place = heapq.heappop(self._heap)
                if self._is_valid(place):
                    passed.append(place)
                    yield place.block
        finally:
            for place in passed:
                if self._is_valid(place):
                    heapq.heappush(self._heap, place)

    def _recency(self, block: Ranked) -> float:
        if not self._hit_seconds:
            return block.last_use
        return block.last_use + self._hit_seconds * math.log2(1 + max(block.meta.hits, 0))

    def _is_valid(self, place: _Place) -> bool:
        return self._places.get(place.block) is place

    def _is_due(self, end: _End) -> bool:
        place = self._places.get(end.block)
        return place is not None and place.number == end.number

    def _expire(self, now: float) -> None:
        """Place those anew whose priority has come to its end: otherwise they would be passed over for ever."""
        while self._ends and self._ends[0].at <= now:
            end = heapq.heappop(self._ends)
            if self._is_due(end):
                self.offered(end.block, now)

    def _compact(self) -> None:
        most = 2 * len(self._places) + _SLACK
        if len(self._heap) > most:
            self._heap = [place for place in self._heap if self._is_valid(place)]
            heapq.heapify(self._heap)
        if len(self._ends) > most:
            self._ends = [end for end in self._ends if self._is_due(end)]
            heapq.heapify(self._ends)
