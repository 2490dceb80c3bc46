"""Evict and erase: what is to be forgotten is gone everywhere, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.errors import InvalidRequest, StorageError
from octavo.storage.naming import tenant_digest
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.tests.engine.tier_rig import (
    GREEDY,
    LONG,
    ONE,
    EngineOf,
    Faulty,
    ask,
    cool,
    lasting,
    memory,
    prompt,
    settled,
    tiering,
    tokens,
    until,
)

FIFTY = SamplingParams(max_tokens=50, temperature=0.0)
Alone = Callable[..., Awaitable[list[RequestOutput]]]


def of_tenant(store: MemoryStore, tenant: str | None) -> int:
    return sum(shelf.tenant == tenant_digest(tenant) for shelf, _ in store.blocks)


async def found(engine: AsyncEngine, ids: list[int], tenant: str | None = None) -> int:
    return (await engine.explain(ids, tenant=tenant)).cached_tokens


def all_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


# evict


@pytest.mark.asyncio
@pytest.mark.parametrize("tiers", [True, False])
async def test_a_prefix_and_what_goes_on_from_it(tiers: bool, engine_of: EngineOf) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"m": memory(store=store)}, demotion="write_through") as engine:
        base = prompt(1)[:8]
        for tail in (1, 2, 3):
            await ask(engine, [*base, *[tail] * 9], ONE)
        await ask(engine, prompt(2), ONE)
        await settled(engine)
        assert len(store.blocks) == 2 + 3 * 2 + 4
        gone = await engine.evict([*base, 1, 1, 1, 1], tiers=tiers)
        assert gone == (2, 2 if tiers else 0)
        assert [await found(engine, [*base, *[tail] * 9]) for tail in (1, 2, 3)] == [8 if tiers else 16, 16, 16]
        gone = await engine.evict(base, tiers=tiers)
        assert gone.device_blocks == 6
        assert await found(engine, prompt(2)) == 16
        assert len(store.blocks) == (4 if tiers else 12)
        assert [await found(engine, [*base, *[tail] * 9]) for tail in (1, 2, 3)] == [0 if tiers else 16] * 3


@pytest.mark.asyncio
async def test_what_lies_in_a_tier_alone_is_found_below_the_prefix(engine_of: EngineOf) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"m": memory(store=store)}) as engine:
        await ask(engine, prompt(1, 30), ONE)
        await ask(engine, prompt(2), ONE)
        await cool(engine)
        assert await engine.evict(prompt(1, 30)[:8]) == (0, 6)
        assert len(store.blocks) == 5


@pytest.mark.asyncio
async def test_what_a_request_or_a_pin_holds_stays_on_the_device(engine_of: EngineOf, alone: Alone) -> None:
    async with engine_of(mounts={"m": memory()}, num_blocks=128) as engine:
        pin = await engine.pin(prompt(1))
        task = asyncio.create_task(ask(engine, prompt(2), FIFTY))
        await until(lambda: engine.stats().running == 1 and engine.stats().generated_tokens > 3)
        assert (await engine.evict(prompt(1))).device_blocks == 0
        assert (await engine.evict(prompt(2))).device_blocks == 0
        assert (await task).token_ids == (await alone(prompt(2), FIFTY))[0].token_ids
        assert (await engine.explain(prompt(1))).device_tokens == 16
        await engine.unpin(pin)
        assert (await engine.evict(prompt(1))).device_blocks == 4


@pytest.mark.asyncio
async def test_evicting_spares_other_tenants(engine_of: EngineOf) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"m": memory(store=store)}, demotion="write_through") as engine:
        for tenant in ("a", "b", None):
            await ask(engine, prompt(1), ONE, tenant=tenant)
        await settled(engine)
        await engine.evict(prompt(1), tenant="a")
        assert [of_tenant(store, tenant) for tenant in ("a", "b", None)] == [0, 4, 4]
        assert await found(engine, prompt(1), "a") == 0
        assert await found(engine, prompt(1), "b") == 16


@pytest.mark.asyncio
async def test_blocks_in_write_queues_are_forgotten_too(engine_of: EngineOf) -> None:
    store = MemoryStore()
    faulty, gate = Faulty(memory(store=store)), anyio.Event()
    async with engine_of(mounts={"m": faulty}, demotion="write_through", tier_deadline=60.0) as engine:
        faulty.tier.inject(Fault("put", "slow", gate=gate))
        for number in (1, 2, 3):
            await ask(engine, prompt(number), ONE)
        await until(lambda: engine.stats().tiers[0].queued_blocks == 12)
        evicting = asyncio.create_task(engine.evict(prompt(3)))
        await asyncio.sleep(0)
        gate.set()
        await evicting
        await settled(engine)
        assert await found(engine, prompt(3)) == 0
        assert len(store.blocks) == 8


# erase


@pytest.mark.asyncio
async def test_a_tenant_is_gone_from_everywhere(engine_of: EngineOf, tmp_path: Path) -> None:
    """Device, both tiers, snapshots; others keep all they have."""
    host, disk = MemoryStore(), MemoryStore()
    mounts = {"a": memory(store=host), "b": lasting(disk)}
    async with engine_of(mounts=mounts, demotion="write_through") as engine:
        for tenant in ("gone", "stays", None):
            await ask(engine, prompt(1), ONE, tenant=tenant)
            await ask(engine, prompt(2), ONE, tenant=tenant)
        await settled(engine)
        await engine.snapshot(tmp_path / "one")
        await engine.snapshot(tmp_path / "two")
        assert await engine.erase("gone", snapshots=[tmp_path / "one", tmp_path / "two"]) == 8 + 16 + 16
        for store in (host, disk):
            assert [of_tenant(store, tenant) for tenant in ("gone", "stays", None)] == [0, 8, 8]
        assert await found(engine, prompt(1), "gone") == 0
        assert await found(engine, prompt(1), "stays") == 16
        explanation = await engine.explain(prompt(1), tenant="gone")
        assert explanation.device.evicted is None, "that it was there is forgotten as well"
        digest = tenant_digest("gone")
        assert digest not in all_bytes(tmp_path)
    async with engine_of(restore=tmp_path / "one") as engine:
        assert await found(engine, prompt(1), "gone") == 0
        assert await found(engine, prompt(1), "stays") == 16


@pytest.mark.asyncio
async def test_requests_of_the_tenant_are_aborted_and_leave_nothing(engine_of: EngineOf, alone: Alone) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"m": memory(store=store)}, demotion="write_through", num_blocks=256) as engine:
        mine = asyncio.create_task(ask(engine, prompt(1), LONG, tenant="gone"))
        waiting = asyncio.create_task(ask(engine, prompt(3), LONG, tenant="gone"))
        other = asyncio.create_task(ask(engine, prompt(1), GREEDY, tenant="stays"))
        await until(lambda: engine.stats().running > 0)
        assert await engine.erase("gone") >= 0
        for task in (mine, waiting):
            assert (await task).finish_reason is FinishReason.ABORT
        assert [(await other).token_ids] == tokens(await alone(prompt(1), GREEDY))
        await settled(engine)
        assert of_tenant(store, "gone") == 0
        assert await found(engine, prompt(1), "gone") == 0


@pytest.mark.asyncio
async def test_erasing_while_its_blocks_are_being_loaded_and_written(engine_of: EngineOf) -> None:
    store = MemoryStore()
    faulty, gate = Faulty(memory(store=store)), anyio.Event()
    async with engine_of(
        mounts={"m": faulty}, tier_deadline=60.0, promotion="wait", num_blocks=128, max_batch_tokens=300
    ) as engine:
        for number in (1, 2):
            await ask(engine, prompt(number), ONE, tenant="gone")
            await cool(engine)
        await ask(engine, prompt(3, 300), ONE, tenant="gone")
        faulty.tier.inject(Fault("get", "slow", gate=gate), Fault("put", "slow", gate=gate))
        await engine._loop.at_edge(lambda: engine._loop.cache.evict(128))
        loading = asyncio.create_task(ask(engine, prompt(1), ONE, tenant="gone"))
        await until(lambda: faulty.tier.running["get"] == 1 and faulty.tier.running["put"] == 1)
        erasing = asyncio.create_task(engine.erase("gone"))
        assert (await loading).finish_reason is FinishReason.ABORT
        gate.set()
        await erasing
        await settled(engine)
        assert of_tenant(store, "gone") == 0
        assert await found(engine, prompt(1), "gone") == 0


@pytest.mark.asyncio
async def test_what_was_evicted_a_moment_before_does_not_get_into_a_tier(engine_of: EngineOf) -> None:
    """It was to be copied before the next step, and the step did not come yet."""
    store = MemoryStore()
    async with engine_of(mounts={"m": memory(store=store)}) as engine:
        await ask(engine, prompt(1), ONE, tenant="gone")
        evicting = asyncio.create_task(engine._loop.at_edge(lambda: engine._loop.cache.evict(64)))
        erasing = asyncio.create_task(engine.erase("gone"))
        await asyncio.gather(evicting, erasing)
        await settled(engine)
        assert of_tenant(store, "gone") == 0
        assert engine.stats().transfers.exported_blocks == 0


@pytest.mark.asyncio
async def test_what_waits_to_be_exported_is_withdrawn(engine_of: EngineOf) -> None:
    """Blocks that were promised to a tier that takes nothing now must not reach it afterwards."""
    store = MemoryStore()
    faulty, gate = Faulty(memory(store=store)), anyio.Event()
    async with engine_of(
        mounts={"m": faulty}, demotion="write_through", tier_queue_bytes=600, tier_deadline=60.0
    ) as engine:
        faulty.tier.inject(Fault("put", "slow", gate=gate))
        for number in (1, 2, 3):
            await ask(engine, prompt(number), ONE, tenant="gone")
        assert tiering(engine).exports.has_waiting
        erasing = asyncio.create_task(engine.erase("gone"))
        await until(lambda: not tiering(engine).exports.has_waiting)
        gate.set()
        await erasing
        await settled(engine)
        assert of_tenant(store, "gone") == 0


@pytest.mark.asyncio
async def test_a_tier_that_cannot_erase_is_told_and_the_others_have(engine_of: EngineOf) -> None:
    """What a caller was promised is true, or there is an error: never silence."""
    store = MemoryStore()
    faulty = Faulty()
    async with engine_of(mounts={"bad": faulty, "good": memory(store=store)}, demotion="write_through") as engine:
        await ask(engine, prompt(1), ONE, tenant="gone")
        await settled(engine)
        faulty.tier.inject(Fault("erase", "fail", times=1))
        with pytest.raises(StorageError, match="bad"):
            await engine.erase("gone")
        assert of_tenant(store, "gone") == 0
        assert await engine.erase("gone") == 4, "the second try"


@pytest.mark.asyncio
async def test_an_erased_tenant_can_begin_anew(engine_of: EngineOf, alone: Alone) -> None:
    async with engine_of(mounts={"m": memory()}) as engine:
        for _ in range(3):
            output = await ask(engine, prompt(1), tenant="t")
            assert output.cached_tokens == 0
            assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
            await cool(engine)
            assert await engine.erase("t") == 5


@pytest.mark.asyncio
@pytest.mark.parametrize("tenant", [5, b"a", ["a"]])
async def test_a_malformed_tenant_erases_nobody(tenant: object, engine_of: EngineOf) -> None:
    """HASH-07."""
    async with engine_of() as engine:
        await ask(engine, prompt(1))
        with pytest.raises(InvalidRequest):
            await engine.erase(tenant)  # type: ignore[arg-type]  # what is tested
        with pytest.raises(InvalidRequest):
            await engine.evict(prompt(1), tenant=tenant)  # type: ignore[arg-type]  # what is tested
        assert await found(engine, prompt(1)) == 17
