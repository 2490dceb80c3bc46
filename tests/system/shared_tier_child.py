"""Run as a script with a folder of a model and the URL of a Redis server: an engine over both.

Each line of its input is a list of token ids; for each it prints what the model said, how many blocks came from the
server and how many of them were wrong. What it has computed is on the server when it has answered.
"""

from __future__ import annotations

import asyncio
import json
import sys

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.tests.system.tier_steps import written

BLOCK = 8
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


async def serve(folder: str, url: str) -> None:
    """Until the input ends."""
    settings = EngineConfig(
        num_blocks=128,
        block_size=BLOCK,
        tiers=("redis",),
        tier_options={"redis": {"url": url}},
        demotion="write_through",
        promotion="wait",
        tier_deadline=30.0,
    )
    async with AsyncEngine.open(folder, settings) as engine:
        print("ready", flush=True)  # noqa: T201  # its answer
        while line := await asyncio.to_thread(sys.stdin.readline):
            [output] = await engine.complete(json.loads(line), GREEDY)
            await engine._loop.wait_idle()
            await written(engine)
            tier = engine.stats().tiers[0]
            answer = {"tokens": output.token_ids, "loaded": tier.loaded_blocks, "corrupt": tier.corrupt}
            print(json.dumps(answer), flush=True)  # noqa: T201  # its answer


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
