"""CacheManager: admit, extend, commit, fork, finish, evict. The only door to pool, tables and tree.

Every call is synchronous and belongs to the one coroutine that owns the engine's state; none waits, none does I/O.
Copies that a call asks for are returned as (source, destination) pairs for the step to make *before* its writes; their
sources stay pinned until ``copied`` is called.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ...errors import CacheMisuse, OutOfBlocks
from ...policies.eviction.base import EvictionPolicy
from .block_pool import BlockPool
from .census import Census, take_census
from .containment import ContainedPolicy
from .cost import CostModel
from .eviction import EvictionHook, Evictor
from .ghosts import Ghosts
from .in_flight import InFlight
from .prefix_tree import Match, PrefixTree
from .sequence import NEVER, Sequence, State
from .stats import CacheStats

Copies: TypeAlias = tuple[tuple[int, int], ...]
MISS = Match(None, 0, array("i"), 0, 0, 0)
NOT_ADMITTED = -1  # as ``publish_at``: every commit takes the slow path, which refuses


class Admission(NamedTuple):
    """What an admission found and still needs."""

    cached_tokens: int
    """Tokens at the front that need not be computed; at least one token always does."""
    copies: Copies


class CacheManager:
    """The paged, shared, copy-on-write cache of one engine."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        *,
        clock: Callable[[], float],
        on_fault: Callable[[str, BaseException | str], None],
        sharing: bool = True,
        hook: EvictionHook | None = None,
    ) -> None:
        """``on_fault(where, error)`` hears of every breach of contract by the policy or the hook."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.policy = ContainedPolicy(policy, on_fault)
        self.tree = PrefixTree(block_size, self.policy, clock)
        self.cost = CostModel()
        self._clock = clock
        self._sharing = sharing
        self._ghosts = Ghosts(bound=num_blocks)
        self._evictor = Evictor(self.pool, self.tree, self.policy, clock=clock, ghosts=self._ghosts, hook=hook)
        self._in_flight = InFlight(block_size)
        self._sequences: dict[int, Sequence] = {}
        self._hits = self._hit_tokens = self._query_tokens = self._resume_hit_tokens = 0
        self._cow_forks = self._partial_copies = self._duplicates_freed = 0

    # a sequence's way through

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill."""
        return -(-tokens // self.block_size)

    def producer(self, sequence: Sequence) -> Sequence | None:
        """Another sequence that is computing the first block ``sequence`` would have to compute, if any. Pure."""
        if not self._sharing or not len(self._in_flight):
            return None
        key = sequence.tokens.tobytes()
        found = self.tree.match(sequence.namespace, key, len(sequence.tokens) - 1).ids
        return self._in_flight.producer(sequence.namespace, key, len(found))

    def try_admit(
        self, sequence: Sequence, *, headroom: int = 0, reuse: bool = True, resumed: bool = False
    ) -> Admission | None:
        """Take every block that the tokens of ``sequence`` need, or nothing.

        ``headroom``: blocks that must be left over. ``reuse=False`` computes everything afresh (it is published all the
        same). ``resumed``: the sequence was here before, so what it finds does not count as a hit. ``None`` means: not
        now; nothing has changed.

        :raises CacheMisuse: when the sequence holds blocks, is finished, has another block size, or its id is taken.
        """
        sequence.require(State.OUTSIDE)
        if sequence.seq_id in self._sequences:
            raise CacheMisuse(f"sequence id {sequence.seq_id} is in use")
        if sequence.table.block_size != self.block_size:
            raise CacheMisuse(
                f"sequence {sequence.seq_id} has blocks of {sequence.table.block_size}, not {self.block_size}"
            )
        match = self._match(sequence) if reuse and self._sharing else MISS
        needed = self.blocks_for(len(sequence.tokens)) - len(match.ids)
        spare = self.pool.free + self.tree.idle_blocks - match.idle - needed
        if spare < headroom:
            return None
        if spare == 0:  # the block to copy from may be the last one that can be evicted
            match = match._replace(partial_tokens=0)
        try:
            copies = self._take(sequence, match, needed)
        except OutOfBlocks:  # what was evicted is still in transfer
            return None
        self._count_admission(sequence, match, resumed)
        return Admission(sequence.computed, copies)

    def admit(self, sequence: Sequence, *, headroom: int = 0) -> Admission:
        """``try_admit`` or raise.

        :raises OutOfBlocks: when the blocks cannot be had now; nothing has changed.
        """
        admission = self.try_admit(sequence, headroom=headroom)
        if admission is None:
            needed = self.blocks_for(len(sequence.tokens))
            raise OutOfBlocks(f"sequence {sequence.seq_id} needs up to {needed} blocks; {self.pool.free} are free")
        return admission

    def extend(self, sequence: Sequence, count: int) -> Copies:
        """Make the next ``count`` positions writable: new blocks, and own copies of blocks that a fork shares.

        :raises OutOfBlocks: when the blocks cannot be had, not even by eviction; the sequence is unchanged.
        :raises CacheMisuse: when the sequence is not admitted.
        """
        end = sequence.computed + count
        if end <= sequence.writable:
            return ()
        return self._make_writable(sequence, end)

    def commit(self, sequence: Sequence, count: int, token: int | None = None) -> None:
        """The step has computed ``count`` tokens, and ``token`` came out. Full blocks are published.

        :raises CacheMisuse: when the sequence is not admitted.
        """
        computed = sequence.computed + count
        if computed >= sequence.publish_at:
            sequence.require(State.ADMITTED)
            sequence.computed = computed
            self._publish(sequence)
        else:
            sequence.computed = computed
        if token is not None:
            sequence.tokens.append(token)

    def measured(self, sequence: Sequence, seconds: float) -> None:
        """Prefill of ``sequence`` took this long in the step that is about to be committed."""
        sequence.prefill_seconds += seconds

    def fork(self, sequence: Sequence, seq_id: int) -> Sequence:
        """A second sequence with the same tokens on the same blocks. Costs no block until one of them writes.

        Not while copies for ``sequence`` are still to be made: a step reads all sources before it writes, so a copy for
        the child would be one of an empty block.

        :raises CacheMisuse: when ``sequence`` is not admitted or ``seq_id`` is taken.
        """
        sequence.require(State.ADMITTED)
        if seq_id in self._sequences:
            raise CacheMisuse(f"sequence id {seq_id} is in use")
        child = Sequence(
            seq_id,
            sequence.tokens[:],
            sequence.namespace,
            block_size=self.block_size,
            priority=sequence.priority,
        )
        self.pool.retain(sequence.table.own)
        if sequence.node is not None:
            self.tree.lock(sequence.node)
        child.state, child.node, child.table = State.ADMITTED, sequence.node, sequence.table.fork()
        child.computed, child.publish_at = sequence.computed, sequence.publish_at
        sequence.writable = child.writable = sequence.computed
        self._sequences[seq_id] = child
        return child

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done; what it published stays in the tree until it is evicted.

        :raises CacheMisuse: when it is not admitted (a second finish).
        """
        self._leave(sequence, State.FINISHED)

    def discard(self, sequence: Sequence) -> None:
        """As ``finish``, for a sequence whose K and V cannot be trusted: what it published and nobody else holds goes.

        :raises CacheMisuse: when it is not admitted.
        """
        node = sequence.node
        self._leave(sequence, State.FINISHED)
        while node is not None and node in self.tree.candidates:
            above = node.parent
            self._evictor.drop(node)
            node = above

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks back; the sequence keeps its tokens and can be admitted again.

        :raises CacheMisuse: when it is not admitted.
        """
        self._leave(sequence, State.OUTSIDE)

    def copied(self, copies: Copies) -> None:
        """The step that makes ``copies`` has ended, well or badly: their sources are not needed any more."""
        for source, _ in copies:
            self.pool.unpin(source)

    # room

    @property
    def available(self) -> int:
        """Blocks that are free or can be made so by eviction."""
        return self.pool.free + self.tree.idle_blocks

    def exclusive_blocks(self, sequence: Sequence) -> int:
        """Blocks that nobody else references: what preempting ``sequence`` gains."""
        blocks = sum(1 for block in sequence.table.own if self.pool.references(block) == 1)
        node = sequence.node
        while node is not None and node.locks == 1:
            blocks += len(node.ids)
            node = node.parent
        return blocks

    def evict(self, count: int) -> int:
        """Evict cached blocks until ``count`` came free or none is left; returns how many did."""
        return self._evictor.evict(count, "call")

    def maybe_evict(self, low: int, high: int) -> int:
        """The background tick: when less than ``low`` blocks are free, evict until ``high`` are."""
        if self.pool.free >= low:
            return 0
        return self._evictor.evict(high - self.pool.free, "watermark")

    # looking

    def census(self) -> Census:
        """Prove that the books are right. O(pool + tree).

        :raises CensusFailed: with every contradiction found.
        """
        return take_census(self.pool, self.tree, self._sequences.values())

    def stats(self) -> CacheStats:
        """A snapshot; O(1)."""
        return CacheStats(
            allocations=self.pool.allocations,
            evictions=dict(self._evictor.evicted),
            prefix_hits=self._hits,
            prefix_hit_tokens=self._hit_tokens,
            prefix_query_tokens=self._query_tokens,
            resume_hit_tokens=self._resume_hit_tokens,
            cow_forks=self._cow_forks,
            partial_copies=self._partial_copies,
            duplicates_freed=self._duplicates_freed,
            evicted_then_wanted=self._ghosts.hits,
            evicted_then_wanted_seconds=self._ghosts.gap_seconds,
            policy_faults=self.policy.faults,
            hook_faults=self._evictor.hook_faults,
            free=self.pool.free,
            idle=self.tree.idle_blocks,
            total=self.pool.num_blocks,
        )

    # inside

    def _match(self, sequence: Sequence) -> Match:
        """The longest cached prefix that leaves at least the last token to compute."""
        return self.tree.match(sequence.namespace, sequence.tokens.tobytes(), len(sequence.tokens) - 1)

    def _allocate(self, count: int, after: int = -1) -> array[int]:
        if count > self.pool.free:
            self._evictor.evict(count - self.pool.free, "allocate")
        return self.pool.allocate(count, after)

    def _take(self, sequence: Sequence, match: Match, needed: int) -> Copies:
        """Lock what matched, allocate the rest, and enter the sequence; undone if the allocation fails."""
        node = self.tree.lock_match(sequence.namespace, match) if self._sharing else None
        shared = match.ids
        copying = match.partial_tokens > 0
        if copying:
            self.pool.pin(match.partial_block)
        try:
            fresh = self._allocate(needed, after=shared[-1] if shared else -1)
        except OutOfBlocks:
            if copying:
                self.pool.unpin(match.partial_block)
            if node is not None:
                self.tree.unlock(node)
            raise
        table = sequence.table
        table.blocks, table.shared = shared + fresh, len(shared)
        sequence.state, sequence.node = State.ADMITTED, node
        sequence.computed = len(shared) * self.block_size + match.partial_tokens
        sequence.writable = table.capacity
        self._sequences[sequence.seq_id] = sequence
        if self._sharing:
            sequence.publish_at = (table.shared + 1) * self.block_size
            self._in_flight.watch(sequence)
        else:
            sequence.publish_at = NEVER
        return ((match.partial_block, fresh[0]),) if copying else ()

    def _count_admission(self, sequence: Sequence, match: Match, resumed: bool) -> None:
        self._partial_copies += match.partial_tokens > 0
        if resumed:
            self._resume_hit_tokens += sequence.computed
            return
        self._query_tokens += len(sequence.tokens)
        self._hit_tokens += sequence.computed
        self._hits += sequence.computed > 0
        if match.ids and sequence.node is not None:
            self.tree.count_hit(sequence.node)
        if len(self._ghosts):
            self._recall(sequence)

    def _recall(self, sequence: Sequence) -> None:
        """Tell the policy if the first block that the cache lacks was there once."""
        depth = sequence.table.shared * self.block_size
        block = sequence.tokens[depth : depth + self.block_size].tobytes()
        now = self._clock()
        idle = self._ghosts.recall(sequence.namespace, depth, block, now)
        if idle is not None:
            self.policy.on_ghost_hit(depth, idle, now)

    def _make_writable(self, sequence: Sequence, end: int) -> Copies:
        sequence.require(State.ADMITTED)
        blocks = sequence.table.blocks
        first, last, owned = sequence.computed // self.block_size, self.blocks_for(end), len(blocks)
        if first == owned:  # the common case: nothing written yet, so nothing shared
            blocks += self._allocate(last - owned, after=blocks[-1])
            sequence.writable = last * self.block_size
            return ()
        shared = [i for i in range(first, min(last, owned)) if self.pool.references(blocks[i]) > 1]
        fresh = self._allocate(len(shared) + max(last - owned, 0), after=blocks[-1])
        copies = []
        for index, own in zip(shared, fresh, strict=False):
            if index * self.block_size < sequence.computed:  # it has rows that this sequence needs
                self.pool.pin(blocks[index])
                copies.append((blocks[index], own))
            self.pool.release(blocks[index : index + 1])
            blocks[index] = own
        blocks += fresh[len(shared) :]
        sequence.writable = last * self.block_size
        self._cow_forks += len(copies)
        return tuple(copies)

    def _publish(self, sequence: Sequence) -> None:
        """Hand the full blocks of ``sequence`` to the tree; where the tree has them already, use the tree's."""
        table, node, size = sequence.table, sequence.node, self.block_size
        if node is None:
            raise CacheMisuse(f"sequence {sequence.seq_id} has no place in the tree")
        shared, full = table.shared, sequence.computed // size
        own = table.blocks[shared:full]
        tokens = memoryview(sequence.tokens)[shared * size : full * size].tobytes()
        seconds = self._block_seconds(sequence, full * size, full - shared)
        sequence.node, known = self.tree.publish(node, tokens, own, seconds, sequence.priority)
        if known:
            self.pool.release(own[: len(known)])
            table.blocks[shared : shared + len(known)] = known
            self._duplicates_freed += len(known)
        table.shared = full
        sequence.publish_at = (full + 1) * size
        if sequence.in_flight_key is not None:
            self._in_flight.watch(sequence)

    def _block_seconds(self, sequence: Sequence, depth: int, blocks: int) -> float:
        if sequence.prefill_seconds > 0:
            self.cost.observe(depth, blocks, sequence.prefill_seconds)
            sequence.prefill_seconds = 0.0
        return self.cost.seconds(depth)

    def _leave(self, sequence: Sequence, state: State) -> None:
        sequence.require(State.ADMITTED)
        self._in_flight.forget(sequence)
        self.pool.release(sequence.table.own)
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
        sequence.table.blocks, sequence.table.shared = array("i"), 0
        sequence.state, sequence.node = state, None
        sequence.computed = sequence.writable = 0
        sequence.publish_at = NOT_ADMITTED
        sequence.prefill_seconds = 0.0
        del self._sequences[sequence.seq_id]
