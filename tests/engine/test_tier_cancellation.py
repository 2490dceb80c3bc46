"""Cancellation while tiers are at work, at every moment: nothing leaks, nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

import anyio
import pytest

from octavo import AsyncEngine, RequestOutput, SamplingParams
from octavo.errors import OctavoError
from octavo.storage.base import Stored
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import Fault, MemoryStore, MemoryTier, SharedMemoryTier
from octavo.tests.engine.tier_rig import (
    GREEDY,
    ONE,
    EngineOf,
    Faulty,
    MakeTier,
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
Errand = Callable[[AsyncEngine], Coroutine[object, object, object]]
KINDS = {
    "greedy": GREEDY,
    "n=3": SamplingParams(max_tokens=3, n=3, seed=1),
    "beams": SamplingParams(max_tokens=3, beam_width=2),
}


class Patient(MemoryTier):
    """Every call takes some turns of the event loop, so that a cancellation finds it anywhere."""

    async def _turns(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        await self._turns()
        found = await super().get(shelf, names)
        await self._turns()
        return found


class Remote(SharedMemoryTier):
    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().contains(shelf, names)


def patient(store: MemoryStore) -> MakeTier:
    return lambda geometry: Patient(geometry, store=store)


def remote(store: MemoryStore) -> MakeTier:
    return lambda geometry: Remote(geometry, store=store)


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [patient, remote])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_is_cancelled_at_every_moment_of_its_load(
    kind: str, make: Callable[[MemoryStore], MakeTier], engine_of: EngineOf, alone: Alone
) -> None:
    """LEAK-01, LEAK-05: before the look-up, during it, while it waits, reads, is copied, runs."""
    expected = tokens(await alone(prompt(2), ONE))
    async with engine_of(mounts={"m": make(MemoryStore())}, num_blocks=24, promotion="wait") as engine:
        await ask(engine, prompt(1), ONE)
        await settled(engine)
        turns, running = 0, True
        while running:
            await cool(engine)
            task = asyncio.create_task(engine.complete(prompt(1), KINDS[kind]))
            canary = asyncio.create_task(ask(engine, prompt(2), ONE))
            for _ in range(turns):
                await asyncio.sleep(0)
            running = task.cancel()
            await asyncio.wait((task,))
            assert [(await canary).token_ids] == expected
            await settled(engine)
            assert tiering(engine)._looking == set()
            turns += 1
        assert turns > 15
        outcomes = engine.stats().transfers.loads
        assert outcomes["given up"] > 3
        assert outcomes["complete"] > 0


@pytest.mark.asyncio
async def test_a_request_that_found_a_prefix_and_never_got_blocks_leaves_no_hold_on_it(engine_of: EngineOf) -> None:
    """LEAK-05: the pool is full, it is looked up and cancelled, many times; then the tier must evict that prefix."""
    store = MemoryStore()
    async with engine_of(mounts={"m": memory(8, store)}, num_blocks=16, max_running=1) as engine:
        await ask(engine, prompt(1), ONE)
        await cool(engine)
        assert len(store.blocks) == 4
        long = asyncio.create_task(ask(engine, prompt(2, 50), SamplingParams(max_tokens=10, temperature=0.0)))
        await until(lambda: engine.stats().running == 1)
        for _ in range(100):
            task = asyncio.create_task(ask(engine, prompt(1), ONE))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
        await long
        await settled(engine)
        before = set(store.blocks)
        for number in range(10, 16):
            await ask(engine, prompt(number), ONE)
            await cool(engine)
        assert not before & set(store.blocks)
        assert len(store.blocks) <= 8


ERRANDS: dict[str, Errand] = {
    "pin": lambda engine: engine.pin(prompt(1), ttl=0.5),
    "evict": lambda engine: engine.evict(prompt(1)),
    "erase": lambda engine: engine.erase("t"),
    "explain": lambda engine: engine.explain(prompt(1)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ERRANDS)
async def test_operators_are_cancelled_at_every_moment(name: str, engine_of: EngineOf, alone: Alone) -> None:
    expected = tokens(await alone(prompt(1), ONE))
    async with engine_of(
        mounts={"a": patient(MemoryStore()), "b": remote(MemoryStore())}, num_blocks=24, demotion="write_through"
    ) as engine:
        for turns in range(30):
            await ask(engine, prompt(1), ONE, tenant="t")
            await ask(engine, prompt(1), ONE)
            task = asyncio.ensure_future(ERRANDS[name](engine))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
            assert [(await ask(engine, prompt(1), ONE)).token_ids] == expected
            for pin_id in list(engine._loop._pins._leases):
                engine._loop.post(lambda pin_id=pin_id: (engine._loop._pins.release(pin_id), None)[1])  # type: ignore[misc]
            await engine._loop.at_edge(lambda: None)
            await settled(engine)


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", [0, 1, 3, 8, 20, 60])
@pytest.mark.parametrize("work", ["loads", "exports", "checkpoint", "snapshot", "import"])
async def test_an_engine_is_closed_in_the_middle_of_everything(
    work: str, turns: int, monkeypatch: pytest.MonkeyPatch, engine_of: EngineOf, tmp_path: object
) -> None:
    """Whatever is under way ends, and no task, thread or promise is left."""
    store = MemoryStore()
    how: dict[str, object] = {"num_blocks": 32, "demotion": "write_through", "checkpoint_interval": 0.001}
    async with engine_of() as other:
        await ask(other, prompt(9))
        await other.snapshot(f"{tmp_path}/other")
    async with threaded(monkeypatch, {"a": memory(), "b": lasting(store)}, **how) as engine:
        for number in range(8):
            await ask(engine, prompt(number), ONE)
        tasks: list[asyncio.Future[object]] = []
        if work in ("loads", "exports"):
            tasks += [asyncio.ensure_future(engine.complete(prompt(number), GREEDY)) for number in range(12)]
        elif work == "snapshot":
            tasks.append(asyncio.ensure_future(engine.snapshot(f"{tmp_path}/s")))
        elif work == "import":
            tasks.append(asyncio.ensure_future(engine.import_snapshot(f"{tmp_path}/other")))
        for _ in range(turns):
            await asyncio.sleep(0)
        parts = tiering(engine)
        with anyio.fail_after(10):
            await engine.close()
        for task in tasks:
            with anyio.fail_after(5):
                await asyncio.wait((task,))
        assert all(isinstance(task.exception(), OctavoError | None) for task in tasks)
        assert len(parts.loads) == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_whoever_cancels_closing_gets_it_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    faulty = Faulty(lasting(store))
    async with threaded(monkeypatch, {"m": faulty}, close_budget=0.3, tier_deadline=60.0) as engine:
        await ask(engine, prompt(1))
        faulty.tier.inject(Fault("put", "hang"))
        closing = asyncio.create_task(engine.close())
        await until(lambda: faulty.tier.running["put"] == 1)
        closing.cancel()
        with anyio.fail_after(8):
            await asyncio.wait((closing,))
        assert closing.cancelled()
        assert not engine.is_open
    assert faulty.tier.running.total() == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
