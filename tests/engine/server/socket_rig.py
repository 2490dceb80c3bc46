"""Raw connections to a server that runs in the same event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import NamedTuple

import anyio

from octavo import AsyncEngine
from octavo.engine.server.running import Address

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
PATIENCE = 20.0
"""Seconds after which a test that hangs is told so; no result depends on it."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, dict[str, str]]:
        decoded: dict[str, dict[str, str]] = json.loads(self.body)
        return decoded


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_all(self, pieces: AsyncIterator[bytes], limit: int) -> int:
        """Send until the server hangs up or ``limit`` bytes are sent; how many were."""
        sent = 0
        with suppress(ConnectionError):
            async for piece in pieces:
                await self.send(piece)
                sent += len(piece)
                if sent >= limit:
                    break
                await asyncio.sleep(0)
        return sent

    async def answer(self) -> Answer:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split()[1]), headers, body)

    async def chunks(self) -> bytes:
        """A body of unknown length, to its end; the connection goes on."""
        pieces = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            pieces.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return b"".join(pieces)

    async def rest(self) -> bytes:
        """All that comes until the server hangs up."""
        chunks = []
        with suppress(ConnectionError):
            while chunk := await self._reader.read(65536):
                chunks.append(chunk)
        return b"".join(chunks)

    async def read_some(self) -> bytes:
        return await self._reader.read(1024)


@asynccontextmanager
async def wire(
    address: Address, *, receive_buffer: int | None = None, patience: float = PATIENCE
) -> AsyncIterator[Wire]:
    """A connection, closed in the end. With a small ``receive_buffer`` it holds little that is not read."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    raw.setblocking(False)
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(raw, (address.host, address.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=receive_buffer or 65536)
    try:
        with anyio.fail_after(patience):
            yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def get(path: str = "/health", *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: octavo", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, form: object, *headers: str) -> bytes:
    body = form if isinstance(form, bytes) else json.dumps(form).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: octavo", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def completion(prompt: str = "0123456789", *headers: str, **form: object) -> bytes:
    return post(
        "/v1/completions", {"model": "fake", "prompt": prompt, "max_tokens": 4, "temperature": 0, **form}, *headers
    )


async def alive(address: Address) -> None:
    """The canary: somebody else is served as if nothing had happened."""
    status = 503
    while status == 503:  # the server may not have seen yet that connections are closed
        async with wire(address) as connection:
            await connection.send(completion())
            status = (await connection.answer()).status
    assert status == 200


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come to be."""
    with anyio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110  # it is seen from outside only
            await asyncio.sleep(0.005)
