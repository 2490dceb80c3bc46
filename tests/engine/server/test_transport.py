from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.server.guarded_rig import HASTY, PATIENT, endless, rig_of
from octavo.tests.engine.server.socket_rig import EngineOf, completion, get, post, wire

# heads


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_random_bytes_do_no_harm(engine_of: EngineOf, seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311  # repeatable
    whole = completion()
    async with rig_of(engine_of, HASTY) as rig:
        for _ in range(10):
            noise = generator.randbytes(generator.choice([1, 20, 3000]))
            cut = generator.randrange(len(whole))
            for data in (noise, whole[:cut] + noise, whole[:cut] + noise + whole[cut:], whole + noise):
                async with wire(rig.address) as connection:
                    await connection.send(data)
                    connection.writer.write_eof()
                    answer = await connection.rest()
                assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
                assert b" 500 " not in answer[:20]


@pytest.mark.asyncio
async def test_what_is_no_http_is_told_so_in_the_form_of_all_errors(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(b"\x16\x03\x01 hello\r\n\r\n")
        answer = await connection.answer()
        assert answer.status == 400
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert await connection.rest() == b""


@pytest.mark.asyncio
@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX: "])
async def test_a_head_without_end_is_cut_off_early(engine_of: EngineOf, first: bytes) -> None:
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(first)
        sent = await connection.send_all(endless(b"a" * 65536), limit=1_000_000_000)
        assert sent < 100_000_000  # what is thrown away, and what sockets hold


@pytest.mark.asyncio
@pytest.mark.parametrize("piecewise", [False, True])
async def test_ten_thousand_headers_are_too_many(engine_of: EngineOf, piecewise: bool) -> None:
    request = get("/health", *[f"X-{number}: 1" for number in range(10_000)])
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        for start in range(0, len(request), 4096 if piecewise else len(request)):
            await connection.send(request[start : start + (4096 if piecewise else len(request))])
            await asyncio.sleep(0)
        assert (await connection.answer()).status == 431
        assert await connection.rest() == b""


@pytest.mark.asyncio
@pytest.mark.parametrize("beginning", [b"", b"GET /health HT"])
async def test_a_head_that_does_not_come_is_not_waited_for(engine_of: EngineOf, beginning: bytes) -> None:
    async with rig_of(engine_of, HASTY) as rig, wire(rig.address) as connection:
        await connection.send(beginning)
        assert await connection.rest() == b""


@pytest.mark.asyncio
async def test_a_head_that_trickles_is_not_waited_for_after_another_request_either(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, HASTY) as rig, wire(rig.address) as connection:
        await connection.send(get())
        assert (await connection.answer()).status == 200

        async def slowly() -> AsyncIterator[bytes]:
            for byte in get() * 1000:
                yield bytes([byte])
                await asyncio.sleep(0.05)

        assert await connection.send_all(slowly(), limit=len(get())) < len(get())


@pytest.mark.asyncio
async def test_an_idle_connection_is_closed_after_its_time(engine_of: EngineOf) -> None:
    settings = ServerSettings(keep_alive_timeout=0.1)
    async with rig_of(engine_of, settings) as rig, wire(rig.address) as connection:
        await connection.send(get())
        assert (await connection.answer()).status == 200
        assert await connection.rest() == b""


# bodies


@pytest.mark.asyncio
async def test_a_body_without_end_is_refused(engine_of: EngineOf) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: octavo\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(head)
        answer = asyncio.create_task(connection.answer())
        sent = await connection.send_all(endless(b"10000\r\n" + b"a" * 65536 + b"\r\n"), limit=1_000_000_000)
        assert sent < 100_000_000
        assert (await answer).status == 413


@pytest.mark.asyncio
async def test_a_body_that_is_announced_too_long_is_refused_before_it_comes(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: octavo\r\nContent-Length: 99999999\r\n\r\n{")
        assert (await connection.answer()).status == 413


@pytest.mark.asyncio
async def test_a_body_that_trickles_is_not_waited_for(engine_of: EngineOf) -> None:
    async with rig_of(engine_of, HASTY) as rig, wire(rig.address) as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: octavo\r\nContent-Length: 100\r\n\r\n{")
        assert (await connection.answer()).status == 408
        assert await connection.rest() == b""


@pytest.mark.asyncio
async def test_what_anybody_may_ask_is_answered_without_its_body(engine_of: EngineOf) -> None:
    """Else strangers could make the server hold a body for each of their connections."""
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(get("/health", "Content-Length: 100000") + b"a")
        assert (await connection.answer()).status == 200
        await connection.send(b"a" * 99_999 + get("/version"))
        assert (await connection.answer()).status == 200


@pytest.mark.asyncio
async def test_a_body_that_nobody_wants_is_not_read_for_ever(engine_of: EngineOf) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: octavo\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def slowly() -> AsyncIterator[bytes]:
        while True:
            yield b"1\r\na\r\n"
            await asyncio.sleep(0.02)

    async with rig_of(engine_of, HASTY) as rig, wire(rig.address) as connection:
        await connection.send(head)
        assert (await connection.answer()).status == 404
        assert await connection.send_all(slowly(), limit=60_000) < 60_000


@pytest.mark.asyncio
@pytest.mark.parametrize("form", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 33_000 + b"1" + b"}" * 33_000])
async def test_json_that_is_nested_too_deeply_is_refused(engine_of: EngineOf, form: bytes) -> None:
    async with rig_of(engine_of, PATIENT) as rig, wire(rig.address) as connection:
        await connection.send(post("/v1/completions", form))
        assert (await connection.answer()).status == 400


@pytest.mark.asyncio
async def test_ten_thousand_messages_are_answered_or_refused(engine_of: EngineOf) -> None:
    messages = [{"role": "user", "content": ""}] * 10_000
    settings = ServerSettings()
    async with rig_of(engine_of, settings) as rig, wire(rig.address) as connection:
        await connection.send(post("/v1/chat/completions", {"model": "fake", "messages": messages}))
        assert (await connection.answer()).status in {200, 400}


BROKEN = {
    "longer than it says": b"Content-Length: 5\r\n\r\n" + b'{"model": "fake"}',
    "shorter than it says": b"Content-Length: 500\r\n\r\n{}",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "no number": b"Content-Length: two\r\n\r\n{}",
    "below zero": b"Content-Length: -2\r\n\r\n{}",
    "length and chunks": b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "no chunk": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk too short": b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}{}{}\r\n0\r\n\r\n",
    "an unknown coding": b"Transfer-Encoding: gzip\r\n\r\n{}",
}


@pytest.mark.asyncio
@pytest.mark.parametrize("rest", BROKEN.values(), ids=BROKEN.keys())
async def test_a_body_whose_length_is_wrong_never_becomes_a_failure(engine_of: EngineOf, rest: bytes) -> None:
    async with rig_of(engine_of, HASTY) as rig, wire(rig.address) as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: octavo\r\n" + rest)
        answer = await connection.rest()
        assert answer[:13] in {b"HTTP/1.1 400 ", b"HTTP/1.1 408 ", b"HTTP/1.1 501 "}
