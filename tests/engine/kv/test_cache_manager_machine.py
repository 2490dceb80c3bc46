"""CacheManager under random use, against a memory that holds for each slot the whole text it was computed from.

A slot of the pretended device memory keeps (namespace, tokens up to and with its own). K and V of a position depend
on exactly that, so any mix-up of blocks, any stale hit, any write into somebody else's slot shows as a wrong cell.
Steps run as a runner runs them: all copies at once, then the writes, then the commits.

What is evicted goes to a pretended tier, and comes back from there by its name. For every cached block the model knows
how it has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from math import inf
from random import Random
from typing import NamedTuple, TypeAlias

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.engine.kv import (
    CacheManager,
    CacheStats,
    EvictedRun,
    Lease,
    Namespace,
    Retention,
    Sequence,
    encode_tokens,
    meta_of,
)
from octavo.engine.kv.node import Node
from octavo.errors import CacheMisuse, OutOfBlocks
from octavo.policies.eviction.base import Entry
from octavo.policies.eviction.lru import Lru
from octavo.storage.base import Meta
from octavo.storage.naming import names_after

BLOCK = 4
POOL = 14
Text: TypeAlias = tuple[int, ...]
Cell: TypeAlias = tuple[Namespace, Text] | None
Copies: TypeAlias = tuple[tuple[int, int], ...]
Chain: TypeAlias = tuple[Namespace, Text]
Wish: TypeAlias = tuple[int, float]  # priority and when it ends
PLAIN: Wish = (0, inf)
WALL = 1e9  # what the wall clock shows when the other one shows 0

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

    def __init__(self, *, sharing: bool = True) -> None:
        self.sharing = sharing
        self.time = 0.0
        self.faults: list[str] = []
        self.policy = MoodyLru(POOL)
        self.manager = CacheManager(
            POOL,
            BLOCK,
            self.policy,
            clock=lambda: self.time,
            on_fault=lambda where, _: self.faults.append(where),
            sharing=sharing,
        )
        self.manager.watch(self)
        self.memory: list[list[Cell]] = [[None] * BLOCK for _ in range(POOL)]
        self.live: dict[int, Live] = {}
        self.outside: list[Live] = []
        self.pending: dict[int, Copies] = {}  # copies of admissions that no step has made yet
        self.ids = count()
        self.kept: dict[Chain, Wish] = {}  # every block in the tree
        self.tier: dict[bytes, tuple[Chain, Meta]] = {}
        self.leases: dict[Lease, Chain] = {}

    # what the tiers would do

    def evicted(self, run: EvictedRun) -> None:
        meta = meta_of(run.entry, self.time, self.time + WALL)
        chains = [self.chain_of(block) for block in run.blocks]
        for chain, name, block in zip(chains, run.names, run.blocks, strict=True):
            self.check_block(block, run.namespace, chain[1], len(chain[1]) - BLOCK, BLOCK)
            wish = self.kept.pop(chain)
            assert (meta.priority, inf if meta.ttl is None else self.time + meta.ttl) == (
                wish[0],
                max(wish[1], self.time),
            )
            assert name == _names(*chain)[-1]
            self.tier[name] = (chain, meta)
        first = chains[0][1]
        assert run.start == len(first) - BLOCK
        assert run.parent == [run.namespace.shelf().namespace, *_names(run.namespace, first)][-2]
        assert run.tokens == encode_tokens(chains[-1][1][run.start :]).tobytes()
        assert run.reason in ("allocate", "call", "watermark")

    def dropped(self, run: EvictedRun) -> None:
        for block in run.blocks:
            del self.kept[self.chain_of(block)]

    def chain_of(self, block: int) -> Chain:
        cell = self.memory[block][-1]
        assert cell is not None
        return cell

    def load(self, live: Live, rng: Random) -> None:
        """Fill some of the next blocks of a sequence that was just admitted from the tier, in one go or in two."""
        sequence, text = live
        limit = len(text) - rng.choice((0, 1, 1, 1))
        names = self.manager.names_beyond(sequence, limit)
        start = sequence.table.shared
        assert names == _names(sequence.namespace, tuple(text[:limit]))[start:]
        there = next((i for i, name in enumerate(names) if name not in self.tier), len(names))
        if not there:
            return
        self.manager.forgo_copy(sequence, self.pending.pop(sequence.seq_id))
        assert sequence.computed == start * BLOCK
        used = rng.random() < 0.8
        first = rng.randint(1, there)
        for part in (names[:first], names[first : rng.randint(first, there)]):
            self.bring(live, part, used=used)

    def bring(self, live: Live, names: list[bytes], *, used: bool) -> None:
        sequence = live.sequence
        start, before = sequence.table.shared, self.manager.stats()
        metas = []
        for number, name in enumerate(names, start):
            (namespace, text), meta = self.tier[name]
            metas.append(meta)
            cells: list[Cell] = [(namespace, text[: len(text) - BLOCK + i + 1]) for i in range(BLOCK)]
            self.memory[sequence.table.blocks[number]] = cells
        self.manager.loaded(sequence, metas, "host", 0.25, wall_now=self.time + WALL, used=used)
        assert sequence.computed == (start + len(names)) * BLOCK
        for number, meta in enumerate(metas, start):
            ttl = inf if meta.ttl is None else meta.aged(self.time + WALL).ttl
            ends = self.time + (inf if ttl is None else ttl)
            self.published(live, number, (meta.priority, ends) if meta.priority and ends > self.time else PLAIN)
            self.published(live, number, self.wish(sequence, number))
        after, tokens = self.manager.stats(), len(names) * BLOCK
        assert (after.loaded_blocks, after.loaded_tokens) == (
            before.loaded_blocks + len(names),
            before.loaded_tokens + tokens,
        )
        first_time = used and not sequence.resumed
        assert after.tier_hit_tokens - before.tier_hit_tokens == tokens * first_time
        assert after.prefix_hit_tokens - before.prefix_hit_tokens == tokens * first_time
        assert after.prefix_hits - before.prefix_hits == (first_time and not start and bool(names))
        assert after.resume_hit_tokens - before.resume_hit_tokens == tokens * (used and sequence.resumed)

    # how blocks are to be kept

    def wish(self, sequence: Sequence, number: int) -> Wish:
        """What the sequence itself wants for one of its blocks."""
        asked = [
            (each.priority, inf if each.ttl is None else sequence.retained_since + each.ttl)
            for each in sequence.retention
            if each.start < (number + 1) * BLOCK and (each.end is None or each.end > number * BLOCK)
        ]
        best = max((wish if wish[0] else PLAIN for wish in asked), default=PLAIN)
        return best if best[0] else PLAIN

    def published(self, live: Live, number: int, wish: Wish) -> None:
        """Block ``number`` of a sequence is in the tree now, or was already."""
        chain = (live.sequence.namespace, tuple(live.text[: (number + 1) * BLOCK]))
        known = self.kept.get(chain)
        if known is None or (wish != PLAIN and wish > known):
            self.kept[chain] = wish

    def expire(self, rng: Random) -> None:
        ended = [chain for chain, wish in self.kept.items() if wish[1] <= self.time]
        assert self.manager.expire(self.time) == len(ended)
        self.kept.update(dict.fromkeys(ended, PLAIN))

    def keep(self, rng: Random) -> None:
        namespace, text = self.some_prefix(rng)
        priority, expires = rng.choice((-1, 0, 2, 3)), rng.choice((None, self.time + rng.randint(-1, 30)))
        covered = self.manager.keep(namespace, encode_tokens(text), priority, expires)
        whole = self.whole_blocks(namespace, text)
        assert covered == whole * BLOCK
        wish = (priority, inf if expires is None else expires)
        if priority and wish[1] > self.time:
            for end in range(BLOCK, covered + 1, BLOCK):
                chain = (namespace, text[:end])
                self.kept[chain] = max(self.kept[chain], wish)

    def pin(self, rng: Random) -> None:
        namespace, text = self.some_prefix(rng)
        whole = len(text) // BLOCK * BLOCK
        if not whole:
            return
        pinned = self.pinned()
        more = pinned | {(namespace, text[:end]) for end in range(BLOCK, whole + 1, BLOCK)}
        is_cached = self.whole_blocks(namespace, text) * BLOCK == whole
        if is_cached and len(more) > POOL // 2:
            with pytest.raises(OutOfBlocks, match="pinned prefixes hold"):
                self.manager.pin(namespace, encode_tokens(text))
            return
        lease = self.manager.pin(namespace, encode_tokens(text))
        assert (lease is not None) == is_cached
        if lease is not None:
            assert lease.tokens == whole
            self.leases[lease] = (namespace, text[:whole])

    def unpin(self, rng: Random) -> None:
        if self.leases:
            lease = rng.choice(list(self.leases))
            del self.leases[lease]
            self.manager.unpin(lease)
            with pytest.raises(CacheMisuse):
                self.manager.unpin(lease)

    def pinned(self) -> set[Chain]:
        return {(ns, text[:end]) for ns, text in self.leases.values() for end in range(BLOCK, len(text) + 1, BLOCK)}

    # forgetting and explaining

    def forget(self, rng: Random) -> None:
        namespace, text = self.some_prefix(rng)
        if rng.random() < 0.3:
            expected = {chain for chain in self.kept if chain[0].salt == namespace.salt} - self.held()
            assert self.manager.forget_tenant(namespace.salt) == len(expected)
        else:
            mine = [other for ns, other in self.kept if ns == namespace]
            region = {
                (namespace, own)
                for own in mine
                if all(_is_in_line(other, text) for other in mine if other[: len(own)] == own)
                and _is_in_line(own, text)
            }
            expected = region - self.held()
            names = self.manager.forget(namespace, encode_tokens(text))
            assert sorted(names) == sorted(_names(*chain)[-1] for chain in region)
        assert not expected & self.kept.keys()

    def explain(self, rng: Random) -> None:
        namespace, text = self.some_prefix(rng)
        text = (*text, *rng.choices((1, 2), k=rng.randint(1, 5)))
        sequence = Sequence(next(self.ids), encode_tokens(text), namespace, block_size=BLOCK)
        before = self.manager.stats()
        found = self.manager.explain(namespace, sequence.tokens, others=True)
        assert self.manager.stats() == before
        whole, partial = self.best_hit(sequence)
        assert found.cached_tokens == whole * BLOCK + partial
        blocks = self.whole_blocks(namespace, text)
        assert found.missing_from == (blocks * BLOCK if (blocks + 1) * BLOCK <= len(text) else None)
        longest = max((self.whole_blocks(other, text) for other in NAMESPACES if other != namespace), default=0)
        assert found.other_salt == (longest > blocks)
        same = [
            other for ns, other in self.kept if ns == namespace and _agreeing(other, text) < min(len(other), len(text))
        ]
        if found.relative is not None:
            position, start, stored = found.relative
            assert position == max(_agreeing(other, text) for other in same)
            assert any(other[start : start + len(stored)] == stored for other in same)
            assert stored[: position - start] == text[start:position]
            assert stored[position - start] != text[position]

    def held(self) -> set[Chain]:
        shared = {
            (live.sequence.namespace, tuple(live.text[:end]))
            for live in self.live.values()
            for end in range(BLOCK, live.sequence.table.shared * BLOCK + 1, BLOCK)
        }
        return shared | self.pinned()

    def some_prefix(self, rng: Random) -> Chain:
        """Something cached, a part of it, or anything."""
        if self.kept and rng.random() < 0.8:
            namespace, text = rng.choice(list(self.kept))
            return namespace, text[: rng.choice((len(text), len(text), rng.randint(0, len(text))))]
        return rng.choice(NAMESPACES), tuple(rng.choices((1, 2), k=rng.randint(0, 9)))

    def whole_blocks(self, namespace: Namespace, text: Text) -> int:
        blocks = 0
        while (end := (blocks + 1) * BLOCK) <= len(text) and (namespace, text[:end]) in self.kept:
            blocks += 1
        return blocks

    # the life of a sequence

    def admit(self, rng: Random) -> None:
        text = [rng.randint(1, 2) for _ in range(rng.choice((1, 4, 5, 8, 9, rng.randint(1, 24))))]
        namespace = NAMESPACES[rng.choice((0, 0, 0, 0, 0, 1, 2, 3))]
        retention = _some_retention(rng, len(text)) if rng.random() < 0.4 else ()
        sequence = Sequence(next(self.ids), encode_tokens(text), namespace, block_size=BLOCK, retention=retention)
        headroom, reuse = rng.choice((0, 0, 0, 2)), rng.random() < 0.8
        self.try_admit(Live(sequence, text), headroom, reuse=reuse, resumed=False)
        if sequence.seq_id in self.live and self.sharing and rng.random() < 0.6:
            self.load(self.live[sequence.seq_id], rng)

    def resume(self, rng: Random) -> None:
        if self.outside:
            live = self.outside.pop(rng.randrange(len(self.outside)))
            self.try_admit(live, 0, reuse=True, resumed=True)
            if live.sequence.seq_id in self.live and self.sharing and rng.random() < 0.6:
                self.load(live, rng)

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
        assert sequence.resumed == resumed
        assert sequence.retained_since == self.time or not sequence.retention
        for number in range(sequence.table.shared):
            self.published(live, number, self.wish(sequence, number))

    def step(self, rng: Random) -> None:
        """Plan for some sequences, then execute and commit, or fail."""
        plan: list[tuple[Live, int]] = []
        copies: dict[int, Copies] = {}
        for seq_id, live in list(self.live.items()):
            if rng.random() < 0.3 or not live.sequence.uncomputed:  # all of it was loaded, to be cached and no more
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
            shared = live.sequence.table.shared
            self.manager.measured(live.sequence, 0.5)
            self.manager.commit(live.sequence, length, token)
            for number in range(shared, live.sequence.table.shared):
                self.published(live, number, self.wish(live.sequence, number))
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
            bad = rng.random() < 0.1
            self.leave(live, keep=rng.random() < 0.4, bad=bad)
            if not pinned:
                assert self.manager.available == available + gain

    def leave(self, live: Live, *, keep: bool, bad: bool = False) -> None:
        sequence = live.sequence
        self.manager.copied(self.pending.pop(sequence.seq_id, ()))
        del self.live[sequence.seq_id]
        if keep:
            self.manager.preempt(sequence)
            self.outside.append(live)
        elif bad:
            before = set(self.kept)
            names = self.manager.discard(sequence)
            assert sorted(names) == sorted(_names(*chain)[-1] for chain in before - self.kept.keys())
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
        self.time += rng.randint(0, 3)
        actions = (self.admit, self.step, self.fork, self.resume, self.finish_or_preempt, self.evict)
        weights = (12, 18, 4, 6, 8, 2)
        more = (self.background_eviction, self.expire, self.keep, self.pin, self.unpin, self.forget, self.explain)
        rng.choices((*actions, *more), (*weights, 2, 2, 1, 1, 2, 1, 2))[0](rng)

    # what must hold after everything

    def check(self) -> None:
        self.census_is_clean()
        self.every_sequence_reads_its_own_text()
        self.what_is_writable_is_exclusive()
        self.every_index_entry_holds_its_text()
        self.what_is_pinned_is_there()
        self.the_map_shows_every_block()
        self.nothing_grows()
        assert self.sharing or not self.manager.tree.blocks

    def census_is_clean(self) -> None:
        census = self.manager.census()
        assert self.manager.available == census.free + census.idle
        self.policy.held = [node for node in self.manager.tree.nodes() if not node.candidate]

    def the_map_shows_every_block(self) -> None:
        """By a walk over the whole tree, which the map does without."""
        tree, pool = self.manager.tree, self.manager.pool
        pinned = {block for lease in self.manager._leases.held for block in tree.path_ids(lease.node)}
        held = {block for live in self.live.values() for block in live.sequence.table.blocks}
        held |= {block for node in tree.nodes() if node.locks for block in node.ids}
        idle = {block for node in tree.nodes() for block in node.ids}
        letters = [(pinned, "p"), (held, "h"), (idle, "i"), (set(pool.free_ids()), "f")]
        expected = [
            next((letter for blocks, letter in letters if block in blocks), "t") for block in range(pool.num_blocks)
        ]
        assert self.manager.pool_map().decode() == "".join(expected)

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
        """REFCOUNT-05, PREFIX-01, PREFIX-11: one entry per chain, its block holds that chain, kept as it has to be."""
        chains: set[Chain] = set()
        for node in self.manager.tree.nodes():
            text = tuple(_ints(self.prefix(node)))
            first = len(text) - len(node.ids) * BLOCK
            assert (node.priority, node.expires) == node.keep
            for number, block in enumerate(node.ids):
                start = first + number * BLOCK
                chain = (node.namespace, text[: start + BLOCK])
                assert chain not in chains
                chains.add(chain)
                self.check_block(block, node.namespace, text, start, BLOCK)
                expires = inf if node.keep.expires is None else node.keep.expires
                assert (node.keep.priority, expires) == self.kept[chain]
        assert chains == self.kept.keys()

    def what_is_pinned_is_there(self) -> None:
        pinned = self.pinned()
        assert pinned <= self.kept.keys()
        assert self.manager.pinned_blocks == self.manager.stats().pinned == len(pinned) <= POOL // 2

    def images_hold_everything(self) -> None:
        image = self.manager.image(self.time + WALL)
        known: set[bytes] = {space.shelf().namespace for space in NAMESPACES}
        found: set[Chain] = set()
        for run in image:
            assert run.parent in known
            known.update(run.names)
            for name, block in zip(run.names, run.ids, strict=True):
                assert name == _names(*self.chain_of(block))[-1]
                found.add(self.chain_of(block))
        assert found == self.kept.keys()

    def nothing_grows(self) -> None:
        """GROWTH-01: the containers are bound by the pool and by what is live."""
        assert len(self.manager._in_flight) <= len(self.live)
        assert len(self.manager._ghosts) <= 4 * POOL
        assert self.manager._sequences.keys() == self.live.keys()
        assert len(self.manager.tree._roots) <= len(NAMESPACES)
        assert len(self.manager.tree.expiries) <= len(self.kept)

    def close(self) -> None:
        """With everybody gone nothing is held, and all of the cache can be evicted (LEAK-08)."""
        self.images_hold_everything()
        for live in list(self.live.values()):
            self.leave(live, keep=False)
        for lease in self.leases:
            self.manager.unpin(lease)
        self.leases.clear()
        assert self.manager.census().held == 0
        assert not self.manager.pool._pins
        self.manager.evict(POOL)
        assert self.manager.census().free == POOL
        assert not self.kept
        assert not self.manager.tree._roots
        assert not len(self.manager.tree.expiries)
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
            tuple(_ints(self.prefix(node)))[: end * BLOCK]
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
            key = self.prefix(node)
            first = node.depth // BLOCK - len(node.ids)
            text = sequence.tokens[: whole * BLOCK].tobytes()
            common = min(whole, node.depth // BLOCK) - first
            if node.namespace == sequence.namespace and not node.locks and common > 0:
                idle += sum(
                    key[: (first + k) * BLOCK * 4] == text[: (first + k) * BLOCK * 4] for k in range(1, common + 1)
                )
        return idle

    def prefix(self, node: Node) -> bytes:
        return b"".join(reversed([bytes(part.tokens) for part in self.manager.tree.path(node)]))

    def evictions(self) -> int:
        return sum(self.manager.stats().evictions.values())


def _ints(tokens: bytes) -> list[int]:
    return list(memoryview(tokens).cast("i"))


def _names(namespace: Namespace, text: Text) -> list[bytes]:
    """Of all whole blocks of a text, from scratch."""
    return names_after(namespace.shelf().namespace, encode_tokens(text).tobytes(), BLOCK)


def _some_retention(rng: Random, length: int) -> tuple[Retention, ...]:
    ranges = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randint(0, length)
        end = rng.choice((None, start + rng.randint(1, 9)))
        ranges.append(Retention(start, end, rng.choice((-1, 0, 1, 2)), rng.choice((None, rng.randint(1, 60)))))
    return tuple(ranges)


def _is_in_line(one: Text, other: Text) -> bool:
    """Whether one of them continues the other."""
    return _agreeing(one, other) == min(len(one), len(other))


def _agreeing(one: Text, other: Text) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


class CacheMachine(RuleBasedStateMachine):
    """The same actions, chosen and shrunk by hypothesis."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(sharing=st.booleans())
    def choose(self, *, sharing: bool) -> None:
        self.world = World(sharing=sharing)

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
    stats = _walk(World(), seed, steps=4000)
    reached = (
        stats.prefix_hits,
        stats.resume_hit_tokens,
        stats.cow_forks,
        stats.partial_copies,
        stats.duplicates_freed,
        stats.tier_hit_tokens,
    )
    assert all(reached), "the walk must come through every part"
    assert stats.evicted_then_wanted
    assert stats.policy_faults
    assert set(stats.evictions) == {"allocate", "call", "watermark", "forget", "distrust"}
    assert stats.loaded_tokens > stats.tier_hit_tokens


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
    _walk(World(sharing=seed % 5 > 0), seed, steps=40_000)
