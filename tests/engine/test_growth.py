"""Nothing grows with the number of requests that are over."""

from __future__ import annotations

import asyncio
import gc
import logging
import types
from collections import Counter, deque
from collections.abc import Iterable

import pytest

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeCodec, FakeRunner

CONTAINERS = (dict, list, set, frozenset, tuple, deque)
FOREIGN = (
    *(types.ModuleType, type, types.FunctionType, types.FrameType, asyncio.AbstractEventLoop),
    *(logging.Logger, logging.Handler),  # pytest keeps every line that a test logs
)


def octavo_objects() -> Counter[str]:
    """Live objects by type, of Octavo's own types."""
    gc.collect()
    names = (f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())
    return Counter(name for name in names if name.startswith("octavo."))


def all_objects() -> Counter[type]:
    gc.collect()
    return Counter(map(type, gc.get_objects()))


def reachable_items(root: object) -> int:
    """Items in all containers that can be reached from ``root``, but not through code, types, the event
    loop and the log.
    """
    seen: dict[int, object] = {}
    todo: list[object] = [root]
    total = 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, FOREIGN):
            continue
        seen[id(thing)] = thing
        total += len(thing) if isinstance(thing, CONTAINERS) else 0
        todo += _referents(thing)
    return total


def _referents(thing: object) -> Iterable[object]:
    if isinstance(thing, types.MethodType):
        return (thing.__self__,)
    return gc.get_referents(thing)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="adaptive"),
        pytest.param({"eviction_policy": "lfu", "scheduling_policy": "priority"}, id="lfu, priority"),
        pytest.param({"eviction_policy": "cost_aware"}, id="cost aware", marks=pytest.mark.slow),
        pytest.param({"enable_prefix_caching": False}, id="no sharing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_nothing_grows_with_requests_that_are_over(count: int, config: dict[str, object]) -> None:
    """GROWTH-01 and GROWTH-04: distinct prompts and parameters, aborts, parallel samples, errors at the door."""
    settings = EngineConfig(**{"num_blocks": 16, "block_size": 2} | config)  # type: ignore[arg-type]  # names come from above
    async with AsyncEngine(runner=FakeRunner(), codec=FakeCodec(), config=settings) as engine:
        number = 0

        async def some(requests: int) -> None:
            nonlocal number
            for _ in range(requests // 10):
                batch = []
                for _ in range(10):
                    number += 1
                    prompt = [number % 64, number // 64 % 64, number // 4096 % 64, 1]
                    params = SamplingParams(
                        max_tokens=2 + number % 3, n=1 + (number % 7 == 0), stop=[f"{number % 97}x"]
                    )
                    batch.append(asyncio.create_task(engine.complete(prompt, params, tenant=f"t{number}")))
                await asyncio.sleep(0)
                batch[number % 9].cancel()
                await asyncio.gather(*batch, return_exceptions=True)
            await engine._loop.wait_idle()

        await some(200)
        own, everything, items = octavo_objects(), all_objects(), reachable_items(engine)
        await some(count)
        assert octavo_objects() - own <= Counter(dict.fromkeys(octavo_objects(), 20))
        grown = {kind.__name__: more for kind, more in (all_objects() - everything).items() if more > 150}
        assert grown == {}
        assert reachable_items(engine) < items + 150


def test_the_measure_sees_growth() -> None:
    """A leak of one small object per request would show in what the test above compares."""

    class Holder:
        def __init__(self) -> None:
            self.kept: list[list[int]] = []

    holder = Holder()
    before, everything = reachable_items(holder), all_objects()
    holder.kept += [[number] for number in range(600)]
    assert reachable_items(holder) >= before + 1200
    assert (all_objects() - everything)[list] > 500  # others may let go of some meanwhile
