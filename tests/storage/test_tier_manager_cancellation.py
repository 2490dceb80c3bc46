"""Every call of the manager is cancelled after each number of turns that it takes; nothing may be left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from octavo.storage.manager.settings import ManagerSettings
from octavo.storage.manager.tier_manager import Loaded
from octavo.storage.testing.contract import Fault, FaultyTier
from octavo.tests.storage.manager_rig import (
    SAMPLES,
    SHELF,
    Rig,
    batch_of,
    cancelled_after,
    memory,
    names_of,
    remote,
    until,
)

CHAIN = SAMPLES.chain(SHELF, 8)
NAMES = names_of(CHAIN)
SMALL = ManagerSettings(batch_blocks=2, deadline=60.0)
pytestmark = pytest.mark.asyncio


async def slowly(_: list[Loaded]) -> None:
    for _turn in range(3):
        await asyncio.sleep(0)


async def close_completely(rig: Rig) -> None:
    await rig.manager.close(10.0)


CALLS: dict[str, Callable[[Rig], Awaitable[object]]] = {
    "load": lambda rig: rig.manager.load(SHELF, NAMES, slowly, deadline=None),
    "load with a deadline": lambda rig: rig.manager.load(SHELF, NAMES, slowly, deadline=60.0),
    "ask": lambda rig: rig.manager.ask(SHELF, NAMES),
    "prefetch": lambda rig: rig.manager.prefetch(SHELF, NAMES),
    "persist": lambda rig: rig.manager.persist(60.0),
    "flush": lambda rig: rig.manager.flush(60.0),
    "forget": lambda rig: rig.manager.forget(SHELF, NAMES),
    "erase": lambda rig: rig.manager.erase(SHELF.tenant),
    "children": lambda rig: rig.manager.children(SHELF, SHELF.namespace),
    "touch": lambda rig: rig.manager.touch(SHELF, {}),
    "open": lambda rig: rig.manager.open(),
    "close": close_completely,
}


async def rig_with_work(*, hanging: bool) -> tuple[Rig, tuple[FaultyTier, ...]]:
    """Blocks in both tiers, in the queue of the first, and tiers whose calls take turns or never end."""
    tiers = FaultyTier(memory()), FaultyTier(remote())
    rig = Rig(*tiers, settings=SMALL)
    await rig.manager.open()
    await rig.stored(CHAIN[:3], 0)
    await rig.stored(CHAIN, 1)
    await rig.manager.ask(SHELF, NAMES)
    rig.manager.offer(batch_of(SAMPLES.chain(SHELF, 5, seed=1)), to="first")
    if hanging:
        for tier in tiers:
            tier.inject(Fault("*", "hang"))
    return rig, tiers


@pytest.mark.parametrize("hanging", [False, True])
@pytest.mark.parametrize("with_writers", [False, True])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_cancelled_at_every_turn_it_leaves_nothing_behind(name: str, with_writers: bool, hanging: bool) -> None:
    for steps in range(60):
        rig, tiers = await rig_with_work(hanging=hanging)
        before = asyncio.all_tasks()
        async with anyio.create_task_group() as group:
            if with_writers:
                group.start_soon(rig.manager.run)
            ended = await cancelled_after(steps, lambda: CALLS[name](rig))  # noqa: B023  # called at once
            for tier in tiers:
                tier.heal()
            if hanging and with_writers:  # the write that hangs is the writers', and has a minute
                await rig.manager._writer.stop()
            if name != "close":
                await check_usable(rig)
            await rig.manager.close(10.0)
        rig.census()
        await until(lambda: asyncio.all_tasks() <= before)  # noqa: B023  # as above
        assert all(not tier.running.total() for tier in tiers)
        if ended:
            break


async def check_usable(rig: Rig) -> None:
    """All that is not being written goes in and comes out; no breaker took the cancellation for a fault."""
    chain = SAMPLES.chain(SHELF, 3, seed=2)
    rig.manager.offer(batch_of(chain), to="first")
    await rig.manager.flush(10.0)
    _, outcome = await rig.load(names_of(chain))
    assert outcome.reason == "complete"
    for report in rig.manager.stats():
        assert (report.failures, report.abandoned, report.corrupt, report.queued_blocks) == (0, 0, 0, 0)


async def test_many_cancelled_loads_leave_the_tier_to_others() -> None:
    tier = FaultyTier(memory())
    rig = Rig(tier, settings=SMALL)
    await rig.manager.open()
    await rig.stored(CHAIN, 0)
    tier.inject(Fault("get", "hang"))
    tasks = [asyncio.ensure_future(rig.load(NAMES)) for _ in range(50)]
    await until(lambda: tier.running["get"] == SMALL.concurrent_reads)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    tier.heal()
    assert tier.running["get"] == 0
    assert (await rig.load(NAMES))[1] == (8, "complete")
    await rig.manager.close(1.0)
    rig.census()
