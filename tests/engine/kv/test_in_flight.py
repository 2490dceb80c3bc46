from __future__ import annotations

from array import array

from octavo.engine.kv import Namespace, Sequence, encode_tokens
from octavo.engine.kv.in_flight import InFlight

SPACE = Namespace("w")


def _sequence(tokens: list[int], shared: int = 0, space: Namespace = SPACE) -> Sequence:
    sequence = Sequence(1, encode_tokens(tokens), space, block_size=4)
    sequence.table.blocks, sequence.table.shared = array("i", range(shared)), shared
    return sequence


def _key(tokens: list[int]) -> bytes:
    return encode_tokens(tokens).tobytes()


def test_the_next_block_finds_its_producer() -> None:
    index = InFlight(4)
    producer = _sequence(list(range(12)), shared=1)
    index.watch(producer)
    assert index.producer(SPACE, _key(list(range(9))), 1) is producer
    assert index.producer(SPACE, _key(list(range(9))), 0) is None
    assert index.producer(SPACE, _key(list(range(7))), 1) is None  # that block is not wanted in full
    assert index.producer(Namespace("w", salt="s"), _key(list(range(9))), 1) is None


def test_the_whole_prefix_must_agree() -> None:
    index = InFlight(4)
    index.watch(_sequence(list(range(12)), shared=1))
    assert index.producer(SPACE, _key([9, 1, 2, 3, 4, 5, 6, 7, 8]), 1) is None


def test_a_block_that_is_not_known_in_full_has_no_producer() -> None:
    index = InFlight(4)
    index.watch(_sequence(list(range(7)), shared=1))
    assert len(index) == 0


def test_the_first_producer_stays() -> None:
    index = InFlight(4)
    first, second = _sequence(list(range(8))), _sequence(list(range(12)))
    index.watch(first)
    index.watch(second)
    assert index.producer(SPACE, _key(list(range(8))), 0) is first
    index.forget(second)
    assert index.producer(SPACE, _key(list(range(8))), 0) is first
    index.forget(first)
    assert index.producer(SPACE, _key(list(range(8))), 0) is None
    assert len(index) == 0


def test_a_producer_moves_on_and_can_be_forgotten_twice() -> None:
    index = InFlight(4)
    producer = _sequence(list(range(9)))
    index.watch(producer)
    producer.table.shared = 1
    index.watch(producer)
    assert index.producer(SPACE, _key(list(range(9))), 0) is None
    assert index.producer(SPACE, _key(list(range(9))), 1) is producer
    producer.table.shared = 2
    index.watch(producer)
    assert len(index) == 0
    index.forget(producer)
