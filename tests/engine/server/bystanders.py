"""Streams that run while something bad happens to others: they must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from octavo import SamplingParams
from octavo.tests.engine.server.http_rig import Exchange, Server, read_stream

COMPLETIONS: Final = "/v1/completions"
PROMPTS: Final = ([1, 2, 3, 4, 5], [7, 8, 9], [30] * 11)
COUNT: Final = len(PROMPTS)
TOKENS: Final = 60


@asynccontextmanager
async def bystanders(server: Server) -> AsyncIterator[None]:
    """Three streams, which have begun. When this is left they have said what they say alone, and so has a canary."""
    expected = [await _alone(server, prompt) for prompt in PROMPTS]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(_opened(server, prompt)) for prompt in PROMPTS]
        for stream in streams:
            while len(stream.messages) < 2:
                assert await stream.read() is not None
        yield
        for stream, text in zip(streams, expected, strict=True):
            read = read_stream(await stream.whole())
            assert (read.text(), read.finish_reasons()) == (text, ["length"])
        canary = await server.post(COMPLETIONS, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0)
        assert canary["choices"][0]["text"] == expected[0]  # type: ignore[index]  # JSON


def _opened(server: Server, prompt: list[int]) -> Exchange:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    return Exchange(server.app, COMPLETIONS, body, headers=server.headers)


async def _alone(server: Server, prompt: list[int]) -> str:
    (output,) = await server.engine.complete(prompt, SamplingParams(max_tokens=TOKENS, temperature=0.0))
    return output.text


async def together(*asked: tuple[str, dict[str, object]], server: Server) -> list[tuple[int, dict[str, object]]]:
    """Status and body of several requests that are sent at once."""
    client, headers = server.client, server.headers
    answers = await asyncio.gather(*(client.post(path, json=body, headers=headers) for path, body in asked))
    return [(answer.status_code, answer.json()) for answer in answers]
