"""CacheManager: admit, extend, commit, fork, finish, evict. The only door to pool, tables and tree.

Every call is synchronous and belongs to the one coroutine that owns the engine's state; none waits, none does I/O.
Copies that a call asks for are returned as (source, destination) pairs for the step to make *before* its writes; their
sources stay pinned until ``copied`` is called.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Container
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, TypeAlias

from ...errors import CacheMisuse, OutOfBlocks
from ...policies.eviction.base import EvictionPolicy
from ...storage.base import Meta
from ...storage.naming import BlockName, names_after
from ...telemetry import names
from ...telemetry.record import NO_TRACK, Track
from .census import Census, take_census
from .control import CacheControl
from .cost import CostModel
from .ghosts import Ghost
from .in_flight import InFlight
from .loads import TierCost
from .names import end_name
from .outlook import Outlook, outlook
from .pool_map import pool_map
from .prefix_tree import Match
from .publishing import Publisher
from .quotas import Quotas
from .sequence import ADMITTED, FINISHED, NEVER, OUTSIDE, Sequence, State

Copies: TypeAlias = tuple[tuple[int, int], ...]
MISS = Match(None, 0, array("i"), 0, 0, 0)
NOT_ADMITTED = -1  # as ``publish_at``: every commit takes the slow path, which refuses


class Admission(NamedTuple):
    """What an admission found and still needs."""

    cached_tokens: int
    """Tokens at the front that need not be computed; at least one token always does."""
    copies: Copies


class CacheManager(CacheControl):
    """The paged, shared, copy-on-write cache of one engine."""

    def __init__(  # noqa: PLR0913  # what a host decides about its cache, each by its name
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        *,
        clock: Callable[[], float],
        on_fault: Callable[[str, BaseException | str], None],
        sharing: bool = True,
        background: Track = NO_TRACK,
        policy_timeout: float = math.inf,
        quotas: Quotas | None = None,
    ) -> None:
        """``on_fault(where, error)`` hears of every breach of contract by the policy or the hook. ``background``: where
        is noted what no request caused. ``policy_timeout``: seconds beyond which a call of the policy is such
        a breach. ``quotas``: new books of who owns which block, if that matters.
        """
        super().__init__(
            num_blocks,
            block_size,
            policy,
            clock=clock,
            on_fault=on_fault,
            background=background,
            policy_timeout=policy_timeout,
            quotas=quotas,
        )
        self.cost = CostModel()
        self._sharing = sharing
        self._in_flight = InFlight(block_size)
        self._sequences: dict[int, Sequence] = {}
        self._publisher = Publisher(
            self.pool, self.tree, self._in_flight, self.cost, self._counts, self._watchers, self._narrator, self._moment
        )

    # a sequence's way through

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill."""
        return -(-tokens // self.block_size)

    def producer(self, sequence: Sequence) -> Sequence | None:
        """Another sequence that is computing the first block ``sequence`` would have to compute, if any. Pure."""
        if not self._sharing or not len(self._in_flight):
            return None
        key = sequence.tokens.tobytes()
        return self._in_flight.producer(self.tree.match(sequence.namespace, key, len(sequence.tokens) - 1), key)

    def outlook(self, sequence: Sequence) -> Outlook:
        """What an admission of ``sequence`` would find now, for those who choose whom to admit. Pure."""
        if not self._sharing:
            return Outlook(0, None, is_computed=False)
        return outlook(self.tree, self._in_flight, sequence)

    def try_admit(
        self,
        sequence: Sequence,
        *,
        headroom: int = 0,
        reuse: bool = True,
        resumed: bool = False,
        used: bool = True,
    ) -> Admission | None:
        """Take every block that the tokens of ``sequence`` need, or nothing.

        ``headroom``: blocks that must be left over. ``reuse=False`` computes everything afresh (it is published all the
        same). ``resumed``: the sequence was here before, so what it finds does not count as a hit. ``used``: it is a
        request; otherwise, when a cache is restored, what it finds is not counted at all. ``None`` means: not now;
        nothing has changed.

        :raises CacheMisuse: when the sequence holds blocks, is finished, has another block size, or its id is taken.
        """
        if sequence.state is not OUTSIDE:
            sequence.require(OUTSIDE)
        if sequence.seq_id in self._sequences:
            raise CacheMisuse(f"sequence id {sequence.seq_id} is in use")
        if sequence.table.block_size != self.block_size:
            raise CacheMisuse(
                f"sequence {sequence.seq_id} has blocks of {sequence.table.block_size}, not {self.block_size}"
            )
        self._moment.begin()
        match = self._match(sequence) if reuse and self._sharing else MISS
        needed = -(-len(sequence.tokens) // self.block_size) - len(match.ids)
        spare = self.pool.free_runs.count + self.tree.idle_blocks - match.idle - needed
        if spare < headroom:
            return None
        if spare == 0:  # the block to copy from may be the last one that can be evicted
            match = match._replace(partial_tokens=0)
        try:
            copies = self._take(sequence, match, needed)
        except OutOfBlocks:  # what was evicted is still in transfer
            return None
        self._count_admission(sequence, match, resumed=resumed, used=used)
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
            if sequence.state is not ADMITTED:
                sequence.require(ADMITTED)
            self._moment.begin()
            sequence.computed = computed
            self._publisher.publish(sequence)
        else:
            sequence.computed = computed
        if token is not None:
            sequence.tokens.append(token)

    def measured(self, sequence: Sequence, seconds: float) -> None:
        """Prefill of ``sequence`` took this long in the step that is about to be committed."""
        sequence.prefill_seconds += seconds

    def fork(self, sequence: Sequence, seq_id: int, request: int | None = None) -> Sequence:
        """A second sequence with the same tokens on the same blocks. Costs no block until one of them writes.
        ``request``: whose it is, if not the same one's.

        Not while copies for ``sequence`` are still to be made: a step reads all sources before it writes, so a copy for
        the child would be one of an empty block.

        :raises CacheMisuse: when ``sequence`` is not admitted or ``seq_id`` is taken.
        """
        sequence.require(ADMITTED)
        if seq_id in self._sequences:
            raise CacheMisuse(f"sequence id {seq_id} is in use")
        child = Sequence(
            seq_id,
            sequence.tokens[:],
            sequence.namespace,
            block_size=self.block_size,
            retention=sequence.retention,
            request=sequence.request if request is None else request,
        )
        self.pool.retain(sequence.table.own)
        if sequence.node is not None:
            self.tree.lock(sequence.node)
        child.state, child.node, child.table = ADMITTED, sequence.node, sequence.table.fork()
        child.computed, child.publish_at = sequence.computed, sequence.publish_at
        child.retained_since, child.track = sequence.retained_since, sequence.track
        child.is_told, child.names = sequence.is_told, sequence.names[:]
        sequence.writable = child.writable = sequence.computed
        self._sequences[seq_id] = child
        if self._watchers.requests:
            self._moment.begin()
            self._narrator.forked(sequence, child)
        return child

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done; what it published stays in the tree until it is evicted.

        :raises CacheMisuse: when it is not admitted (a second finish).
        """
        self._leave(sequence, FINISHED)

    def discard(self, sequence: Sequence) -> list[BlockName]:
        """As ``finish``, for a sequence whose K and V cannot be trusted: what it published and nobody else holds goes.

        Returns the names of what went, for tiers that may have copies; none when nobody reads names.

        :raises CacheMisuse: when it is not admitted.
        """
        node = sequence.node
        self._leave(sequence, FINISHED)
        path = [] if node is None else list(self.tree.path(node))
        return self._evictor.drop(path, "distrust", sequence.track)

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks back; the sequence keeps its tokens and can be admitted again.

        :raises CacheMisuse: when it is not admitted.
        """
        self._leave(sequence, OUTSIDE)

    def abandon(self, sequence: Sequence) -> None:
        """A sequence that holds nothing will not be admitted (again). Nothing happens when it never was."""
        sequence.require(OUTSIDE)
        if sequence.is_told:
            self._moment.begin()
            self._tell_left(sequence, 0, "abandoned")

    def copied(self, copies: Copies) -> None:
        """The step that makes ``copies`` has ended, well or badly: their sources are not needed any more."""
        for source, _ in copies:
            self.pool.unpin(source)

    # blocks that come from a tier

    def names_beyond(self, sequence: Sequence, limit_tokens: int) -> list[BlockName]:
        """The names of the whole blocks of an admitted sequence from where its shared ones end up to ``limit_tokens``:
        what tiers can be asked for.
        """
        if sequence.node is None:
            return []
        start = sequence.table.shared * self.block_size
        tokens = sequence.tokens[start : max(limit_tokens, start)].tobytes()
        return names_after(end_name(sequence.node), tokens, self.block_size)

    def keep_copy(self, sequence: Sequence, copies: Copies) -> None:
        """The next step makes these ``copies`` of the part of a block that the admission of ``sequence`` found."""
        self._note_copies(sequence, len(copies), "partial")

    def forgo_copy(self, sequence: Sequence, copies: Copies, *, used: bool = True) -> None:
        """Give up the part of a block that the admission of ``sequence`` found: that block is loaded as a whole. Its
        ``copies`` were not made. ``used``: as it was admitted.
        """
        if not copies:
            return
        self.copied(copies)
        border = sequence.table.shared * self.block_size
        tokens, sequence.computed = sequence.computed - border, border
        self._counts.partial_copies -= len(copies)
        if used:
            self._count_found(sequence, -tokens, -(not border))

    def loaded(
        self,
        sequence: Sequence,
        metas: SequenceOf[Meta],
        tier: str,
        reload_seconds: float | None,
        *,
        wall_now: float,
        used: bool = True,
    ) -> None:
        """The next ``len(metas)`` blocks of ``sequence`` have their contents from ``tier``: publish them, with what
        ``metas`` tell of them.

        ``reload_seconds``: measured, for one block. ``wall_now``: seconds since the epoch. ``used``: the sequence is a
        request, so this is a use and a hit; otherwise, when a cache is restored, recency stays as it was.

        :raises CacheMisuse: when the sequence is not admitted, is not at the end of its shared blocks, or has not that
            many whole blocks more.
        """
        sequence.require(ADMITTED)
        self._moment.begin()
        start, shared = sequence.computed, sequence.table.shared
        end = (shared + len(metas)) * self.block_size
        if not self._sharing or start != shared * self.block_size or end > len(sequence.tokens):
            raise CacheMisuse(f"{sequence!r} cannot take {len(metas)} loaded blocks after {shared} shared ones")
        if not metas:
            return
        self._counts.loaded_blocks += len(metas)
        self._counts.loaded_tokens += end - start
        if used:
            self._counts.tier_hit_tokens[tier] += 0 if sequence.resumed else end - start
            self._count_found(sequence, end - start, not start)
        sequence.computed = end
        source = TierCost(tier, reload_seconds)
        self._publisher.publish_loaded(sequence, metas, source, wall_now=wall_now, used=used)

    # room

    def exclusive_blocks(self, sequence: Sequence) -> int:
        """Blocks that nobody else references: what preempting ``sequence`` gains."""
        blocks = sum(1 for block in sequence.table.own if self.pool.references(block) == 1)
        node = sequence.node
        while node is not None and node.locks == 1:
            blocks += len(node.ids)
            node = node.parent
        return blocks

    def use_policy(self, policy: EvictionPolicy) -> None:
        super().use_policy(policy)
        for sequence in self._sequences.values():
            # memories of the other policy on their way back
            sequence.returns = [back._replace(memory=None) for back in sequence.returns]

    def new_blocks(self, sequence: Sequence, *, reuse: bool = True) -> int:
        """Blocks that an admission of ``sequence`` would hold now and nobody holds yet. Pure."""
        match = self._match(sequence) if reuse and self._sharing else MISS
        return self.blocks_for(len(sequence.tokens)) - len(match.ids) + match.idle

    def held_by_group(self, without: Container[Sequence] = ()) -> Counter[str]:
        """Blocks that are held by group of tenants, each once, not counting what only the sequences in ``without``
        hold; nothing where there are no quotas. O(what is held).
        """
        if self.quotas is None:
            return Counter()
        others = (sequence for sequence in self._sequences.values() if sequence not in without)
        return self.quotas.held(others, self._leases.held)

    # looking

    def census(self) -> Census:
        """Prove that the books are right. O(pool + tree).

        :raises CensusFailed: with every contradiction found.
        """
        return take_census(self.pool, self.tree, self._sequences.values(), self._leases.held, self.quotas)

    def pool_map(self) -> bytes:
        """What each block is now, one letter for one block; see :mod:`.pool_map`. Cheap enough for every second."""
        tables = (sequence.table.blocks for sequence in self._sequences.values())
        return pool_map(self.pool, tables, (self.tree.path_ids(lease.node) for lease in self._leases.held))

    # inside

    def _match(self, sequence: Sequence) -> Match:
        """The longest cached prefix that leaves at least the last token to compute."""
        return self.tree.match(sequence.namespace, sequence.tokens.tobytes(), len(sequence.tokens) - 1)

    def _allocate(self, count: int, sequence: Sequence, after: int = -1) -> array[int]:
        if self.quotas is None:
            return self._obtain(count, sequence.track, after)
        with self.quotas.taking(sequence.namespace.salt, count):
            ids = self._obtain(count, sequence.track, after)
        self.quotas.took(sequence.namespace.salt, ids)
        return ids

    def _obtain(self, count: int, cause: Track, after: int) -> array[int]:
        missing = count - self.pool.free_runs.count
        if missing > 0:
            self._evictor.evict(missing, "allocate", cause)
        return self.pool.allocate(count, after)

    def _take(self, sequence: Sequence, match: Match, needed: int) -> Copies:
        """Lock what matched, allocate the rest, and enter the sequence; undone if the allocation fails."""
        node = self.tree.lock_match(sequence.namespace, match) if self._sharing else None
        shared = match.ids
        copying = match.partial_tokens > 0
        if copying:
            self.pool.pin(match.partial_block)
        if node is not None and self._watchers.requests:
            self._narrator.locked(sequence.seq_id, node, len(shared))
        try:
            fresh = self._allocate(needed, sequence, after=shared[-1] if shared else -1)
        except OutOfBlocks:
            if copying:
                self.pool.unpin(match.partial_block)
            if node is not None:
                self._unlock(sequence.seq_id, node)
            raise
        table = sequence.table
        size = self.block_size
        table.blocks = blocks = shared + fresh if shared else fresh
        table.shared = len(shared)
        sequence.state, sequence.node = ADMITTED, node
        sequence.computed = len(shared) * size + match.partial_tokens
        sequence.writable = len(blocks) * size
        self._sequences[sequence.seq_id] = sequence
        if self._sharing:
            sequence.publish_at = (len(shared) + 1) * size
            self._in_flight.watch(sequence)
        else:
            sequence.publish_at = NEVER
        return ((match.partial_block, fresh[0]),) if copying else ()

    def _count_admission(self, sequence: Sequence, match: Match, *, resumed: bool, used: bool) -> None:
        self._counts.partial_copies += match.partial_tokens > 0
        origin, last = sequence.track.origin, sequence.node
        if last is not None and (origin or last.owner) is not None:  # who is not traced uses it last all the same
            for node in self.tree.path(last):
                node.owner = origin
        sequence.resumed, sequence.is_told = resumed, used
        if used and sequence.computed:
            self._count_found(sequence, sequence.computed, 1)
        if sequence.retention:
            sequence.retained_since = self._moment.now
            self._publisher.retain(sequence, 0)
        if self._watchers.requests or self.policy.wants_requests:
            ghosts = self._ghosts_of(sequence) if self._watchers.requests else ()  # a hash over the prompt
            self._narrator.admitted(sequence, ghosts, used=used)
        if resumed:
            return
        self._counts.prefix_query_tokens += len(sequence.tokens)
        if match.ids and sequence.node is not None:
            self.tree.count_hit(sequence.node, self.residency)
        if len(self._ghosts):
            self._recall(sequence)

    def _count_found(self, sequence: Sequence, tokens: int, hits: int) -> None:
        if sequence.resumed:
            self._counts.resume_hit_tokens += tokens
            return
        self._counts.prefix_hit_tokens += tokens
        self._counts.prefix_hits += hits

    def _recall(self, sequence: Sequence) -> None:
        """Note which blocks that the cache lacks were there once: the policy hears of them when they are back."""
        first, now = sequence.table.shared, self._moment.now
        sequence.returns = self._ghosts.recall(sequence.namespace, sequence.tokens, first, self.block_size, now)
        for back in sequence.returns:
            self.residency.wanted_gap.observe(back.idle)

    def _ghosts_of(self, sequence: Sequence) -> SequenceOf[tuple[int, Ghost]]:
        """What ``_recall`` is going to find."""
        if sequence.resumed:
            return ()
        return self._ghosts.wanted(sequence.namespace, sequence.tokens, sequence.table.shared, self.block_size)

    def _make_writable(self, sequence: Sequence, end: int) -> Copies:
        sequence.require(ADMITTED)
        self._moment.begin()
        blocks = sequence.table.blocks
        first, last, owned = sequence.computed // self.block_size, self.blocks_for(end), len(blocks)
        if first == owned:  # the common case: nothing written yet, so nothing shared
            blocks += self._allocate(last - owned, sequence, after=blocks[-1])
            sequence.writable = last * self.block_size
            if self._watchers.requests:
                self._narrator.extended(sequence, last - owned)
            return ()
        shared = [i for i in range(first, min(last, owned)) if self.pool.references(blocks[i]) > 1]
        fresh = self._allocate(len(shared) + max(last - owned, 0), sequence, after=blocks[-1])
        copies = []
        for index, own in zip(shared, fresh, strict=False):
            if index * self.block_size < sequence.computed:  # it has rows that this sequence needs
                self.pool.pin(blocks[index])
                copies.append((blocks[index], own))
            self.pool.release(blocks[index : index + 1])
            blocks[index] = own
        blocks += fresh[len(shared) :]
        sequence.writable = last * self.block_size
        if self._watchers.requests and fresh:
            self._narrator.extended(sequence, len(fresh))
        self._counts.cow_forks += len(copies)
        self._note_copies(sequence, len(copies), "fork")
        return tuple(copies)

    def _note_copies(self, sequence: Sequence, blocks: int, kind: str) -> None:
        """The copies themselves are made by the next step, before it writes."""
        if blocks and sequence.track.is_on:
            now = self._clock()
            sequence.track.act(names.COW_FORK, now, now, {names.BLOCKS: blocks, names.KIND: kind, names.TIER: "device"})

    def _leave(self, sequence: Sequence, state: State) -> None:
        if sequence.state is not ADMITTED:
            sequence.require(ADMITTED)
        self._moment.begin()
        if sequence.in_flight_key is not None:
            self._in_flight.forget(sequence)
        table = sequence.table
        published = table.shared
        if len(table.blocks) > published:
            self.pool.release(table.blocks[published:])
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
        table.blocks, table.shared = table.blocks[:0], 0
        sequence.state, sequence.node = state, None
        sequence.computed = sequence.writable = 0
        sequence.publish_at = NOT_ADMITTED
        sequence.prefill_seconds, sequence.returns = 0.0, ()
        del self._sequences[sequence.seq_id]
        if self._watchers.requests or self.policy.wants_requests:
            self._tell_left(sequence, published, "finished" if state is FINISHED else "preempted")
        elif state is FINISHED:
            sequence.is_told = False

    def _tell_left(self, sequence: Sequence, published: int, kind: str) -> None:
        """It gave its blocks back; the first ``published`` of them are in the tree."""
        if sequence.is_told and kind != "preempted":
            sequence.is_told = False
            self._narrator.over(sequence, published)
        if self._watchers.requests:
            self._narrator.left(sequence, kind)
