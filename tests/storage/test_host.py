from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest, StorageError
from octavo.storage.base import Meta, Record
from octavo.storage.host import slab as slab_module
from octavo.storage.host.index import HostEntry, HostIndex
from octavo.storage.host.slab import Copy, Slab, pieces
from octavo.storage.host.tier import HostOptions, HostTier
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.ranking import Recency
from octavo.storage.testing.contract import SampleBlocks

SAMPLES = SampleBlocks()
LARGE = SampleBlocks(payload_bytes=600_000)
SHELF = SAMPLES.shelf("a")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(slots: int, samples: SampleBlocks = SAMPLES, clock: Clock | None = None) -> AsyncIterator[HostTier]:
    chosen = clock or Clock()
    wall = chosen if clock else Clock()
    options = HostOptions(bytes=slots * samples.geometry.record_bytes)
    tier = HostTier(options, samples.geometry, clock=chosen, wall=wall)
    await tier.open()
    yield tier
    await tier.close()


def names(records: Sequence[Record]) -> list[BlockName]:
    return [record.head.name for record in records]


async def there(tier: HostTier, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
    return await tier.contains(shelf, names(records))


def single(seed: int, shelf: Shelf = SHELF, **meta: float) -> Record:
    known = Meta(written=100.0, **meta)  # type: ignore[arg-type]  # numbers of the right type by the caller
    return SAMPLES.chain(shelf, 1, seed=seed, meta=known)[0]


class TestMakingRoom:
    @pytest.mark.asyncio
    async def test_the_longest_unused_goes_first(self) -> None:
        clock = Clock()
        async with opened(3, clock=clock) as tier:
            records = [single(seed) for seed in range(5)]
            for record in records[:3]:
                clock.now += 1
                await tier.put(SHELF, [record._replace(meta=Meta(written=clock.now))])
            clock.now += 1
            await tier.get(SHELF, names(records[:1]))
            await tier.put(SHELF, records[3:4])
            assert await there(tier, SHELF, records) == [True, False, True, True, False]
            assert tier.stats().evicted == 1

    @pytest.mark.asyncio
    async def test_how_long_a_block_was_unused_before_counts(self) -> None:
        async with opened(2) as tier:
            cold, warm, new = single(1, idle=50.0), single(2, idle=5.0), single(3)
            await tier.put(SHELF, [warm])
            await tier.put(SHELF, [cold])
            await tier.put(SHELF, [new])
            assert await there(tier, SHELF, [cold, warm, new]) == [False, True, True]

    @pytest.mark.asyncio
    async def test_the_lowest_priority_goes_first(self) -> None:
        async with opened(3) as tier:
            high, low, middle = single(1, priority=5), single(2, priority=-1), single(3, priority=1)
            for record in (low, middle, high):
                await tier.put(SHELF, [record])
            await tier.put(SHELF, [single(4, priority=5)])
            await tier.put(SHELF, [single(5, priority=5)])
            assert await there(tier, SHELF, [low, middle, high]) == [False, False, True]

    @pytest.mark.asyncio
    async def test_nothing_goes_for_a_block_of_lower_priority(self) -> None:
        async with opened(1) as tier:
            await tier.put(SHELF, [single(1, priority=2)])
            assert await tier.put(SHELF, [single(2, priority=1)]) == [False]
            assert tier.stats().declined == 1

    @pytest.mark.asyncio
    async def test_a_priority_ends_with_its_time_to_live(self) -> None:
        clock = Clock()
        async with opened(1, clock=clock) as tier:
            await tier.put(SHELF, [single(1, priority=2, ttl=10.0)])
            clock.now += 9.0
            assert await tier.put(SHELF, [single(2)]) == [False]
            clock.now += 1.0
            assert await tier.put(SHELF, [single(2)]) == [True]

    @pytest.mark.asyncio
    async def test_a_wall_clock_that_was_wrong_makes_nothing_live_for_ever(self) -> None:
        clock, wall = Clock(), Clock()
        tier = HostTier(HostOptions(bytes=SAMPLES.geometry.record_bytes), SAMPLES.geometry, clock=clock, wall=wall)
        await tier.open()
        future = Meta(written=wall.now + 10 * 365 * 86400, priority=2, ttl=10.0)
        await tier.put(SHELF, [single(1)._replace(meta=future)])
        wall.now -= 86400
        clock.now += 10.0
        assert await tier.put(SHELF, [single(2)]) == [True]
        await tier.close()

    @pytest.mark.asyncio
    async def test_a_touch_prolongs_or_ends_a_priority(self) -> None:
        clock = Clock()
        async with opened(1, clock=clock) as tier:
            held = single(1, priority=2, ttl=10.0)
            await tier.put(SHELF, [held])
            await tier.touch(SHELF, {held.head.name: Meta(clock.now, priority=2, ttl=30.0)})
            clock.now += 20.0
            assert await tier.put(SHELF, [single(2)]) == [False]
            await tier.touch(SHELF, {held.head.name: Meta(clock.now)})
            assert await tier.put(SHELF, [single(2)]) == [True]

    @pytest.mark.asyncio
    async def test_children_go_before_their_parents(self) -> None:
        async with opened(4) as tier:
            chain = SAMPLES.chain(SHELF, 4)
            await tier.put(SHELF, chain)
            for gone in range(1, 5):
                await tier.put(SHELF, [single(gone + 10)])
                assert await there(tier, SHELF, chain) == [True] * (4 - gone) + [False] * gone

    @pytest.mark.asyncio
    async def test_a_parent_is_not_evicted_for_its_child(self) -> None:
        async with opened(2) as tier:
            trunk = SAMPLES.chain(SHELF, 3)
            await tier.put(SHELF, trunk[:2])
            assert await tier.put(SHELF, trunk[2:]) == [False]
            assert await there(tier, SHELF, trunk) == [True, True, False]

    @pytest.mark.asyncio
    async def test_of_a_batch_that_is_too_large_the_first_blocks_stay(self) -> None:
        async with opened(4) as tier:
            await tier.put(SHELF, [single(seed) for seed in range(4)])
            chain = SAMPLES.chain(SHELF, 40, seed=9)
            assert await tier.put(SHELF, chain) == [True] * 4 + [False] * 36
            assert tier.stats().declined == 36
            assert tier.stats().evicted == 4
            assert tier.stats().bytes == tier.stats().capacity

    @pytest.mark.asyncio
    async def test_blocks_that_are_being_read_stay_and_the_rest_is_declined(self) -> None:
        async with opened(4, LARGE) as tier:
            shelf = LARGE.shelf("a")
            pinned = LARGE.chain(shelf, 4)
            await tier.put(shelf, pinned)
            with _paused_copies() as paused:
                reading = asyncio.create_task(tier.get(shelf, names(pinned)))
                await paused.entered()
                offered = LARGE.chain(shelf, 40, seed=1)
                assert await tier.put(shelf, offered) == [False] * 40
                assert tier.stats().bytes == tier.stats().capacity
                paused.release()
                stored = await reading
            assert [item and item.data == record.data for item, record in zip(stored, pinned, strict=True)] == [
                True
            ] * 4
            assert tier.stats().declined == 40

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11), st.integers(0, 3)), max_size=60))
    def test_no_child_is_ever_left_without_its_parent_by_eviction(self, acts: list[tuple[int, int, int]]) -> None:
        async def run() -> None:
            async with opened(5) as tier:
                trunk = SAMPLES.chain(SHELF, 4)
                chains = [trunk + SAMPLES.chain(SHELF, 3, seed=seed, after=trunk[seed].head) for seed in range(3)]
                for chain, length, kind in acts:
                    records = chains[chain % 3][: 1 + length % 7]
                    records = [record._replace(meta=Meta(100.0, priority=kind)) for record in records]
                    leading = tier.peek(SHELF, names(records))
                    await tier.put(SHELF, records[leading:])
                    await tier.get(SHELF, names(records[-1:]))
                    listed = [item.head async for item in tier.listing()]
                    known = {SHELF.namespace, *(head.name for head in listed)}
                    assert all(head.parent in known for head in listed)
                    assert len(listed) == tier.stats().blocks <= 5

        anyio.run(run)


def test_a_block_that_is_read_cannot_go_when_nothing_follows_it_any_more() -> None:
    index = HostIndex(Recency())
    parent, child = (HostEntry(SHELF, record.head, 0, Meta(), 1.0, None) for record in SAMPLES.chain(SHELF, 2))
    for entry in (parent, child):
        index.add(entry, 1.0)
    index.hold(parent)
    index.remove(child, 2.0)
    assert list(index.leaving(1, 3.0)) == []
    index.release(parent, 4.0)
    assert list(index.leaving(1, 5.0)) == [parent]


class TestLeaving:
    @pytest.mark.asyncio
    async def test_the_least_valuable_are_spilled_first_and_free_their_slots(self) -> None:
        async with opened(4) as tier:
            chain = SAMPLES.chain(SHELF, 3)
            other = single(5, priority=3)
            await tier.put(SHELF, [*chain, other])
            spilled = await tier.spill(2)
            assert [record.head for _, record in spilled] == [chain[2].head, chain[1].head]
            assert [record.data for _, record in spilled] == [chain[2].data, chain[1].data]
            assert tier.stats().blocks == 2
            assert tier.stats().bytes == 2 * SAMPLES.geometry.record_bytes
            assert [record.head for _, record in await tier.spill(9)] == [chain[0].head, other.head]
            assert await tier.spill(9) == []
            assert tier.stats().bytes == 0

    @pytest.mark.asyncio
    @pytest.mark.parametrize("how", ["cancel", "erase", "close"])
    async def test_a_spill_that_is_disturbed_loses_and_leaks_nothing(self, how: str) -> None:
        shelf = LARGE.shelf("a")
        records = LARGE.chain(shelf, 3)
        async with opened(4, LARGE) as tier:
            await tier.put(shelf, records)
            with _paused_copies() as paused:
                spilling = asyncio.create_task(tier.spill(2))
                await paused.entered()
                if how == "cancel":
                    spilling.cancel()
                elif how == "erase":
                    erasing = asyncio.create_task(tier.erase(shelf.tenant))
                    await asyncio.sleep(0)
                else:
                    await tier.close()
                paused.release()
                with suppress(asyncio.CancelledError):
                    assert await spilling == []
            if how == "cancel":
                assert await there(tier, shelf, records) == [True] * 3
                stored = await tier.get(shelf, names(records))
                assert [item and item.data == record.data for item, record in zip(stored, records, strict=True)] == [
                    True
                ] * 3
            if how == "erase":
                assert await erasing == 1
                assert tier.stats().bytes == 0

    @pytest.mark.asyncio
    async def test_an_erased_block_is_overwritten(self) -> None:
        async with opened(3) as tier:
            await tier.put(SHELF, SAMPLES.chain(SHELF, 3))
            slab = tier._opened()
            assert any(bytes(slab.view(0)))
            assert await tier.erase(SHELF.tenant) == 3
            assert not any(any(bytes(slab.view(slot))) for slot in range(3))
            assert tier.stats().bytes == 0

    @pytest.mark.asyncio
    async def test_an_erase_waits_for_readers_and_dooms_writers(self) -> None:
        shelf = LARGE.shelf("a")
        old, new = LARGE.chain(shelf, 2), LARGE.chain(shelf, 2, seed=1)
        async with opened(6, LARGE) as tier:
            await tier.put(shelf, old)
            slab = tier._opened()
            with _paused_copies() as paused:
                reading = asyncio.create_task(tier.get(shelf, names(old)))
                await paused.entered()
                writing = asyncio.create_task(tier.put(shelf, new))
                await paused.entered()
                erasing = asyncio.create_task(tier.erase(shelf.tenant))
                await asyncio.sleep(0.01)
                assert not erasing.done()
                assert await there(tier, shelf, old) == [False, False]
                paused.release()
                assert [item and item.data == record.data for item, record in zip(await reading, old, strict=True)] == [
                    True,
                    True,
                ]
                assert await writing == [False, False]
                assert await erasing == 2
            assert await there(tier, shelf, new) == [False, False]
            assert tier.stats().bytes == 0
            assert not any(any(bytes(slab.view(slot))) for slot in slab._free[-4:]), "the last four are those erased"

    @pytest.mark.asyncio
    async def test_a_deleted_slot_is_free_once_it_is_read(self) -> None:
        shelf = LARGE.shelf("a")
        records = LARGE.chain(shelf, 2)
        async with opened(2, LARGE) as tier:
            await tier.put(shelf, records)
            with _paused_copies() as paused:
                reading = asyncio.create_task(tier.get(shelf, names(records)))
                await paused.entered()
                assert await tier.delete(shelf, names(records)) == 2
                assert tier.stats().blocks == 0
                assert await tier.put(shelf, LARGE.chain(shelf, 1, seed=1)) == [False], "the slot is still being read"
                paused.release()
                stored = await reading
            assert [item and item.data == record.data for item, record in zip(stored, records, strict=True)] == [
                True
            ] * 2
            assert tier.stats().bytes == 0
            assert await tier.put(shelf, LARGE.chain(shelf, 2, seed=1)) == [True, True]


class TestCancelling:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("call", ["put", "get", "spill"])
    async def test_a_cancelled_copy_has_ended_and_its_slots_are_free(self, call: str) -> None:
        shelf = LARGE.shelf("a")
        old, new = LARGE.chain(shelf, 2), LARGE.chain(shelf, 2, seed=1)
        async with opened(4, LARGE) as tier:
            await tier.put(shelf, old)
            with _paused_copies() as paused:
                calls: dict[str, Callable[[], Coroutine[None, None, object]]] = {
                    "put": lambda: tier.put(shelf, new),
                    "get": lambda: tier.get(shelf, names(old)),
                    "spill": lambda: tier.spill(2),
                }
                task = asyncio.create_task(calls[call]())
                await paused.entered()
                task.cancel()
                paused.release_soon()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert paused.running == 0, "the copy goes on after the call has ended"
            assert tier.stats().bytes == 2 * LARGE.geometry.record_bytes
            assert await there(tier, shelf, old + new) == [True, True, False, False]
            assert await tier.put(shelf, new) == [True, True]
            stored = await tier.get(shelf, names(old + new))
            assert [bytes(item.data) for item in stored if item] == [bytes(record.data) for record in old + new]

    @pytest.mark.asyncio
    async def test_two_puts_of_one_block_take_one_slot(self) -> None:
        shelf = LARGE.shelf("a")
        records = LARGE.chain(shelf, 2)
        async with opened(4, LARGE) as tier:
            with _paused_copies() as paused:
                puts = [asyncio.create_task(tier.put(shelf, records)) for _ in range(2)]
                await paused.entered()
                await paused.entered()
                assert tier.stats().bytes == 4 * LARGE.geometry.record_bytes
                paused.release()
                assert [await put for put in puts] == [[True, True], [True, True]]
            assert tier.stats().bytes == 2 * LARGE.geometry.record_bytes

    @pytest.mark.asyncio
    async def test_what_was_closed_meanwhile_is_not_kept(self) -> None:
        shelf = LARGE.shelf("a")
        async with opened(4, LARGE) as tier:
            with _paused_copies() as paused:
                put = asyncio.create_task(tier.put(shelf, LARGE.chain(shelf, 2)))
                await paused.entered()
                await tier.close()
                paused.release()
                assert await put == [False, False]
            assert tier.stats().blocks == 0


class TestMemory:
    def test_too_few_bytes_for_one_block_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match=r"one block takes \d+"):
            HostTier.create({"bytes": 10}, SAMPLES.geometry)
        with pytest.raises(InvalidRequest, match="needs the option `bytes`"):
            HostTier.create({}, SAMPLES.geometry)

    @pytest.mark.asyncio
    async def test_more_memory_than_there_is_is_a_storage_error(self) -> None:
        tier = HostTier(HostOptions(bytes=1 << 60), SAMPLES.geometry)
        with pytest.raises(StorageError, match="lower its 'bytes'"):
            await tier.open()

    @pytest.mark.asyncio
    async def test_pinning_without_a_device_is_a_storage_error(self) -> None:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a device")
        tier = HostTier(HostOptions(bytes=1 << 20, pin=True), SAMPLES.geometry)
        with pytest.raises(StorageError, match="set 'pin' to False"):
            await tier.open()

    @pytest.mark.asyncio
    async def test_a_record_of_another_length_is_declined(self) -> None:
        async with opened(2) as tier:
            record = single(1)
            assert await tier.put(SHELF, [record._replace(data=record.data[:-1])]) == [False]
            assert tier.stats().bytes == 0

    @pytest.mark.asyncio
    async def test_the_queue_does_not_grow_with_use(self) -> None:
        clock = Clock()
        async with opened(8, clock=clock) as tier:
            records = [single(seed, priority=1, ttl=1e6) for seed in range(4)]
            await tier.put(SHELF, records)
            for _ in range(500):
                clock.now += 1.0
                await tier.get(SHELF, names(records))
                metas = {name: Meta(clock.now, priority=1, ttl=1e6 + clock.now) for name in names(records)}
                await tier.touch(SHELF, metas)
            ranking = tier._index.ranking
            assert isinstance(ranking, Recency)
            assert ranking.load <= 2 * (2 * 4 + 64)

    def test_pieces_cover_everything_in_order(self) -> None:
        for size in (1, 1 << 20, 3 << 20, 5 << 20):
            cut = [list(piece) for piece in pieces(range(20), size)]
            assert [item for piece in cut for item in piece] == list(range(20))
            assert all(len(piece) == 1 or len(piece) * size <= slab_module.PIECE_BYTES for piece in cut)

    @pytest.mark.asyncio
    async def test_a_copy_that_fails_says_so_and_ends(self) -> None:
        slab = Slab(2, 1 << 20, pin=False)
        with pytest.raises(ValueError, match="broadcast"):
            await slab.copy([Copy(memoryview(bytes(2 << 20)), slab.view(0))])


class _paused_copies:  # noqa: N801  # reads as a verb
    """Copies in threads wait in here until they are released."""

    def __enter__(self) -> Self:
        self._gate = threading.Event()
        self._arrived = threading.Semaphore(0)
        self.running = 0
        self._patch = pytest.MonkeyPatch()
        real = slab_module._copy_all

        def copy(copies: Sequence[Copy]) -> None:
            if threading.current_thread() is threading.main_thread():
                return real(copies)
            self.running += 1
            self._arrived.release()
            self._gate.wait(20.0)
            real(copies)
            self.running -= 1
            return None

        self._patch.setattr(slab_module, "_copy_all", copy)
        return self

    async def entered(self) -> None:
        """One more copy has begun."""
        await anyio.to_thread.run_sync(self._arrived.acquire)

    def release(self) -> None:
        self._gate.set()

    def release_soon(self) -> None:
        """From another thread: the loop may be waiting for the copy."""
        threading.Timer(0.02, self._gate.set).start()

    def __exit__(self, *_: object) -> None:
        self._gate.set()
        self._patch.undo()
