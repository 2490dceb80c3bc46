"""Five hundred clients at once, on the fake model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable

import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.server.running import Address, serving
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.server.socket_rig import Answer, completion, until, wire

CLIENTS = 500
PROMPTS = 20
pytestmark = pytest.mark.system


def prompt_of(client: int) -> str:
    return chr(48 + client % PROMPTS) * 20


async def ask(address: Address, client: int) -> Answer:
    async with wire(address) as connection:
        await connection.send(completion(prompt_of(client), max_tokens=8))
        return await connection.answer()


def text_of(answer: Answer) -> str:
    text: str = json.loads(answer.body)["choices"][0]["text"]
    return text


@pytest.mark.asyncio
@pytest.mark.parametrize("max_waiting", [CLIENTS, 50])
async def test_each_gets_its_own_answer_or_is_told_to_come_again(
    max_waiting: int, assert_at_rest: Callable[[AsyncEngine], None]
) -> None:
    config = EngineConfig(num_blocks=2048, max_batch_tokens=2048, eviction_policy="lru", max_waiting=max_waiting)
    async with AsyncEngine(runner=FakeRunner(), codec=FakeCodec(), config=config) as engine:
        tasks = len(asyncio.all_tasks())
        async with serving(engine) as address:
            expected = [text_of(await ask(address, client)) for client in range(PROMPTS)]
            answers = await asyncio.gather(*(ask(address, client) for client in range(CLIENTS)))
        for client, answer in enumerate(answers):
            if answer.status == 200:
                assert text_of(answer) == expected[client % PROMPTS]
            else:
                assert answer.status == 429
                assert int(answer.headers["retry-after"]) >= 1
        statuses = Counter(answer.status for answer in answers)
        assert statuses[200] >= (min(CLIENTS, max_waiting))
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert_at_rest(engine)


@pytest.mark.asyncio
async def test_more_connections_than_there_may_be_are_refused_and_the_others_are_served(
    assert_at_rest: Callable[[AsyncEngine], None],
) -> None:
    config = EngineConfig(num_blocks=2048, max_batch_tokens=2048, eviction_policy="lru")
    settings = ServerSettings(max_connections=100)
    async with AsyncEngine(runner=FakeRunner(), codec=FakeCodec(), config=config) as engine:
        async with serving(engine, settings=settings) as address:
            answers = await asyncio.gather(*(ask(address, client) for client in range(CLIENTS)))
        statuses = Counter(answer.status for answer in answers)
        assert set(statuses) == {200, 503}
        assert statuses[200] >= 100
        assert_at_rest(engine)
