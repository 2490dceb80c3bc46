"""The contract of eviction policies.

The cache is a tree of prefixes; an *entry* is one of its edges, a run of blocks. Only the tails of leaves that nobody
references can go: such an entry is a *candidate*. The engine tells a policy what happens and asks it, when blocks are
short, which candidate goes first. A policy frees nothing itself: it ranks. One that raises or names something that is
no candidate is contained: the fault is counted and logged, and the engine takes the least recently used for that
call.

Retention is not a policy's business: the engine ranks entries of different :attr:`Entry.priority` by one policy each
(see :mod:`~octavo.policies.eviction.priority_ttl`), so a policy sees entries of one priority only.

Two ways in:

* subclass :class:`~octavo.policies.eviction.scored.ScoredPolicy` and write ``score(entry, now)``;
* subclass :class:`EvictionPolicy` and keep a structure of your own from the events.

All calls come from the engine's one coroutine: no locks. They must not block. Storage tiers take the same policies,
each tier an object of its own, whose entries are single blocks: there an object is used by one thread at a time, but
not always by the same one, and ``on_request`` and ``on_complete`` do not come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

Json: TypeAlias = "str | int | float | bool | Mapping[str, Json] | Sequence[Json] | None"
"""What a policy may put into its state: no NaN and no infinity."""

NAME_BYTES = 8
"""Bytes of a block name as policies get it: a name stands for the block and for everything before it."""


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
    candidates of a lower priority go before all of a higher one, whatever the policy's own order."""
    expires: float | None = None
    """When the priority falls back to 0, on the engine's monotonic clock; ``None``: never."""
    tenant: str = ""
    candidate: bool = False
    """Whether its tail may be evicted now: a leaf that nobody references."""


class Returned(NamedTuple):
    """What is known of a run that was evicted and is wanted again."""

    memory: object
    """What ``on_evict`` returned, if the policy is still the same one."""
    depth: int
    """Tokens from the start of the prompt to where the evicted run began."""
    idle: float
    """Seconds between its eviction and the request that wanted it."""
    at: int = 0
    """Blocks of the entry before it."""
    blocks: int = 1
    """Blocks of it that the entry has again."""


class Tail(NamedTuple):
    """The end of a candidate: what a policy names that would let only a part of an entry go."""

    entry: Entry
    blocks: int
    """At most so many from its end, at least 1."""


class EvictionPolicy(ABC):
    """Ranks candidates. Times are seconds on the engine's monotonic clock and never run backwards."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    """Another major version than the engine's is refused; minor ones only add methods with defaults."""
    wants_requests: bool = False
    """Whether ``on_request`` and ``on_complete`` are of use. Names of blocks cost a hash each, so only then are they
    worked out."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: blocks in the pool, at least 1."""
        self.capacity = capacity

    @property
    def wants_returns(self) -> bool:
        """Whether ``on_ghost_hit`` is of use. Who is to be told costs a search for each run that is back, so only then
        is it done. By itself: whether the class has a method of its own for it."""
        return type(self).on_ghost_hit is not EvictionPolicy.on_ghost_hit

    @property
    def name(self) -> str:
        """What traces, metrics and logs call it."""
        return type(self).__name__

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
        """``entry`` became a candidate: its last holder or its last child went."""

    def on_held(self, entry: Entry) -> None:
        """``entry`` is no candidate any more: somebody references it or it has got a child."""

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        """``blocks`` of its tail were evicted; ``entry.blocks`` is what is left. At 0 the entry is gone for good.

        What this returns is a *memory* of the evicted run, anything at all. The engine keeps it as long as it remembers
        the run (four times as many runs as the pool has blocks) and brings it back in ``on_ghost_hit``.
        """
        return None

    def on_forget(self, entry: Entry) -> None:
        """``entry`` is none of this policy's any more, though it was not evicted: it has another priority now, or a
        tier was told to delete it. It is no candidate of this policy at that moment (``on_held`` came)."""

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        """A run that was evicted is back: ``entry`` holds its first block again. Comes right after the ``on_insert`` or
        ``on_extend`` that brought it, of a run that was computed again or loaded from a tier."""

    def on_request(self, number: int, names: bytes, now: float) -> None:
        """A request was admitted. ``number`` is its own; ``names``: of the whole blocks of its prompt from the start,
        ``NAME_BYTES`` each, the cached ones and the others. Only with ``wants_requests``; comes before the ``on_hit``
        of what it reuses. Not again when it was preempted and comes back."""

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        """The request is over, well or badly; ``names``: of all blocks that it leaves in the cache, generated ones
        included. A fork has a number that ``on_request`` did not tell. Only with ``wants_requests``."""

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """What the policy has learned, to be saved. ``key`` gives a number for a living entry that stays the same in
        the next process. Modifies nothing."""
        return {}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        """Take over what another object of this class has dumped; after the events that told of what is cached now.
        ``entry``: the living entry with a key, if there is one. A state that does not fit is ignored, or raises
        ``ValueError``, ``TypeError`` or ``KeyError``: it is contained and the policy starts afresh."""

    @abstractmethod
    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        """Yield candidates, the one to go first in front; or tails of them, where a part should go and not the rest.

        Between two yields the engine evicts blocks from the tail of the entry it was given, so ``on_evict`` comes, and
        ``on_candidate`` for a parent that lost its last child. It closes the iterator once it has the ``count`` blocks
        it wants; when the iterator ends before that, it asks again, as long as something was named. An entry with
        blocks left may be yielded again. Naming nothing while candidates exist, or something that is no candidate,
        breaks the contract. Modifies nothing beyond the policy's own bookkeeping. The simplest form::

            while self.queue:
                yield min(self.queue, key=self.worth)
        """
