"""Engines that share a store, and how to see what one finds of what another has computed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
from redis.asyncio import Redis

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeRunner

B = 4
"""Tokens of a block."""
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
PATIENCE = 30.0
"""Seconds after which a test that hangs is told so; no result depends on it."""


class Store(NamedTuple):
    """A store that engines share."""

    tier: str
    options: Mapping[str, object]
    clear: Callable[[], Awaitable[None]]
    """Forget everything, behind the engines' backs."""


def redis_store(path: Path, prefix: str, **options: object) -> Store:
    async def clear() -> None:
        async with Redis(unix_socket_path=str(path)) as client:
            for key in [key async for key in client.scan_iter(f"{prefix}:*", count=1000)]:
                await client.delete(key)

    return Store("octavo.storage.redis.tier:RedisTier", {"url": f"unix://{path}", "prefix": prefix, **options}, clear)


def folder_store(path: Path) -> Store:
    def unlink() -> None:
        for file in path.rglob("*"):
            if file.is_file():
                file.unlink()

    async def clear() -> None:
        await anyio.to_thread.run_sync(unlink)

    return Store("octavo.storage.object_store.tier:ObjectStoreTier", {"url": path.as_uri()}, clear)


@dataclass
class Clock:
    """Of engines: it stands still, so that no load looks too slow, until a test moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


SMALL: Mapping[str, object] = {
    "num_blocks": 64,
    "block_size": B,
    # by path, as the tiers: looking names up in what is installed takes longer than most tests
    "eviction_policy": "octavo.policies.eviction.lru:Lru",
    "scheduling_policy": "octavo.policies.scheduling.fcfs:Fcfs",
    "persistence_backend": "octavo.storage.snapshot.backend:FolderBackend",
}


@asynccontextmanager
async def replica(
    store: Store,
    *,
    runner: FakeRunner | None = None,
    clock: Clock | None = None,
    restore: Path | None = None,
    **settings: object,
) -> AsyncIterator[AsyncEngine]:
    """An engine over ``store``. Nothing is left behind when it ends."""
    wanted: dict[str, object] = {
        **SMALL,
        "tiers": (store.tier,),
        "tier_options": {store.tier: dict(store.options)},
        "promotion": "wait",
        "tier_deadline": PATIENCE,
        "checkpoint_interval": 0.0,
        "demotion": "write_through",
    }
    config = EngineConfig(**wanted | settings)  # type: ignore[arg-type]  # names and values come from the tests
    made = AsyncEngine(runner=runner or FakeRunner(), config=config, restore=restore, clock=clock or Clock())
    async with made as engine:
        with anyio.fail_after(PATIENCE):
            yield engine
            await engine._loop.wait_idle()
        census = engine.census()
        assert (census.held, census.in_transfer) == (0, 0)


def prompt(number: int, length: int = 18) -> list[int]:
    """A text that shares nothing with those of other numbers."""
    return [number % 64, *((number * 7 + at * at) % 64 for at in range(length - 1))]


async def ask(engine: AsyncEngine, ids: Sequence[int], tenant: str | None = None) -> tuple[int, ...]:
    """What the engine says."""
    [output] = await engine.complete(list(ids), GREEDY, tenant=tenant)
    return output.token_ids


async def cold(ids: Sequence[int], runner: FakeRunner | None = None) -> tuple[int, ...]:
    """What an engine says that has found nothing."""
    config = EngineConfig(**SMALL)  # type: ignore[arg-type]  # as above
    async with AsyncEngine(runner=runner or FakeRunner(), config=config) as engine:
        return await ask(engine, ids)


def loaded(engine: AsyncEngine) -> int:
    """Blocks that came from the store, right."""
    return engine.stats().tiers[0].loaded_blocks


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE):
        while not holds():  # noqa: ASYNC110  # tiers ring no bell
            await anyio.sleep(0.002)


async def written(engine: AsyncEngine) -> None:
    """Wait until everything that is on its way down has arrived."""
    exports = engine._life.parts.tiering.exports

    def is_on_its_way() -> bool:
        waits = exports._outstanding or exports._urgent or exports._later
        return bool(waits) or any(tier.queued_blocks for tier in engine.stats().tiers)

    await engine._loop.wait_idle()
    await until(lambda: not is_on_its_way())


async def push_out(engine: AsyncEngine) -> None:
    """Evict everything from the device, as pressure would, and wait until it has arrived below."""
    cache = engine._loop.cache
    await engine._loop.at_edge(lambda: cache.maybe_evict(low=cache.pool.num_blocks, high=cache.pool.num_blocks))
    await written(engine)
    assert engine.census().idle == 0


async def forget(engine: AsyncEngine, ids: Sequence[int]) -> None:
    """Lose a prefix on the device alone, with nothing written."""
    await engine.evict(list(ids), tiers=False)
