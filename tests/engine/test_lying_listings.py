"""Listings that cannot be true: blocks that descend from themselves lead round in no circle."""

from __future__ import annotations

import anyio
import pytest

from octavo.engine.warming import hottest_paths
from octavo.storage.base import Head, Listed, Meta
from octavo.storage.naming import BlockName, Namespace, Shelf, name_after
from octavo.storage.testing.contract import MemoryTier
from octavo.tests.engine.tier_rig import B, EngineOf, ask, prompt, settled

SHELF = Namespace("m").shelf()
TOKENS = bytes(4 * B)
ROOT, ONE, TWO = (name_after(SHELF.namespace, bytes([number])) for number in range(3))


def block(name: BlockName, parent: BlockName, start: int) -> Listed:
    return Listed(SHELF, Head(name, parent, start, TOKENS), Meta())


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "circle",
    [
        [block(ONE, ONE, B)],
        [block(ONE, TWO, B), block(TWO, ONE, B)],
        [block(ONE, TWO, B), block(TWO, ONE, 2 * B)],
    ],
    ids=["itself", "each other", "above what it is below"],
)
def test_warming_leaves_out_what_descends_from_itself(circle: list[Listed]) -> None:
    good = block(ROOT, SHELF.namespace, 0)
    assert list(hottest_paths([*circle, good], 10)) == [([good], 1)]


class Liar(MemoryTier):
    """Says the truth about children, and lies besides."""

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        lies = [Listed(shelf, Head(parent, parent, B, TOKENS), Meta())]
        lies += [Listed(shelf, Head(name, parent, B, TOKENS), Meta()) for name in (ONE, TWO)]
        return [*lies, *await super().children(shelf, parent)]


@pytest.mark.asyncio
async def test_evicting_comes_to_an_end_and_takes_what_is_truly_below(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": Liar}) as engine:
        await ask(engine, prompt(1))
        await engine._loop.at_edge(lambda: engine._loop.cache.evict(5))
        await settled(engine)
        with anyio.fail_after(5):
            assert await engine.evict(prompt(1)[:B]) == (0, 5)
