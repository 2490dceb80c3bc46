"""Clients that leave: at every moment, whatever they asked for, nothing of their request stays."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from starlette.types import Message

from octavo.engine.testing import FakeRunner
from octavo.tests.engine.server.http_rig import Exchange, ServerOf, read_stream, until

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
BODIES: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    (CHAT, {"messages": [{"role": "user", "content": "abcdefgh"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "abcdefgh"}], "n": 3}),
    (COMPLETIONS, {"prompt": "abcdefgh"}),
    (COMPLETIONS, {"prompt": ["abcdefgh", "ijklm", "nm"], "n": 2}),
    (COMPLETIONS, {"prompt": ["abcdefgh", "ijklm"], "best_of": 2}),
)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_leaves_at_any_turn_of_the_event_loop_leaves_nothing(
    path: str, body: dict[str, object], stream: bool, server_of: ServerOf
) -> None:
    """The client leaves at the first turn of the loop, at the second, ... until the answer is whole: every ``await``
    on the way is met. On leaving ``server_of`` the books are checked.
    """
    asked = {**body, "max_tokens": 3, "stream": stream}

    async def on_step(step: int) -> None:
        for _ in range(3):  # a reader that never gets to wait is no picture of life
            await asyncio.sleep(0)

    async with server_of(prefill_chunk=4, on_step=on_step, check_every_step=True) as server:
        tasks = len(asyncio.all_tasks())
        for turn in range(200):
            async with server.open(path, asked) as exchange:
                for _ in range(turn):
                    await asyncio.sleep(0)
                is_done = not exchange.is_running
                exchange.leave()
                await exchange.ended()
            await server.engine._loop.wait_idle()
            assert server.engine.census().held == 0
            if is_done:
                break
        assert is_done
        assert turn > 10
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        finished = server.engine.stats().finished
        assert finished["abort"] > 5
        assert sum(finished.values()) == server.engine.stats().submitted


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [1, 3])
async def test_a_request_ends_within_a_step_of_its_client(
    path: str, body: dict[str, object], stream: bool, at: int, server_of: ServerOf
) -> None:
    """At step 1 there is no token yet."""

    async def on_step(step: int) -> None:
        if step == at and exchanges:
            exchanges[0].leave()
            await exchanges[0].ended()

    exchanges: list[Exchange] = []
    runner = FakeRunner()
    async with server_of(runner=runner, on_step=on_step) as server:
        async with server.open(path, {**body, "max_tokens": 40, "stream": stream}) as exchange:
            exchanges.append(exchange)
            await exchange.ended()
        await server.engine._loop.wait_idle()
        assert runner.steps <= at + 1
        assert set(server.engine.stats().finished) == {"abort"}


@pytest.mark.asyncio
async def test_those_who_stay_do_not_notice(server_of: ServerOf) -> None:
    asked: dict[str, object] = {"prompt": "abcdefgh", "max_tokens": 12, "temperature": 0, "stream": True}
    async with server_of(num_blocks=256) as server:
        expected = (await server.stream(COMPLETIONS, **asked)).text()
        async with server.open(COMPLETIONS, asked) as staying:
            for turn in range(8):
                async with server.open(COMPLETIONS, {**asked, "n": 2}):
                    for _ in range(turn):
                        await asyncio.sleep(0)
            assert read_stream(await staying.whole()).text() == expected


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES[:4])
async def test_a_client_whose_connection_breaks_while_it_is_written_to(
    path: str, body: dict[str, object], server_of: ServerOf
) -> None:
    """Some servers raise when there is nobody to send to."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise ConnectionResetError

    async with server_of() as server:
        exchange = server.open(path, {**body, "max_tokens": 40, "stream": True})
        await server.app(exchange._scope, exchange._receive, send)
        await server.engine._loop.wait_idle()
        assert set(server.engine.stats().finished) == {"abort"}
