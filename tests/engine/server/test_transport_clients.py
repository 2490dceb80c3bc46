from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from octavo.engine.server import transport
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.server.guarded_rig import HASTY, PATIENT, endless, rig_of
from octavo.tests.engine.server.socket_rig import EngineOf, alive, completion, get, until, wire

# connections


@pytest.mark.asyncio
async def test_one_connection_too_many_is_told_to_come_again(engine_of: EngineOf) -> None:
    settings = ServerSettings(max_connections=3)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(rig_of(engine_of, settings))
        async with AsyncExitStack() as crowd:
            for _ in range(3):  # they have sent nothing yet: their requests may be on their way
                await crowd.enter_async_context(wire(rig.address))
            async with wire(rig.address) as connection:
                answer = await connection.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.asyncio
async def test_an_idle_connection_makes_room_for_a_new_one(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, ServerSettings(max_connections=2)) as rig, wire(rig.address) as idle:
        await idle.send(get())
        assert (await idle.answer()).status == 200
        for _ in range(5):
            async with wire(rig.address) as connection:
                await connection.send(get())
                assert (await connection.answer()).status == 200
        assert await idle.rest() == b""


@pytest.mark.asyncio
async def test_a_connection_whose_head_is_late_makes_room(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds every connection and says nothing shuts nobody out, probes of the server's health least of all."""
    monkeypatch.setattr(transport, "LATE", 0.0)
    settings = ServerSettings(max_connections=3, header_timeout=600.0)
    async with rig_of(engine_of, settings) as rig, AsyncExitStack() as crowd:
        late = [await crowd.enter_async_context(wire(rig.address)) for _ in range(3)]
        await late[0].send(b"GET /health HT")
        async with wire(rig.address) as connection:
            await connection.send(get())
            assert (await connection.answer()).status == 200


@pytest.mark.asyncio
async def test_pipelined_requests_are_answered_in_order(engine_of: EngineOf) -> None:
    paths = ["/health", "/nowhere", "/version", "/v1/models"]
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(b"".join(get(path) for path in paths) + completion() + completion(max_tokens=2))
        assert [(await connection.answer()).status for _ in range(6)] == [200, 404, 200, 200, 200, 200]


@pytest.mark.asyncio
async def test_a_flood_of_pipelined_requests_waits_at_the_client(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, HASTY) as rig, wire(rig.address, receive_buffer=4096) as connection:
        sent = await connection.send_all(endless(get("/openapi.json") * 100), limit=100_000_000)
        assert sent < 20_000_000  # it was cut off, as it reads nothing
        await alive(rig.address)


@pytest.mark.asyncio
async def test_what_comes_behind_a_request_is_no_part_of_it(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(get("/version") + b"\x00\x01\x02\r\n\r\n")
        assert (await connection.answer()).status == 200
        assert (await connection.answer()).status == 400
        assert await connection.rest() == b""


@pytest.mark.asyncio
async def test_expect_continue_is_continued(engine_of: EngineOf) -> None:
    head, _, body = completion("0123456789", "Expect: 100-continue").partition(b"\r\n\r\n")
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(head + b"\r\n\r\n")
        assert (await connection.answer()).status == 100
        await connection.send(body)
        assert (await connection.answer()).status == 200


@pytest.mark.asyncio
async def test_nothing_is_upgraded(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(get("/version", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"))
        assert (await connection.answer()).status == 200


# clients that leave, half or whole


@pytest.mark.asyncio
async def test_a_client_that_sends_no_more_gets_the_answer_to_its_get(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(get("/version"))
        connection.writer.write_eof()
        assert (await connection.answer()).status == 200
        assert await connection.rest() == b""


@pytest.mark.asyncio
async def test_a_generation_ends_when_its_client_shuts_down(engine_of: EngineOf) -> None:
    started = asyncio.Event()

    async def on_step(number: int) -> None:
        started.set()
        await asyncio.sleep(0.001)

    async with rig_of(engine_of, PATIENT, on_step=on_step, num_blocks=600) as rig, wire(rig.address) as connection:
        await connection.send(completion(max_tokens=2000))
        await started.wait()
        connection.writer.write_eof()
        assert await connection.rest() == b""
        await until(lambda: rig.engine.stats().running == 0)
        assert dict(rig.engine.stats().finished)["abort"] == 1


@pytest.mark.asyncio
async def test_a_client_that_reads_nothing_is_cut_off_and_others_run_at_full_speed(engine_of: EngineOf) -> None:
    """FLOW-01."""
    async with (
        rig_of(engine_of, HASTY, num_blocks=2000, max_batch_tokens=64) as rig,
        wire(rig.address, receive_buffer=4096) as stuck,
    ):
        await stuck.send(completion(max_tokens=4000, stream=True, logprobs=5))
        assert b" 200 " in await stuck.read_some()
        steps = rig.engine.stats().steps
        async with wire(rig.address) as other:
            await other.send(completion("9876543210", max_tokens=40))
            assert (await other.answer()).status == 200
        assert rig.engine.stats().steps - steps < 60  # it was in every step
        await until(lambda: rig.engine.stats().running == 0)
        assert rig.engine.census().held == 0
        assert len(await stuck.rest()) < 3_000_000
