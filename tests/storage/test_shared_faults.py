"""A shared store whose values are wrong, that loses some, hangs or dies: misses, and the right text."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from subprocess import Popen
from typing import TypeAlias

import anyio
import pytest
from redis.asyncio import Redis

from octavo import AsyncEngine
from octavo.tests.storage.sharing_rig import (
    B,
    Clock,
    ask,
    cold,
    loaded,
    prompt,
    push_out,
    redis_store,
    replica,
    until,
    written,
)

pytestmark = pytest.mark.asyncio
Spoil: TypeAlias = Callable[[bytes], bytes]
StartRedis: TypeAlias = Callable[..., Popen[bytes]]
IDS = prompt(1)
WHOLE = (len(IDS) - 1) // B
LATER = 1000.0
"""Seconds after which a breaker lets somebody try again."""


async def values(path: Path, prefix: str) -> list[tuple[bytes, bytes]]:
    async with Redis(unix_socket_path=str(path)) as client:
        keys = sorted([bytes(key) async for key in client.scan_iter(f"{prefix}:*", count=1000)])
        found = [await client.get(key) for key in keys]
        return [(key, value) for key, value in zip(keys, found, strict=True) if isinstance(value, bytes)]


def truncated(value: bytes) -> bytes:
    return value[: len(value) // 2]


def flipped(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


def nothing(_: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("spoil", [truncated, flipped, nothing], ids=["truncated", "flipped", "empty"])
@pytest.mark.parametrize("what", ["pieces", "heads"])
async def test_values_that_are_wrong_are_misses_and_counted(redis_socket: Path, spoil: Spoil, what: str) -> None:
    prefix = f"test-{uuid.uuid4().hex}"
    store = redis_store(redis_socket, prefix, value_bytes=1 << 20)
    async with replica(store) as first, replica(store) as second:
        await ask(first, IDS)
        await written(first)
        async with Redis(unix_socket_path=str(redis_socket)) as client:
            for key, value in await values(redis_socket, prefix):
                if (key.count(b":") > 3) == (what == "pieces"):
                    await client.set(key, spoil(value))
        assert await ask(second, IDS) == await cold(IDS)
        report = second.stats().tiers[0]
        assert loaded(second) == 0
        assert report.corrupt + report.tier.corrupt > 0
        await written(second)
        async with replica(store) as third:
            assert await ask(third, IDS) == await cold(IDS)
            assert loaded(third) == WHOLE, "right ones took their place"


async def test_records_of_other_blocks_are_not_taken_for_those_asked_for(redis_socket: Path) -> None:
    prefix = f"test-{uuid.uuid4().hex}"
    store = redis_store(redis_socket, prefix, value_bytes=1 << 20)
    async with replica(store) as first, replica(store) as second:
        await ask(first, IDS)
        await ask(first, prompt(2))
        await written(first)
        pieces = [(key, value) for key, value in await values(redis_socket, prefix) if key.count(b":") > 3]
        async with Redis(unix_socket_path=str(redis_socket)) as client:
            for (key, _), (_, value) in zip(pieces, pieces[1:] + pieces[:1], strict=True):
                await client.set(key, value)
        assert await ask(second, IDS) == await cold(IDS)
        assert loaded(second) == 0
        assert second.stats().tiers[0].corrupt > 0


@pytest.mark.parametrize("seed", range(2))
async def test_blocks_of_which_the_server_has_dropped_a_part_are_never_used(redis_socket: Path, seed: int) -> None:
    random = Random(seed)  # noqa: S311  # no secret
    prefix = f"test-{uuid.uuid4().hex}"
    store = redis_store(redis_socket, prefix, value_bytes=16)
    prompts = [prompt(number, 26) for number in range(6)]
    async with replica(store) as first, replica(store) as second:
        for ids in prompts:
            await ask(first, ids)
        await written(first)
        async with Redis(unix_socket_path=str(redis_socket)) as client:
            keys = [key for key, _ in await values(redis_socket, prefix)]
            await client.delete(*random.sample(keys, len(keys) // 10))
        whole = await whole_blocks(second, prompts)
        assert [await ask(second, ids) for ids in prompts] == [await cold(ids) for ids in prompts]
        assert loaded(second) <= whole < len(prompts) * (25 // B)


async def whole_blocks(engine: AsyncEngine, prompts: Sequence[Sequence[int]]) -> int:
    """Blocks in the store of which all keys are there."""
    mount = engine._life.parts.tiering.manager._mounts[0]
    listed = [(each.shelf, each.head.name) async for each in mount.tier.listing()]
    there = [await mount.tier.contains(shelf, [name]) for shelf, name in listed]
    assert len(there) <= len(prompts) * (29 // B + 1)
    return sum(each == [True] for each in there)


@pytest.mark.slow
async def test_a_server_that_evicts_as_it_likes_costs_hits_alone(start_redis: StartRedis, socket_path: Path) -> None:
    start_redis(socket_path, "--maxmemory", "1600kb", "--maxmemory-policy", "allkeys-random")
    store = redis_store(socket_path, "test", value_bytes=64)
    prompts = [prompt(number, 40) for number in range(60)]
    expected = [await cold(ids) for ids in prompts]
    async with (
        replica(store) as first,
        replica(store) as second,
        anyio.create_task_group() as tasks,
    ):
        for engine in (first, second):
            tasks.start_soon(go_through, engine, prompts, expected)
    async with Redis(unix_socket_path=str(socket_path)) as client:
        assert (await client.info())["evicted_keys"] > 0


async def go_through(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], expected: Sequence[tuple[int, ...]]
) -> None:
    for turn in range(2):
        for at in range(len(prompts)):
            which = (at * 7 + turn) % len(prompts)
            assert await ask(engine, prompts[which]) == expected[which]
    report = engine.stats().tiers[0]
    assert (report.corrupt, report.failures) == (0, 0)


# a server that is not there


@pytest.mark.parametrize("answers", [1, 6, 13])
async def test_a_server_that_dies_in_the_middle_costs_hits_alone(
    start_redis: StartRedis, socket_path: Path, answers: int
) -> None:
    """``answers``: after how many it is killed, while others are being read and written."""
    server = start_redis(socket_path)
    store, clock = redis_store(socket_path, "test", value_bytes=16), Clock()
    prompts = [prompt(number, 26) for number in range(8)]
    expected = {number: await cold(ids) for number, ids in enumerate(prompts)}
    given: list[int] = []

    async def client(engine: AsyncEngine, offset: int) -> None:
        for at in range(16):
            which = (offset + 3 * at) % len(prompts)
            assert await ask(engine, prompts[which]) == expected[which]
            await engine.evict(list(prompts[which]), tiers=False)
            given.append(which)
            if len(given) == answers:
                server.kill()
                server.wait()

    async with replica(store, clock=clock) as first, replica(store, clock=clock) as second:
        async with anyio.create_task_group() as tasks:
            for engine in (first, second):
                for offset in range(2):
                    tasks.start_soon(client, engine, offset)
        assert {engine.stats().tiers[0].breaker for engine in (first, second)} == {"open"}
        assert [engine.stats().finished.get("error", 0) for engine in (first, second)] == [0, 0]
        start_redis(socket_path)
        assert await ask(second, prompts[0]) == expected[0]
        assert second.stats().tiers[0].breaker == "open", "it is left alone for a while"
        clock.now = LATER
        await recovered(first, second)


async def test_a_server_that_hangs_stalls_a_few_calls_and_nobody_after_them(
    start_redis: StartRedis, socket_path: Path
) -> None:
    server = start_redis(socket_path)
    store, clock = redis_store(socket_path, "test", timeout=30.0), Clock()
    prompts = [prompt(number) for number in range(12)]
    expected = [await cold(ids) for ids in prompts]
    async with (
        replica(store, clock=clock, tier_deadline=0.5, close_budget=1.0) as first,
        replica(store, clock=clock, tier_deadline=0.5, close_budget=1.0) as second,
    ):
        await ask(first, IDS)
        await written(first)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert [await ask(second, ids) for ids in prompts] == expected
            stalled = second.stats().tiers[0]
            assert 3 <= stalled.timeouts <= 6, "three in a row for reading, and three for writing"
            assert (stalled.breaker, loaded(second)) == ("open", 0)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        clock.now = LATER
        await recovered(first, second)


async def recovered(first: AsyncEngine, second: AsyncEngine) -> None:
    """Both find out that the store is there again, and share as before."""
    for engine in (first, second):
        await ask(engine, prompt(40))
        await written(engine)
        await push_out(engine)
    await until(lambda: all(engine.stats().tiers[0].breaker == "closed" for engine in (first, second)))
    fresh = prompt(41)
    assert await ask(first, fresh) == await cold(fresh)
    await written(first)
    before = loaded(second)
    assert await ask(second, fresh) == await cold(fresh)
    assert loaded(second) - before == (len(fresh) - 1) // B


async def test_many_engines_open_and_serve_while_there_is_no_server(socket_path: Path) -> None:
    store = redis_store(socket_path, "test")
    async with replica(store) as first, replica(store) as second:
        answers = await asyncio.gather(*[ask(engine, IDS) for engine in (first, second)])
        assert answers == [await cold(IDS)] * 2
        assert not any(engine.stats().tiers[0].tier.healthy for engine in (first, second))
