"""Warming gives way: a request gets the blocks that it holds, and never waits or fails for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig, RequestOutput, Retention
from octavo.engine.warming import hottest_paths
from octavo.errors import InvalidRequest
from octavo.storage.base import Head, Listed, Meta, Stored, TierGeometry
from octavo.storage.naming import BlockName, Namespace, Shelf, name_after
from octavo.storage.testing.contract import Fault, FaultyTier, MemoryStore
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import (
    GREEDY,
    B,
    EngineOf,
    Faulty,
    LastingTier,
    ask,
    cool,
    lasting,
    prompt,
    settled,
    tiering,
    tokens,
    until,
)

Alone = Callable[..., Awaitable[list[RequestOutput]]]
PAYLOAD = 8 * B
"""Bytes of a block of the fake model."""
PATIENT: dict[str, object] = {"warm_bytes": 10**6, "tier_deadline": 60.0, "promotion": "wait"}
"""Warms everything, and gives up nothing by itself."""


class Late(LastingTier):
    """Reads at once, and hands out what it has read when the event is set."""

    def __init__(self, geometry: TierGeometry, store: MemoryStore, gate: anyio.Event) -> None:
        super().__init__(geometry, store=store)
        self.has_read = False
        self._gate = gate

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        read = await super().get(shelf, names)
        self.has_read = True
        await self._gate.wait()
        return read


async def two_prompts(engine_of: EngineOf) -> MemoryStore:
    """Prompt 1 was used twice and is warmed first; then prompt 2."""
    store = MemoryStore()
    async with engine_of(mounts={"m": lasting(store)}) as engine:
        for number in (1, 1, 2):
            await ask(engine, prompt(number))
    return store


@asynccontextmanager
async def warming(engine_of: EngineOf, **config: object) -> AsyncIterator[tuple[AsyncEngine, FaultyTier, anyio.Event]]:
    """An engine that warms prompt 1, and the tier that does not answer before the event is set."""
    faulty, gate = Faulty(lasting(await two_prompts(engine_of))), anyio.Event()
    faulty.prepare(Fault("get", "slow", gate=gate, times=1))
    async with engine_of(mounts={"m": faulty}, **PATIENT | config) as engine:
        await until(lambda: faulty.tier.running["get"] == 1)
        try:
            with anyio.fail_after(5):
                yield engine, faulty.tier, gate
        finally:
            gate.set()
        await until(lambda: engine.stats().restore.readiness == "ready")
        await settled(engine)


@pytest.mark.asyncio
async def test_a_request_for_what_is_being_warmed_does_not_wait_for_it(engine_of: EngineOf, alone: Alone) -> None:
    async with warming(engine_of) as (engine, tier, gate):
        output = await ask(engine, prompt(1))
        assert not gate.is_set()
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        assert engine.stats().transfers.loads["given up"] == 1
        assert tier.running["get"] == 0


@pytest.mark.asyncio
async def test_a_request_gets_the_blocks_that_warming_holds(engine_of: EngineOf, alone: Alone) -> None:
    """Four of eight are held and it needs six; no request would ever give any back."""
    async with warming(engine_of, num_blocks=8) as (engine, _, gate):
        output = await ask(engine, prompt(30))
        assert not gate.is_set()
        assert [output.token_ids] == tokens(await alone(prompt(30), GREEDY))
        assert engine.stats().preemptions == 0


@pytest.mark.asyncio
async def test_it_goes_on_with_the_next_path(engine_of: EngineOf) -> None:
    async with warming(engine_of) as (engine, _, _):
        await ask(engine, prompt(1))
        await until(lambda: engine.stats().restore.readiness == "ready")
        assert engine.stats().restore.warmed_blocks >= 5
        assert (await engine.explain(prompt(2))).device_tokens >= 16


@pytest.mark.asyncio
async def test_it_does_not_give_way_to_who_needs_nothing_of_it(engine_of: EngineOf) -> None:
    """Also when one request waits for what another computes."""
    async with warming(engine_of) as (engine, tier, _):
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(ask, engine, prompt(30))
        assert engine.stats().transfers.loads == {}
        assert tier.running["get"] == 1


@pytest.mark.asyncio
async def test_what_is_being_warmed_is_erased_as_well(engine_of: EngineOf) -> None:
    """It was read before the tier was erased and arrives after."""
    store, gate = await two_prompts(engine_of), anyio.Event()
    async with engine_of(mounts={"m": lambda geometry: Late(geometry, store, gate)}, **PATIENT) as engine:
        tier = tiering(engine).manager._mounts[0].tier
        await until(lambda: isinstance(tier, Late) and tier.has_read)
        assert await engine.erase(None) == 10
        gate.set()
        await until(lambda: engine.stats().restore.readiness == "ready")
        await settled(engine)
        assert engine._loop.cache.tree.blocks == 0
        assert store.blocks == {}


def block(number: int, **meta: float) -> Listed:
    shelf: Shelf = Namespace("m").shelf()
    parent: BlockName = shelf.namespace
    data = number.to_bytes(4 * B, "little")
    return Listed(shelf, Head(name_after(parent, data), parent, 0, data), Meta(**meta))  # type: ignore[arg-type]  # fields by name


def test_a_priority_whose_time_is_over_is_none() -> None:
    blocks = [block(1, priority=9, ttl=0.0), block(2, hits=1), block(3, priority=1, ttl=5.0)]
    assert [path[0] for path, _ in hottest_paths(blocks, 3)] == [blocks[2], blocks[1], blocks[0]]


@pytest.mark.asyncio
@pytest.mark.parametrize(("seconds_off", "warm"), [(1.0, 1), (100.0, 2)])
async def test_the_time_of_a_priority_passes_while_the_engine_is_off(
    seconds_off: float, warm: int, engine_of: EngineOf
) -> None:
    store, clock = MemoryStore(), FakeClock()
    async with engine_of(mounts={"m": lasting(store)}, clock=clock, wall=clock) as engine:
        await ask(engine, prompt(1), retention=[Retention(0, None, 5, ttl=10.0)])
        for _ in range(2):
            await ask(engine, prompt(2))
    clock.now += seconds_off
    assert await warmed(engine_of, store, clock) == [warm]


@pytest.mark.asyncio
async def test_what_was_stored_long_ago_is_not_the_latest(engine_of: EngineOf) -> None:
    """It was stored at once after its use; the other one some seconds after."""
    store, clock = MemoryStore(), FakeClock()
    async with engine_of(mounts={"m": lasting(store)}, clock=clock, wall=clock) as engine:
        for number, seconds in ((1, 0.0), (2, 10.0)):
            await ask(engine, prompt(number))
            clock.now += seconds
            await cool(engine)
            clock.now += 1000.0
    assert await warmed(engine_of, store, clock) == [2]


async def warmed(engine_of: EngineOf, store: MemoryStore, clock: FakeClock) -> list[int]:
    """Which of prompts 1 and 2 comes back when there is room for one."""
    async with engine_of(mounts={"m": lasting(store)}, clock=clock, wall=clock, warm_bytes=5 * PAYLOAD) as engine:
        await until(lambda: engine.stats().restore.warmed_blocks == 5)
        await until(lambda: engine.stats().restore.readiness == "ready")
        await settled(engine)
        return [number for number in (1, 2) if (await engine.explain(prompt(number))).device_tokens >= 16]


def test_a_budget_without_end_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="warm_bytes"):
        EngineConfig(warm_bytes=float("inf"))  # type: ignore[arg-type]  # that is the point
