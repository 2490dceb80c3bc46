"""Checkpoints: what a restart finds, and what closing costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Self

import anyio
import pytest

from octavo import RequestOutput, Retention
from octavo.engine.testing import FakeRunner
from octavo.storage.base import Record, TierGeometry
from octavo.storage.naming import Shelf
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import (
    GREEDY,
    ONE,
    EngineOf,
    Faulty,
    LastingTier,
    ask,
    cool,
    lasting,
    memory,
    prompt,
    settled,
    threaded,
    tiering,
    tokens,
    until,
)

Alone = Callable[..., Awaitable[list[RequestOutput]]]


class Pause(anyio.Event):
    """Takes a while, each time anew."""

    def __new__(cls) -> Self:
        return object.__new__(cls)

    async def wait(self) -> None:
        await anyio.sleep(0.003)


class Diary(LastingTier):
    """Keeps the order in which blocks came."""

    def __init__(self, geometry: TierGeometry, store: MemoryStore, diary: list[int]) -> None:
        super().__init__(geometry, store=store)
        self._diary = diary

    async def put(self, shelf: Shelf, records: list[Record]) -> list[bool]:  # type: ignore[override]  # a list it is
        self._diary += [record.head.tokens[0] if not record.head.start else -1 for record in records]
        return await super().put(shelf, records)


@pytest.mark.asyncio
async def test_everything_cached_is_there_after_a_clean_restart(engine_of: EngineOf, alone: Alone) -> None:
    """DISK-03, DISK-15: nothing was evicted, so nothing was written before; closing writes it all."""
    store = MemoryStore()
    async with engine_of(mounts={"m": lasting(store)}, num_blocks=256) as engine:
        for number in range(20):
            await ask(engine, prompt(number))
        assert not store.blocks
    assert len(store.blocks) == 100
    runner = FakeRunner()
    async with engine_of(mounts={"m": lasting(store)}, num_blocks=256, runner=runner) as engine:
        assert engine.stats().restore.stored_blocks == 100
        for number in range(20):
            longer = [*prompt(number), 1, 2, 3]
            before = runner.tokens_computed
            output = await ask(engine, longer, ONE)
            assert [output.token_ids] == tokens(await alone(longer, ONE))
            assert output.cached_tokens == 16
            assert runner.tokens_computed - before == len(longer) - 16, "hits that save nothing"
        assert engine.stats().restore.saved_tokens == 20 * 16
    assert len(store.blocks) == 120, "only the blocks that are new were written"


@pytest.mark.asyncio
async def test_volatile_tiers_are_emptied_into_a_persistent_one(engine_of: EngineOf) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"up": memory(), "low": lasting(store)}, num_blocks=32) as engine:
        for number in range(10):
            await ask(engine, prompt(number))
        await cool(engine)
        assert (engine.stats().tiers[0].tier.blocks, len(store.blocks)) == (50, 0)
    assert len(store.blocks) == 50


@pytest.mark.asyncio
async def test_the_most_valuable_goes_first_and_no_block_before_its_parent(engine_of: EngineOf) -> None:
    diary: list[int] = []
    clock = FakeClock()
    mounts = {"m": lambda geometry: Diary(geometry, MemoryStore(), diary)}
    async with engine_of(mounts=mounts, clock=clock) as engine:
        await ask(engine, prompt(1), retention=[Retention(0, None, 5)])
        for number, uses in ((2, 1), (3, 3), (4, 2)):
            for _ in range(uses):
                clock.now += 1
                await ask(engine, prompt(number))
        clock.now += 100
    assert [number for number in diary if number >= 0] == [1, 3, 4, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("queue_blocks", [1, 4, 100])
async def test_closing_waits_for_a_queue_that_is_smaller_than_what_is_hot(
    queue_blocks: int, engine_of: EngineOf
) -> None:
    """DISK-19: a bounded queue and a writer that takes its time; all twelve entries are there afterwards."""
    store = MemoryStore()
    faulty = Faulty(lasting(store))
    async with engine_of(mounts={"m": faulty}, tier_queue_bytes=queue_blocks * 320, num_blocks=128) as engine:
        for number in range(12):
            await ask(engine, prompt(number, 9), ONE)
        faulty.tier.inject(Fault("put", "slow", gate=Pause()))
    assert len(store.blocks) == 24


@pytest.mark.asyncio
async def test_closing_keeps_its_budget_and_counts_what_it_could_not_save(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DISK-19: a writer that hangs, and one that is dead."""
    for kind in ("hang", "fail"):
        caplog.clear()
        faulty = Faulty(lasting(MemoryStore()))
        budget = 1.0 if kind == "hang" else 5.0  # threads copy and seal before the tier is called
        async with threaded(monkeypatch, {"m": faulty}, close_budget=budget, tier_deadline=5.0) as engine:
            for number in range(12):
                await ask(engine, prompt(number), ONE)
            faulty.tier.inject(Fault("put", kind))
            with anyio.fail_after(10):
                await engine.close()
        assert "not_written" in caplog.text or "not saved" in caplog.text or kind == "fail", caplog.text
        assert "tier_failed" in caplog.text or kind == "hang"


@pytest.mark.asyncio
async def test_a_checkpoint_beside_the_loop_saves_what_a_crash_would_lose(engine_of: EngineOf, alone: Alone) -> None:
    """An engine that never closes: what the last checkpoint brought is there for the next one."""
    store = MemoryStore()
    async with engine_of(mounts={"m": lasting(store)}, checkpoint_interval=0.01) as engine:
        await ask(engine, prompt(1))
        await until(lambda: len(store.blocks) == 5)
        await settled(engine)
        crashed = MemoryStore(store.blocks.copy())
        made = engine.stats().transfers.checkpoints
        await until(lambda: engine.stats().transfers.checkpoints > made + 1)
        assert engine.stats().tiers[0].put_blocks == 5, "what is there is not written again"
    async with engine_of(mounts={"m": lasting(crashed)}) as engine:
        output = await ask(engine, prompt(1))
        assert output.cached_tokens == 16
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))


@pytest.mark.asyncio
async def test_what_was_used_since_has_its_statistics_noted(engine_of: EngineOf) -> None:
    store, clock = MemoryStore(), FakeClock()
    async with engine_of(mounts={"m": lasting(store)}, clock=clock, wall=clock) as engine:
        parts = tiering(engine)
        await ask(engine, prompt(1))
        clock.now += 10
        await parts.checkpoint.make(engine._loop, 60.0)
        assert {kept.meta.hits for kept in store.blocks.values()} == {0}
        assert {kept.meta.idle for kept in store.blocks.values()} == {10.0}
        for _ in range(3):
            clock.now += 1
            await ask(engine, prompt(1))
        await parts.checkpoint.make(engine._loop, 60.0)
        assert max(kept.meta.hits for kept in store.blocks.values()) == 3


@pytest.mark.asyncio
async def test_a_checkpoint_while_everything_is_being_evicted(engine_of: EngineOf, alone: Alone) -> None:
    """The blocks that it is to save leave the device meanwhile: they are copied before they are overwritten."""
    store = MemoryStore()
    async with engine_of(
        mounts={"m": lasting(store)}, num_blocks=16, checkpoint_interval=0.001, tier_queue_bytes=3_000
    ) as engine:
        for number in range(30):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))
    async with engine_of(mounts={"m": lasting(store)}, num_blocks=16) as engine:
        for number in range(30):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))
        assert engine.stats().tiers[0].corrupt == 0


@pytest.mark.asyncio
async def test_memory_is_given_back_after_the_writers_have_read_it(
    engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    """STOP-06: closing with a full queue; the tiers close last and what was written is whole."""
    store, order = MemoryStore(), list[str]()

    class Ordered(LastingTier):
        async def put(self, shelf: Shelf, records: list[Record]) -> list[bool]:  # type: ignore[override]  # a list it is
            await anyio.sleep(0.01)
            order.append("put")
            return await super().put(shelf, records)

        async def close(self) -> None:
            order.append("close")
            await super().close()

    async with engine_of(mounts={"m": lambda geometry: Ordered(geometry, store=store)}) as engine:
        for number in range(12):
            await ask(engine, prompt(number))
        await engine._loop.at_edge(lambda: engine._loop.cache.evict(64))
    assert order[-1] == "close"
    assert order.count("close") == 1
    assert len(store.blocks) == 60
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
