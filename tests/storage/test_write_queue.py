from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import StorageError
from octavo.storage.base import Meta
from octavo.storage.manager.write_queue import Batch, Cargo, Item, Offer, WriteQueue, seal_items
from octavo.tests.storage.manager_rig import RECORD, SAMPLES, SHELF, batch_of, names_of

OTHER = SAMPLES.shelf("other")
CHAIN = SAMPLES.chain(SHELF, 12)
THERE = SAMPLES.chain(OTHER, 12)


def queue_of(blocks: int) -> WriteQueue:
    return WriteQueue(blocks * RECORD + RECORD - 1, RECORD)


def item(at: int, *, other: bool = False) -> Item:
    record = (THERE if other else CHAIN)[at]
    return Item(OTHER if other else SHELF, record.head, record.meta, record.data)


def test_takes_what_there_is_room_for_each_block_once() -> None:
    queue = queue_of(3)
    assert queue.add([item(0), item(0), item(1)]) == 2
    assert queue.add([item(1), item(2), item(3)]) == 1
    assert queue.add([item(0)]) == 0
    assert queue.blocks == 3
    assert queue.bytes == 3 * RECORD
    assert queue.find(SHELF, CHAIN[3].head.name) is None
    assert queue.find(OTHER, CHAIN[0].head.name) is None


def test_what_is_being_written_is_found_and_counts_until_it_is_done() -> None:
    queue = queue_of(2)
    queue.add([item(0), item(1)])
    taken = queue.take(1)
    assert [each.head for each in taken] == [CHAIN[0].head]
    assert queue.find(SHELF, CHAIN[0].head.name) is not None
    assert queue.room() == 0
    queue.done(taken)
    assert queue.find(SHELF, CHAIN[0].head.name) is None
    assert queue.room() == 1


def test_a_batch_is_of_one_shelf() -> None:
    queue = queue_of(9)
    queue.add([item(0), item(1), item(0, other=True), item(2)])
    assert [len(queue.take(8)) for _ in range(4)] == [2, 1, 1, 0]


def test_reserved_room_is_nobody_elses() -> None:
    queue = queue_of(4)
    assert queue.reserve(3) == 3
    assert queue.reserve(3) == 1
    assert queue.add([item(0)]) == 0
    queue.release(4)
    assert queue.add([item(0)]) == 1


def test_removes_by_tenant_and_remembers_newer_meta() -> None:
    queue = queue_of(9)
    queue.add([item(0), item(1, other=True), item(2)])
    queue.touch(SHELF, {CHAIN[2].head.name: Meta(hits=9), CHAIN[5].head.name: Meta()})
    assert queue.remove(lambda each: each.shelf == OTHER) == 1
    assert [(each.head, each.meta.hits) for each in queue.take(9)] == [(CHAIN[0].head, 0), (CHAIN[2].head, 9)]
    assert queue.clear() == []


@given(st.lists(st.tuples(st.sampled_from("artdcv"), st.integers(0, 11)), max_size=60), st.integers(1, 6))
def test_the_bound_holds_whatever_happens(steps: list[tuple[str, int]], bound: int) -> None:
    queue, written, reserved = queue_of(bound), list[Item](), 0
    for act, at in steps:
        if act == "a":
            queue.add([item(at), item(11 - at, other=True)])
        elif act == "r":
            reserved += queue.reserve(at)
        elif act == "v":
            queue.release(reserved)
            reserved = 0
        elif act == "t":
            written += queue.take(at)
        elif act == "d":
            queue.done(written[:at])
            written = written[at:]
        else:
            queue.clear()
        assert queue.blocks + reserved <= bound
        assert queue.room() == bound - queue.blocks - reserved
        assert all(queue.find(each.shelf, each.head.name) is not None for each in written)


def test_an_offer_shares_the_memory_of_its_batch_or_copies_few_rows() -> None:
    batch = batch_of(CHAIN[:8])
    shared, few = queue_of(8), queue_of(2)
    offer = Offer(batch, pass_on=True)
    assert offer.to(shared, range(8)) == set(range(8))
    assert offer.to(few, range(8)) == {0, 1}
    assert offer.to(few, range(8)) == {0, 1}  # known, and no room for more
    for queue, expected in ((shared, True), (few, False)):
        entry = queue.find(SHELF, CHAIN[1].head.name)
        assert entry is not None
        assert isinstance(entry.source, Cargo)
        assert (entry.source.rows[entry.row].base is batch.buffer) is expected
        payload = entry.payload(SAMPLES.codec.header_bytes)
        assert payload == CHAIN[1].data[SAMPLES.codec.header_bytes :]


def test_a_batch_without_enough_rows_is_refused() -> None:
    batch = batch_of(CHAIN[:2])
    with pytest.raises(StorageError, match="rows"):
        Offer(Batch(SHELF, [*batch.blocks, *batch.blocks], batch.buffer), pass_on=False)


@pytest.mark.asyncio
async def test_a_row_is_sealed_once_however_many_tiers_take_it() -> None:
    queues = [queue_of(8), queue_of(8), queue_of(2)]
    offer = Offer(batch_of(CHAIN[:8]), pass_on=False)
    for queue in queues:
        offer.to(queue, range(8))
    limiter = anyio.CapacityLimiter(4)
    sealed: list[list[tuple[bytes, bytes]]] = []

    async def seal(queue: WriteQueue, created: float) -> None:
        records = await seal_items(queue.take(8), SAMPLES.codec, created, limiter)
        sealed.append([(record.head.name, bytes(record.data)) for record in records])

    async with anyio.create_task_group() as group:
        for created, queue in enumerate(queues):
            group.start_soon(seal, queue, float(created))
    everywhere = [records for records in sealed if len(records) == 8]
    assert everywhere[0] == everywhere[1]
    for records in sealed:
        for name, data in records:
            opened = SAMPLES.codec.open(SHELF, name, memoryview(data))
            assert opened.head.name == name
    assert [name for name, _ in everywhere[0]] == names_of(CHAIN[:8])


def test_is_ready_for_a_usual_batch_or_when_it_is_empty() -> None:
    small, large = queue_of(2), queue_of(100)
    assert small.ready_for()
    small.add([item(0)])
    assert not small.ready_for()
    large.add(item(at) for at in range(12))
    assert large.ready_for()
    large.reserve(30)
    assert not large.ready_for()
