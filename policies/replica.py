"""Replica: the cache as policies see it. Runs of named blocks in a tree, and how many blocks are free; no contents.

It sends a policy the same events in the same order as the engine's own cache does, so what a policy does here it does
there. Three things are built on it: the simulator, shadow policies beside a live engine, and policies that try others
on a sample of the requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import CacheMisuse, ContractBroken
from .eviction.base import NAME_BYTES, Entry, EvictionPolicy, Tail
from .returning import Return, tell_returns


class Run(Entry):
    """One edge of the tree."""

    __slots__ = ("children", "locks", "names", "parent")

    def __init__(self, parent: Run | None, names: bytes, depth: int, now: float) -> None:
        super().__init__(len(names) // NAME_BYTES, depth, now, now)
        self.parent = parent
        self.names = names
        self.children: dict[bytes, Run] = {}  # name of the first block -> child
        self.locks = 0


class Lease:
    """What one request holds. Belongs to the replica that gave it; others read it only."""

    __slots__ = ("found", "held", "names", "node", "number", "priority", "published", "returns", "tenant")

    def __init__(
        self, number: int, names: bytes, node: Run, found: int, held: int, priority: int, tenant: str = ""
    ) -> None:
        self.number = number
        self.names = names
        """Of all whole blocks of the request that are known by now."""
        self.node = node
        """Deepest run that it has a lock on."""
        self.found = found
        """Blocks that were there when it came."""
        self.published = found
        """Blocks of ``names``, from the start, that are in the tree."""
        self.held = held
        """Blocks that it has beside those."""
        self.priority = priority
        """Of retention, of all that it uses or publishes."""
        self.tenant = tenant
        """Of all that it publishes."""
        self.returns: Sequence[Return] = ()
        """Evicted runs that it is going to bring back."""


class Match(NamedTuple):
    """The longest cached prefix of a request."""

    node: Run
    used: int
    """Blocks of ``node`` that belong to it."""
    blocks: int
    idle: int
    """Blocks of it that nobody holds."""


class _Ghost(NamedTuple):
    memory: object
    when: float
    blocks: int


class Replica:
    """A pool of ``capacity`` blocks and one policy. Times are passed in and never run backwards."""

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        *,
        block_tokens: int = 16,
        most_ghosts: int | None = None,
        on_evicted: Callable[[bytes, int], None] | None = None,
    ) -> None:
        """``most_ghosts``: evicted runs that are remembered, by default four times ``capacity``.
        ``on_evicted(names, depth)`` hears of every run that leaves, ``depth`` tokens below the start of the prompt.
        """
        self.capacity = capacity
        self.policy = policy
        self.free = capacity
        self.idle = 0
        """Cached blocks that nobody holds."""
        self.evicted = 0
        """Blocks evicted so far."""
        self.wanted_again = 0
        """Evicted runs that a request asked for while they were remembered."""
        self._block_tokens = block_tokens
        self._root = Run(None, b"", 0, 0.0)
        self._candidates: dict[Run, None] = {}
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._most_ghosts = 4 * capacity if most_ghosts is None else most_ghosts
        self._on_evicted = on_evicted
        self._numbers = 0

    # a request's way through

    def match(self, names: bytes) -> Match:
        """The longest prefix of ``names`` that is cached. Changes nothing."""
        node, used, at, idle, end = self._root, 0, 0, 0, len(names)
        while at < end:
            child = node.children.get(names[at : at + NAME_BYTES])
            if child is None:
                break
            node, used = child, child.blocks
            if not names.startswith(child.names, at):
                used = agreeing_blocks(child.names, names, at)
            at += used * NAME_BYTES
            idle += 0 if node.locks else used
            if used < node.blocks:
                break
        return Match(node, used, at // NAME_BYTES, idle)

    def admit(
        self,
        names: bytes,
        private: int,
        now: float,
        *,
        used: bool = True,
        priority: int = 0,
        tenant: str = "",
        reusable: int | None = None,
    ) -> Lease | None:
        """Lock what is cached of a prompt and take the blocks for the rest, and ``private`` ones beside; ``None``:
        there is no room now, and nothing has changed.

        ``names``: of its whole blocks, ``NAME_BYTES`` each. ``used``: it is a new request; otherwise one that comes
        back after a preemption, and what it finds is no hit. ``priority``: of retention; what is cached is kept at
        least as it says. ``tenant``: whose blocks the new ones are. ``reusable``: at most so many blocks count as
        cached, where others have to be computed whether or not they are there (the engine always computes the last
        token of a prompt).
        """
        match = self.match(names if reusable is None else names[: reusable * NAME_BYTES])
        needed = len(names) // NAME_BYTES - match.blocks + private
        if self.free + self.idle - match.idle < needed:
            return None
        node = match.node if match.used == match.node.blocks else self._split(match.node, match.used, now)
        self._lock(node, now)
        if needed > self.free:
            self.evict(needed - self.free, now)
        self.free -= needed
        self._numbers += 1
        lease = Lease(self._numbers, names, node, match.blocks, needed, priority, tenant)
        if priority:
            _raise_path(node, priority)
        if used:
            if self.policy.wants_requests:
                self.policy.on_request(lease.number, names, now)
            self._count_hit(node, now)
            lease.returns = self._recall(names, match.blocks, now)
        return lease

    def extend(self, lease: Lease, count: int, now: float) -> bool:
        """``count`` more blocks for a request, by eviction if need be; ``False``: there are none, nothing changed."""
        if self.free + self.idle < count:
            return False
        if count > self.free:
            self.evict(count - self.free, now)
        self.free -= count
        lease.held += count
        return True

    def publish(self, lease: Lease, blocks: int, now: float, recompute_seconds: float = 0.0) -> None:
        """The first ``blocks`` blocks of the request are computed: they go into the tree, as far as they are not there.

        :raises CacheMisuse: when ``names`` of the lease, or the blocks that it holds, are fewer than that.
        """
        new = blocks - lease.published
        if new <= 0:
            return
        if blocks * NAME_BYTES > len(lease.names) or new > lease.held:
            raise CacheMisuse(f"request {lease.number} has not got {blocks} blocks to publish")
        rest = lease.names[lease.published * NAME_BYTES : blocks * NAME_BYTES]
        node, known = self._publish(lease, rest, recompute_seconds, now)
        lease.node, lease.published = node, blocks
        lease.held -= new
        self.free += known
        self.greet(lease, blocks - new + known, now)

    def greet(self, lease: Lease, new_from: int, now: float) -> None:
        """Tell the policy which evicted runs are back with the blocks that a request has just published, from number
        ``new_from`` on.
        """
        if not lease.returns:
            return

        def entry_at(block: int) -> tuple[Run, int]:
            node = lease.node
            while (begins := node.depth // self._block_tokens - node.blocks) > block and node.parent is not None:
                node = node.parent
            return node, begins

        lease.returns = tell_returns(
            self.policy,
            lease.returns,
            new_from=new_from,
            stop=lease.published,
            block_tokens=self._block_tokens,
            entry_at=entry_at,
            now=now,
        )

    def finish(self, lease: Lease, now: float, *, over: bool = True) -> None:
        """Give back what a request holds; what it published stays. ``over=False``: it was preempted and comes back."""
        self.free += lease.held
        self._unlock(lease.node, now)
        if over and self.policy.wants_requests:
            self.policy.on_complete(lease.number, lease.names[: lease.published * NAME_BYTES], now)
        lease.held = 0

    # room

    def evict(self, count: int, now: float) -> int:
        """Evict until ``count`` blocks came free or none is left; returns how many did.

        :raises ContractBroken: when the policy names nothing while candidates are left, or what is none.
        """
        wanted = count
        while wanted > 0 and self._candidates:
            before = wanted
            victims = self.policy.victims(count, now)
            for named in victims:
                entry, most = named if isinstance(named, Tail) else (named, self.capacity)
                if not isinstance(entry, Run) or entry not in self._candidates or most < 1:
                    raise ContractBroken(f"{self._policy_name} named {named!r}, which cannot be evicted")
                part = min(wanted, entry.blocks, most)
                self._evict_tail(entry, part, now)
                wanted -= part
                if not wanted:
                    break
            _close(victims)
            if wanted == before:
                raise ContractBroken(f"{self._policy_name} named nothing while {len(self._candidates)} runs can go")
        return count - wanted

    def drop(self, names: bytes, now: float) -> int:
        """Take the runs of a prefix out that nobody holds and that nothing continues, deepest first; returns blocks.
        Unlike what is evicted, they are not remembered.
        """
        match = self.match(names)
        node, blocks = match.node if match.used == match.node.blocks else self._root, 0
        while node in self._candidates and node.parent is not None:
            above = node.parent
            blocks += node.blocks
            self._cut_tail(node, node.blocks, now)
            node = above
        return blocks

    # looking

    @property
    def cached(self) -> int:
        """Blocks in the tree."""
        return sum(run.blocks for run in self.runs())

    def runs(self) -> Iterator[Run]:
        """Every run, parents first."""
        stack = list(self._root.children.values())
        while stack:
            run = stack.pop()
            stack.extend(run.children.values())
            yield run

    # inside: as PrefixTree does it, so that policies cannot tell the two apart

    @property
    def _policy_name(self) -> str:
        return self.policy.name

    def _lock(self, node: Run, now: float) -> None:
        part: Run | None = node
        while part is not None:
            if not part.locks:
                self.idle -= part.blocks
                self._withdraw(part)
            part.locks += 1
            part = part.parent

    def _unlock(self, node: Run, now: float) -> None:
        part: Run | None = node
        while part is not None:
            part.locks -= 1
            if not part.locks:
                self.idle += part.blocks
                self._offer(part, now)
            part = part.parent

    def _count_hit(self, node: Run, now: float) -> None:
        on_hit = self.policy.on_hit
        part = node
        while part.parent is not None:
            on_hit(part, now)
            part.last_use = now
            part.hits += 1
            part = part.parent

    def _publish(self, lease: Lease, names: bytes, recompute_seconds: float, now: float) -> tuple[Run, int]:
        """Where the lease is now, and how many leading blocks were in the tree already."""
        node, priority, at = lease.node, lease.priority, 0
        while at < len(names):
            child = node.children.get(names[at : at + NAME_BYTES])
            if child is None:
                return self._grow(node, names[at:], lease, recompute_seconds, now), at // NAME_BYTES
            used = child.blocks
            if not names.startswith(child.names, at):
                used = agreeing_blocks(child.names, names, at)
            node = child if used == child.blocks else self._split(child, used, now)
            if not node.locks:
                self.idle -= node.blocks
                self._withdraw(node)
            node.locks += 1
            if priority:
                node.priority = max(node.priority, priority)
            at += used * NAME_BYTES
        return node, at // NAME_BYTES

    def _grow(self, node: Run, names: bytes, lease: Lease, recompute_seconds: float, now: float) -> Run:
        priority, blocks = lease.priority, len(names) // NAME_BYTES
        depth = node.depth + blocks * self._block_tokens
        if node.parent is not None and not node.children and node.locks == 1 and node.priority == priority:
            node.names += names
            node.blocks += blocks
            node.depth = depth
            node.last_use, node.recompute_seconds = now, recompute_seconds
            self.policy.on_extend(node, blocks, now)
            return node
        child = Run(node, names, depth, now)
        child.locks, child.recompute_seconds, child.priority = 1, recompute_seconds, priority
        child.tenant = lease.tenant
        node.children[names[:NAME_BYTES]] = child
        self.policy.on_insert(child, now)
        return child

    def _split(self, node: Run, used: int, now: float) -> Run:
        cut = used * NAME_BYTES
        upper = Run(node.parent, node.names[:cut], node.depth - (node.blocks - used) * self._block_tokens, now)
        upper.insert_time, upper.last_use, upper.hits = node.insert_time, node.last_use, node.hits
        upper.recompute_seconds, upper.locks = node.recompute_seconds, node.locks
        upper.priority, upper.expires, upper.tenant = node.priority, node.expires, node.tenant
        upper.reload_tier, upper.reload_seconds = node.reload_tier, node.reload_seconds
        if node.parent is not None:
            node.parent.children[upper.names[:NAME_BYTES]] = upper
        node.names = node.names[cut:]
        node.blocks -= used
        node.parent = upper
        upper.children[node.names[:NAME_BYTES]] = node
        self.policy.on_split(upper, node, now)
        return upper

    def _evict_tail(self, node: Run, count: int, now: float) -> None:
        first, memory = self._cut_tail(node, count, now)
        self._ghosts[first] = _Ghost(memory, now, count)
        if len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def _cut_tail(self, node: Run, count: int, now: float) -> tuple[bytes, object]:
        """The name of the first block that went, and what the policy remembers of them."""
        cut = len(node.names) - count * NAME_BYTES
        gone, first = node.names[cut:], node.names[:NAME_BYTES]
        node.names = node.names[:cut]
        node.blocks -= count
        node.depth -= count * self._block_tokens
        self.free += count
        self.idle -= count
        self.evicted += count
        parent = node.parent
        if not node.blocks and parent is not None:
            del self._candidates[node]
            node.candidate = False
            del parent.children[first]
        memory = self.policy.on_evict(node, count, now)
        if self._on_evicted is not None:
            self._on_evicted(gone, node.depth)
        if not node.blocks and parent is not None and not parent.locks:
            self._offer(parent, now)
        return gone[:NAME_BYTES], memory

    def _offer(self, node: Run, now: float) -> None:
        if node.children or node.parent is None:
            return
        node.candidate = True
        self._candidates[node] = None
        self.policy.on_candidate(node, now)

    def _withdraw(self, node: Run) -> None:
        if node in self._candidates:
            node.candidate = False
            del self._candidates[node]
            self.policy.on_held(node)

    def _recall(self, names: bytes, first: int, now: float) -> list[Return]:
        """What is remembered of the blocks of a request from number ``first`` on, the first one that is not there."""
        returns, number = list[Return](), first
        while ghost := self._ghosts.pop(names[number * NAME_BYTES : (number + 1) * NAME_BYTES], None):
            self.wanted_again += 1
            blocks = min(ghost.blocks, len(names) // NAME_BYTES - number)
            returns.append(Return(ghost.memory, number, blocks, now - ghost.when))
            number += ghost.blocks
        return returns


def _raise_path(node: Run, priority: int) -> None:
    """A locked path is no candidate, so no policy hears of it."""
    part = node
    while part.parent is not None:
        part.priority = max(part.priority, priority)
        part = part.parent


def agreeing_blocks(edge: bytes, names: bytes, at: int) -> int:
    """Leading blocks of ``edge`` that equal ``names`` from byte ``at`` on; the first one is known to."""
    low, high = 1, min(len(edge), len(names) - at) // NAME_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if names.startswith(edge[low * NAME_BYTES : middle * NAME_BYTES], at + low * NAME_BYTES):
            low = middle
        else:
            high = middle - 1
    return low


def _close(victims: Iterator[Entry | Tail]) -> None:
    close = getattr(victims, "close", None)
    if close is not None:
        close()
