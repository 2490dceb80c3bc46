"""Blocks that several engines share: none takes from the others what they put, and one hiccup costs nothing."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import Popen

import pytest
from redis.asyncio import Redis

from octavo.storage.base import Record
from octavo.storage.redis.tier import RedisTier
from octavo.storage.testing.contract import Fault, FaultyTier, SampleBlocks
from octavo.tests.storage import manager_rig
from octavo.tests.storage.manager_rig import Rig, memory, remote

SAMPLES = SampleBlocks()
SHELF = SAMPLES.shelf("tenant")
CHAIN = SAMPLES.chain(SHELF, 3)


@asynccontextmanager
async def opened(path: Path, prefix: str) -> AsyncIterator[RedisTier]:
    tier = RedisTier.create({"url": f"unix://{path}", "prefix": prefix, "value_bytes": 200}, SAMPLES.geometry)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def names(records: Sequence[Record]) -> list[bytes]:
    return [record.head.name for record in records]


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.mark.asyncio
async def test_a_full_server_keeps_the_blocks_that_it_has(
    start_redis: Callable[..., Popen[bytes]], socket_path: Path, prefix: str
) -> None:
    start_redis(socket_path, "--maxmemory-policy", "noeviction")
    more = SAMPLES.chain(SHELF, 1, seed=1)
    async with opened(socket_path, prefix) as mine, opened(socket_path, prefix) as theirs:
        assert all(await mine.put(SHELF, CHAIN))
        async with Redis(unix_socket_path=str(socket_path)) as client:
            await client.config_set("maxmemory", "1")
            assert await theirs.put(SHELF, [*CHAIN, *more]) == [True, True, True, False]
            assert theirs.stats().declined == 1
            assert await mine.contains(SHELF, names([*CHAIN, *more])) == [True, True, True, False]
            left = [key async for key in client.scan_iter(f"{prefix}:*{more[0].head.name.hex()}*")]
        assert left == []


@pytest.mark.asyncio
async def test_a_block_that_somebody_is_putting_is_left_alone(redis_socket: Path, prefix: str) -> None:
    async with opened(redis_socket, prefix) as mine, opened(redis_socket, prefix) as theirs:
        await mine.put(SHELF, CHAIN)
        async with Redis(unix_socket_path=str(redis_socket)) as client:
            [about] = [
                key async for key in client.scan_iter(f"{prefix}:*{CHAIN[0].head.name.hex()}") if key.count(b":") == 3
            ]
            last = await client.getdel(about)  # as before the last key of a put arrives
            found = await theirs.get(SHELF, names(CHAIN))
            assert [each is not None for each in found] == [False, True, True]
            assert last is not None
            await client.set(about, last, ex=1000)
        assert theirs.stats().corrupt == 0
        assert await mine.contains(SHELF, names(CHAIN)) == [True] * 3
        [stored, *_] = await mine.get(SHELF, names(CHAIN))
        assert stored is not None
        assert bytes(stored.data) == bytes(CHAIN[0].data)


@pytest.mark.asyncio
async def test_a_shared_tier_that_does_not_say_what_it_has_is_given_everything() -> None:
    records = manager_rig.SAMPLES.chain(manager_rig.SHELF, 5)
    below = FaultyTier(remote())
    rig = Rig(memory(), below)
    await rig.manager.open()
    await rig.stored(records, 0)
    below.inject(Fault("contains", "fail", times=1))
    assert await rig.manager.persist(10.0) == 5
    assert await below.contains(manager_rig.SHELF, names(records)) == [True] * 5
    await rig.manager.close(10.0)
