"""Field reports over HTTP: streaming and slow clients, leaks when clients leave, the end of the server.

Which report is tested where is in ``test_field_reports_http.py``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.model.runner import StepInput
from octavo.engine.model.text import HuggingFaceCodec
from octavo.engine.server.app import create_app
from octavo.engine.server.running import serving
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.storage.testing.contract import Fault
from octavo.tests.engine.model.tokenizer_rig import byte_level, wrap
from octavo.tests.engine.server.host_rig import client_of
from octavo.tests.engine.server.http_rig import PATIENCE, Exchange, ServerOf, read_stream
from octavo.tests.engine.server.socket_rig import completion, until, wire
from octavo.tests.engine.tier_rig import Faulty, cool, settled

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
ASKED: Final[dict[str, dict[str, object]]] = {
    CHAT: {"messages": [{"role": "user", "content": "abcdefgh"}]},
    COMPLETIONS: {"prompt": "abcdefgh"},
    RESPONSES: {"input": "abcdefgh", "max_output_tokens": 40},
}


@asynccontextmanager
async def threaded(**config: object) -> AsyncIterator[tuple[AsyncEngine, FakeRunner]]:
    """An engine whose model computes in a thread."""
    runner = FakeRunner()
    settings = EngineConfig(**{"num_blocks": 600, "block_size": 4, "eviction_policy": "lru", **config})  # type: ignore[arg-type]  # names and values come from the tests
    async with AsyncEngine(runner=runner, codec=FakeCodec(), config=settings) as engine:
        yield engine, runner
        await engine._loop.wait_idle()
        assert engine.census().held == 0


# LEAK-04


@pytest.mark.asyncio
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["limit", "stop"])
async def test_who_leaves_during_the_last_step_has_left(
    route: str, stream: bool, how: str, server_of: ServerOf
) -> None:
    """In the only step there is, or in that of a stop token: it counts as aborted, and as nothing else."""

    async def on_step(step: int) -> None:
        if exchanges:
            exchanges[0].leave()
            await exchanges[0].ended()

    exchanges: list[Exchange] = []
    ends = {"max_tokens": 1} if how == "limit" else {"max_tokens": 50, "stop_token_ids": list(range(64))}
    async with server_of(on_step=on_step) as server:
        async with server.open(route, {**ASKED[route], **ends, "stream": stream}) as exchange:
            exchanges.append(exchange)
            await exchange.ended()
        await server.engine._loop.wait_idle()
        assert server.engine.stats().finished == {"abort": 1}
        metrics = (await server.client.get("/metrics")).text
        assert f'status="{200 if stream else 499}"' in metrics
        assert 'finished_total{reason="stop"} 1' not in metrics.replace("octavo_requests_", "")
        exchanges.clear()
        assert await server.post(route, **ASKED[route], max_tokens=2)


@pytest.mark.asyncio
@pytest.mark.parametrize("route", [COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_while_its_prefix_is_loaded_holds_nothing(
    route: str, stream: bool, server_of: ServerOf
) -> None:
    """LEAK-01, LEAK-05: eight of them, before anything of theirs was computed; the load ends afterwards."""
    slow, gate = Faulty(), anyio.Event()
    body: dict[str, object] = {**ASKED[route], "temperature": 0}
    async with server_of(mounts={"m": slow}, num_blocks=64, tier_deadline=60.0, promotion="wait") as server:
        canary = await server.post(route, **body)
        await cool(server.engine)
        slow.tier.inject(Fault("get", "slow", gate=gate))
        clients = [server.open(route, {**body, "stream": stream}) for _ in range(8)]
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.__aenter__)
        await until(lambda: server.engine.stats().loading > 0)
        for client in clients:
            client.leave()
            await client.ended()
        assert server.engine.stats().running == 0
        gate.set()
        await settled(server.engine)
        assert dict(server.engine.stats().finished)["abort"] == 8
        again = await server.post(route, **body)
        name = "output" if route == RESPONSES else "choices"
        assert texts(again[name]) == texts(canary[name])


def texts(answer: object) -> list[str]:
    """All texts in it, whatever their form."""
    if isinstance(answer, dict):
        own = [str(answer[name]) for name in ("text", "content") if isinstance(answer.get(name), str)]
        return own + [text for value in answer.values() for text in texts(value)]
    return [text for value in answer for text in texts(value)] if isinstance(answer, list) else []


# FLOW


@pytest.mark.asyncio
async def test_while_the_model_computes_everything_else_goes_on() -> None:
    """FLOW-04: the step does not end before the others have been served and a client has left."""
    go_on, inside = threading.Event(), threading.Event()

    def block(step: StepInput) -> None:
        inside.set()
        go_on.wait(PATIENCE)

    async with threaded() as (engine, runner), serving(engine) as address:
        runner.before_step = block
        async with client_of(address) as client, wire(address) as leaving, wire(address) as staying:
            await leaving.send(completion(max_tokens=2000, stream=True))
            await staying.send(completion("9876543210"))
            await asyncio.to_thread(inside.wait, PATIENCE)
            for path in ("/health", "/ready", "/v1/models", "/metrics", "/load", "/ui"):
                assert (await client.get(path)).status_code == 200
            assert (await client.post("/tokenize", json={"prompt": "abc"})).status_code == 200
            assert (await client.post(COMPLETIONS, json={"prompt": ""})).status_code == 400
            leaving.writer.transport.abort()
            assert runner.steps == 0
            go_on.set()
            assert (await staying.answer()).status == 200
        await until(lambda: not engine.requests())
        assert engine.stats().finished == {"abort": 1, "length": 1}


@pytest.mark.asyncio
async def test_a_long_text_is_tokenised_while_others_are_served() -> None:
    """FLOW-04: the tokenizer lets other threads go on. A bound that is relative, and a few tries: machines are busy."""
    codec = HuggingFaceCodec(wrap(byte_level()))
    text = "naïve café 日本語 " * 13_000
    began = time.perf_counter()
    codec.encode(text)
    alone = time.perf_counter() - began
    runner, config = FakeRunner(vocab_size=400), EngineConfig(num_blocks=16)
    async with AsyncEngine(runner=runner, codec=codec, config=config) as engine:
        lags = [await lag_of(engine, text)]
        while min(lags) >= alone / 2 and len(lags) < 10:
            lags.append(await lag_of(engine, text))
    assert min(lags) < alone / 2


async def lag_of(engine: AsyncEngine, text: str) -> float:
    """Seconds for which the event loop stood still at most."""
    task, worst = asyncio.create_task(engine.tokenize(text)), 0.0
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - before)
    assert len(await task) > 50_000
    return worst


@pytest.mark.asyncio
async def test_a_flood_of_tokens_for_a_client_that_sleeps_waits_in_the_model() -> None:
    """FLOW-06: nothing queues up between the model's thread and the socket, and leaving ends it."""
    async with threaded(num_blocks=1100) as (engine, runner):
        app = create_app(engine)
        body = {"prompt": "abcdefgh", "max_tokens": 4000, "stream": True}
        async with Exchange(app, COMPLETIONS, body, window=1) as exchange:
            await exchange.read()
            await exchange.read()
            sent = len(exchange.messages)
            await until(lambda: runner.steps > 300)
            assert exchange._sent.qsize() <= 1
            assert len(exchange.messages) == sent
            await exchange.read()
            text = await exchange.read()
            assert text is not None
            assert len(text["body"]) < 300_000
            exchange.leave()
        await until(lambda: not engine.requests())
        steps = runner.steps
        await asyncio.sleep(0.02)
        assert runner.steps <= steps + 1


def test_the_loop_ends_in_the_middle_of_streams(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """FLOW-06, CONC-06: the model's thread still produces while the loop is closed. Nobody complains."""

    async def main() -> None:
        async with threaded() as (engine, _), serving(engine) as address:
            for number in range(3):
                loop, connection = asyncio.get_running_loop(), socket.socket()
                connection.setblocking(False)
                connections.append(connection)
                await loop.sock_connect(connection, address[:2])
                await loop.sock_sendall(connection, completion(chr(50 + number) * 8, max_tokens=2000, stream=True))
                assert b" 200 " in await loop.sock_recv(connection, 100)
            raise KeyboardInterrupt

    connections: list[socket.socket] = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    for connection in connections:
        connection.close()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["put", "flush", "contains"])
async def test_a_store_that_stands_still_keeps_no_stream_waiting(call: str, server_of: ServerOf) -> None:
    """FLOW-07: it stands still from the first stream to the last."""
    slow, gate = Faulty(), anyio.Event()
    slow.prepare(Fault(call, "slow", gate=gate))
    async with server_of(mounts={"m": slow}, num_blocks=40, demotion="write_through", tier_deadline=0.05) as server:
        for number in range(10):
            stream = await server.stream(COMPLETIONS, prompt=[number] * 20, max_tokens=20)
            assert stream.finish_reasons() == ["length"]
            assert (await server.client.get("/health")).status_code == 200
        assert not gate.is_set()
        gate.set()
        await settled(server.engine)


@pytest.mark.asyncio
@pytest.mark.parametrize("fails_at", [0, 1, 3, 7])
async def test_one_prompt_of_several_fails_in_the_middle_of_their_stream(fails_at: int, server_of: ServerOf) -> None:
    """FLOW-09: one error and nothing else ends it; what the others had said by then stays said."""

    def fail(step: StepInput) -> None:
        rows = [row.sampling for row in step.rows if row.sampling is not None]
        if any(row.history[0] == 5 and len(row.history) >= 2 + fails_at for row in rows):
            raise RuntimeError("secret of the model")

    runner = FakeRunner()
    async with server_of(runner=runner) as server:
        body = {"prompt": [[1, 2], [5, 6], [3, 4]], "max_tokens": 20, "temperature": 0}
        alone = await server.stream(COMPLETIONS, **body)
        runner.before_step = fail
        async with server.open(COMPLETIONS, {**body, "stream": True}) as exchange:
            raw = await exchange.whole()
        stream = read_stream(raw)
        assert b"secret" not in raw
        assert stream.error is not None
        assert stream.error["code"] == "internal_error"
        assert stream.finish_reasons(1) == []
        assert len(stream.text(1)) == fails_at
        assert all(alone.text(index).startswith(stream.text(index)) for index in range(3))
        await server.engine._loop.wait_idle()
        runner.before_step = None
        again = await server.stream(COMPLETIONS, **body)
        assert [again.text(index) for index in range(3)] == [alone.text(index) for index in range(3)]
