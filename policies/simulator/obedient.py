"""ObedientReplica: a replica that does what a live cache did, by order rather than by itself."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ContractBroken
from ..eviction.base import NAME_BYTES, EvictionPolicy, Tail
from ..history import Part
from ..replica import Lease, Replica, Run, agreeing_blocks

SAME_MOMENT = 1.0
"""Seconds: ends of retention that lie closer together count as one, as in the engine."""
Victim = tuple[bytes, int]
"""Name of the last block, and number of blocks."""


class ObedientReplica(Replica):
    """A replica that does what it is told: it holds given paths, publishes with given traits, remembers by number."""

    def __init__(self, capacity: int, policy: EvictionPolicy, block_tokens: int) -> None:
        self.log: list[Victim] = []
        super().__init__(capacity, policy, block_tokens=block_tokens, on_evicted=self._note)
        self.gone = 0
        """Runs evicted so far."""
        self.memories: dict[int, object] = {}
        """By number of the run, of those that the policy wants something remembered of."""

    def hold(self, names: bytes, now: float) -> Run:
        """Lock exactly these blocks, all of them cached, or none."""
        node = self.find(names, now)
        self._lock(node, now)
        return node

    def fork(self, lease: Lease, number: int, now: float) -> Lease:
        """The same once more."""
        self._lock(lease.node, now)
        child = Lease(number, lease.names, lease.node, lease.found, lease.held, lease.priority)
        child.published = lease.published
        return child

    def release(self, node: Run, now: float) -> None:
        """One lock less."""
        self._unlock(node, now)

    def use(self, node: Run, now: float) -> None:
        """The path down to ``node`` was reused."""
        self._count_hit(node, now)

    def find(self, names: bytes, now: float) -> Run:
        """Where the path of exactly these names ends, cut there if need be.

        :raises KeyError: when they are not cached.
        """
        match = self.match(names)
        if match.blocks * NAME_BYTES != len(names):
            raise KeyError(f"{len(names) // NAME_BYTES - match.blocks} blocks that it needs are not cached")
        return match.node if match.used == match.node.blocks else self._split(match.node, match.used, now)

    def keep(self, names: bytes, blocks: int, priority: int, expires: float | None, now: float) -> None:
        """The last ``blocks`` blocks of this path are kept like this, and are a run of their own."""
        node = self.find(names, now)
        if blocks < node.blocks:
            self._split(node, node.blocks - blocks, now)
        is_candidate = node.candidate
        if is_candidate:
            self._withdraw(node)
        node.priority, node.expires = priority, expires
        if is_candidate:
            self._offer(node, now)

    def take_out(self, names: bytes, now: float) -> None:
        """Drop the run that ends this path."""
        node = self.find(names, now)
        self._cut_tail(node, node.blocks, now)

    def evict_given(self, names: bytes, blocks: int, now: float) -> None:
        """Evict the last ``blocks`` blocks of this path, whatever the policy would say."""
        match = self.match(names)
        self._evict_tail(match.node, blocks, now)

    def evict_in_parts(self, asked: int, parts: Sequence[int], now: float) -> None:
        """Let the policy name runs when it is asked for ``asked`` blocks, and evict so many blocks of each."""
        left = list(reversed(parts))
        while left and self._candidates:
            before = len(left)
            for named in self.policy.victims(asked, now):
                entry = named.entry if isinstance(named, Tail) else named
                if not isinstance(entry, Run) or entry not in self._candidates:
                    raise ContractBroken(f"{self.policy.name} named {entry!r}, which cannot be evicted")
                self._evict_tail(entry, min(left.pop(), entry.blocks), now)
                if not left:
                    break
            if len(left) == before:
                raise ContractBroken(f"{self.policy.name} named nothing")

    def put(self, lease: Lease, names: bytes, part: Part, tenant: str, now: float) -> None:
        """Publish the next blocks of a request, with what was known of them."""
        node, at = lease.node, 0
        while at < len(names):
            child = node.children.get(names[at : at + NAME_BYTES])
            if child is None:
                node = self._add(node, names[at:], part, tenant, now)
                break
            used = agreeing_blocks(child.names, names, at)
            node = child if used == child.blocks else self._split(child, used, now)
            if not node.locks:
                self.idle -= node.blocks
                self._withdraw(node)
            node.locks += 1
            _merge(node, part)
            _raise(node, part)
            at += used * NAME_BYTES
        lease.node = node

    def _add(self, node: Run, names: bytes, part: Part, tenant: str, now: float) -> Run:
        """New blocks below ``node``: a longer run where it is held by the caller alone and kept alike."""
        blocks = len(names) // NAME_BYTES
        depth = node.depth + blocks * self._block_tokens
        last_use = now if part.last_use is None else part.last_use
        if node.parent is not None and not node.children and node.locks == 1 and _takes(node, part):
            node.names += names
            node.blocks, node.depth, node.recompute_seconds = node.blocks + blocks, depth, part.recompute_seconds
            node.last_use = now if part.last_use is None else node.last_use
            _merge(node, part)
            self.policy.on_extend(node, blocks, now)
            return node
        child = Run(node, names, depth, now)
        child.locks, child.tenant, child.last_use = 1, tenant, last_use
        child.recompute_seconds, child.hits = part.recompute_seconds, part.hits
        child.reload_tier, child.reload_seconds = part.reload_tier, part.reload_seconds
        child.priority, child.expires = part.priority, part.expires
        node.children[names[:NAME_BYTES]] = child
        self.policy.on_insert(child, now)
        return child

    def _evict_tail(self, node: Run, count: int, now: float) -> None:
        _, memory = self._cut_tail(node, count, now)
        if memory is not None:
            self.memories[self.gone] = memory
        self.gone += 1

    def _note(self, names: bytes, depth: int) -> None:
        self.log.append((names[-NAME_BYTES:], len(names) // NAME_BYTES))


def _takes(node: Run, part: Part) -> bool:
    """Whether a run lengthens another one: both are kept alike, and the same tier has copies."""
    if node.expires is None or part.expires is None:
        same = (node.priority, node.expires) == (part.priority, part.expires)
    else:
        same = node.priority == part.priority and abs(node.expires - part.expires) < SAME_MOMENT
    return same and node.reload_tier == part.reload_tier


def _merge(node: Run, part: Part) -> None:
    """Blocks that were here already came with earlier uses."""
    if part.last_use is not None:
        node.hits, node.last_use = max(node.hits, part.hits), max(node.last_use, part.last_use)
        node.reload_tier, node.reload_seconds = part.reload_tier, part.reload_seconds


def _raise(node: Run, part: Part) -> None:
    """The dearer wish counts; the run is held, so no policy hears of it now."""
    longer = node.expires is not None and (part.expires is None or part.expires > node.expires)
    if part.priority > node.priority or (part.priority == node.priority and part.priority and longer):
        node.priority, node.expires = part.priority, part.expires
