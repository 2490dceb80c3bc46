"""Run as a script with a folder: asks an engine over that folder for ten prefixes and prints how many were found whole.

The model is the fake one; whether it was computed or loaded, the text is compared with that of an engine without tiers.
"""

from __future__ import annotations

import asyncio
import sys

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeRunner

BLOCK = 4
LENGTH = 23
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


async def found(folder: str) -> int:
    """How many of the prefixes came whole from ``folder``."""
    prompts = [[(7 * i + 3 * at) % 64 for at in range(LENGTH)] for i in range(10)]
    async with AsyncEngine(runner=FakeRunner(), config=EngineConfig(block_size=BLOCK)) as engine:
        expected = [(await engine.complete(prompt, GREEDY))[0].token_ids for prompt in prompts]
    settings = EngineConfig(
        block_size=BLOCK,
        tiers=("disk",),
        disk_path=folder,
        disk_bytes=2**24,
        tier_options={"disk": {"free_floor": 0}},
        promotion="wait",
    )
    async with AsyncEngine(runner=FakeRunner(), config=settings, clock=lambda: 0.0) as engine:  # nothing is too slow
        outputs = [(await engine.complete(prompt, GREEDY))[0] for prompt in prompts]
        if [output.token_ids for output in outputs] != expected:
            raise SystemExit("the text is wrong")
        whole = [output.cached_tokens == (LENGTH - 1) // BLOCK * BLOCK for output in outputs]
        if engine.stats().transfers.loaded_tokens.get("disk", 0) != sum(output.cached_tokens for output in outputs):
            raise SystemExit("something was found that was not loaded")
    return sum(whole)


if __name__ == "__main__":
    print(asyncio.run(found(sys.argv[1])))  # noqa: T201  # its answer
