"""Evicting a prefix that is just on its way from the device into the tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from octavo.tests.engine.conftest import InlineThread
from octavo.tests.engine.tier_rig import EngineOf, ask, memory, prompt, settled, stored, tiering


@pytest.mark.parametrize("turns", [0, 5, 40])
@pytest.mark.asyncio
async def test_what_is_being_copied_out_is_forgotten_as_well(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Copying takes some turns of the event loop, in which the tiers could have forgotten already."""
    call = InlineThread.call

    async def slow(thread: InlineThread, function: Callable[..., object], *args: object) -> object:
        for _ in range(turns if function.__name__ == "export_blocks" else 0):
            await asyncio.sleep(0)
        return await call(thread, function, *args)

    monkeypatch.setattr(InlineThread, "call", slow)
    async with engine_of(mounts={"m": memory()}) as engine:
        await ask(engine, prompt(1))
        await ask(engine, prompt(2))
        pressure = asyncio.create_task(engine._loop.at_edge(lambda: engine._loop.cache.evict(64)))
        evicting = asyncio.create_task(engine.evict(prompt(1)[:8]))
        await asyncio.gather(pressure, evicting)
        await settled(engine)
        assert (await engine.explain(prompt(1))).cached_tokens == 4
        assert (await engine.explain(prompt(2))).cached_tokens == 16
        left = await stored(tiering(engine).manager._mounts[0].tier)
        assert len(left) == 1 + 5, "what goes on from it is left behind"
