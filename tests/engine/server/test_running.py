from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from octavo.engine.server.lifecycle import Ending, Stop, serve
from octavo.engine.server.running import Address, listening, serving
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.errors import InvalidRequest
from octavo.tests.engine.server.host_rig import (
    Streams,
    client_of,
    maker,
    nobody_looks,
)
from octavo.tests.engine.server.socket_rig import PATIENCE, until


@pytest.mark.asyncio
async def test_a_host_serves_its_own_engine_and_keeps_it() -> None:
    engine = maker(step_seconds=0.002)(nobody_looks)
    async with engine:
        async with AsyncExitStack() as clients:
            async with serving(engine) as address:
                streams = Streams(await clients.enter_async_context(client_of(address)), 1, max_tokens=3000)
                await streams.all_begun()
            with pytest.raises(httpx.RemoteProtocolError):  # cut off in the middle of its chunks
                await streams.texts()
        await until(lambda: engine.stats().running == 0)
        assert engine.is_open


@pytest.mark.asyncio
async def test_it_may_be_left_in_another_task_than_it_was_entered() -> None:
    async with maker()(nobody_looks) as engine:
        server = serving(engine)
        address = await asyncio.create_task(server.__aenter__())
        async with client_of(address) as client:
            assert (await client.get("/health")).status_code == 200
        await asyncio.create_task(server.__aexit__(None, None, None))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address.host, address.port)


@pytest.mark.asyncio
async def test_an_address_that_is_taken_is_a_clear_error() -> None:
    async with maker()(nobody_looks) as engine, serving(engine) as address:
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{address.port}"):
            await serving(engine, port=address.port).__aenter__()


def test_addresses_as_clients_write_them() -> None:
    assert Address("127.0.0.1", 80).url == "http://127.0.0.1:80"
    assert Address("::1", 80).url == "http://[::1]:80"
    assert Address("", 0, "/run/octavo").url == "unix:/run/octavo"


@pytest.mark.asyncio
async def test_a_unix_socket_is_served_and_cleared_away(socket_path: Path) -> None:
    path = str(socket_path)
    for _ in range(2):
        with listening("", 0, path) as (listener, address):
            service, stop = Service(ServerSettings()), Stop()
            task = asyncio.create_task(serve(service, maker(), listener, Ending(), stop))
            async with httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=address.path), base_url="http://octavo"
            ) as client:
                assert (await client.get("/health")).status_code == 200
            stop.ask()
            await asyncio.wait_for(task, PATIENCE)
        assert not os.path.lexists(path)  # noqa: ASYNC240  # a look


def test_a_unix_socket_that_was_left_behind_is_replaced_and_others_are_not(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))
    with listening("", 0, str(socket_path)), pytest.raises(InvalidRequest), listening("", 0, str(socket_path)):
        pass
    socket_path.write_text("precious")
    with pytest.raises(InvalidRequest), listening("", 0, str(socket_path)):
        pass
    assert socket_path.read_text() == "precious"
