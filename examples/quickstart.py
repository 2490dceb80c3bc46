"""Octavo in cells: a stream, chats side by side, samples, beams, a fork, prefix hits and why, and a client over HTTP.

Run it as a script, ``python examples/quickstart.py``, or cell by cell in an editor that knows ``# %%``.
"""

# %% One engine, in an event loop of its own: cells are not async. In an async program you write `async with` instead.
from __future__ import annotations

import asyncio
from contextlib import ExitStack
from importlib.util import find_spec

from anyio.from_thread import start_blocking_portal

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams

MODEL = "smollm2"  # or a directory, a hub id, a .gguf file
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)

stack = ExitStack()
loop = stack.enter_context(start_blocking_portal())
engine = stack.enter_context(loop.wrap_async_context_manager(AsyncEngine.open(MODEL, EngineConfig(num_blocks=256))))


# %% A stream
async def stream(prompt: str) -> None:
    """Print the text as it comes."""
    async for output in engine.generate(prompt, GREEDY):
        print(output.text_delta, end="", flush=True)


print("stream:", end=" ")
loop.call(stream, "The capital of France is")


# %% Chats side by side: one batch. They begin with the same system prompt, which is computed once
SYSTEM = {"role": "system", "content": "You are a sailor, and you answer in one short sentence."}


async def chats(*questions: str) -> list[list[RequestOutput]]:
    """An answer to each question."""
    prompts = [[SYSTEM, {"role": "user", "content": question}] for question in questions]
    return await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts))


print()
for (answer,) in loop.call(chats, "What is the sea?", "What is a ship?"):
    print(f"chat: {answer.text!r}, {answer.cached_tokens} of {answer.prompt_tokens} tokens cached")

# %% From threads like this one the engine can be used without `await`. Samples and beams share the prompt's blocks
blocking = engine.blocking()
samples = blocking.complete("Once upon a time", SamplingParams(max_tokens=8, n=3, seed=1))
print("samples:", [sample.text for sample in samples])
beams = blocking.complete("Once upon a time", SamplingParams(max_tokens=8, beam_width=4, n=2))
print("beams:", [beam.text for beam in beams])


# %% A fork: a running request goes on in two ways, and no token is computed twice
async def fork(prompt: str) -> str:
    """What the fork says."""
    async with engine.generate(prompt, GREEDY, request_id="source") as source:
        await anext(source)
        outputs = await engine.fork("source", SamplingParams(max_tokens=12, temperature=1.0, seed=3))
        return [output.text async for output in outputs][-1]


print("fork:", loop.call(fork, "My favourite port is"))

# %% What would be found in the cache, before asking, and why it is not more
NOTES = "Notes on ports. Bergen: rain, herring, wooden houses. Genoa: steep lanes, pesto. Valparaiso: lifts, hills. "
print("explain:", loop.call(engine.explain, NOTES + "Which has hills?"))
blocking.complete(NOTES + "Which has rain?", GREEDY)
print("explain:", loop.call(engine.explain, NOTES + "Which has hills?"))
(hit,) = blocking.complete(NOTES + "Which has hills?", GREEDY)
print(f"hit: {hit.cached_tokens} of {hit.prompt_tokens} tokens cached")

# %% The same engine over HTTP, as `octavo serve` runs it, and OpenAI's own client
if find_spec("openai") and find_spec("uvicorn"):
    from openai import OpenAI

    from octavo.engine.server.running import serving

    address = stack.enter_context(loop.wrap_async_context_manager(serving(engine)))
    with OpenAI(base_url=f"{address.url}/v1", api_key="none") as client:
        completion = client.completions.create(
            model=client.models.list().data[0].id, prompt=NOTES + "Which has pesto?", max_tokens=8, temperature=0
        )
    print("client:", completion.choices[0].text, completion.usage)
else:
    print("client: it needs `pip install 'octavo[server]' openai`")

# %% What the cache holds, and the end
print("cache:", blocking.stats().cache)
print("census:", loop.call(engine.census))
stack.close()
