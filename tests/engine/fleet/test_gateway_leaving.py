"""Clients of a gateway that leave, at every moment: nothing of their request stays, on no replica."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from starlette.types import Message

from octavo.engine.fleet import in_process
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.fleet.gateway_rig import CHAT, COMPLETIONS, RESPONSES, DoorOf, turns
from octavo.tests.engine.server.http_rig import until

BODIES: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    (CHAT, {"messages": [{"role": "user", "content": "abcdefgh"}], "max_tokens": 3}),
    (COMPLETIONS, {"prompt": ["abcdefgh", "ijklm"], "n": 2, "max_tokens": 3}),
    (RESPONSES, {"input": "abcdefgh", "max_output_tokens": 3, "previous_response_id": "resp_0"}),
    (RESPONSES, {"input": "abcdefgh", "max_output_tokens": 3}),
)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_leaves_at_any_turn_of_the_event_loop_leaves_nothing(
    path: str, body: dict[str, object], stream: bool, door_of: DoorOf
) -> None:
    """The client leaves at the first turn of the loop, at the second, ... until the answer is whole: every ``await``
    on the way is met.
    """

    async def on_step(step: int) -> None:
        await turns(3)

    async with door_of(on_step=on_step, prefill_chunk=4) as door:
        tasks = len(asyncio.all_tasks())
        for turn in range(300):
            async with door.open(path, {**body, "stream": stream}) as exchange:
                await turns(turn)
                is_done = not exchange.is_running
                exchange.leave()
                await exchange.ended()
            await door.quiet()
            assert door.fleet.view.requests.tolist() == [0, 0]
            if is_done:
                break
        assert is_done
        assert turn > 10
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        for engine in door.engines.values():
            stats = engine.stats()
            assert sum(stats.finished.values()) == stats.submitted
        aborted = sum(engine.stats().finished.get("abort", 0) for engine in door.engines.values())
        assert aborted > 5 or "previous_response_id" in body


@pytest.mark.asyncio
async def test_a_client_that_reads_nothing_is_sent_little(door_of: DoorOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not read lies in the stream of the engine, which joins it; on the way are a few messages."""
    async with door_of(num_blocks=256) as door:
        form = {"prompt": "0123", "max_tokens": 600, "temperature": 0, "stream": True}
        sent = 0
        send = in_process._Client.send

        async def counted(self: in_process._Client, message: Message) -> None:
            nonlocal sent
            await send(self, message)
            sent += 1

        monkeypatch.setattr(in_process._Client, "send", counted)
        async with door.open(COMPLETIONS, form, window=1) as exchange:
            await exchange.read()
            await turns(5000)
            assert not any(engine.stats().running for engine in door.engines.values())  # it has made all by now
            assert sent < in_process.WINDOW + 5
        await door.quiet()


@pytest.mark.asyncio
async def test_who_is_too_slow_to_read_is_given_up(door_of: DoorOf) -> None:
    async with door_of(settings=ServerSettings(stall_timeout=0.05)) as door:
        form = {"prompt": "0123", "max_tokens": 200, "temperature": 0, "stream": True}
        async with door.open(COMPLETIONS, form, window=1) as exchange:
            await until(lambda: not exchange.is_running)
        await door.quiet()
