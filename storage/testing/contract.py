"""The contract of storage tiers as tests: subclass, say how the tier is made, run pytest.

.. code-block:: python

    from octavo.storage.testing.contract import TierContract

    class TestMyTier(TierContract):
        @pytest.fixture(autouse=True)
        def place(self, tmp_path):
            self.path = tmp_path

        def make_tier(self, geometry):
            return MyTier(MyOptions(path=self.path, bytes=64 * geometry.record_bytes), geometry)

The tests bring their own event loop, so that no plug-in of pytest is needed. :class:`SampleBlocks` makes records for
tests of your own; :class:`MemoryTier` and :class:`FaultyTier` stand for tiers where something else is tested.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import ClassVar, TypeVar

import anyio
import anyio.abc

from ...errors import InvalidRequest, StorageError
from ..base import Meta, Record, Stored, Tier, TierGeometry
from ..naming import Shelf
from .checks import (
    Walk,
    answers_or_raises_storage_error,
    cancelled,
    check,
    check_meta,
    names_of,
    raises_storage_error,
)
from .fakes import Fault, FaultyTier, MemoryStore, MemoryTier, SharedMemoryTier
from .samples import SampleBlocks

__all__ = [
    "Fault",
    "FaultyTier",
    "MemoryStore",
    "MemoryTier",
    "SampleBlocks",
    "SharedMemoryTier",
    "TierContract",
]

_C = TypeVar("_C", bound="TierContract")
_PATIENCE = 60.0
"""Seconds for one test; what takes longer hangs."""


def _on_loop(test: Callable[[_C], Coroutine[None, None, None]]) -> Callable[[_C], None]:
    """Run a test in an event loop of its own; what hangs fails."""

    async def bounded(contract: _C) -> None:
        with anyio.fail_after(_PATIENCE):
            await test(contract)

    def run(contract: _C) -> None:
        anyio.run(bounded, contract)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class TierContract(ABC):
    """What every tier must hold. pytest collects subclasses whose name starts with ``Test``.

    ``persistent`` and ``shared`` of the tier decide which tests expect what.
    """

    samples: ClassVar[SampleBlocks] = SampleBlocks()
    """Where blocks come from; replace it for another geometry."""

    @abstractmethod
    def make_tier(self, geometry: TierGeometry) -> Tier:
        """A tier that is not open, with room for 16 to 200 blocks of ``geometry.record_bytes`` if it is bounded.

        Within one test all tiers that are made use the same place (folder, server, ...); each test gets a new one.
        Only one is open at a time.
        """

    async def break_tier(self, tier: Tier) -> bool:
        """Make what is below the open ``tier`` fail from now on: stop its server, break its files. Returns whether it
        did; the default cannot.
        """
        return False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Tier]:
        """An open tier, closed afterwards."""
        tier = self.make_tier(self.samples.geometry)
        await tier.open()
        try:
            yield tier
        finally:
            await tier.close()

    # What a tier is.

    def test_is_written_for_this_version(self) -> None:
        assert self.make_tier(self.samples.geometry).api_version[0] == Tier.api_version[0]

    def test_refuses_an_unknown_option_by_name(self) -> None:
        kind = type(self.make_tier(self.samples.geometry))
        message = ""
        try:
            kind.create({"no_such_option": 1}, self.samples.geometry)
        except InvalidRequest as error:
            message = str(error)
        assert "no_such_option" in message, f"create() must refuse an unknown option by name; it says: {message!r}"

    # One call after the other.

    @_on_loop
    async def test_gives_back_what_was_put(self) -> None:
        shelf, meta = self.samples.shelf(), Meta(time.time(), 1.5, 3, 2, 1000.0, 0.25)
        records = self.samples.chain(shelf, 4, meta=meta)
        async with self.opened() as tier:
            assert await tier.put(shelf, records) == [True] * 4, "an empty tier has no reason to decline four blocks"
            await tier.flush()
            stored = await tier.get(shelf, names_of(records))
            for record, item in zip(records, stored, strict=True):
                check(record, item)
                assert item is not None, "a block that was kept is not found"
                check_meta(meta, item.meta)

    @_on_loop
    async def test_answers_in_the_order_of_the_question(self) -> None:
        shelf = self.samples.shelf()
        records, unknown = self.samples.chain(shelf, 3), self.samples.chain(shelf, 1, seed=1)
        async with self.opened() as tier:
            await tier.put(shelf, records)
            asked = [records[2], unknown[0], records[0], records[2], records[1]]
            stored = await tier.get(shelf, names_of(asked))
            assert [item is None for item in stored] == [False, True, False, False, False]
            for record, item in zip(asked, stored, strict=True):
                check(record, item)
            assert await tier.contains(shelf, names_of(asked)) == [True, False, True, True, True]

    @_on_loop
    async def test_knows_nothing_that_was_never_put(self) -> None:
        shelf = self.samples.shelf()
        names = names_of(self.samples.chain(shelf, 3))
        async with self.opened() as tier:
            assert await tier.get(shelf, names) == [None] * 3
            assert await tier.contains(shelf, names) == [False] * 3
            assert tier.peek(shelf, names) in (0, None)
            assert await tier.delete(shelf, names) == 0
            assert await tier.erase(shelf.tenant) == 0
            assert await tier.children(shelf, names[0]) == []
            await tier.touch(shelf, {names[0]: Meta()})
            assert await tier.contains(shelf, names[:1]) == [False], "touch() made a block"

    @_on_loop
    async def test_takes_empty_batches(self) -> None:
        shelf = self.samples.shelf()
        async with self.opened() as tier:
            assert await tier.put(shelf, []) == []
            assert await tier.get(shelf, []) == []
            assert await tier.contains(shelf, []) == []
            assert tier.peek(shelf, []) in (0, None)
            assert await tier.delete(shelf, []) == 0
            await tier.touch(shelf, {})
            assert await tier.spill(0) == []
            await tier.flush()

    @_on_loop
    async def test_takes_a_block_twice(self) -> None:
        shelf = self.samples.shelf()
        record = self.samples.chain(shelf, 1)[0]
        newer = Meta(time.time(), hits=7, priority=1)
        async with self.opened() as tier:
            await tier.put(shelf, [record, record])
            before = tier.stats()
            assert await tier.put(shelf, [record._replace(meta=newer)]) == [True]
            stored = await tier.get(shelf, names_of([record]))
            check(record, stored[0])
            assert stored[0] is not None, "a block that was put three times is not found"
            check_meta(newer, stored[0].meta)
            assert tier.stats().blocks == before.blocks, "a block that is there was counted again"
            assert len([listed async for listed in tier.listing(shelf)]) == 1

    @_on_loop
    async def test_shelves_are_apart(self) -> None:
        mine, others = (
            self.samples.shelf("mine"),
            [self.samples.shelf("other"), self.samples.shelf("mine", adapter="b")],
        )
        records = self.samples.chain(mine, 2)
        async with self.opened() as tier:
            await tier.put(mine, records)
            for shelf in others:
                assert await tier.get(shelf, names_of(records)) == [None, None], "a block is found on another shelf"
                assert await tier.contains(shelf, names_of(records)) == [False, False]
                assert tier.peek(shelf, names_of(records)) in (0, None)
                assert await tier.children(shelf, records[0].head.name) == []
                assert await tier.delete(shelf, names_of(records)) == 0
                assert [listed async for listed in tier.listing(shelf)] == []
            assert await tier.contains(mine, names_of(records)) == [True, True], "another shelf's delete() took a block"

    @_on_loop
    async def test_forgets_what_is_deleted(self) -> None:
        shelf = self.samples.shelf()
        records = self.samples.chain(shelf, 4)
        async with self.opened() as tier:
            await tier.put(shelf, records)
            unknown = self.samples.chain(shelf, 1, seed=1)
            assert await tier.delete(shelf, names_of(records[2:] + unknown)) == 2
            await self._expect(tier, shelf, records, [True, True, False, False])
        if tier.persistent:
            async with self.opened() as tier:
                await self._expect(tier, shelf, records, [True, True, False, False])

    @_on_loop
    async def test_erases_a_tenant_on_every_shelf(self) -> None:
        gone = [self.samples.shelf("gone"), self.samples.shelf("gone", adapter="b")]
        stays = self.samples.shelf("stays")
        chains = {shelf: self.samples.chain(shelf, 3) for shelf in (*gone, stays)}
        async with self.opened() as tier:
            for shelf, records in chains.items():
                await tier.put(shelf, records)
            assert await tier.erase(gone[0].tenant) == 6
            for shelf, records in chains.items():
                await self._expect(tier, shelf, records, [shelf == stays] * 3)
            assert await tier.put(gone[0], chains[gone[0]]) == [True] * 3, "an erased tenant cannot come back"
            assert await tier.erase(gone[0].tenant) == 3
        if tier.persistent:
            async with self.opened() as tier:
                for shelf, records in chains.items():
                    await self._expect(tier, shelf, records, [shelf == stays] * 3)

    @_on_loop
    async def test_lists_parents_before_children(self) -> None:
        shelf, other = self.samples.shelf("a"), self.samples.shelf("b")
        trunk = self.samples.chain(shelf, 3)
        branches = [self.samples.chain(shelf, 2, seed=seed, after=trunk[1].head) for seed in (1, 2)]
        records = trunk + branches[0] + branches[1]
        async with self.opened() as tier:
            for record in reversed(records):
                await tier.put(shelf, [record])
            await tier.put(other, self.samples.chain(other, 2))
            listed = [item async for item in tier.listing(shelf)]
            assert {item.head for item in listed} == {record.head for record in records}
            assert {item.shelf for item in listed} == {shelf}
            seen = {shelf.namespace}
            for item in listed:
                assert item.head.parent in seen, "a child is listed before its parent"
                seen.add(item.head.name)
            assert len([item async for item in tier.listing()]) == len(records) + 2

    @_on_loop
    async def test_children_are_told_rightly_or_not_at_all(self) -> None:
        shelf = self.samples.shelf()
        trunk = self.samples.chain(shelf, 2)
        branches = [self.samples.chain(shelf, 1, seed=seed, after=trunk[0].head)[0] for seed in (1, 2)]
        async with self.opened() as tier:
            await tier.put(shelf, trunk + branches)
            children = {item.head for item in await tier.children(shelf, trunk[0].head.name)}
            assert children in (set(), {trunk[1].head, branches[0].head, branches[1].head})
            first = {item.head for item in await tier.children(shelf, shelf.namespace)}
            assert first in (set(), {trunk[0].head})

    @_on_loop
    async def test_peek_agrees_with_contains(self) -> None:
        shelf = self.samples.shelf()
        records = self.samples.chain(shelf, 5)
        async with self.opened() as tier:
            await tier.put(shelf, records[:2] + records[3:])
            names = names_of(records)
            assert tier.peek(shelf, names) in (2, None)
            assert tier.peek(shelf, names[3:]) in (2, None)
            assert await tier.contains(shelf, names) == [True, True, False, True, True]

    @_on_loop
    async def test_spills_what_it_then_no_longer_has(self) -> None:
        shelf = self.samples.shelf()
        records = {record.head.name: record for record in self.samples.chain(shelf, 6)}
        async with self.opened() as tier:
            await tier.put(shelf, list(records.values()))
            spilled = await tier.spill(2)
            assert len(spilled) <= 2
            for where, record in spilled:
                assert where == shelf
                check(records[record.head.name], Stored(record.data, record.meta))
                assert await tier.contains(shelf, [record.head.name]) == [False], "spill() left a block behind"

    # Memory and bounds.

    @_on_loop
    async def test_does_not_depend_on_the_callers_memory(self) -> None:
        shelf = self.samples.shelf()
        records = self.samples.chain(shelf, 4)
        async with self.opened() as tier:
            mine = [record._replace(data=memoryview(bytearray(record.data))) for record in records]
            await tier.put(shelf, mine)
            for record in mine:
                record.data[:] = bytes(len(record.data))
            for record, item in zip(records, await tier.get(shelf, names_of(records)), strict=True):
                check(record, item)

    @_on_loop
    async def test_what_it_hands_out_stays_as_it_is(self) -> None:
        shelf = self.samples.shelf()
        records = self.samples.chain(shelf, 4)
        async with self.opened() as tier:
            await tier.put(shelf, records)
            stored = await tier.get(shelf, names_of(records))
            await tier.delete(shelf, names_of(records))
            for seed in range(1, 4 * self._room(tier) // 16 + 1):
                await tier.put(shelf, self.samples.chain(shelf, 16, seed=seed))
            await tier.erase(shelf.tenant)
        for record, item in zip(records, stored, strict=True):
            check(record, item)

    @_on_loop
    async def test_keeps_its_bound(self) -> None:
        shelf = self.samples.shelf()
        async with self.opened() as tier:
            declined = 0
            chains = [self.samples.chain(shelf, 16, seed=seed) for seed in range(4 * self._room(tier) // 16)]
            chains.append(self.samples.chain(shelf, 2 * self._room(tier), seed=-1))
            for records in chains:
                declined += (await tier.put(shelf, records)).count(False)
                self._check_bound(tier)
                for record, item in zip(records, await tier.get(shelf, names_of(records)), strict=True):
                    check(record, item)
            await tier.flush()
            self._check_bound(tier)
            assert tier.stats().declined >= declined, "declined blocks were not counted"
            offered = sum(len(records) for records in chains)
            room = await self._count(tier, shelf, chains)
            assert room + tier.stats().evicted + tier.stats().declined >= offered, "blocks were lost without a trace"

    # Many at a time.

    @_on_loop
    async def test_serves_many_at_a_time(self) -> None:
        shelf = self.samples.shelf()
        chains = [self.samples.chain(shelf, 4, seed=seed) for seed in range(4)]

        async def work(tier: Tier, seed: int) -> None:
            for at in range(6):
                records = chains[(seed + at) % len(chains)]
                await tier.put(shelf, records)
                for record, item in zip(records, await tier.get(shelf, names_of(records)), strict=True):
                    check(record, item)
                if (seed + at) % 5 == 0:
                    await tier.delete(shelf, names_of(records[2:]))

        async with self.opened() as tier:
            ends = await asyncio.gather(*(work(tier, seed) for seed in range(8)), return_exceptions=True)
            for error in ends:
                if error is not None:
                    raise error
            self._check_bound(tier)
            for records in chains:
                assert await tier.put(shelf, records) == [True] * 4

    def test_never_gives_a_wrong_byte_whatever_happens(self) -> None:
        self._walk(seed=1, steps=120)

    def test_never_gives_a_wrong_byte_in_a_longer_walk(self) -> None:
        self._walk(seed=2, steps=240)

    @_on_loop
    async def test_a_cancelled_call_leaves_it_usable(self) -> None:
        shelf = self.samples.shelf()
        old, new = self.samples.chain(shelf, 4, seed=0), self.samples.chain(shelf, 4, seed=1)
        async with self.opened() as tier:
            for patience in (0, 1, 2, 3, 5, 8):
                for call in self._calls(tier, shelf, old, new):
                    await tier.put(shelf, old)
                    await cancelled(call, patience)
                    await self._check_whole(tier, shelf, old + new)
            assert await tier.put(shelf, old + new) == [True] * 8, "cancelled calls left less room"
            for record, item in zip(old + new, await tier.get(shelf, names_of(old + new)), strict=True):
                check(record, item)

    # Beginning and end.

    @_on_loop
    async def test_after_a_restart_is_what_was_or_nothing(self) -> None:
        shelf, meta = self.samples.shelf(), Meta(time.time(), 1.0, 2, 3, None, 0.5)
        records = self.samples.chain(shelf, 5, meta=meta)
        async with self.opened() as tier:
            await tier.put(shelf, records)
            await tier.flush()
        persistent = tier.persistent
        async with self.opened() as tier:
            stored = await tier.get(shelf, names_of(records))
            assert [item is not None for item in stored] == [persistent] * 5
            for record, item in zip(records, stored, strict=True):
                check(record, item)
                if item is not None:
                    check_meta(meta, item.meta)
            assert [item async for item in tier.listing(shelf)] != [] or not persistent
            await tier.put(shelf, self.samples.chain(shelf, 2, seed=1))
            await self._check_whole(tier, shelf, records)

    @_on_loop
    async def test_closes_once_and_for_all(self) -> None:
        shelf = self.samples.shelf()
        records = self.samples.chain(shelf, 2)
        async with self.opened() as tier:
            await tier.put(shelf, records)
            await tier.close()
            await tier.close()
            for call in self._calls(tier, shelf, records, records):
                await raises_storage_error(call)
            await raises_storage_error(tier.flush)
            tier.stats()
            tier.peek(shelf, names_of(records))

    @_on_loop
    async def test_one_that_was_never_opened_closes(self) -> None:
        await self.make_tier(self.samples.geometry).close()

    @_on_loop
    async def test_when_broken_it_fails_as_agreed(self) -> None:
        shelf = self.samples.shelf()
        old, new = self.samples.chain(shelf, 4, seed=0), self.samples.chain(shelf, 4, seed=1)
        async with self.opened() as tier:
            await tier.put(shelf, old)
            if not await self.break_tier(tier):
                return
            for call in [*self._calls(tier, shelf, old, new), tier.flush]:
                await answers_or_raises_storage_error(call)
            await self._check_whole(tier, shelf, old + new)
            tier.stats()

    # Help.

    def _room(self, tier: Tier) -> int:
        """Blocks that fill the tier, if it has a bound."""
        capacity = tier.stats().capacity
        blocks = 16 if capacity is None else capacity // self.samples.geometry.record_bytes
        assert 16 <= blocks <= 200, f"make_tier() makes a tier of {blocks} blocks; 16 to 200 were asked for"
        return blocks

    def _check_bound(self, tier: Tier) -> None:
        stats = tier.stats()
        assert stats.blocks >= 0
        assert stats.bytes >= 0
        if stats.capacity is not None:
            assert stats.bytes <= stats.capacity, f"{stats.bytes} bytes are used and {stats.capacity} are allowed"

    async def _count(self, tier: Tier, shelf: Shelf, chains: Sequence[Sequence[Record]]) -> int:
        return sum([sum(await tier.contains(shelf, names_of(records))) for records in chains])

    async def _expect(self, tier: Tier, shelf: Shelf, records: Sequence[Record], there: Sequence[bool]) -> None:
        """All ways of asking agree on what is there."""
        stored = await tier.get(shelf, names_of(records))
        assert [item is not None for item in stored] == list(there)
        for record, item in zip(records, stored, strict=True):
            check(record, item)
        assert await tier.contains(shelf, names_of(records)) == list(there)
        leading = [*there, False].index(False)
        assert tier.peek(shelf, names_of(records)) in (leading, None)
        listed = {item.head.name async for item in tier.listing(shelf)}
        assert [record.head.name in listed for record in records] == list(there)

    async def _check_whole(self, tier: Tier, shelf: Shelf, records: Sequence[Record]) -> None:
        """Every block is there as it should be, or is not there."""
        try:
            stored = await tier.get(shelf, names_of(records))
        except StorageError:
            return
        for record, item in zip(records, stored, strict=True):
            check(record, item)
        self._check_bound(tier)

    def _calls(
        self, tier: Tier, shelf: Shelf, old: Sequence[Record], new: Sequence[Record]
    ) -> list[Callable[[], Awaitable[object]]]:
        """Each call of the contract once, reading and deleting ``old``, putting ``new``."""

        async def listing() -> None:
            async for _ in tier.listing():
                pass

        return [
            partial(tier.put, shelf, new),
            partial(tier.get, shelf, names_of(old)),
            partial(tier.contains, shelf, names_of(old)),
            partial(tier.touch, shelf, {old[0].head.name: Meta(hits=1)}),
            listing,
            partial(tier.delete, shelf, names_of(old)),
            partial(tier.erase, shelf.tenant),
        ]

    def _walk(self, seed: int, steps: int) -> None:
        anyio.run(self._bounded_walk, seed, steps)

    async def _bounded_walk(self, seed: int, steps: int) -> None:
        with anyio.fail_after(_PATIENCE):
            walk = Walk(self.samples, Random(seed))  # noqa: S311  # reproducible, not secret
            while steps > 0:
                async with self.opened() as tier:
                    for _ in range(min(steps, 40)):
                        await walk.step(tier)
                        self._check_bound(tier)
                    await tier.flush()
                walk.restarted(persistent=tier.persistent)
                steps -= 40
