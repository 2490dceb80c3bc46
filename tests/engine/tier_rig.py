"""What tests of the engine with tiers share: tiers, prompts, and how to wait until everything has settled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar, TypeAlias

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine import mounting
from octavo.engine.testing import FakeRunner
from octavo.engine.tiering import Tiering
from octavo.storage.base import Meta, Tier, TierGeometry
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import Fault, FaultyTier, MemoryStore, MemoryTier
from octavo.tests.engine.conftest import DEFAULTS, Cellar

EngineOf: TypeAlias = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
MakeTier: TypeAlias = Callable[[TierGeometry], Tier]
B = 4
"""Tokens of a block in these tests."""
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
ONE = SamplingParams(max_tokens=1, temperature=0.0)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
VOCABULARY = 64


class LastingTier(MemoryTier):
    """A memory tier whose store is there again after a restart, like a disk."""

    persistent: ClassVar[bool] = True


def memory(blocks: int | None = None, store: MemoryStore | None = None) -> MakeTier:
    """How a tier in memory is made."""
    return lambda geometry: MemoryTier(geometry, blocks=blocks, store=store)


def lasting(store: MemoryStore, blocks: int | None = None) -> MakeTier:
    """The same that outlives the engine."""
    return lambda geometry: LastingTier(geometry, blocks=blocks, store=store)


class Faulty:
    """Makes one faulty tier and keeps hold of it."""

    def __init__(self, make: MakeTier | None = None) -> None:
        self._make = make or memory()
        self._made: list[FaultyTier] = []
        self._faults: list[Fault] = []

    def __call__(self, geometry: TierGeometry) -> Tier:
        self._made.append(FaultyTier(self._make(geometry)))
        self.tier.inject(*self._faults)
        return self.tier

    def prepare(self, *faults: Fault) -> None:
        """Faults of the tier that is going to be made."""
        self._faults += faults

    @property
    def tier(self) -> FaultyTier:
        return self._made[-1]


def prompt(number: int, length: int = 18) -> list[int]:
    """A text that shares nothing with those of other numbers."""
    head = [number % VOCABULARY, number // VOCABULARY % VOCABULARY]
    return (head + [(number * 7 + at * at) % VOCABULARY for at in range(length)])[:length]


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@asynccontextmanager
async def threaded(
    monkeypatch: pytest.MonkeyPatch,
    mounts: Mapping[str, MakeTier],
    **config: object,
) -> AsyncIterator[AsyncEngine]:
    """An engine with a thread and clocks of its own, for tests of its end. It may be closed before the context is."""
    settings = EngineConfig(**DEFAULTS | {"tiers": tuple(mounts)} | config)  # type: ignore[arg-type]  # names come from the tests
    engine = AsyncEngine(runner=FakeRunner(), config=settings)
    with monkeypatch.context() as patch:
        patch.setattr(mounting, "STORAGE_TIERS", Cellar(mounts))
        await engine.__aenter__()
    try:
        yield engine
    finally:
        await engine.close()


def tiering(engine: AsyncEngine) -> Tiering:
    return engine._life.parts.tiering


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks and threads bring about."""
    while not condition():  # noqa: ASYNC110  # it comes from many sides
        await anyio.sleep(0.001)


def at_rest(engine: AsyncEngine) -> bool:
    """Whether nothing is under way between the device and the tiers."""
    parts = tiering(engine)
    queued = any(report.queued_blocks for report in parts.manager.stats())
    exports = parts.exports
    return not (
        queued or exports._outstanding or exports._urgent or exports._later or len(parts.loads) or parts._looking
    )


async def settled(engine: AsyncEngine) -> None:
    """Wait until it is so, and check that nothing is left behind."""
    await engine._loop.wait_idle()
    await until(lambda: at_rest(engine))
    assert all(report.queued_bytes == 0 for report in engine.stats().tiers)
    census = engine.census()
    assert (census.held, census.in_transfer) == (0, 0)


async def cool(engine: AsyncEngine) -> None:
    """Evict everything from the device, and wait until it is below."""
    await engine._loop.at_edge(lambda: engine._loop.cache.evict(engine._loop.cache.pool.num_blocks))
    await settled(engine)


async def ask(engine: AsyncEngine, ids: list[int], params: SamplingParams = GREEDY, **how: object) -> RequestOutput:
    """The only output of a request."""
    (output,) = await engine.complete(ids, params, **how)  # type: ignore[arg-type]  # names and values come from the tests
    return output


async def stored(tier: Tier) -> dict[tuple[Shelf, BlockName], Meta]:
    """What a tier has."""
    return {(each.shelf, each.head.name): each.meta async for each in tier.listing()}
