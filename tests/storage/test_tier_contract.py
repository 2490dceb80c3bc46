"""Tests of the conformance kit: for each way to be wrong a tier that is, and the test of the kit that must notice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import anyio
import anyio.lowlevel
import pytest

from octavo.errors import StorageError
from octavo.storage.base import Listed, Meta, Options, Record, Stored, Tier, TierGeometry, TierStats
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import MemoryStore, MemoryTier, SampleBlocks, SharedMemoryTier, TierContract

ONE_SHELF = Shelf(b"n" * 32, b"t" * 32)


class WrongVersion(MemoryTier):
    api_version = (2, 0)


class TakesAnything(MemoryTier):
    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> TakesAnything:  # noqa: ARG003  # wrong
        return cls(geometry, blocks=32)


class DeclinesAll(MemoryTier):
    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        return [False] * len(records)


class FlipsBits(MemoryTier):
    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        stored = await super().get(shelf, names)
        return [item and item._replace(data=memoryview(bytes(item.data[:-1]) + b"\x00")) for item in stored]


class GivesBytes(MemoryTier):
    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        stored = await super().get(shelf, names)
        return [item and item._replace(data=bytes(item.data)) for item in stored]  # type: ignore[arg-type]  # wrong


class LosesMeta(MemoryTier):
    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        return [item and item._replace(meta=Meta()) for item in await super().get(shelf, names)]


class SkipsMissing(MemoryTier):
    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        return [item for item in await super().get(shelf, names) if item]


class MixesOrder(MemoryTier):
    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        return await super().get(shelf, sorted(names))


class OneShelf(MemoryTier):
    """Does not look at the shelf."""

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        return await super().put(ONE_SHELF, records)

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        return await super().get(ONE_SHELF, names)

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        return await super().contains(ONE_SHELF, names)

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        return super().peek(ONE_SHELF, names)


class Unbounded(MemoryTier):
    def stats(self) -> TierStats:
        return super().stats()._replace(capacity=32 * self._record_bytes)


class ForgetsSilently(MemoryTier):
    def stats(self) -> TierStats:
        return super().stats()._replace(evicted=0, declined=0)


class KeepsOldMeta(MemoryTier):
    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        there = await self.contains(shelf, [record.head.name for record in records])
        new = [record for record, known in zip(records, there, strict=True) if not known]
        kept = iter(await super().put(shelf, new))
        return [known or next(kept) for known in there]


class KeepsDeleted(MemoryTier):
    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        return sum(await self.contains(shelf, names))


class MiscountsDeleted(MemoryTier):
    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        await super().delete(shelf, names)
        return len(names)


class ErasesAll(MemoryTier):
    async def erase(self, tenant: bytes) -> int:
        count = len([key for key in self.store.blocks if key[0].tenant == tenant])
        self.store.blocks.clear()
        return count


class ErasesOneShelf(MemoryTier):
    async def erase(self, tenant: bytes) -> int:
        shelf = next((key[0] for key in self.store.blocks if key[0].tenant == tenant), None)
        return await self.delete(shelf, [key[1] for key in self.store.blocks if key[0] == shelf]) if shelf else 0


class ListsAsItComes(MemoryTier):
    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        for (where, _), kept in list(self.store.blocks.items()):
            if shelf in (None, where):
                yield Listed(where, kept.head, kept.meta)


class ListsAllShelves(MemoryTier):
    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        async for listed in super().listing():
            yield listed


class WrongChildren(MemoryTier):
    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        return [listed async for listed in self.listing(shelf)]


class PeeksTooFar(MemoryTier):
    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        return sum((shelf, name) in self.store.blocks for name in names)


class TouchMakesBlocks(MemoryTier):
    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        sample = SampleBlocks().chain(shelf, 1)[0]
        await self.put(shelf, [sample._replace(head=sample.head._replace(name=name)) for name in metas])


class SpillsCopies(MemoryTier):
    async def spill(self, count: int) -> list[tuple[Shelf, Record]]:
        blocks = list(self.store.blocks.items())[:count]
        return [(key[0], Record(kept.head, memoryview(kept.data), kept.meta)) for key, kept in blocks]


class KeepsTheCallersMemory(MemoryTier):
    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        kept = await super().put(shelf, records)
        for record in records:
            there = self.store.blocks.get((shelf, record.head.name))
            if there is not None:
                data: bytes = record.data  # type: ignore[assignment]  # wrong
                self.store.blocks[shelf, record.head.name] = there._replace(data=data)
        return kept


class HandsOutItsOwnMemory(MemoryTier):
    """One buffer for all answers."""

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        stored = await super().get(shelf, names)
        self._buffer = bytearray(max((len(item.data) for item in stored if item), default=0))
        answer: list[Stored | None] = []
        for item in stored:
            if item is not None:
                self._buffer[:] = item.data
            answer.append(item and item._replace(data=memoryview(self._buffer)))
        return answer


class WipesWhatItHandedOut(MemoryTier):
    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        stored = await super().get(shelf, names)
        self.out = [bytearray(item.data) if item else bytearray() for item in stored]
        views = [memoryview(copy) for copy in self.out]
        return [item and item._replace(data=view) for item, view in zip(stored, views, strict=True)]

    async def erase(self, tenant: bytes) -> int:
        for copy in getattr(self, "out", []):
            copy[:] = bytes(len(copy))
        return await super().erase(tenant)


class MixesUpConcurrentCalls(MemoryTier):
    """Keeps the question in the object and looks at it after a wait."""

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        self._asked = (shelf, names)
        await anyio.lowlevel.checkpoint()
        return await super().get(*self._asked)


class HalfABlockWhenCancelled(MemoryTier):
    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        kept = await super().put(shelf, [record._replace(data=bytes(len(record.data))) for record in records])  # type: ignore[arg-type]  # wrong
        await anyio.lowlevel.checkpoint()
        for record in records:
            there = self.store.blocks.get((shelf, record.head.name))
            if there is not None:
                self.store.blocks[shelf, record.head.name] = there._replace(data=bytes(record.data))
        return kept


class LosesItsLockWhenCancelled(MemoryTier):
    def __init__(self, geometry: TierGeometry, *, blocks: int | None = None, store: MemoryStore | None = None) -> None:
        super().__init__(geometry, blocks=blocks, store=store)
        self._busy = False

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        if self._busy:
            raise StorageError("busy for ever")
        self._busy = True
        await anyio.lowlevel.checkpoint()
        self._busy = False
        return await super().get(shelf, names)


class ForgetsAtRestart(SharedMemoryTier):
    async def close(self) -> None:
        self.store.blocks.clear()
        await super().close()


class ResurrectsAtRestart(SharedMemoryTier):
    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        self.saved = dict(self.store.blocks)
        return await super().delete(shelf, names)

    async def close(self) -> None:
        self.store.blocks.update(getattr(self, "saved", {}))
        await super().close()


class WorksWhenClosed(MemoryTier):
    def _check_open(self) -> None:
        """Nothing."""


class RaisesOnTheSecondClose(MemoryTier):
    async def close(self) -> None:
        self._check_open()
        await super().close()


class RaisesWhatItLikes(MemoryTier):
    broken = False

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        if self.broken:
            raise OSError(5, "Input/output error")
        return await super().get(shelf, names)


def contract_for(kind: type[MemoryTier]) -> TierContract:
    store = MemoryStore() if kind.persistent else None

    class Contract(TierContract):
        def make_tier(self, geometry: TierGeometry) -> Tier:
            return kind(geometry, blocks=None if kind in (Unbounded, SharedMemoryTier) else 32, store=store)

        async def break_tier(self, tier: Tier) -> bool:
            tier.broken = True  # type: ignore[attr-defined]  # one of them has it
            return True

    return Contract()


BROKEN = [
    (WrongVersion, "is_written_for_this_version"),
    (TakesAnything, "refuses_an_unknown_option_by_name"),
    (DeclinesAll, "gives_back_what_was_put"),
    (FlipsBits, "gives_back_what_was_put"),
    (FlipsBits, "never_gives_a_wrong_byte_whatever_happens"),
    (GivesBytes, "gives_back_what_was_put"),
    (LosesMeta, "gives_back_what_was_put"),
    (SkipsMissing, "answers_in_the_order_of_the_question"),
    (MixesOrder, "answers_in_the_order_of_the_question"),
    (OneShelf, "shelves_are_apart"),
    (OneShelf, "never_gives_a_wrong_byte_whatever_happens"),
    (KeepsOldMeta, "takes_a_block_twice"),
    (KeepsDeleted, "forgets_what_is_deleted"),
    (MiscountsDeleted, "forgets_what_is_deleted"),
    (ErasesAll, "erases_a_tenant_on_every_shelf"),
    (ErasesOneShelf, "erases_a_tenant_on_every_shelf"),
    (ListsAsItComes, "lists_parents_before_children"),
    (ListsAllShelves, "lists_parents_before_children"),
    (WrongChildren, "children_are_told_rightly_or_not_at_all"),
    (PeeksTooFar, "peek_agrees_with_contains"),
    (TouchMakesBlocks, "knows_nothing_that_was_never_put"),
    (SpillsCopies, "spills_what_it_then_no_longer_has"),
    (KeepsTheCallersMemory, "does_not_depend_on_the_callers_memory"),
    (HandsOutItsOwnMemory, "gives_back_what_was_put"),
    (WipesWhatItHandedOut, "what_it_hands_out_stays_as_it_is"),
    (ForgetsSilently, "keeps_its_bound"),
    (MixesUpConcurrentCalls, "serves_many_at_a_time"),
    (HalfABlockWhenCancelled, "a_cancelled_call_leaves_it_usable"),
    (LosesItsLockWhenCancelled, "a_cancelled_call_leaves_it_usable"),
    (ForgetsAtRestart, "after_a_restart_is_what_was_or_nothing"),
    (ResurrectsAtRestart, "forgets_what_is_deleted"),
    (WorksWhenClosed, "closes_once_and_for_all"),
    (RaisesOnTheSecondClose, "closes_once_and_for_all"),
    (RaisesOnTheSecondClose, "one_that_was_never_opened_closes"),
    (RaisesWhatItLikes, "when_broken_it_fails_as_agreed"),
]


@pytest.mark.parametrize(("kind", "test"), BROKEN, ids=[f"{kind.__name__}-{test}" for kind, test in BROKEN])
def test_the_kit_notices(kind: type[MemoryTier], test: str) -> None:
    run = getattr(contract_for(kind), f"test_{test}")
    with pytest.raises((AssertionError, StorageError, OSError, ValueError)):
        run()
    getattr(contract_for(MemoryTier), f"test_{test}")()


def test_the_kit_notices_a_bound_that_does_not_hold() -> None:
    with pytest.raises(AssertionError, match="are allowed"):
        contract_for(Unbounded).test_keeps_its_bound()


def test_the_kit_notices_a_tier_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(MemoryTier):
        async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
            await anyio.sleep_forever()
            return []

    monkeypatch.setattr("octavo.storage.testing.contract._PATIENCE", 0.05)
    with pytest.raises(TimeoutError):
        contract_for(Hangs).test_gives_back_what_was_put()


def test_sample_blocks_are_what_they_seem() -> None:
    samples = SampleBlocks(block_size=3, payload_bytes=100)
    shelf = samples.shelf("a")
    trunk = samples.chain(shelf, 3)
    for record in [*trunk, *samples.chain(shelf, 2, seed=5, after=trunk[1].head)]:
        opened = samples.codec.open(shelf, record.head.name, record.data)
        assert opened.head == record.head
        assert len(record.data) == samples.geometry.record_bytes
    assert samples.chain(shelf, 3) == trunk
    assert samples.chain(samples.shelf("b"), 1)[0].head.name != trunk[0].head.name
