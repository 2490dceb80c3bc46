"""Tier policies: an eviction policy as the ranking of a storage tier.

A tier keeps single blocks, so each is an :class:`~octavo.policies.eviction.base.Entry` of one block: a candidate while
nothing in the same tier follows it and nobody reads it. The policy hears the same events in the same order as in the
cache on the device; on a tier nobody holds a block for long, so an entry that is used or gets another priority is held
and becomes a candidate again at the same moment.

A use is a read from the tier, and also news that the block was used since in a tier above, or on the device.

A policy is used by one thread at a time, but not always by the same one: the disk tier calls it from its threads, with
a lock held.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..policies.eviction.base import Entry, EvictionPolicy, Returned, Tail
from ..policies.eviction.lru import Lru
from ..policies.eviction.priority_ttl import PriorityTtl
from ..storage.naming import TOKEN_BYTES, BlockName, Shelf
from ..storage.ranking import Ranked, Ranking, Recency
from .choosing import EVICTION_POLICIES, made
from .kv.containment import VICTIMS, WINDOW, ContainedPolicy

OnFault: TypeAlias = Callable[[str, BaseException | str], None]


class _Ghost(NamedTuple):
    """A block that was evicted."""

    memory: object
    when: float
    """On the tier's clock."""


class PolicyRanking(Ranking):
    """Ranks the blocks of one tier by an eviction policy, in a box: what it raises and what it names wrongly is counted
    and reported, and then the least recently used goes, the lowest priority first. No fault of it reaches the tier.

    On top of the policy O(1) per event, and O(log n) while somebody stands in for it.
    """

    def __init__(self, policy: ContainedPolicy) -> None:
        """``policy``: as many evicted blocks as its ``capacity`` are remembered. The device remembers more, for there
        it is runs that are counted, and they are fewer."""
        self._policy = policy
        self._entries: dict[Ranked, Entry] = {}
        self._candidates: dict[Entry, Ranked] = {}
        self._ghosts: OrderedDict[tuple[Shelf, BlockName], _Ghost] = OrderedDict()
        self._standby: Recency | None = None
        self._calm = 0  # calls in a row for which the standby was not needed

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def faults(self) -> int:
        return self._policy.all_faults

    # what happens

    def added(self, block: Ranked, now: float) -> None:
        entry = self._entries[block] = _entry_of(block, now)
        self._policy.on_insert(entry, now)
        ghost = self._ghosts.pop((block.shelf, block.head.name), None)
        if ghost is not None:
            returned = Returned(ghost.memory, block.head.start, now - ghost.when)
            self._policy.on_ghost_hit(entry, returned, now)

    def offered(self, block: Ranked, now: float) -> None:
        entry = self._entries[block]
        entry.candidate = True
        self._candidates[entry] = block
        if self._standby is not None:
            self._standby.offered(block, now)
        self._policy.on_candidate(entry, now)

    def withdrawn(self, block: Ranked) -> None:
        entry = self._entries[block]
        if self._strike(entry, block):
            self._policy.on_held(entry)

    def used(self, block: Ranked, now: float) -> None:
        self._update(block, now, is_use=True)

    def changed(self, block: Ranked, now: float) -> None:
        self._update(block, now, is_use=block.last_use > self._entries[block].last_use)

    def removed(self, block: Ranked, now: float, *, evicted: bool) -> None:
        entry = self._entries[block]
        if evicted:
            self._strike(entry, block)
            entry.blocks = 0
            entry.depth = block.head.start
            self._remember(block, _Ghost(self._policy.on_evict(entry, 1, now), now))
        else:
            self.withdrawn(block)
            self._policy.on_forget(entry)
        del self._entries[block]

    def forgotten(self, tenant: bytes) -> None:
        """O(evicted blocks that are remembered)."""
        for key in [key for key in self._ghosts if key[0].tenant == tenant]:
            del self._ghosts[key]

    # choosing

    def leaving(self, count: int, now: float) -> Generator[Ranked, None, None]:
        policy, faults = self._policy, self._policy.all_faults
        passed: list[Ranked] = []
        self._calm_down()
        try:
            while self._candidates and policy.all_faults == faults and not policy.set_aside:
                yield from self._choices(count, now, passed)
            if self._candidates:
                yield from self._stand_in(now).leaving(count, now)
        finally:
            for block in passed:
                if block in self._entries:
                    self.offered(block, now)

    def _choices(self, count: int, now: float, passed: list[Ranked]) -> Generator[Ranked, None, None]:
        """What the policy names until it ends, fails, or is passed over. What was passed over is held, and added to
        ``passed``: so the policy does not name it again."""
        block = over = None
        faults, named = self._policy.all_faults, self._policy.victims(count, now)
        try:
            for choice in named:
                entry = _meant(choice)
                block = None if entry is None else self._candidates.get(entry)
                if block is None:
                    self._policy.fault(VICTIMS, _wrong_with(choice))
                    break
                yield block
                if entry in self._candidates:
                    over = block
                    break
        finally:
            getattr(named, "close", lambda: None)()
        if over is not None:
            self.withdrawn(over)
            passed.append(over)
        elif block is None and self._policy.all_faults == faults and not self._policy.set_aside:
            self._policy.fault(VICTIMS, "named nothing")

    def _calm_down(self) -> None:
        """Nobody needs the standby after a while without a fault, and keeping it up to date costs."""
        self._calm += 1
        if self._calm > WINDOW and not self._policy.set_aside:
            self._standby = None

    def _stand_in(self, now: float) -> Recency:
        self._calm = 0
        if self._standby is None:
            self._standby = Recency()
            for block in self._candidates.values():
                self._standby.offered(block, now)
        return self._standby

    # books

    def _update(self, block: Ranked, now: float, *, is_use: bool) -> None:
        entry, meta = self._entries[block], block.meta
        moves = is_use or (entry.priority, entry.expires) != (meta.priority, block.expires)
        is_candidate = moves and entry in self._candidates
        if is_candidate:
            self.withdrawn(block)
        entry.priority, entry.expires = meta.priority, block.expires
        entry.recompute_seconds = _seconds(meta.recompute_seconds)
        if is_use:
            self._policy.on_hit(entry, now)
            entry.last_use = max(entry.last_use, block.last_use)
            entry.hits += 1
        entry.hits = max(entry.hits, meta.hits)
        if is_candidate:
            self.offered(block, now)

    def _strike(self, entry: Entry, block: Ranked) -> bool:
        """``entry`` is no candidate any more; whether it was."""
        entry.candidate = False
        if self._standby is not None:
            self._standby.withdrawn(block)
        return self._candidates.pop(entry, None) is not None

    def _remember(self, block: Ranked, ghost: _Ghost) -> None:
        self._ghosts[block.shelf, block.head.name] = ghost
        if len(self._ghosts) > self._policy.capacity:
            self._ghosts.popitem(last=False)


@dataclass(frozen=True, slots=True)
class TierPolicies:
    """Where the tier ``tier`` gets its ranking by the name of a policy."""

    tier: str
    on_fault: OnFault
    """Hears of each breach of a policy's contract, in the thread in which it happens."""
    clock: Callable[[], float]
    """How long calls take is measured with it."""
    timeout: float = math.inf
    """Seconds that one call may take; a longer one is a fault."""

    def __call__(self, policy: str, blocks: int) -> Callable[[], Ranking]:
        """:raises PluginError: when there is no such policy, it cannot be imported, is none or cannot be made."""
        cls, capacity = EVICTION_POLICIES.resolve(policy), max(blocks, 1)
        made(lambda: PriorityTtl(capacity, cls), policy)

        def fault(where: str, error: BaseException | str) -> None:
            self.on_fault(f"eviction policy {policy!r} of tier {self.tier!r}, {where}", error)

        def make() -> Ranking:
            ranked = _policy_of(cls, capacity, fault)
            return PolicyRanking(ContainedPolicy(ranked, fault, clock=self.clock, timeout=self.timeout))

        return make


def _policy_of(cls: Callable[[int], EvictionPolicy], capacity: int, fault: OnFault) -> EvictionPolicy:
    """A tier that opens again wants a new one; what could be made the first time may fail by now."""
    try:
        return PriorityTtl(capacity, cls)
    except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
        fault("could not be made", error)
        return PriorityTtl(capacity, Lru)


def _entry_of(block: Ranked, now: float) -> Entry:
    head, meta = block.head, block.meta
    return Entry(
        blocks=1,
        depth=head.start + len(head.tokens) // TOKEN_BYTES,
        insert_time=now,
        last_use=block.last_use,
        hits=max(meta.hits, 0),
        recompute_seconds=_seconds(meta.recompute_seconds),
        priority=meta.priority,
        expires=block.expires,
        tenant=sys.intern(block.shelf.tenant.hex()),  # the digest: a tier does not know who it is
    )


def _seconds(measured: float) -> float:
    return measured if 0.0 <= measured < math.inf else 0.0


def _meant(choice: object) -> Entry | None:
    """Of an entry of one block, the end is the whole."""
    entry = choice.entry if type(choice) is Tail else choice
    return entry if type(entry) is Entry else None


def _wrong_with(choice: object) -> str:
    entry = _meant(choice)
    if entry is None:
        return f"named {type(choice).__name__}, which is none of its entries"
    return "named what is gone" if not entry.blocks else "named what something follows, or somebody reads"
