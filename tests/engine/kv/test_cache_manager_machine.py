"""CacheManager under random use, against a memory that holds for each slot the whole text it was computed from.

A slot of the pretended device memory keeps (namespace, tokens up to and with its own). K and V of a position depend
on exactly that, so any mix-up of blocks, any stale hit, any write into somebody else's slot shows as a wrong cell.
Steps run as a runner runs them: all copies at once, then the writes, then the commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import NamedTuple, TypeAlias

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.engine.kv import CacheManager, CacheStats, EvictedRun, Namespace, Sequence, encode_tokens
from octavo.errors import CacheMisuse, OutOfBlocks
from octavo.policies.eviction.base import Entry
from octavo.policies.eviction.lru import Lru

BLOCK = 4
POOL = 14
Text: TypeAlias = tuple[int, ...]
Cell: TypeAlias = tuple[Namespace, Text] | None
Copies: TypeAlias = tuple[tuple[int, int], ...]

# pairs that a careless key would confuse (HASH-05, TENANT-01)
NAMESPACES = (Namespace("w"), Namespace("w", adapter="x"), Namespace("w", salt="x"), Namespace("w", salt=""))
MOODS = ("good", "silent", "raises", "raises late", "no entry", "held entry", "stale entry")


class MoodyLru(Lru):
    """LRU that breaks its contract when told to."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.mood = "good"
        self.held: list[Entry] = []
        self._stale = Entry(blocks=3, depth=12, insert_time=0.0, last_use=0.0, candidate=True)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        good = super().victims(count, now)
        if self.mood == "raises":
            raise RuntimeError(self.mood)
        if self.mood == "silent":
            return
        if self.mood in ("no entry", "stale entry"):
            yield None if self.mood == "no entry" else self._stale  # type: ignore[misc]  # the breach that is tested
        if self.mood == "held entry":
            yield from self.held
        for served, entry in enumerate(good):
            if self.mood == "raises late" and served:
                raise RuntimeError(self.mood)
            yield entry


class Live(NamedTuple):
    """The model of one admitted sequence."""

    sequence: Sequence
    text: list[int]


class World:
    """One manager, the memory, and what should be true. Whoever drives it brings the random choices."""

    def __init__(self, *, sharing: bool = True, hook_pins: bool = True) -> None:
        self.sharing = sharing
        self.ticks = count()
        self.faults: list[str] = []
        self.policy = MoodyLru(POOL)
        self.manager = CacheManager(
            POOL,
            BLOCK,
            self.policy,
            clock=lambda: float(next(self.ticks)),
            on_fault=lambda where, _: self.faults.append(where),
            sharing=sharing,
            hook=self.on_evicted,
        )
        self.memory: list[list[Cell]] = [[None] * BLOCK for _ in range(POOL)]
        self.live: dict[int, Live] = {}
        self.outside: list[Live] = []
        self.pending: dict[int, Copies] = {}  # copies of admissions that no step has made yet
        self.ids = count()
        self.hook_pins = hook_pins
        self.in_transfer: list[int] = []

    # what the tiers would do

    def on_evicted(self, run: EvictedRun) -> None:
        text = tuple(_ints(run.prefix + run.tokens))
        first = len(text) - len(run.blocks) * BLOCK
        for number, block in enumerate(run.blocks):
            self.check_block(block, run.namespace, text, first + number * BLOCK, BLOCK)
            if self.hook_pins:
                self.manager.pool.pin(block)
                self.in_transfer.append(block)

    def transfers_end(self, number: int) -> None:
        for block in self.in_transfer[:number]:
            self.manager.pool.unpin(block)
        del self.in_transfer[:number]

    # the life of a sequence

    def admit(self, rng: Random) -> None:
        text = [rng.randint(1, 2) for _ in range(rng.choice((1, 4, 5, 8, 9, rng.randint(1, 24))))]
        namespace = NAMESPACES[rng.choice((0, 0, 0, 0, 0, 1, 2, 3))]
        sequence = Sequence(next(self.ids), encode_tokens(text), namespace, block_size=BLOCK)
        headroom, reuse = rng.choice((0, 0, 0, 2)), rng.random() < 0.8
        self.try_admit(Live(sequence, text), headroom, reuse=reuse, resumed=False)

    def resume(self, rng: Random) -> None:
        if self.outside:
            live = self.outside.pop(rng.randrange(len(self.outside)))
            self.try_admit(live, 0, reuse=True, resumed=True)

    def try_admit(self, live: Live, headroom: int, *, reuse: bool, resumed: bool) -> None:
        sequence, text = live
        whole, partial = self.best_hit(sequence) if reuse and self.sharing else (0, 0)
        producer = self.manager.producer(sequence)
        if producer is not None:
            assert self.live[producer.seq_id].sequence is producer
            end = (self.best_hit(sequence)[0] + 1) * BLOCK
            assert (producer.namespace, list(producer.tokens[:end])) == (sequence.namespace, text[:end])
            assert len(text) >= end > producer.computed
        before, evictions = self.manager.stats(), self.evictions()
        available, needed = self.manager.available, -(-len(text) // BLOCK) - whole
        idle_hit = self.idle_part_of_hit(sequence, whole)
        admission = self.manager.try_admit(sequence, headroom=headroom, reuse=reuse, resumed=resumed)
        spare = available - idle_hit - needed
        if admission is None:
            assert spare < headroom or self.manager.pool._pins
            assert sequence.computed == 0
            assert not len(sequence.table)
            if spare < headroom:
                assert self.evictions() == evictions
            if resumed:
                self.outside.append(live)
            return
        assert spare >= headroom
        expected = whole * BLOCK + (partial if spare else 0)
        assert admission.cached_tokens == sequence.computed == expected < len(text)
        after = self.manager.stats()
        assert after.resume_hit_tokens - before.resume_hit_tokens == (expected if resumed else 0)
        assert after.prefix_hit_tokens - before.prefix_hit_tokens == (0 if resumed else expected)
        assert after.prefix_query_tokens - before.prefix_query_tokens == (0 if resumed else len(text))
        self.live[sequence.seq_id] = live
        self.pending[sequence.seq_id] = admission.copies

    def step(self, rng: Random) -> None:
        """Plan for some sequences, then execute and commit, or fail."""
        plan: list[tuple[Live, int]] = []
        copies: dict[int, Copies] = {}
        for seq_id, live in list(self.live.items()):
            if rng.random() < 0.3:
                continue
            most = live.sequence.uncomputed
            length = most if rng.random() < 0.6 else rng.randint(1, most)
            try:
                extra = self.manager.extend(live.sequence, length)
            except OutOfBlocks:
                assert self.manager.available < POOL
                continue
            copies[seq_id] = self.pending.pop(seq_id, ()) + extra
            plan.append((live, length))
        if rng.random() < 0.15:
            self.fail_step(copies, rng)
        else:
            self.execute(plan, copies, rng)

    def execute(self, plan: list[tuple[Live, int]], copies: dict[int, Copies], rng: Random) -> None:
        pairs = [pair for of_sequence in copies.values() for pair in of_sequence]
        contents = [list(self.memory[source]) for source, _ in pairs]
        assert len({destination for _, destination in pairs}) == len(pairs)
        for (_, destination), content in zip(pairs, contents, strict=True):
            self.memory[destination] = content
        written: set[int] = set()
        for live, length in plan:
            written |= self.write(live, length, written)
        for live, length in plan:  # what the runner reads: the whole context, after the writes
            self.check_view(live, live.sequence.computed + length)
        for live, length in plan:
            token = rng.randint(1, 2) if length == live.sequence.uncomputed else None
            self.manager.measured(live.sequence, 0.5)
            self.manager.commit(live.sequence, length, token)
            if token is not None:
                live.text.append(token)
        for of_sequence in copies.values():
            self.manager.copied(of_sequence)

    def write(self, live: Live, length: int, written: set[int]) -> set[int]:
        start = live.sequence.computed
        slots = [int(slot) for slot in live.sequence.table.slots(start, start + length)]
        assert not written.intersection(slots)
        for position, slot in enumerate(slots, start):
            text = tuple(live.text[: position + 1])
            self.memory[slot // BLOCK][slot % BLOCK] = (live.sequence.namespace, text)
        return set(slots)

    def fail_step(self, copies: dict[int, Copies], rng: Random) -> None:
        """No copy and no write was made: whoever waited for a copy cannot go on with the blocks it has."""
        for seq_id, of_sequence in copies.items():
            if of_sequence:
                self.leave(self.live[seq_id], keep=rng.random() < 0.5)
            self.manager.copied(of_sequence)

    def fork(self, rng: Random) -> None:
        ready = [live for seq_id, live in self.live.items() if not self.pending.get(seq_id)]
        if ready and len(self.live) < 8:
            parent = rng.choice(ready)
            available = self.manager.available
            child = self.manager.fork(parent.sequence, next(self.ids))
            assert self.manager.available == available
            self.live[child.seq_id] = Live(child, list(parent.text))

    def finish_or_preempt(self, rng: Random) -> None:
        if self.live:
            live = rng.choice(list(self.live.values()))
            gain = self.manager.exclusive_blocks(live.sequence)
            pinned = bool(self.manager.pool._pins)
            available = self.manager.available
            self.leave(live, keep=rng.random() < 0.4)
            if not pinned:
                assert self.manager.available == available + gain

    def leave(self, live: Live, *, keep: bool) -> None:
        sequence = live.sequence
        self.manager.copied(self.pending.pop(sequence.seq_id, ()))
        del self.live[sequence.seq_id]
        if keep:
            self.manager.preempt(sequence)
            self.outside.append(live)
        else:
            self.manager.finish(sequence)
        calls: tuple[Callable[[], object], ...] = (
            lambda: self.manager.finish(sequence),
            lambda: self.manager.extend(sequence, 1),
            lambda: self.manager.commit(sequence, 1, 1),
            lambda: self.manager.fork(sequence, 10**6),
        )
        for call in calls:
            with pytest.raises(CacheMisuse):
                call()

    # room

    def evict(self, rng: Random) -> None:
        wanted = rng.randint(0, 5)
        free, idle = self.manager.pool.free, self.manager.tree.idle_blocks
        freed = self.manager.evict(wanted)
        assert self.manager.pool.free == free + freed
        assert freed <= wanted
        if not self.manager.pool._pins:
            assert freed == min(wanted, idle)

    def background_eviction(self, rng: Random) -> None:
        low, more = rng.randint(0, POOL // 2), rng.randint(0, 3)
        free, idle = self.manager.pool.free, self.manager.tree.idle_blocks
        freed = self.manager.maybe_evict(low, low + more)
        assert self.manager.pool.free == free + freed
        if free >= low:
            assert freed == 0
        elif not self.manager.pool._pins:
            assert freed == min(low + more - free, idle)

    def act(self, rng: Random) -> None:
        """One random action."""
        if rng.random() < 0.1:
            self.policy.mood = rng.choice(MOODS)
        if rng.random() < 0.3:
            self.transfers_end(rng.randint(0, 4))
        actions = (self.admit, self.step, self.fork, self.resume, self.finish_or_preempt, self.evict)
        weights = (6, 9, 2, 3, 4, 1)
        rng.choices((*actions, self.background_eviction), (*weights, 1))[0](rng)

    # what must hold after everything

    def check(self) -> None:
        self.census_is_clean()
        self.every_sequence_reads_its_own_text()
        self.what_is_writable_is_exclusive()
        self.every_index_entry_holds_its_text()
        self.nothing_grows()
        assert self.sharing or not self.manager.tree.blocks

    def census_is_clean(self) -> None:
        census = self.manager.census()
        assert self.manager.available == census.free + census.idle
        self.policy.held = [node for node in self.manager.tree.nodes() if not node.candidate]

    def every_sequence_reads_its_own_text(self) -> None:
        for seq_id, live in self.live.items():
            sequence = live.sequence
            assert list(sequence.tokens) == live.text
            unfinished = bool(self.pending.get(seq_id))  # rows of a partial hit that no step has copied yet
            self.check_view(live, sequence.table.shared * BLOCK if unfinished else sequence.computed)

    def what_is_writable_is_exclusive(self) -> None:
        for live in self.live.values():
            sequence = live.sequence
            first, last = sequence.computed // BLOCK, -(-sequence.writable // BLOCK)
            if sequence.computed < sequence.writable:
                assert all(self.manager.pool.references(block) == 1 for block in sequence.table.blocks[first:last])
                assert first >= sequence.table.shared

    def every_index_entry_holds_its_text(self) -> None:
        """REFCOUNT-05, PREFIX-01, PREFIX-11: one entry per chain, and its block holds that chain."""
        chains: set[tuple[Namespace, bytes]] = set()
        for node in self.manager.tree.nodes():
            key = self.manager.tree.prefix(node)
            text = tuple(_ints(key))
            first = len(text) - len(node.ids) * BLOCK
            for number, block in enumerate(node.ids):
                start = first + number * BLOCK
                chain = (node.namespace, key[: (start + BLOCK) * 4])
                assert chain not in chains
                chains.add(chain)
                self.check_block(block, node.namespace, text, start, BLOCK)

    def nothing_grows(self) -> None:
        """GROWTH-01: the containers are bound by the pool and by what is live."""
        assert len(self.manager._in_flight) <= len(self.live)
        assert len(self.manager._ghosts) <= POOL
        assert self.manager._sequences.keys() == self.live.keys()
        assert len(self.manager.tree._roots) <= len(NAMESPACES)

    def close(self) -> None:
        """With everybody gone nothing is held, and all of the cache can be evicted (LEAK-08)."""
        for live in list(self.live.values()):
            self.leave(live, keep=False)
        self.transfers_end(len(self.in_transfer))
        self.hook_pins = False
        assert self.manager.census().held == 0
        assert not self.manager.pool._pins
        self.manager.evict(POOL)
        assert self.manager.census().free == POOL
        assert not self.manager.tree._roots
        assert not len(self.manager._in_flight)

    # helpers

    def check_view(self, live: Live, stop: int) -> None:
        """Every position below ``stop`` reads back as the text of the sequence."""
        blocks = live.sequence.table.covering(stop)
        for position in range(stop):
            cell = self.memory[int(blocks[position // BLOCK])][position % BLOCK]
            assert cell == (live.sequence.namespace, tuple(live.text[: position + 1]))

    def check_block(self, block: int, namespace: Namespace, text: Text, start: int, length: int) -> None:
        expected = [(namespace, text[: position + 1]) for position in range(start, start + length)]
        assert self.memory[block][:length] == expected

    def best_hit(self, sequence: Sequence) -> tuple[int, int]:
        """By brute force over the tree: whole blocks and further tokens that an admission may reuse."""
        text = tuple(sequence.tokens)
        limit = len(text) - 1
        known = {
            tuple(_ints(self.manager.tree.prefix(node)))[: end * BLOCK]
            for node in self.manager.tree.nodes()
            if node.namespace == sequence.namespace
            for end in range(node.depth // BLOCK - len(node.ids) + 1, node.depth // BLOCK + 1)
        }
        whole = 0
        while (whole + 1) * BLOCK <= limit and text[: (whole + 1) * BLOCK] in known:
            whole += 1
        start = whole * BLOCK
        rest = text[start : min(start + BLOCK, limit)]
        tails = [entry[start:] for entry in known if len(entry) == start + BLOCK and entry[:start] == text[:start]]
        return whole, max((_agreeing(tail, rest) for tail in tails), default=0)

    def idle_part_of_hit(self, sequence: Sequence, whole: int) -> int:
        """Blocks of the hit that nobody references now."""
        idle = 0
        for node in self.manager.tree.nodes():
            key = self.manager.tree.prefix(node)
            first = node.depth // BLOCK - len(node.ids)
            text = sequence.tokens[: whole * BLOCK].tobytes()
            common = min(whole, node.depth // BLOCK) - first
            if node.namespace == sequence.namespace and not node.locks and common > 0:
                idle += sum(
                    key[: (first + k) * BLOCK * 4] == text[: (first + k) * BLOCK * 4] for k in range(1, common + 1)
                )
        return idle

    def evictions(self) -> int:
        return sum(self.manager.stats().evictions.values())


def _ints(tokens: bytes) -> list[int]:
    return list(memoryview(tokens).cast("i"))


def _agreeing(one: Text, other: Text) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


class CacheMachine(RuleBasedStateMachine):
    """The same actions, chosen and shrunk by hypothesis."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(sharing=st.booleans(), hook_pins=st.booleans())
    def choose(self, *, sharing: bool, hook_pins: bool) -> None:
        self.world = World(sharing=sharing, hook_pins=hook_pins)

    @rule(rng=st.randoms(use_true_random=False))
    def admit(self, rng: Random) -> None:
        self.world.admit(rng)

    @rule(rng=st.randoms(use_true_random=False))
    def step(self, rng: Random) -> None:
        self.world.step(rng)

    @rule(rng=st.randoms(use_true_random=False))
    def act(self, rng: Random) -> None:
        self.world.act(rng)

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.close()


def _machine_run(examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(CacheMachine, settings=chosen)


def _walk(world: World, seed: int, steps: int) -> CacheStats:
    rng = Random(seed)  # noqa: S311  # not for secrets
    for _ in range(steps):
        world.act(rng)
        world.check()
    stats = world.manager.stats()
    world.close()
    return stats


@pytest.mark.parametrize("seed", range(3))
def test_long_random_walk(seed: int) -> None:
    stats = _walk(World(hook_pins=seed % 2 == 1), seed, steps=4000)
    reached = (
        stats.prefix_hits,
        stats.resume_hit_tokens,
        stats.cow_forks,
        stats.partial_copies,
        stats.duplicates_freed,
    )
    assert all(reached), "the walk must come through every part"
    assert stats.evicted_then_wanted
    assert stats.policy_faults
    assert set(stats.evictions) == {"allocate", "call", "watermark"}


def test_long_random_walk_without_sharing() -> None:
    stats = _walk(World(sharing=False), seed=9, steps=2000)
    assert stats.cow_forks
    assert not stats.prefix_hit_tokens


def test_random_use_by_hypothesis() -> None:
    _machine_run(examples=40, steps=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_random_use_by_hypothesis() -> None:
    _machine_run(examples=500, steps=100)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 120))
def test_very_long_random_walk(seed: int) -> None:
    _walk(World(sharing=seed % 5 > 0, hook_pins=seed % 2 == 1), seed, steps=40_000)
