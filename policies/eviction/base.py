"""The contract of eviction policies.

The cache is a tree of prefixes; an *entry* is one of its edges, a run of blocks. Only the tails of leaves that nobody
references can go: such an entry is a *candidate*. The engine tells a policy what happens and asks it, when blocks are
short, which candidate goes first. A policy frees nothing itself: it ranks. One that raises or names something that is
no candidate is contained: the fault is counted and logged, and the engine takes the least recently used for that
call.

Two ways in:

* subclass :class:`~octavo.policies.eviction.scored.ScoredPolicy` and write ``score(entry, now)``;
* subclass :class:`EvictionPolicy` and keep a structure of your own from the events.

All calls come from the engine's one coroutine: no locks. They must not block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True, eq=False)
class Entry:
    """What a policy may know about a run of cached blocks. Read only for policies; compared by identity."""

    blocks: int
    """Blocks in the run. Shrinks when a part of the tail is evicted."""
    depth: int
    """Tokens from the start of the prompt to the end of the run."""
    insert_time: float
    """Seconds on the engine's monotonic clock."""
    last_use: float
    """When a request last used it; the time of insertion counts."""
    hits: int = 0
    """How many admissions reused it."""
    recompute_seconds: float = 0.0
    """Measured seconds to compute one block of the run again at that depth; 0 until something was measured."""
    reload_seconds: float | None = None
    """Measured seconds to load one block back from ``reload_tier``; ``None``: no tier holds it."""
    reload_tier: str | None = None
    priority: int = 0
    """Retention priority, as requests asked for; it has nothing to do with the order in which requests are served. The
    candidates of a lower priority go before all of a higher one, whatever the policy's own order. Changes of a
    candidate are announced by ``on_held`` and ``on_candidate``."""
    expires: float | None = None
    """When the priority falls back to 0, on the engine's monotonic clock; ``None``: never."""
    tenant: str = ""
    candidate: bool = False
    """Whether its tail may be evicted now: a leaf that nobody references."""


class EvictionPolicy(ABC):
    """Ranks candidates. Times are seconds on the engine's monotonic clock and never run backwards."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    """Another major version than the engine's is refused; minor ones only add methods with defaults."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: blocks in the pool, at least 1."""
        self.capacity = capacity

    def on_insert(self, entry: Entry, now: float) -> None:
        """A run was computed and cached. It may be held still; ``on_candidate`` follows when it is not."""

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        """The run of ``entry`` grew by ``blocks`` at its tail."""

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        """``lower`` was cut in two. It keeps its identity and its tail; ``upper`` is new, holds the head and starts
        with the statistics of ``lower``."""

    def on_hit(self, entry: Entry, now: float) -> None:
        """An admission reused (part of) the run. ``last_use`` still has the value from before this use."""

    def on_candidate(self, entry: Entry, now: float) -> None:
        """``entry`` became a candidate: its last holder or its last child went. Or it has another priority now."""

    def on_held(self, entry: Entry) -> None:
        """``entry`` is no candidate any more: somebody references it or it has got a child. Or its priority changes,
        and ``on_candidate`` follows at once."""

    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        """``blocks`` of its tail were evicted; ``entry.blocks`` is what is left. At 0 the entry is gone for good."""

    def on_ghost_hit(self, depth: int, idle: float, now: float) -> None:
        """A request asked for a run that was evicted ``idle`` seconds ago and ended at ``depth`` tokens."""

    @abstractmethod
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        """Yield candidates, the one to go first in front.

        Between two yields the engine evicts blocks from the tail of the entry it was given, so ``on_evict`` comes, and
        ``on_candidate`` for a parent that lost its last child. It closes the iterator once it has the ``count`` blocks
        it wants; when the iterator ends before that, it asks again, as long as something was named. An entry with
        blocks left may be yielded again. Naming nothing while candidates exist, or something that is no candidate,
        breaks the contract. Modifies nothing beyond the policy's own bookkeeping. The simplest form::

            while self.queue:
                yield min(self.queue, key=lambda entry: (entry.priority, self.worth(entry)))
        """
