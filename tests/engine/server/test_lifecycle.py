from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.server.lifecycle import Ending, heeding_signals
from octavo.engine.server.running import HttpServer
from octavo.engine.snapshotting import SnapshotReport
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ModelError
from octavo.tests.engine.server.host_rig import (
    FOREVER,
    Progress,
    Streams,
    form,
    hosted,
    maker,
)
from octavo.tests.engine.server.socket_rig import PATIENCE, until

# STOP-01


@pytest.mark.asyncio
async def test_what_runs_finishes_and_what_is_new_is_refused() -> None:
    async with hosted(maker(step_seconds=0.002), Ending(drain_timeout=FOREVER)) as server:
        streams = Streams(server.client, 5, max_tokens=60)
        await streams.all_begun()
        server.stop.ask()
        await until(lambda: server.service.is_draining)
        late = await server.client.post("/v1/completions", json=form(1))
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) >= 1
        assert late.json()["error"]["code"] == "shutting_down"
        for text in await streams.texts():
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in text
        assert await server.result()


@pytest.mark.asyncio
@pytest.mark.parametrize("drain_timeout", [0.2, 0.0])
async def test_what_does_not_finish_in_time_is_told(drain_timeout: float) -> None:
    async with hosted(maker(step_seconds=0.005, max_running=2), Ending(drain_timeout=drain_timeout)) as server:
        streams = Streams(server.client, 2, max_tokens=3900)
        await streams.all_begun()
        waiting = asyncio.create_task(server.client.post("/v1/completions", json=form(3900)))
        await until(lambda: server.service.engine.stats().waiting == 1)
        server.stop.ask()
        assert await server.result()
        for text in await streams.texts():
            last = text.removesuffix("\n\n").rpartition("\n\n")[2]
            assert '"error"' in last
            assert "[DONE]" not in text
        assert (await waiting).status_code == 503


@pytest.mark.asyncio
async def test_a_second_signal_waits_for_nobody() -> None:
    async with hosted(maker(step_seconds=0.005), Ending(drain_timeout=FOREVER, snapshot="/nowhere/at/all")) as server:
        streams = Streams(server.client, 2, max_tokens=3900)
        await streams.all_begun()
        server.stop.ask()
        await until(lambda: server.service.is_draining)
        server.stop.ask()
        assert await server.result()  # nothing was saved, as it was told not to wait
        for text in await streams.texts():
            assert '"error"' in text
            assert "[DONE]" not in text


# STOP-04


@pytest.mark.asyncio
@pytest.mark.parametrize("running", [0, 1, 10])
@pytest.mark.parametrize("times", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_a_clean_end_logs_nothing_that_is_wrong(
    times: int, running: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(times):
        async with hosted(maker(step_seconds=0.001), Ending(drain_timeout=0.005)) as server:
            streams = Streams(server.client, running, max_tokens=3000)
            await streams.all_begun()
            server.stop.ask()
            assert await server.result()
            await streams.texts()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# STOP-06


@pytest.mark.asyncio
async def test_the_end_is_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    real_snapshot, real_close, real_shutdown = AsyncEngine.snapshot, AsyncEngine.close, HttpServer.shutdown

    async def snapshot(engine: AsyncEngine, path: str) -> SnapshotReport:
        order.append(f"snapshot, {engine.stats().running} running")
        return await real_snapshot(engine, path)

    async def close(engine: AsyncEngine) -> None:
        order.append("engine")
        await real_close(engine)

    async def shutdown(server: HttpServer, sockets: list[socket.socket] | None = None) -> None:
        order.append("sockets")
        await real_shutdown(server, sockets)

    monkeypatch.setattr(AsyncEngine, "snapshot", snapshot)
    monkeypatch.setattr(AsyncEngine, "close", close)
    monkeypatch.setattr(HttpServer, "shutdown", shutdown)
    make = maker(step_seconds=0.002, tiers=("disk",), disk_path=str(tmp_path / "disk"), disk_bytes=2**24)
    saved = tmp_path / "snapshot"
    async with hosted(make, Ending(snapshot=saved)) as server:
        streams = Streams(server.client, 1, max_tokens=60)
        await streams.all_begun()
        server.stop.ask()
        assert await server.result()
        assert (await streams.texts())[0].endswith("[DONE]\n\n")
    assert order == ["snapshot, 0 running", "engine", "sockets"]

    async with hosted(maker(restore=saved)) as server:
        answer = await server.client.post("/v1/completions", json=form(1, prompt="0" * 8))
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.asyncio
async def test_a_cache_that_cannot_be_saved_is_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    async with hosted(maker(), Ending(snapshot=tmp_path / "file" / "below")) as server:
        server.stop.ask()
        assert not await server.result()
    assert [record.levelname for record in caplog.records if "snapshot_failed" in record.getMessage()] == ["ERROR"]


# the beginning


@pytest.mark.asyncio
async def test_http_is_up_while_the_model_is_loaded() -> None:
    go = asyncio.Event()
    loop = asyncio.get_running_loop()

    def make(progress: Progress) -> AsyncEngine:
        progress("weights", 0.25)

        def load() -> tuple[FakeRunner, FakeCodec]:
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(PATIENCE)
            return FakeRunner(), FakeCodec()

        return AsyncEngine(load=load, config=EngineConfig(num_blocks=16))

    async with hosted(make, is_ready=False) as server:
        await until(lambda: server.service.progress.share > 0)
        assert (await server.client.get("/ready")).status_code == 503
        refused = await server.client.post("/v1/completions", json=form(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert "25%" in refused.json()["error"]["message"]
        go.set()
        await until(lambda: not server.service.is_loading)
        assert (await server.client.get("/ready")).status_code == 200
        assert (await server.client.post("/v1/completions", json=form(1))).status_code == 200


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_loaded_ends_the_server_after_it_was_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(progress: Progress) -> AsyncEngine:
        def load() -> tuple[FakeRunner, FakeCodec]:
            raise ModelError("there is no such file")

        return AsyncEngine(load=load)

    async with hosted(make, Ending(failure_shown=FOREVER)) as server:
        assert server.service.failure is not None
        assert (await server.client.get("/health")).status_code == 503
        assert (await server.client.get("/ready")).status_code == 503
        refused = await server.client.post("/v1/completions", json=form(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_failed")
        server.stop.ask()
        assert not await server.result()
    assert len([record for record in caplog.records if "model_not_loaded" in record.getMessage()]) == 1

    async with hosted(make, Ending(failure_shown=0.0), is_ready=False) as server:
        assert not await server.result()  # by itself


@pytest.mark.asyncio
async def test_a_stop_during_the_load_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(engine: AsyncEngine) -> AsyncEngine:
        await anyio.sleep_forever()
        return engine

    monkeypatch.setattr(AsyncEngine, "__aenter__", endless)
    async with hosted(maker(), is_ready=False) as server:
        await asyncio.sleep(0)
        server.stop.ask()
        assert await server.result()


@pytest.mark.asyncio
async def test_an_engine_that_ends_by_itself_ends_the_server() -> None:
    made: list[AsyncEngine] = []
    async with hosted(maker(made=made)) as server:
        await made[0].close()
        assert not await server.result()


@pytest.mark.asyncio
async def test_signals_ask_once_and_then_at_once() -> None:
    with heeding_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.gently.wait(), PATIENCE)
        assert not stop.now.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.now.wait(), PATIENCE)
