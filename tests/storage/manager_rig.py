"""What the tests of the tier manager share: sample blocks, a clock, a readable log, managers over fake tiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import shake_128
from typing import Self

import anyio

from octavo.storage.base import Record, Tier
from octavo.storage.manager.tier_manager import (
    Batch,
    Loaded,
    LoadOutcome,
    ManagerSettings,
    Mounted,
    Outgoing,
    TierManager,
)
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import MemoryStore, MemoryTier, SampleBlocks, SharedMemoryTier

SAMPLES = SampleBlocks(block_size=4, payload_bytes=128)
RECORD = SAMPLES.codec.record_bytes
SHELF = SAMPLES.shelf()
HANG = 0.03
"""Deadline of tiers that are made to hang; no result depends on its length."""


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def bind(self, **fields: object) -> Self:
        return self

    def debug(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))

    info = warning = error = exception = debug

    def count(self, event: str) -> int:
        return sum(name == event for name, _ in self.events)


def batch_of(records: Sequence[Record], shelf: Shelf = SHELF) -> Batch:
    """The blocks of ``records`` as the engine exports them: payloads in place, headers full of garbage."""
    buffer = SAMPLES.codec.buffer(len(records))
    buffer[:] = 0xEE
    for row, record in zip(SAMPLES.codec.payloads(buffer), records, strict=True):
        row.data[:] = record.data[SAMPLES.codec.header_bytes :]
    return Batch(shelf, [Outgoing(record.head, record.meta) for record in records], buffer)


def names_of(records: Sequence[Record]) -> list[BlockName]:
    return [record.head.name for record in records]


def memory(blocks: int | None = None, store: MemoryStore | None = None) -> MemoryTier:
    return MemoryTier(SAMPLES.geometry, blocks=blocks, store=store)


def remote(store: MemoryStore | None = None) -> SharedMemoryTier:
    return SharedMemoryTier(SAMPLES.geometry, store=store)


class Rig:
    """A manager with its clock and log."""

    def __init__(self, *tiers: Tier, settings: ManagerSettings | None = None) -> None:
        self.clock, self.log = Clock(), Log()
        self.tiers = tiers
        self.manager = TierManager(
            [Mounted(f"tier{at}", tier) for at, tier in enumerate(tiers)],
            SAMPLES.codec,
            settings or ManagerSettings(),
            clock=self.clock,
            wall=self.clock,
            logger=self.log,
        )

    async def load(
        self, names: Sequence[BlockName], shelf: Shelf = SHELF, *, deadline: float | None = None
    ) -> tuple[list[Loaded], LoadOutcome]:
        """What comes, each block checked to be the right one."""
        blocks: list[Loaded] = []

        async def deliver(batch: list[Loaded]) -> None:
            assert batch
            blocks.extend(batch)

        outcome = await self.manager.load(shelf, names, deliver, deadline=deadline)
        assert outcome.blocks == len(blocks)
        assert [block.head.name for block in blocks] == list(names[: len(blocks)])
        for block in blocks:
            check_bytes(block)
        return blocks, outcome

    async def stored(self, records: Sequence[Record], at: int, shelf: Shelf = SHELF) -> None:
        """Put ``records`` into one tier, past the manager."""
        assert all(await self.tiers[at].put(shelf, records))

    def census(self) -> None:
        """Nothing waits, nothing is being written or held."""
        for mount in self.manager._mounts:
            assert mount.queue.blocks == 0
            assert mount.queue._reserved == 0
            assert mount._slots.value == mount.settings.concurrent_reads
            assert not mount.writing.statistics().locked


def check_bytes(block: Loaded) -> None:
    """Whether it is the right payload for its name: it is a function of it."""
    assert bytes(block.payload) == shake_128(block.head.name).digest(SAMPLES.codec.payload_bytes)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what other tasks or threads bring about."""
    with anyio.fail_after(20):
        while not holds():  # noqa: ASYNC110  # anything may bring it about
            await anyio.sleep(0.001)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    """Open, with the writers at work; closed and clean afterwards, no task left."""
    before = asyncio.all_tasks()
    await rig.manager.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.manager.run)
        try:
            yield rig
        finally:
            with anyio.CancelScope(shield=True):
                await rig.manager.close(10.0)
    rig.census()
    await until(lambda: asyncio.all_tasks() <= before)


async def cancelled_after(steps: int, call: Callable[[], Awaitable[object]]) -> bool:
    """Run ``call`` for so many turns of the event loop, then cancel it. Whether it had ended before."""

    async def run() -> None:
        await call()

    task = asyncio.ensure_future(run())
    for _ in range(steps):
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is not None:
        raise task.exception() or AssertionError
    return ended
