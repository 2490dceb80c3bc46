"""Whoever cancels a call to the cache leaves nothing behind, whether its step edge had come by then or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from octavo import AsyncEngine
from octavo.tests.engine.tier_rig import EngineOf, ask, memory, prompt, tiering, until

Call = Callable[[AsyncEngine], Coroutine[object, object, object]]
TURNS = 30
"""Turns of the event loop that a call on an idle engine needs, at most."""


class Canceller:
    """Makes a call during a step, and cancels it before the next edge, or in the middle of it when it was answered."""

    def __init__(self, *, answered: bool) -> None:
        self.engine: AsyncEngine | None = None
        self.call: Call | None = None
        self.task: asyncio.Task[object] | None = None
        self._answered = answered

    async def on_step(self, number: int) -> None:
        if self.call is None or self.engine is None:
            return
        call, self.call, loop = self.call, None, self.engine._loop
        self.task = asyncio.create_task(call(self.engine))
        await until(lambda: bool(loop._inbox))
        if self._answered:
            loop.post(lambda: _cancel(self.task))
        else:
            _cancel(self.task)

    async def run(self, engine: AsyncEngine, call: Call) -> None:
        self.engine, self.call = engine, call
        await ask(engine, prompt(9))
        assert self.task is not None
        await asyncio.wait((self.task,))
        assert self.task.cancelled()
        await engine._loop.at_edge(lambda: None)


def _cancel(task: asyncio.Task[object] | None) -> None:
    assert task is not None
    assert task.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize("answered", [False, True])
async def test_a_cancelled_pin_pins_nothing(answered: bool, engine_of: EngineOf) -> None:
    canceller = Canceller(answered=answered)
    async with engine_of(on_step=canceller.on_step) as engine:
        await ask(engine, prompt(1))
        await canceller.run(engine, lambda engine: engine.pin(prompt(1)))
        assert (engine.stats().pins, engine.stats().cache.pinned) == (0, 0)


@pytest.mark.asyncio
async def test_a_pin_that_is_cancelled_at_any_turn_pins_nothing(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await ask(engine, prompt(1))
        for turns in range(TURNS):
            pinning = asyncio.create_task(engine.pin(prompt(1)))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_running = pinning.cancel()
            await asyncio.wait((pinning,))
            if not was_running:
                assert await engine.unpin(pinning.result())
                break
            await engine._loop.at_edge(lambda: None)
            assert (engine.stats().pins, engine.stats().cache.pinned) == (0, 0), f"cancelled after {turns} turns"
        else:
            pytest.fail("it was cancelled each time")


@pytest.mark.asyncio
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("tiers", [False, True])
async def test_a_cancelled_snapshot_watches_nothing(
    answered: bool, tiers: bool, engine_of: EngineOf, tmp_path: Path
) -> None:
    canceller = Canceller(answered=answered)
    mounts = {"m": memory()} if tiers else None
    async with engine_of(on_step=canceller.on_step, mounts=mounts) as engine:
        await ask(engine, prompt(1))
        await canceller.run(engine, lambda engine: engine.snapshot(tmp_path / "s"))
        assert tiering(engine).exports._watchers == []
        assert engine.stats().transfers.exported_blocks == 0
        assert (await engine.snapshot(tmp_path / "s")).blocks == 10


@pytest.mark.asyncio
@pytest.mark.parametrize(("answered", "looks"), [(False, 0), (True, 1)])
async def test_what_was_found_for_nobody_is_undone(answered: bool, looks: int, engine_of: EngineOf) -> None:
    """And before its edge nobody looks at all."""
    canceller = Canceller(answered=answered)
    looked: list[str] = []
    undone: list[str] = []

    def look() -> str:
        looked.append("found")
        return "found"

    async with engine_of(on_step=canceller.on_step) as engine:
        await canceller.run(engine, lambda engine: engine._loop.at_edge(look, undone.append))
        await engine._loop.at_edge(lambda: None)
    assert (len(looked), len(undone)) == (looks, looks)
