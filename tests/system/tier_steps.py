"""What tests of tiers do to an engine, and how they look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import anyio
import numpy as np

from octavo import AsyncEngine
from octavo.engine.kv import ImageRun

PATIENCE = 30.0
"""Seconds after which a test that hangs is told so; no result depends on it."""
POLL = 0.002


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE):
        while not holds():  # noqa: ASYNC110  # tiers ring no bell
            await anyio.sleep(POLL)


async def written(engine: AsyncEngine) -> None:
    """Wait until everything that is on its way down has arrived."""
    exports = engine._life.parts.tiering.exports
    await until(lambda: not (exports._outstanding or any(tier.queued_blocks for tier in engine.stats().tiers)))


async def push_out(engine: AsyncEngine) -> None:
    """Evict everything from the device, as pressure would, and wait until it has arrived below."""
    cache = engine._loop.cache
    await engine._loop.at_edge(lambda: cache.maybe_evict(low=cache.pool.num_blocks, high=cache.pool.num_blocks))
    await written(engine)
    assert engine.census().idle == 0


class Progress(NamedTuple):
    """Where the sums of an engine stand."""

    computed: int
    """Prompt tokens."""
    loaded: dict[str, int]
    """Tokens, by tier."""

    @classmethod
    def of(cls, engine: AsyncEngine) -> Progress:
        stats = engine.stats()
        return cls(stats.prefill_tokens, stats.transfers.loaded_tokens)

    def since(self, before: Progress) -> Progress:
        loaded = {tier: count - before.loaded.get(tier, 0) for tier, count in self.loaded.items()}
        return Progress(self.computed - before.computed, {tier: count for tier, count in loaded.items() if count})

    @property
    def loaded_tokens(self) -> int:
        return sum(self.loaded.values())


async def payloads(engine: AsyncEngine) -> dict[bytes, bytes]:
    """The bytes of every block on the device, by name."""
    parts = engine._life.parts

    def read() -> dict[bytes, bytes]:
        return dict(_blocks(engine, parts.loop.cache.image(0.0)))

    return await parts.loop.at_edge(read)


def _blocks(engine: AsyncEngine, image: list[ImageRun]) -> Iterator[tuple[bytes, bytes]]:
    runner = engine._life.parts.runner
    for run in image:
        rows = np.empty((len(run.ids), runner.info.bytes_per_block), dtype=np.uint8)
        runner.export_blocks(np.array(run.ids, dtype=np.int32), rows)
        yield from zip(run.names, (row.tobytes() for row in rows), strict=True)
