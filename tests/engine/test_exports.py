"""Exports: what is wanted off the device is copied before anything can overwrite it, once, and failures are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from octavo.engine.exports import EXPORT_BLOCKS, Export, Exports, heads_of
from octavo.engine.model.runner import Int32Array, UInt8Array
from octavo.engine.testing import FakeRunner
from octavo.errors import DeviceOutOfMemory, EngineClosed
from octavo.storage.base import Head, Meta
from octavo.storage.manager.tier_manager import Batch
from octavo.storage.naming import NAME_BYTES, BlockName, Namespace, Shelf, name_after, names_after
from octavo.storage.record import RecordCodec
from octavo.tests.engine.conftest import InlineThread

B = 4
SHELF, OTHER = Namespace("m").shelf(), Namespace("m", salt="t").shelf()
CODEC = RecordCodec(block_size=B, payload_bytes=8 * B, run=b"run 0001")


class Run(NamedTuple):
    parent: BlockName
    names: list[BlockName]
    start: int
    tokens: bytes


class Sink:
    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.batches: list[Batch] = []

    goes_to = "here"

    def take(self, batch: Batch) -> None:
        self.batches.append(batch)

    @property
    def names(self) -> list[bytes]:
        return [block.head.name for batch in self.batches for block in batch.blocks]


class Recorder(FakeRunner):
    """Exports numbers that say which block and which generation of it they are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self.errors: list[Exception | None] = []

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        self.calls.append(blocks.tolist())
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        super().export_blocks(blocks, out)


class Bench:
    def __init__(self) -> None:
        self.runner = Recorder()
        self.runner.allocate(256, B)
        self.runner._memory[:] = [[number] * B for number in range(256)]
        self.faults: list[str] = []
        thread: InlineThread = InlineThread()
        self.exports = Exports(
            self.runner,
            thread,  # type: ignore[arg-type]  # stands in
            CODEC,
            lambda where, error: self.faults.append(f"{where}: {error}"),
            lambda: 0.0,
        )


def export(block: int, sink: Sink, shelf: Shelf = SHELF) -> Export:
    name = name_after(shelf.namespace, block.to_bytes(4, "little"))
    return Export(block, shelf, Head(name, shelf.namespace, 0, bytes(4 * B)), Meta(hits=block), sink)


def many(blocks: range, sink: Sink, shelf: Shelf = SHELF) -> list[Export]:
    return [export(block, sink, shelf) for block in blocks]


@pytest.mark.asyncio
async def test_what_cannot_wait_is_copied_whatever_the_room() -> None:
    bench, sink = Bench(), Sink(room=0)
    bench.exports.now(many(range(3), sink))
    bench.exports.later(many(range(3, 6), sink))
    assert await bench.exports.run(spare=100) == 3
    assert bench.runner.calls == [[0, 1, 2]]
    assert bench.exports.outstanding(sink) == 3
    assert bench.exports.has_waiting
    assert not bench.exports.has_ready


@pytest.mark.asyncio
async def test_the_payloads_are_those_of_the_blocks() -> None:
    bench, sink = Bench(), Sink()
    bench.exports.now(many(range(5, 9), sink))
    await bench.exports.run(spare=0)
    (batch,) = sink.batches
    assert [block.meta.hits for block in batch.blocks] == [5, 6, 7, 8]
    assert [payload[::8].tolist() for payload in CODEC.payloads(batch.buffer)] == [[n] * B for n in range(5, 9)]
    assert bench.exports.blocks == 4


@pytest.mark.asyncio
@pytest.mark.parametrize(("room", "spare", "copied"), [(100, 3, 3), (3, 100, 3), (0, 5, 0), (1, 1, 1)])
async def test_what_can_wait_is_copied_as_far_as_there_is_time_and_room(room: int, spare: int, copied: int) -> None:
    bench, sink = Bench(), Sink(room)
    bench.exports.later(many(range(10), sink))
    assert await bench.exports.run(spare) == copied
    assert bench.exports.outstanding(sink) == 10 - copied
    assert bench.runner.calls == ([list(range(copied))] if copied else [])


@pytest.mark.asyncio
async def test_what_cannot_wait_takes_its_room_first() -> None:
    bench, sink = Bench(), Sink(room=4)
    bench.exports.now(many(range(3), sink))
    bench.exports.later(many(range(3, 9), sink))
    assert await bench.exports.run(spare=100) == 4


@pytest.mark.asyncio
async def test_sinks_that_share_a_queue_are_not_offered_its_room_twice() -> None:
    bench, one, two = Bench(), Sink(room=4), Sink(room=4)
    bench.exports.later(many(range(6), one))
    bench.exports.later(many(range(6, 12), two))
    assert await bench.exports.run(spare=100) == 4


@pytest.mark.asyncio
async def test_a_sink_that_is_full_does_not_hold_up_another() -> None:
    bench, full, free = Bench(), Sink(room=0), Sink()
    bench.exports.later(many(range(3), full))
    bench.exports.later(many(range(2, 6), free))
    await bench.exports.run(spare=100)
    assert [block.meta.hits for block in free.batches[0].blocks] == [3, 4, 5], "block 2 is copied once for both"
    assert full.batches == []


@pytest.mark.asyncio
async def test_a_sink_with_little_room_gets_little() -> None:
    bench, small, large = Bench(), Sink(room=2), Sink(room=100)
    bench.exports.later(many(range(5), small))
    bench.exports.later(many(range(5, 10), large))
    assert await bench.exports.run(spare=100) == 7
    assert (len(small.names), len(large.names)) == (2, 5)


@pytest.mark.asyncio
async def test_a_batch_has_one_sink_and_one_shelf_and_a_bounded_size() -> None:
    bench, one, two = Bench(), Sink(), Sink()
    bench.exports.now(many(range(3), one) + many(range(3, 5), two) + many(range(5, 7), two, OTHER))
    bench.exports.now(many(range(10, 10 + EXPORT_BLOCKS + 1), one))
    await bench.exports.run(spare=0)
    assert [len(call) for call in bench.runner.calls] == [3, 2, 2, EXPORT_BLOCKS, 1]
    assert [(batch.shelf, len(batch.blocks)) for batch in two.batches] == [(SHELF, 2), (OTHER, 2)]


@pytest.mark.asyncio
async def test_a_block_is_copied_once_for_each_sink() -> None:
    bench, one, two = Bench(), Sink(), Sink()
    for sink in (one, two, one):
        bench.exports.later(many(range(2), sink))
    assert (bench.exports.outstanding(one), bench.exports.outstanding(two)) == (2, 2)
    await bench.exports.run(spare=100)
    assert (len(one.names), len(two.names)) == (2, 2)
    assert not bench.exports.has_waiting


@pytest.mark.asyncio
async def test_what_is_evicted_cannot_wait_any_longer() -> None:
    bench, sink, other = Bench(), Sink(room=0), Sink(room=0)
    bench.exports.later(many(range(4), sink))
    assert bench.exports.evicted([1, 3, 9], sink) == {1, 3}
    assert bench.exports.evicted([2], other) == set(), "promised to somebody else only"
    assert await bench.exports.run(spare=0) == 3
    assert sorted(bench.runner.calls[0]) == [1, 2, 3]
    assert bench.exports.outstanding(sink) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [RuntimeError("x"), DeviceOutOfMemory("x"), MemoryError()], ids=repr)
async def test_a_copy_that_fails_loses_its_batch_alone(error: Exception) -> None:
    bench, sink = Bench(), Sink()
    bench.exports.now(many(range(2), sink) + many(range(2, 4), sink, OTHER) + many(range(4, 6), sink))
    bench.runner.errors = [None, error]
    await bench.exports.run(spare=0)
    assert (bench.exports.blocks, bench.exports.failed) == (4, 2)
    assert [batch.shelf for batch in sink.batches] == [SHELF, SHELF]
    assert len(bench.faults) == 1
    assert bench.exports.outstanding(sink) == 0


@pytest.mark.asyncio
async def test_the_end_of_the_thread_is_passed_on_and_nothing_stays_promised() -> None:
    bench, sink = Bench(), Sink()
    bench.exports.now(many(range(2), sink))
    bench.runner.errors = [EngineClosed("closed")]
    with pytest.raises(EngineClosed):
        await bench.exports.run(spare=0)
    assert bench.exports.outstanding(sink) == 0


@pytest.mark.asyncio
async def test_bad_blocks_are_not_copied() -> None:
    bench, sink = Bench(), Sink()
    bench.exports.later(many(range(4), sink))
    bench.exports.dropped([0, 2, 77])
    await bench.exports.run(spare=100)
    assert bench.runner.calls == [[1, 3]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("unwanted", "left"),
    [
        (lambda export: export.shelf == OTHER, [0, 1, 20, 21]),
        (lambda export: export.meta.hits % 10 == 0, [1, 11, 21]),
        (lambda _: True, []),
    ],
)
async def test_what_is_withdrawn_is_not_copied(unwanted: Callable[[Export], bool], left: list[int]) -> None:
    bench, sink = Bench(), Sink()
    bench.exports.now(many(range(2), sink))
    bench.exports.later(many(range(10, 12), sink, OTHER) + many(range(20, 22), sink))
    bench.exports.withdraw(unwanted)
    assert bench.exports.outstanding(sink) == len(left)
    await bench.exports.run(spare=100)
    assert [block for call in bench.runner.calls for block in call] == left


def test_heads_follow_each_other() -> None:
    tokens = bytes(range(4 * B * 3))
    names = names_after(SHELF.namespace, tokens, B)
    heads = heads_of(Run(SHELF.namespace, names, 40, tokens))
    assert [head.start for head in heads] == [40, 44, 48]
    assert [head.parent for head in heads] == [SHELF.namespace, *names[:2]]
    assert b"".join(head.tokens for head in heads) == tokens
    assert all(name_after(head.parent, head.tokens) == head.name for head in heads)
    assert all(len(head.name) == NAME_BYTES for head in heads)
