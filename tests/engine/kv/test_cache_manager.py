from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, count
from random import Random

import pytest

from octavo.engine.kv import CacheManager, Namespace, Retention, Sequence, encode_tokens
from octavo.engine.kv.node import Node
from octavo.engine.kv.sequence import State
from octavo.errors import CacheMisuse, OutOfBlocks
from octavo.policies.eviction import Lru

SPACE = Namespace("w")


class Cache:
    """A manager and a short way to use it; every call is followed by the census."""

    def __init__(self, blocks: int = 32, block_size: int = 4, *, sharing: bool = True) -> None:
        self.block_size = block_size
        self.faults: list[str] = []
        ticks = count()
        self.manager = CacheManager(
            blocks,
            block_size,
            Lru(blocks),
            clock=lambda: float(next(ticks)),
            on_fault=lambda where, _: self.faults.append(where),
            sharing=sharing,
        )
        self._ids = count(1)

    def sequence(self, tokens: list[int], space: Namespace = SPACE) -> Sequence:
        return Sequence(next(self._ids), encode_tokens(tokens), space, block_size=self.block_size)

    def admit(self, tokens: list[int], space: Namespace = SPACE) -> Sequence:
        sequence = self.sequence(tokens, space)
        self.manager.copied(self.manager.admit(sequence).copies)
        self.manager.census()
        return sequence

    def compute(self, sequence: Sequence, tokens: int | None = None, then: int | None = None) -> None:
        """``tokens`` more (all that are left) are computed; ``then`` comes out."""
        length = sequence.uncomputed if tokens is None else tokens
        self.manager.copied(self.manager.extend(sequence, length))
        self.manager.commit(sequence, length, then)
        self.manager.census()

    def decode(self, sequence: Sequence, *tokens: int) -> None:
        for token in tokens:
            self.compute(sequence, then=token)

    def finish(self, sequence: Sequence) -> None:
        self.manager.finish(sequence)
        self.manager.census()

    def serve(self, tokens: list[int], space: Namespace = SPACE) -> int:
        """From beginning to end; returns the tokens that were found."""
        sequence = self.admit(tokens, space)
        found = sequence.computed
        self.compute(sequence, then=0)
        self.finish(sequence)
        return found


def _indexed(manager: CacheManager) -> Iterator[tuple[tuple[Namespace, bytes], int]]:
    """(namespace, whole prefix) and block of every index entry."""
    size = manager.block_size * 4
    for node in manager.tree.nodes():
        key = b"".join(reversed([bytes(part.tokens) for part in manager.tree.path(node)]))
        first = len(key) // size - len(node.ids)
        for number, block in enumerate(node.ids):
            yield (node.namespace, key[: (first + number + 1) * size]), block


def _no_doubles(manager: CacheManager) -> None:
    chains, blocks = zip(*_indexed(manager), strict=True)
    assert len(set(chains)) == len(chains)
    assert len(set(blocks)) == len(blocks)


# hits


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 12, 13])
def test_a_full_hit_leaves_the_last_token_to_compute(length: int) -> None:
    """PREFIX-01, PREFIX-02, PREFIX-13: at least one token, and never a second index entry for a chain."""
    cache = Cache()
    prompt = list(range(1, length + 1))
    assert cache.serve(prompt) == 0
    again = cache.admit(prompt)
    whole = length // 4 * 4
    assert again.computed == min(length - 1, whole)
    assert again.uncomputed >= 1
    assert again.tokens[again.computed] == prompt[again.computed]
    cache.compute(again, then=77)
    assert again.computed == length
    cache.finish(again)
    for tail in ([7] * 5, [8] * 5):
        assert cache.serve(prompt + tail) >= whole
    _no_doubles(cache.manager)
    assert cache.manager.stats().duplicates_freed == (1 if length in (4, 8, 12) else 0)


def test_a_hit_inside_a_block_is_copied() -> None:
    cache = Cache()
    cache.serve([1, 2, 3, 4, 5, 6, 7, 8])
    source = dict(_indexed(cache.manager))[SPACE, encode_tokens(range(1, 9)).tobytes()]
    sequence = cache.sequence([1, 2, 3, 4, 5, 6, 9, 9])
    admission = cache.manager.admit(sequence)
    assert admission.cached_tokens == 6
    assert admission.copies == ((source, sequence.table.blocks[1]),)
    assert sequence.table.shared == 1
    assert cache.manager.stats().partial_copies == 1


def test_the_source_of_a_copy_stays_until_the_copy_was_made() -> None:
    """COW-10: the donor's count covers partial matches too."""
    cache = Cache(blocks=4)
    cache.serve([1, 2, 3, 4])
    sequence = cache.sequence([1, 2, 3, 9])
    ((source, _),) = cache.manager.admit(sequence).copies
    cache.manager.evict(4)
    assert not cache.manager.pool.block(source).is_free
    assert cache.manager.census().in_transfer == 1
    cache.manager.copied(((source, sequence.table.blocks[0]),))
    assert cache.manager.pool.block(source).is_free
    cache.manager.census()


def test_the_last_evictable_block_is_not_kept_to_copy_from() -> None:
    """With no block to spare a partial hit gives way to the admission."""
    cache = Cache(blocks=2)
    cache.serve([1, 2, 3, 4])
    sequence = cache.admit([1, 2, 3, 9, 9, 9, 9, 9])
    assert sequence.computed == 0
    assert cache.manager.stats().evictions == {"allocate": 1}


@pytest.mark.parametrize("outputs", [1, 2, 3, 4, 5, 8])
def test_generated_tokens_are_found_by_the_next_turn(outputs: int) -> None:
    """REFCOUNT-04: what stays cached is prompt + outputs - 1, rounded down to whole blocks."""
    cache = Cache()
    sequence = cache.admit([1, 2, 3, 4, 5])
    cache.decode(sequence, *range(10, 10 + outputs))
    turn = list(sequence.tokens)
    cache.finish(sequence)
    written = (5 + outputs - 1) // 4 * 4
    assert cache.manager.tree.blocks * 4 == written
    assert cache.admit([*turn, 99, 98, 97]).computed == written


def test_a_block_that_was_handed_on_is_not_found_any_more() -> None:
    """REFCOUNT-05, PREFIX-11: an old key never points to a reused block."""
    cache = Cache(blocks=4)
    cache.serve([1, 2, 3, 4, 5, 6, 7, 8])
    other = cache.admit([9] * 16)
    again = cache.sequence([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.manager.try_admit(again) is None
    cache.compute(other, then=1)
    cache.finish(other)
    cache.manager.admit(again)
    assert again.computed == 0
    _no_doubles(cache.manager)


def test_a_tiny_pool_never_gives_a_stale_hit() -> None:
    """PREFIX-11 with 1000 random prompts: a hit never exceeds what the index really holds."""
    cache, random = Cache(blocks=3), Random(5)  # noqa: S311  # not for secrets
    for _ in range(1000):
        prompt = [random.randint(1, 2) for _ in range(random.randint(1, 12))]
        index = dict(_indexed(cache.manager))
        sequence = cache.admit(prompt)
        for number, block in enumerate(sequence.table.blocks[: sequence.table.shared], 1):
            assert index[SPACE, encode_tokens(prompt[: number * 4]).tobytes()] == block
        cache.compute(sequence, then=1)
        cache.finish(sequence)


def test_prompts_share_no_more_than_their_common_beginning() -> None:
    """HASH-01: tokens are compared, nothing is believed for its hash."""
    cache, random = Cache(blocks=400), Random(2)  # noqa: S311  # not for secrets
    prompts = [[random.randint(0, 1) for _ in range(12)] for _ in range(50)]
    for number, prompt in enumerate(prompts):
        common = max((_common(prompt, earlier) for earlier in prompts[:number]), default=0)
        assert cache.serve(prompt) <= min(common, 11)


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


SPACES = [
    Namespace("w", salt="x"),
    Namespace("w", adapter="x"),
    Namespace("w", adapter="a", salt="b"),
    Namespace("w", salt="ab"),
    Namespace("w", salt=""),
    Namespace("w"),
    Namespace("v"),
]


@pytest.mark.parametrize(("one", "other"), list(combinations(SPACES, 2)))
def test_namespaces_never_share(one: Namespace, other: Namespace) -> None:
    """HASH-05: no pair of them, and each with itself."""
    cache = Cache()
    prompt = list(range(10))
    cache.serve(prompt, one)
    assert cache.serve(prompt, other) == 0
    assert cache.serve(prompt, one) == 8


@pytest.mark.parametrize("length", range(8, 65, 8))
def test_a_tenant_cannot_probe_the_prompts_of_another(length: int) -> None:
    """TENANT-01: nothing is found from the first token on, and nothing is copied; with the same salt it is."""
    cache = Cache(blocks=64)
    secret = list(range(64))
    cache.serve(secret, Namespace("w", salt="a"))
    before = cache.manager.stats()
    probe = cache.admit(secret[:length], Namespace("w", salt="b"))
    after = cache.manager.stats()
    assert probe.computed == 0
    assert (after.prefix_hits, after.partial_copies) == (before.prefix_hits, before.partial_copies)
    assert cache.manager.producer(cache.sequence(secret[:length], Namespace("w", salt="a"))) is None
    assert cache.admit(secret[:length], Namespace("w", salt="a")).computed == length - 1


# admission


def test_a_refused_admission_changes_nothing() -> None:
    """EVICT-05: hits are not taken, nothing is evicted, the order stays; what just fits is admitted."""
    cache = Cache(blocks=6)
    cache.serve(list(range(12)))
    manager = cache.manager
    before = manager.census(), manager.stats(), list(manager.tree.candidates), dict(_indexed(manager))
    last_use = [node.last_use for node in manager.tree.nodes()]
    for _ in range(100):
        refused = cache.sequence(list(range(28)))
        assert manager.try_admit(refused) is None
        assert (refused.state, refused.computed, len(refused.table)) == (State.OUTSIDE, 0, 0)
    assert (manager.census(), manager.stats(), list(manager.tree.candidates), dict(_indexed(manager))) == before
    assert [node.last_use for node in manager.tree.nodes()] == last_use
    with pytest.raises(OutOfBlocks, match="needs up to 7 blocks; 3 are free"):
        manager.admit(cache.sequence(list(range(28))))
    assert cache.admit(list(range(24))).computed == 12


def test_an_admission_that_fails_midway_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """LEAK-08: lock, pin and root are undone when the last step fails, 200 times."""
    cache = Cache()
    cache.serve([1, 2, 3, 4, 5, 6, 7, 8])
    manager = cache.manager

    def fail(count: int, after: int = -1) -> None:
        raise OutOfBlocks("as if")

    before = manager.census()
    for space in (SPACE, Namespace("w", salt="new")):
        for _ in range(100):
            with monkeypatch.context() as patch:
                patch.setattr(manager.pool, "allocate", fail)
                assert manager.try_admit(cache.sequence([1, 2, 3, 4, 5, 6, 9, 9], space)) is None
            assert manager.census() == before
            assert not manager.pool._pins
    assert len(manager.tree._roots) == 1
    assert not manager._sequences
    assert len(manager._in_flight) == 0


def test_a_finished_prompt_gives_room_to_the_next_ones() -> None:
    """Allocation evicts: a pool of eight serves any number of distinct prompts."""
    cache = Cache(blocks=8)
    for number in range(40):
        assert cache.serve([number] * 4) == 0


def test_headroom_is_left_over() -> None:
    cache = Cache(blocks=4)
    assert cache.manager.try_admit(cache.sequence([1] * 8), headroom=3) is None
    assert cache.manager.try_admit(cache.sequence([1] * 8), headroom=2) is not None


def test_headroom_counts_what_could_be_evicted() -> None:
    cache = Cache(blocks=4)
    cache.serve([1] * 8)
    assert cache.manager.available == 4
    assert cache.manager.try_admit(cache.sequence([2] * 8), headroom=2) is not None


def test_without_reuse_everything_is_computed_and_published_all_the_same() -> None:
    cache = Cache()
    cache.serve(list(range(8)))
    sequence = cache.sequence(list(range(12)))
    admission = cache.manager.try_admit(sequence, reuse=False)
    assert admission is not None
    assert admission.cached_tokens == 0
    cache.compute(sequence, then=1)
    assert cache.manager.stats().duplicates_freed == 2
    assert cache.manager.tree.blocks == 3
    _no_doubles(cache.manager)


@pytest.mark.parametrize("state", ["twice", "finished", "id taken", "block size"])
def test_misused_admissions_are_refused(state: str) -> None:
    cache = Cache()
    sequence = cache.sequence([1, 2, 3])
    if state != "block size":
        cache.manager.admit(sequence)
    if state == "finished":
        cache.manager.finish(sequence)
    if state == "id taken":
        sequence = Sequence(sequence.seq_id, encode_tokens([1]), SPACE, block_size=4)
    if state == "block size":
        sequence = Sequence(5, encode_tokens([1]), SPACE, block_size=8)
    with pytest.raises(CacheMisuse):
        cache.manager.try_admit(sequence)
    cache.manager.census()


def test_pool_tree_and_tables_have_one_block_size() -> None:
    manager = Cache(block_size=7).manager
    assert manager.block_size == manager.pool.block_size == manager.tree.block_size == 7


# computing


def test_blocks_are_found_only_when_computed() -> None:
    """PREFIX-09: chunk by chunk; the producer is named to those who want the rest; its end strands nobody."""
    cache = Cache()
    prompt = list(range(12))
    first, second = cache.admit(prompt), cache.admit(prompt)
    assert (first.computed, second.computed) == (0, 0)
    follower = cache.sequence(prompt)
    assert cache.manager.producer(follower) is first
    cache.compute(first, 5)
    third = cache.admit(prompt)
    assert third.computed == 4
    assert cache.manager.producer(follower) is first
    cache.compute(first, 3)
    assert cache.manager.tree.blocks == 2
    cache.finish(first)  # cancelled in the middle of its prefill
    assert cache.manager.producer(follower) is not first
    assert cache.admit(prompt).computed == 8
    for sequence in (second, third):
        cache.compute(sequence, then=3)
        assert sequence.computed == 12
    _no_doubles(cache.manager)


def test_a_computed_prompt_has_no_producer_any_more() -> None:
    cache = Cache()
    sequence = cache.admit(list(range(9)))
    assert cache.manager.producer(cache.sequence(list(range(9)))) is sequence
    cache.compute(sequence, then=1)
    assert cache.manager.producer(cache.sequence(list(range(9)))) is None
    assert cache.manager.producer(cache.sequence(list(range(14)))) is None


def test_a_producer_that_left_is_named_to_nobody() -> None:
    cache = Cache()
    sequence = cache.admit(list(range(9)))
    cache.manager.preempt(sequence)
    assert cache.manager.producer(cache.sequence(list(range(9)))) is None


def test_equal_prompts_computed_together_end_on_the_same_blocks() -> None:
    """What was computed twice is freed once, and the index keeps one entry."""
    cache = Cache()
    one, other = cache.admit(list(range(9))), cache.admit(list(range(9)))
    cache.compute(one, then=1)
    cache.compute(other, then=2)
    assert list(one.table.blocks[:2]) == list(other.table.blocks[:2])
    assert one.table.blocks[2] != other.table.blocks[2]
    assert cache.manager.stats().duplicates_freed == 2
    assert cache.manager.pool.free == 32 - 4
    _no_doubles(cache.manager)


def test_commit_moves_on_by_what_was_computed() -> None:
    cache = Cache()
    sequence = cache.admit(list(range(10)))
    cache.compute(sequence, 3)
    assert (sequence.computed, sequence.uncomputed, cache.manager.tree.blocks) == (3, 7, 0)
    cache.compute(sequence, 1)
    assert cache.manager.tree.blocks == 1
    cache.compute(sequence, then=5)
    assert (sequence.computed, list(sequence.tokens[-2:])) == (10, [9, 5])


def test_growth_takes_a_block_when_it_is_needed_and_next_to_the_last_one() -> None:
    cache = Cache()
    sequence = cache.admit([1, 2, 3, 4])
    cache.compute(sequence, then=5)
    assert len(sequence.table) == 1
    cache.decode(sequence, 6, 7, 8, 9)
    assert list(sequence.table.blocks) == [0, 1]
    cache.decode(sequence, 10)
    assert list(sequence.table.blocks) == [0, 1, 2]


def test_growth_that_finds_no_block_changes_nothing() -> None:
    cache = Cache(blocks=2)
    one = cache.admit([1, 2, 3, 4])
    cache.admit([5])
    cache.compute(one, then=9)
    before = list(one.table.blocks), one.computed, one.writable
    with pytest.raises(OutOfBlocks):
        cache.manager.extend(one, 1)
    assert (list(one.table.blocks), one.computed, one.writable) == before
    cache.manager.census()


def test_measured_prefill_becomes_the_cost_of_the_entry() -> None:
    cache = Cache()
    sequence = cache.admit(list(range(8)))
    cache.manager.measured(sequence, 0.25)
    cache.manager.measured(sequence, 0.75)
    cache.compute(sequence, then=1)
    (node,) = cache.manager.tree.nodes()
    assert node.recompute_seconds == 0.5
    assert sequence.prefill_seconds == 0.0


def test_retention_and_tenant_reach_the_policy() -> None:
    cache = Cache()
    retention = (Retention(0, None, priority=3, ttl=50),)
    sequence = Sequence(9, encode_tokens([1] * 4), Namespace("w", salt="t"), block_size=4, retention=retention)
    cache.manager.admit(sequence)
    cache.compute(sequence, then=1)
    (node,) = cache.manager.tree.nodes()
    assert (node.priority, node.expires, node.tenant) == (3, sequence.retained_since + 50, "t")


# forks


def test_a_fork_costs_nothing_until_one_writes() -> None:
    """The first writer copies the block they share, the last one keeps it; neither sees the other's tokens."""
    cache = Cache()
    parent = cache.admit([1, 2, 3, 4, 5, 6])
    cache.compute(parent, then=7)
    free = cache.manager.pool.free
    child = cache.manager.fork(parent, 50)
    assert cache.manager.pool.free == free
    assert list(child.table.blocks) == list(parent.table.blocks)
    shared = parent.table.blocks[1]
    copies = cache.manager.extend(parent, 1)
    assert copies == ((shared, parent.table.blocks[1]),)
    assert parent.table.blocks[1] != child.table.blocks[1] == shared
    assert cache.manager.extend(child, 1) == ()
    assert cache.manager.stats().cow_forks == 1
    cache.manager.copied(copies)
    cache.manager.commit(parent, 1, 8)
    cache.manager.commit(child, 1, 9)
    assert (list(parent.tokens[-2:]), list(child.tokens[-2:])) == ([7, 8], [7, 9])
    cache.finish(parent)
    cache.finish(child)
    assert cache.manager.census().held == 0


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    cache = Cache()
    parent = cache.admit([1, 2, 3, 4])
    cache.compute(parent, then=5)
    child = cache.manager.fork(parent, 50)
    assert cache.manager.extend(parent, 1) == cache.manager.extend(child, 1) == ()
    assert parent.table.blocks[0] == child.table.blocks[0]
    assert parent.table.blocks[1] != child.table.blocks[1]


def test_a_fork_in_the_middle_of_prefill_copies_only_what_was_computed() -> None:
    cache = Cache()
    parent = cache.admit(list(range(16)))
    cache.compute(parent, 6)
    child = cache.manager.fork(parent, 50)
    assert len(cache.manager.extend(child, 10)) == 1
    assert not set(parent.table.blocks[1:]) & set(child.table.blocks[1:])
    cache.manager.census()


def test_a_block_with_free_rows_has_one_writer() -> None:
    """COW-10: three requests on a prompt that ends inside a block."""
    cache = Cache(block_size=8)
    prompt = list(range(11))
    cache.serve(prompt)
    running = [cache.admit(prompt) for _ in range(3)]
    for turn, sequence in enumerate(running):
        cache.decode(sequence, *[turn] * (3 + turn))
    tails = [sequence.table.blocks[1] for sequence in running]
    assert len(set(tails)) == 3
    assert all(cache.manager.pool.references(tail) == 1 for tail in tails)


def test_beams_that_are_pruned_and_forked_again_leave_clean_books() -> None:
    """REFCOUNT-01."""
    cache, random = Cache(blocks=64), Random(3)  # noqa: S311  # not for secrets
    first = cache.admit(list(range(30)))
    cache.compute(first, then=1)
    beams = [first, *(cache.manager.fork(first, 100 + n) for n in range(3))]
    ids = count(1000)
    for _ in range(20):
        for beam in beams:
            cache.compute(beam, then=random.randint(1, 3))
        chosen = [random.randrange(4) for _ in range(4)]
        children = [cache.manager.fork(beams[parent], next(ids)) for parent in chosen]
        for beam in beams:
            cache.finish(beam)
        beams = children
    assert all(len(beam.tokens) == 51 for beam in beams)
    for beam in beams:
        cache.finish(beam)
    assert cache.manager.census().held == 0


def test_children_have_ids_of_their_own() -> None:
    cache = Cache()
    parent = cache.admit([1, 2, 3])
    cache.manager.fork(parent, 50)
    for taken in (50, parent.seq_id):
        with pytest.raises(CacheMisuse, match="in use"):
            cache.manager.fork(parent, taken)
    cache.manager.census()


# the end


@pytest.mark.parametrize("leave", ["finish", "preempt"])
def test_a_sequence_that_left_takes_no_blocks_any_more(leave: str) -> None:
    cache = Cache()
    sequence = cache.admit([1, 2, 3, 4, 5])
    cache.compute(sequence, then=6)
    getattr(cache.manager, leave)(sequence)
    before = cache.manager.census()
    calls: list[Callable[[], object]] = [
        lambda: cache.manager.extend(sequence, 1),
        lambda: cache.manager.commit(sequence, 1, 7),
        lambda: cache.manager.finish(sequence),
        lambda: cache.manager.preempt(sequence),
        lambda: cache.manager.fork(sequence, 60),
    ]
    for call in calls:
        with pytest.raises(CacheMisuse, match=sequence.state.value):
            call()
    assert cache.manager.census() == before
    assert list(sequence.tokens) == [1, 2, 3, 4, 5, 6]


def test_a_preempted_sequence_finds_its_blocks_again_and_no_hit_is_counted() -> None:
    cache = Cache()
    sequence = cache.admit([1, 2, 3, 4, 5, 6])
    cache.decode(sequence, 7, 8, 9)
    cache.manager.preempt(sequence)
    assert sequence.computed == 0
    admission = cache.manager.try_admit(sequence, resumed=True)
    assert admission is not None
    assert admission.cached_tokens == 8
    stats = cache.manager.stats()
    assert (stats.prefix_hits, stats.prefix_hit_tokens, stats.prefix_query_tokens) == (0, 0, 6)
    assert stats.resume_hit_tokens == 8


def test_exclusive_blocks_are_what_preemption_gains() -> None:
    cache = Cache()
    one = cache.admit([1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.compute(one, then=1)
    assert cache.manager.exclusive_blocks(one) == 3
    other = cache.admit([1, 2, 3, 4, 9])
    assert cache.manager.exclusive_blocks(one) == 2
    cache.manager.fork(one, 70)
    assert cache.manager.exclusive_blocks(one) == 0
    assert cache.manager.exclusive_blocks(other) == 1


def test_copies_of_a_step_that_failed_release_their_sources() -> None:
    cache = Cache()
    parent = cache.admit([1, 2, 3])
    cache.compute(parent, then=4)
    child = cache.manager.fork(parent, 50)
    copies = cache.manager.extend(child, 1)
    cache.manager.finish(child)
    cache.manager.copied(copies)
    cache.finish(parent)
    assert cache.manager.census().free == 32


def test_off_means_that_nothing_is_found_or_kept() -> None:
    cache = Cache(sharing=False)
    assert cache.serve(list(range(12))) == 0
    assert cache.serve(list(range(12))) == 0
    waiting = cache.admit(list(range(12)))
    assert cache.manager.producer(cache.sequence(list(range(12)))) is None
    cache.finish(waiting)
    assert cache.manager.census().free == 32


def test_statistics_tell_what_happened() -> None:
    cache = Cache(blocks=8)
    cache.serve([1, 2, 3, 4, 5])
    running = cache.admit([1, 2, 3, 4, 6])
    stats = cache.manager.stats()
    assert (stats.allocations, stats.prefix_hits, stats.prefix_hit_tokens, stats.prefix_query_tokens) == (3, 1, 4, 10)
    assert (stats.free, stats.idle, stats.total, stats.utilization) == (6, 0, 8, 0.25)
    cache.finish(running)
    stats = cache.manager.stats()
    assert (stats.free, stats.idle, stats.utilization) == (7, 1, 0.0)


def test_a_hit_refreshes_the_entry() -> None:
    cache = Cache()
    cache.serve([1, 2, 3, 4])
    (node,) = cache.manager.tree.nodes()
    assert isinstance(node, Node)
    before = node.last_use
    cache.serve([1, 2, 3, 4, 5])
    assert node.last_use > before
    assert node.hits == 1
