"""Lookups in tiers that cannot tell at once: a request waits as long as was promised, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig, RequestOutput
from octavo.errors import InvalidRequest
from octavo.storage.base import Tier, TierGeometry
from octavo.storage.testing.contract import Fault, FaultyTier, MemoryStore, SharedMemoryTier
from octavo.tests.engine.tier_rig import GREEDY, EngineOf, Faulty, ask, prompt, settled, tokens, until

Alone = Callable[..., Awaitable[list[RequestOutput]]]


@asynccontextmanager
async def asked(engine_of: EngineOf, **config: object) -> AsyncIterator[tuple[AsyncEngine, FaultyTier, anyio.Event]]:
    """An engine over a remote tier that has prompt 1, and says so when the event is set."""
    store = MemoryStore()

    def remote(geometry: TierGeometry) -> Tier:
        return SharedMemoryTier(geometry, store=store)

    async with engine_of(mounts={"r": remote}) as engine:
        await ask(engine, prompt(1))
    assert len(store.blocks) == 5
    faulty, gate = Faulty(remote), anyio.Event()
    faulty.prepare(Fault("contains", "slow", gate=gate))
    async with engine_of(mounts={"r": faulty}, tier_deadline=60.0, **config) as engine:
        try:
            yield engine, faulty.tier, gate
        finally:
            gate.set()
        await settled(engine)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config",
    [{"promotion": "best_effort"}, {"promotion": "timeout", "promotion_timeout": 0.001}],
    ids=["best effort", "timeout"],
)
async def test_a_request_does_not_wait_for_an_answer_longer_than_promised(
    config: dict[str, object], engine_of: EngineOf, alone: Alone
) -> None:
    async with asked(engine_of, **config) as (engine, _, gate):
        with anyio.fail_after(5):
            output = await ask(engine, prompt(1))
        assert not gate.is_set()
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        assert output.cached_tokens == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config",
    [{"promotion": "wait"}, {"promotion": "timeout", "promotion_timeout": 60.0}],
    ids=["wait", "timeout"],
)
async def test_and_waits_as_long_as_that(config: dict[str, object], engine_of: EngineOf) -> None:
    async with asked(engine_of, **config) as (engine, tier, gate):
        asking = asyncio.create_task(ask(engine, prompt(1)))
        await until(lambda: tier.running["contains"] == 1)
        for _ in range(10):
            await engine._loop.at_edge(lambda: None)
        assert not asking.done()
        gate.set()
        assert (await asking).cached_tokens == 16


@pytest.mark.parametrize("name", ["tier_deadline", "step_timeout"])
def test_a_deadline_that_never_comes_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        EngineConfig(**{name: float("inf")})  # type: ignore[arg-type]  # the name comes from the test
