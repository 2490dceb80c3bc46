"""Health tells the truth: of an engine that loads, warms, hangs, has a dead model, drains, or has ended."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.engine.model.runner import StepInput
from octavo.engine.server.app import app_of, create_app
from octavo.engine.server.endpoints.health import DEAD_AFTER
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.errors import ModelError
from octavo.tests.engine.conftest import EngineOf, FakeClock
from octavo.tests.engine.server.http_rig import PATIENCE, Json, ServerOf

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def client_of(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app_of(service)), base_url="http://octavo")


async def asked(client: httpx.AsyncClient, path: str) -> tuple[int, Json]:
    answer = await client.get(path)
    return answer.status_code, answer.json()


@pytest.mark.asyncio
async def test_all_is_well(server_of: ServerOf) -> None:
    async with server_of() as server:
        status, health = await asked(server.client, "/health")
        assert (status, health["status"]) == (200, "ok")
        status, ready = await asked(server.client, "/ready")
        assert (status, ready["status"]) == (200, "ready")
        status, version = await asked(server.client, "/version")
        assert status == 200
        assert set(version) == {"version"}
        assert await asked(server.client, "/load") == (200, {"server_load": 0})


@pytest.mark.asyncio
async def test_while_it_loads_it_is_alive_and_not_ready(engine_of: EngineOf) -> None:
    service = Service(ServerSettings())
    async with client_of(service) as client:
        service.note_progress("weights", 0.25)
        status, health = await asked(client, "/health")
        assert (status, health["status"]) == (200, "loading")
        status, ready = await asked(client, "/ready")
        assert (status, ready["status"], ready["phase"], ready["share"]) == (503, "loading", "weights", 0.25)
        assert (await asked(client, "/load"))[0] == 503
        async with engine_of() as engine:
            service.attach(engine)
            assert (await asked(client, "/ready"))[0] == 200


@pytest.mark.asyncio
async def test_a_model_that_could_not_be_loaded_is_told_without_the_reason() -> None:
    service = Service(ServerSettings())
    service.failure = "/secret/path is no model"
    async with client_of(service) as client:
        for path in ("/health", "/ready"):
            status, body = await asked(client, path)
            assert (status, body["status"]) == (503, "failed")
            assert "secret" not in str(body)


@pytest.mark.asyncio
async def test_draining_is_alive_and_not_ready(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        service = Service(ServerSettings(), engine)
        service.is_draining = True
        async with client_of(service) as client:
            assert (await asked(client, "/health"))[0] == 200
            status, ready = await asked(client, "/ready")
            assert (status, ready["status"]) == (503, "draining")
            asking = await client.post("/v1/completions", json={"model": "fake", "prompt": [1], "max_tokens": 1})
            assert (asking.status_code, asking.json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.asyncio
async def test_an_engine_that_has_ended_is_dead() -> None:
    engine = AsyncEngine(runner=FakeRunner())
    transport = httpx.ASGITransport(app=create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        async with engine:
            assert (await asked(client, "/health"))[0] == 200
        for path in ("/health", "/ready"):
            status, body = await asked(client, path)
            assert (status, body["status"]) == (503, "dead")


@pytest.mark.asyncio
async def test_a_step_that_hangs_is_told(server_of: ServerOf) -> None:
    clock, hanging, go_on = FakeClock(), anyio.Event(), anyio.Event()

    async def hang(step: int) -> None:
        if step == 1:
            hanging.set()
            await go_on.wait()

    async with (
        server_of(clock=clock, on_step=hang, step_timeout=10.0) as server,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(server.engine.complete, [1] * 4, ONE)
        await hanging.wait()
        clock.now += 9.0
        assert (await asked(server.client, "/health"))[0] == 200
        assert await asked(server.client, "/load") == (200, {"server_load": 1})
        clock.now += 3.0
        status, health = await asked(server.client, "/health")
        assert (status, health["status"]) == (503, "stuck")
        assert "2 s longer" in str(health["detail"])
        assert (await asked(server.client, "/ready"))[0] == 503
        go_on.set()
        await server.engine._loop.wait_idle()
        assert (await asked(server.client, "/health"))[0] == 200


@pytest.mark.asyncio
async def test_a_dead_model_is_told_and_one_bad_request_is_not(server_of: ServerOf) -> None:
    """TENANT-05: the runner gives nothing but errors while the engine goes on."""
    broken = False

    def before(step: StepInput) -> None:
        if broken:
            raise RuntimeError("device lost")

    async with server_of(runner=FakeRunner(before_step=before)) as server:

        async def ask(number: int) -> None:
            try:
                await server.engine.complete([number] * 4, ONE)
            except ModelError:
                assert broken

        statuses = []
        for number in range(DEAD_AFTER + 2):
            broken = number > 1
            await ask(number)
            statuses.append((await asked(server.client, "/health"))[0])
        assert statuses == [200] * (DEAD_AFTER + 1) + [503]
        status, ready = await asked(server.client, "/ready")
        assert (status, ready["status"]) == (503, "dead")
        broken = False
        await ask(40)
        assert (await asked(server.client, "/health"))[0] == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_requests_that_break_the_model_do_not_make_it_look_dead(server_of: ServerOf, path: str) -> None:
    def before(step: StepInput) -> None:
        if any(row.sampling is not None and 7 in row.sampling.history for row in step.rows):
            raise RuntimeError("no model takes this")

    async with server_of(runner=FakeRunner(before_step=before)) as server:
        for _ in range(2 * DEAD_AFTER):
            with pytest.raises(ModelError):
                await server.engine.complete([7], ONE)
            assert (await asked(server.client, path))[0] == 200


@pytest.mark.asyncio
async def test_what_a_restart_has_kept_is_shown(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of() as engine:
        await engine.complete([1] * 16, ONE)
        await engine.snapshot(tmp_path / "snapshot")
    async with (
        engine_of(restore=tmp_path / "snapshot", warm_bytes=10**6) as engine,
        client_of(Service(ServerSettings(), engine)) as client,
    ):
        status, ready = await asked(client, "/ready")
        with anyio.fail_after(PATIENCE):
            while status == 503:
                assert ready["status"] == "warming"
                await anyio.sleep(0.001)
                status, ready = await asked(client, "/ready")
        assert (ready["stored_blocks"], ready["planned_blocks"], ready["warmed_blocks"]) == (4, 4, 4)
        assert (ready["status"], ready["refused"]) == ("ready", None)
        done = await engine.complete([1] * 16, ONE)
        assert done[0].cached_tokens == 15
        _, ready = await asked(client, "/ready")
        assert ready["saved_tokens"] == 16


@pytest.mark.asyncio
async def test_a_snapshot_that_is_not_used_is_told(engine_of: EngineOf, tmp_path: Path) -> None:
    async with (
        engine_of(restore=tmp_path / "nothing") as engine,
        client_of(Service(ServerSettings(), engine)) as client,
    ):
        status, ready = await asked(client, "/ready")
        assert status == 200
        assert ready["refused"]
