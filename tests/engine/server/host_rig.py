"""Servers with a whole life, over the fake model, and clients of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx

from octavo import AsyncEngine, EngineConfig
from octavo.engine.server.lifecycle import Ending, MakeEngine, Stop, serve
from octavo.engine.server.running import Address, listening
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.server.socket_rig import PATIENCE, until

FOREVER = 1000.0
Progress = Callable[[str, float], None]


class Hosted(NamedTuple):
    client: httpx.AsyncClient
    service: Service
    stop: Stop
    task: asyncio.Task[bool]

    async def result(self) -> bool:
        return await asyncio.wait_for(self.task, PATIENCE)


def maker(
    *, step_seconds: float = 0.0, restore: Path | None = None, made: list[AsyncEngine] | None = None, **config: object
) -> MakeEngine:
    settings = EngineConfig(
        **{  # type: ignore[arg-type]  # names and values come from the tests
            "num_blocks": 4000,
            "block_size": 4,
            "eviction_policy": "octavo.policies.eviction.lru:Lru",
            "scheduling_policy": "octavo.policies.scheduling.fcfs:Fcfs",
            **config,
        }
    )

    def make(progress: Progress) -> AsyncEngine:
        runner = FakeRunner(step_seconds=step_seconds)
        engine = AsyncEngine(runner=runner, codec=FakeCodec(), config=settings, restore=restore)
        if made is not None:
            made.append(engine)
        return engine

    return make


@asynccontextmanager
async def hosted(make: MakeEngine, ending: Ending | None = None, *, is_ready: bool = True) -> AsyncIterator[Hosted]:
    """A server in a task; it has ended when this is left."""
    service, stop = Service(ServerSettings()), Stop()
    with listening("127.0.0.1", 0) as (listener, address):
        task = asyncio.create_task(serve(service, make, listener, ending or Ending(), stop))
        try:
            async with client_of(address) as client:
                if is_ready:
                    await until(lambda: not service.is_loading)
                yield Hosted(client, service, stop, task)
        finally:
            stop.ask()
            stop.ask()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task})


def client_of(address: Address) -> httpx.AsyncClient:
    """Without TLS: reading the certificates takes longer than most of these tests."""
    return httpx.AsyncClient(base_url=address.url, timeout=PATIENCE, verify=False)  # noqa: S501


def nobody_looks(what: str, share: float) -> None:
    pass


def form(max_tokens: int, *, stream: bool = False, prompt: str = "0123456789") -> dict[str, object]:
    return {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}


class Streams:
    """Several streams that are read side by side."""

    def __init__(self, client: httpx.AsyncClient, count: int, max_tokens: int) -> None:
        self.begun = 0
        self._client = client
        self._tasks = [asyncio.create_task(self._read(number, max_tokens)) for number in range(count)]

    async def all_begun(self) -> None:
        await until(lambda: self.begun == len(self._tasks))

    async def texts(self) -> list[str]:
        return list(await asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE))

    async def _read(self, number: int, max_tokens: int) -> str:
        text = ""
        body = form(max_tokens, stream=True, prompt=chr(48 + number) * 8)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in response.aiter_text():
                self.begun += not text
                text += chunk
        return text
