"""Octavo in one page: streams, chats side by side, parallel samples, beams, a fork, and a look at the cache.

python examples/quickstart.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from octavo import AsyncEngine, EngineConfig, SamplingParams

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


async def main(model: str) -> None:
    """Show all of it with ``model``."""
    config = EngineConfig(num_blocks=256, eviction_policy="lru")
    async with AsyncEngine.open(model, config) as engine:
        print("stream:", end=" ", flush=True)
        async for output in engine.generate("The capital of France is", GREEDY):
            print(output.text_delta, end="", flush=True)

        system = {"role": "system", "content": "You answer in one short sentence."}
        questions = ("What is the sea?", "What is a ship?")
        chats = [[system, {"role": "user", "content": question}] for question in questions]
        for answers in await asyncio.gather(*(engine.complete(chat, GREEDY) for chat in chats)):
            print(
                f"\nchat: {answers[0].text!r}, {answers[0].cached_tokens} of {answers[0].prompt_tokens} tokens cached"
            )

        samples = await engine.complete("Once upon a time", SamplingParams(max_tokens=8, n=3, seed=1))
        print("samples:", [sample.text for sample in samples])

        beams = await engine.complete("Once upon a time", SamplingParams(max_tokens=8, beam_width=4, n=2))
        print("beams:", [beam.text for beam in beams])

        source = engine.generate("My favourite port is", GREEDY, request_id="source")
        await anext(source)
        fork = await engine.fork("source", SamplingParams(max_tokens=24, temperature=1.0, seed=3))
        print("fork:", [output.text async for output in fork][-1:])
        source.close()

        print("cache:", engine.stats().cache)
        print("census:", engine.census())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
