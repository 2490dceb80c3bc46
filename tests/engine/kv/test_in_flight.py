from __future__ import annotations

from array import array

from octavo.engine.kv import Namespace, PrefixTree, Sequence, encode_tokens
from octavo.engine.kv.in_flight import InFlight
from octavo.engine.kv.node import Traits
from octavo.policies.eviction import Lru

SPACE = Namespace("w")
BLOCK = 4


class Work:
    """A tree, the index, and sequences with leases on what the tree has of them."""

    def __init__(self) -> None:
        self.tree = PrefixTree(BLOCK, Lru(64), lambda: 0.0)
        self.index = InFlight(BLOCK)

    def sequence(self, tokens: list[int], space: Namespace = SPACE) -> Sequence:
        sequence = Sequence(1, encode_tokens(tokens), space, block_size=BLOCK)
        match = self.tree.match(space, sequence.tokens.tobytes(), len(tokens) - 1)
        sequence.node, sequence.table.shared = self.tree.lock_match(space, match), len(match.ids)
        return sequence

    def publish(self, sequence: Sequence, blocks: int) -> None:
        """So many more of its blocks."""
        shared = sequence.table.shared
        assert sequence.node is not None
        tokens = sequence.tokens[shared * BLOCK : (shared + blocks) * BLOCK].tobytes()
        ids = array("i", range(shared, shared + blocks))
        sequence.node, _ = self.tree.publish(sequence.node, tokens, ids, Traits(0.0))
        sequence.table.shared += blocks

    def producer(self, tokens: list[int], space: Namespace = SPACE) -> Sequence | None:
        key = encode_tokens(tokens).tobytes()
        return self.index.producer(self.tree.match(space, key, len(tokens)), key)


def test_the_next_block_finds_its_producer() -> None:
    work = Work()
    producer = work.sequence(list(range(12)))
    work.publish(producer, 1)
    work.index.watch(producer)
    assert work.producer(list(range(9))) is producer
    assert work.producer(list(range(7))) is None  # that block is not wanted in full
    assert work.producer([0, 1, 2, 3, 4, 5, 6, 9, 8]) is None
    assert work.producer(list(range(9)), Namespace("w", salt="s")) is None


def test_the_whole_prefix_must_agree() -> None:
    work = Work()
    producer, other = work.sequence(list(range(12))), work.sequence([9, 1, 2, 3, 8, 8, 8, 8])
    work.publish(producer, 1)
    work.publish(other, 1)
    work.index.watch(producer)
    assert work.producer([9, 1, 2, 3, 4, 5, 6, 7, 8]) is None


def test_who_parts_before_its_place_finds_no_producer() -> None:
    work = Work()
    producer = work.sequence(list(range(12)))
    work.publish(producer, 2)
    work.index.watch(producer)
    assert work.producer([0, 1, 2, 3, 8, 9, 10, 11]) is None  # in the middle of its edge; those are its next tokens


def test_a_producer_is_found_when_its_edge_was_split() -> None:
    work = Work()
    producer = work.sequence(list(range(16)))
    work.publish(producer, 2)
    work.index.watch(producer)
    other = work.sequence([0, 1, 2, 3, 7, 7, 7, 7])
    work.publish(other, 1)
    assert work.producer(list(range(12))) is producer


def test_a_block_that_is_not_known_in_full_has_no_producer() -> None:
    work = Work()
    sequence = work.sequence(list(range(7)))
    work.publish(sequence, 1)
    work.index.watch(sequence)
    assert len(work.index) == 0


def test_who_has_no_place_in_the_tree_is_nobodys_producer() -> None:
    work = Work()
    work.index.watch(Sequence(1, encode_tokens(list(range(8))), SPACE, block_size=BLOCK))
    assert len(work.index) == 0


def test_the_first_producer_stays() -> None:
    work = Work()
    first, second = work.sequence(list(range(8))), work.sequence(list(range(12)))
    work.index.watch(first)
    work.index.watch(second)
    assert work.producer(list(range(8))) is first
    work.index.forget(second)
    assert work.producer(list(range(8))) is first
    work.index.forget(first)
    assert work.producer(list(range(8))) is None
    assert len(work.index) == 0


def test_a_producer_moves_on_and_can_be_forgotten_twice() -> None:
    work = Work()
    producer = work.sequence(list(range(9)))
    work.index.watch(producer)
    work.publish(producer, 1)
    work.index.watch(producer)
    assert work.producer(list(range(9))) is producer
    work.publish(producer, 1)
    work.index.watch(producer)
    assert len(work.index) == 0
    work.index.forget(producer)
