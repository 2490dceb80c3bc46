"""What one engine has computed is loaded by the others that share its store; and never what is not theirs."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import TypedDict

import pytest

from octavo.engine.testing import FakeRunner
from octavo.storage.naming import tenant_digest
from octavo.tests.storage.sharing_rig import (
    B,
    Clock,
    Store,
    ask,
    cold,
    folder_store,
    forget,
    loaded,
    prompt,
    push_out,
    redis_store,
    replica,
    written,
)

pytestmark = pytest.mark.asyncio
IDS = prompt(1)
WHOLE = (len(IDS) - 1) // B
"""Blocks of it that can be found; at least one token is computed."""


class Settings(TypedDict, total=False):
    """What an engine may have of its own."""

    block_size: int
    storage_key: bytes


@pytest.fixture(params=["redis", "object_store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "redis":
        return redis_store(request.getfixturevalue("redis_socket"), f"test-{uuid.uuid4().hex}", value_bytes=20)
    return folder_store(tmp_path / "objects")


@pytest.mark.parametrize("way", ["write_through", "write_back", "close"])
async def test_a_prefix_that_one_has_computed_is_loaded_by_those_that_were_open_before(store: Store, way: str) -> None:
    expected = await cold(IDS)
    demotion = "write_through" if way == "write_through" else "write_back"
    async with replica(store) as second, replica(store) as third:
        async with replica(store, demotion=demotion) as first:
            assert await ask(first, IDS) == expected
            if way == "write_back":
                assert first.stats().tiers[0].put_blocks == 0
                await push_out(first)
            await written(first)
        for engine in (second, third):
            assert await ask(engine, IDS) == expected
            assert loaded(engine) == engine.stats().tiers[0].foreign_blocks == WHOLE
            before = engine.stats().cache
            assert await ask(engine, IDS) == expected
            after = engine.stats().cache
            assert loaded(engine) == WHOLE, "it is on the device now"
            assert after.prefix_hit_tokens - before.prefix_hit_tokens == len(IDS) - 1


async def test_what_was_not_there_a_moment_ago_is_found_by_the_very_next_request(store: Store) -> None:
    """That something is missing is never remembered. Time stands still here."""
    clock = Clock()
    async with replica(store, clock=clock) as first, replica(store, clock=clock, demotion="write_back") as second:
        for _ in range(2):
            await ask(second, IDS)
            await forget(second, IDS)
        assert (loaded(second), second.stats().tiers[0].put_blocks) == (0, 0)
        await ask(first, IDS)
        await written(first)
        assert await ask(second, IDS) == await ask(first, IDS)
        assert loaded(second) == WHOLE


async def test_a_longer_prompt_takes_what_there_is_and_gives_back_the_rest(store: Store) -> None:
    longer = [*IDS[: WHOLE * B], *prompt(2)]
    async with replica(store) as first, replica(store) as second, replica(store) as third:
        await ask(first, IDS)
        await written(first)
        assert await ask(second, longer) == await cold(longer)
        assert loaded(second) == WHOLE
        await written(second)
        assert await ask(third, longer) == await cold(longer)
        assert loaded(third) == (len(longer) - 1) // B


async def test_many_may_write_the_same_block_at_once(store: Store) -> None:
    prompts = [prompt(number, 30) for number in range(6)]
    expected = [await cold(ids) for ids in prompts]
    async with replica(store) as first, replica(store) as second, replica(store) as third:
        for _ in range(2):
            answers = await asyncio.gather(*[ask(each, ids) for each in (first, second) for ids in prompts])
            assert answers == expected * 2
        await asyncio.gather(written(first), written(second))
        await asyncio.gather(push_out(first), push_out(second))
        for engine in (third, first, second):
            assert [await ask(engine, ids) for ids in prompts] == expected
        assert loaded(third) == len(prompts) * (29 // B)
        assert all(tier.corrupt == tier.tier.corrupt == 0 for each in (first, second) for tier in each.stats().tiers)


async def test_bytes_that_move_are_counted_on_both_sides(store: Store) -> None:
    async with replica(store) as first, replica(store) as second:
        size = first._life.parts.tiering.manager._reader._codec.record_bytes
        await ask(first, IDS)
        await written(first)
        await ask(second, IDS)
        wrote, read = first.stats().tiers[0], second.stats().tiers[0]
        assert wrote.put_bytes == wrote.put_blocks * size > 0
        assert read.loaded_bytes == read.loaded_blocks * size == WHOLE * size
        shown = {
            (sample.name, sample.labels["tier"]): sample.value
            for family in second.registry.collect()
            for sample in family.samples
            if "tier" in sample.labels
        }
        assert shown["octavo_tier_read_bytes_total", store.tier] == read.loaded_bytes
        assert shown["octavo_tier_written_bytes_total", store.tier] == read.put_bytes


async def test_a_store_that_was_emptied_is_a_miss_and_fills_again(store: Store) -> None:
    expected = await cold(IDS)
    async with replica(store) as first, replica(store) as second:
        await ask(first, IDS)
        await written(first)
        await ask(second, IDS)
        await push_out(second)
        await store.clear()
        assert await ask(second, IDS) == expected, "it remembers that the store had them"
        assert loaded(second) == WHOLE
        await written(second)
        async with replica(store) as third:
            assert await ask(third, IDS) == expected
            assert loaded(third) == WHOLE


# what is not theirs


@pytest.mark.parametrize(
    ("identity", "settings"),
    [
        ({"weights": "other"}, {}),
        ({"weights": "fake, one weight changed"}, {}),
        ({"dtype": "float16"}, {}),
        ({"configuration": "other"}, {}),
        ({"tokenizer": "other"}, {}),
        ({"position encoding": "other"}, {}),
        ({"lora": "an adapter"}, {}),
        ({}, Settings(block_size=2)),
        ({}, Settings(storage_key=b"k" * 32)),
    ],
    ids=["weights", "version", "dtype", "configuration", "tokenizer", "positions", "adapter", "block size", "key"],
)
async def test_another_model_finds_nothing_and_says_what_it_says_alone(
    redis_socket: Path, identity: dict[str, str], settings: Settings
) -> None:
    store = redis_store(redis_socket, f"test-{uuid.uuid4().hex}")
    other = FakeRunner(identity=identity)
    async with replica(store) as first, replica(store, runner=other, **settings) as second:
        expected = await ask(first, IDS)
        await written(first)
        answer = await ask(second, IDS)
        assert (loaded(second), second.stats().transfers.loads) == (0, {})
        assert answer == await cold(IDS, FakeRunner(identity=identity))
        await written(second)
        await push_out(first)
        assert await ask(first, IDS) == expected, "nor does it spoil what was there"
        assert loaded(first) == WHOLE


async def test_tenants_find_their_own_blocks_alone(store: Store) -> None:
    tenants = (None, "", "a", "b")
    async with replica(store) as first:
        for count, tenant in enumerate(tenants):
            async with replica(store, demotion="write_back", close_budget=0.0) as second:
                for other in tenants[count:]:
                    await ask(second, IDS, other)
                assert loaded(second) == 0
                await ask(first, IDS, tenant)
                await written(first)
                await second.evict(list(IDS), tenant=tenant, tiers=False)
                await ask(second, IDS, tenant)
                assert loaded(second) == WHOLE


async def test_erasing_a_tenant_empties_the_store_and_no_device_but_its_own(store: Store) -> None:
    """Others keep what they hold until they are told, and may write it again: whoever erases tells all."""
    async with replica(store) as first, replica(store) as second, replica(store) as third:
        for tenant in ("a", "b"):
            await ask(first, IDS, tenant)
            await written(first)
            await ask(second, IDS, tenant)
        assert await first.erase("a") > 0
        await ask(third, IDS, "a")
        assert loaded(third) == 0
        await third.erase("a")
        before = second.stats().cache.prefix_hit_tokens
        await ask(second, IDS, "a")
        assert second.stats().cache.prefix_hit_tokens - before == len(IDS) - 1, "it is on its device still"
        await second.erase("a")
        before = loaded(second)
        await ask(second, IDS, "a")
        assert loaded(second) == before, "nor does it believe that the store has them"
        for engine in (first, second, third):
            await engine.erase("a")
        await push_out(second)
        await ask(third, IDS, "b")
        assert loaded(third) == WHOLE, "the other tenant's are left alone"
        listed = [each async for each in first._life.parts.tiering.manager._mounts[0].tier.listing()]
        assert {each.shelf.tenant for each in listed} == {tenant_digest("b")}


async def test_a_snapshot_and_the_store_complete_each_other(store: Store, tmp_path: Path) -> None:
    other = prompt(2)
    async with replica(store) as first:
        await ask(first, other)
        await written(first)
        await forget(first, other)
        await store.clear()
        await ask(first, IDS)
        await first.snapshot(tmp_path / "snapshot")
        await forget(first, IDS)
        await store.clear()
        await ask(first, other)
        await written(first)
    async with replica(store, restore=tmp_path / "snapshot") as second:
        assert [await ask(second, ids) for ids in (IDS, other)] == [await cold(ids) for ids in (IDS, other)]
        tokens = second.stats().transfers.loaded_tokens
        assert tokens == {"snapshot": WHOLE * B, store.tier: WHOLE * B}
