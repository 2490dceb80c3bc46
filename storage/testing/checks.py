"""What the contract tests of :mod:`octavo.storage.testing.contract` check, and their random walk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import anyio

from ...errors import StorageError
from ..base import Meta, Record, Stored, Tier
from ..naming import BlockName, Shelf
from .samples import SampleBlocks


class Walk:
    """Random calls, and what may be answered: a block that was put may be gone, but never another one, and one that
    was deleted or never put is not there.
    """

    def __init__(self, samples: SampleBlocks, random: Random) -> None:
        self._random = random
        self._shelves = [samples.shelf("a"), samples.shelf("a", adapter="b"), samples.shelf("c")]
        self._chains = [(shelf, samples.chain(shelf, 12, seed=seed)) for shelf in self._shelves for seed in range(3)]
        self._there: set[tuple[Shelf, BlockName]] = set()

    async def step(self, tier: Tier) -> None:
        """One call and its check."""
        shelf, chain = self._random.choice(self._chains)
        first = self._random.randrange(len(chain))
        records = chain[first : first + self._random.randrange(1, 9)]
        match self._random.randrange(10):
            case 0 | 1 | 2:
                await self._put(tier, shelf, records)
            case 3 | 4 | 5:
                await self._get(tier, shelf, records)
            case 6:
                await self._contains(tier, shelf, records)
            case 7:
                await tier.delete(shelf, names_of(records))
                self._there -= {(shelf, record.head.name) for record in records}
            case 8:
                await self._rare(tier, shelf, records)
            case _:
                await self._list(tier, shelf)

    def restarted(self, *, persistent: bool) -> None:
        """What was there before a restart is gone if the tier does not outlive the process."""
        if not persistent:
            self._there.clear()

    async def _put(self, tier: Tier, shelf: Shelf, records: Sequence[Record]) -> None:
        kept = await tier.put(shelf, records)
        assert len(kept) == len(records)
        self._there |= {(shelf, record.head.name) for record, yes in zip(records, kept, strict=True) if yes}

    async def _get(self, tier: Tier, shelf: Shelf, records: Sequence[Record]) -> None:
        for record, item in zip(records, await tier.get(shelf, names_of(records)), strict=True):
            check(record, item)
            assert item is None or (shelf, record.head.name) in self._there, "a block is there that should not be"

    async def _contains(self, tier: Tier, shelf: Shelf, records: Sequence[Record]) -> None:
        names = names_of(records)
        there = await tier.contains(shelf, names)
        assert all((shelf, name) in self._there for name, yes in zip(names, there, strict=True) if yes)
        assert tier.peek(shelf, names) in ([*there, False].index(False), None)

    async def _list(self, tier: Tier, shelf: Shelf) -> None:
        listed = [(item.shelf, item.head.name) async for item in tier.listing(shelf)]
        assert set(listed) <= self._there
        assert len(set(listed)) == len(listed), "a block is listed twice"

    async def _rare(self, tier: Tier, shelf: Shelf, records: Sequence[Record]) -> None:
        match self._random.randrange(3):
            case 0:
                await tier.erase(shelf.tenant)
                self._there = {key for key in self._there if key[0].tenant != shelf.tenant}
            case 1:
                spilled = await tier.spill(len(records))
                self._there -= {(where, record.head.name) for where, record in spilled}
            case _:
                await tier.touch(shelf, {name: Meta(time.time(), hits=1) for name in names_of(records)})


def names_of(records: Sequence[Record]) -> list[BlockName]:
    """What the records are called."""
    return [record.head.name for record in records]


def check(record: Record, item: Stored | None) -> None:
    """What came back, if anything did, is the block."""
    if item is None:
        return
    assert isinstance(item.data, memoryview), f"a block came back as {type(item.data).__name__}, not as a memoryview"
    assert item.data.contiguous
    assert item.data.itemsize == 1
    assert item.data == record.data, "a block came back with other bytes"


def check_meta(put: Meta, got: Meta) -> None:
    """Durations may have aged, the rest is as it was."""
    assert (got.hits, got.priority) == (put.hits, put.priority)
    assert got.recompute_seconds == put.recompute_seconds
    assert got.idle >= put.idle - 0.001
    assert (got.ttl is None) == (put.ttl is None)
    assert got.ttl is None or put.ttl is None or got.ttl <= put.ttl


async def cancelled(call: Callable[[], Awaitable[object]], patience: int) -> None:
    """Let ``call`` run for ``patience`` turns of the loop and cancel it, in asyncio's way and in anyio's."""

    async def run() -> None:
        await call()

    task = asyncio.ensure_future(run())
    for _ in range(patience):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    _only_storage_errors(None if task.cancelled() else task.exception())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_tolerant, call)
        for _ in range(patience):
            await asyncio.sleep(0)
        tasks.cancel_scope.cancel()


async def _tolerant(call: Callable[[], Awaitable[object]]) -> None:
    try:
        await call()
    except StorageError:
        return


def _only_storage_errors(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, StorageError):
        raise error


async def raises_storage_error(call: Callable[[], Awaitable[object]]) -> None:
    """A tier that is closed says so."""
    try:
        await call()
    except StorageError:
        return
    raise AssertionError(f"{call} worked on a closed tier")


async def answers_or_raises_storage_error(call: Callable[[], Awaitable[object]]) -> None:
    """Errors of other types, and calls that never end, fail the test."""
    with anyio.fail_after(20.0):
        await _tolerant(call)
