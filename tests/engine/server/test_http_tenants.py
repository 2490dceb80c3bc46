"""Two API keys share nothing of the cache: not blocks, not numbers, not what is explained (TENANT-01)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.storage.testing.contract import MemoryStore
from octavo.tests.engine.server.http_rig import Server, ServerOf
from octavo.tests.engine.tier_rig import memory

PROMPT = "0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmno"  # 64 tokens
KEYS = Keys(
    {
        digest("key-a"): Caller("a", name="a"),
        digest("key-a2"): Caller("a", name="a2"),
        digest("key-b"): Caller("b", name="b"),
    }
)


class Client:
    """Who has one key."""

    def __init__(self, server: Server, runner: FakeRunner, key: str) -> None:
        self._server = server
        self._runner = runner
        self._headers = {"Authorization": f"Bearer {key}"}

    async def ask(self, prompt: str, path: str = "/v1/completions") -> tuple[int, int]:
        """Tokens that were cached, as the usage says, and tokens that were computed."""
        given: dict[str, object] = {"prompt": prompt}
        if "chat" in path:
            given = {"messages": [{"role": "user", "content": prompt}]}
        before = self._runner.tokens_computed
        body = {"model": "fake", "max_tokens": 1, "temperature": 0, **given}
        answer = await self._server.client.post(path, json=body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(cached, int)
        return cached, self._runner.tokens_computed - before

    async def explain(self, prompt: str) -> dict[str, object]:
        answer = await self._server.client.post(
            "/v1/cache/explain", json={"prompt": prompt, "others": True, "tenant": "a"}, headers=self._headers
        )
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found


@asynccontextmanager
async def clients(server_of: ServerOf, **options: object) -> AsyncIterator[tuple[Client, Client, Client]]:
    runner = FakeRunner()
    async with server_of(runner=runner, settings=ServerSettings(keys=KEYS), **options) as server:
        a, other_a, b = (Client(server, runner, key) for key in ("key-a", "key-a2", "key-b"))
        yield a, other_a, b


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_no_prefix_of_another_tenant_is_found(path: str, server_of: ServerOf) -> None:
    async with clients(server_of, num_blocks=256) as (a, other_a, b):
        cold = await a.ask(PROMPT, path)
        assert cold[0] == 0
        for length in range(8, 65, 8):
            cached, computed = await b.ask(PROMPT[:length], path)
            assert (cached, computed) == (max(length - 8, 0), 8 + cold[1] - 64)  # of its own probes
        assert await other_a.ask(PROMPT, path) == (cold[1] - 1, 1)
        for length in range(8, 65, 8):
            cached, _ = await other_a.ask(PROMPT[:length], path)
            assert cached >= length - 4


@pytest.mark.asyncio
async def test_no_prefix_of_another_tenant_comes_from_a_tier(server_of: ServerOf) -> None:
    tier = memory(store=MemoryStore())
    async with clients(server_of, mounts={"m": tier}, num_blocks=20, demotion="write_through") as (a, other_a, b):
        assert await a.ask(PROMPT) == (0, 64)
        assert await b.ask("n" * 64) == (0, 64)  # takes the room
        assert await b.ask(PROMPT) == (0, 64)
        cached, computed = await other_a.ask(PROMPT)
        assert cached > 0
        assert cached + computed == 64


@pytest.mark.asyncio
async def test_nothing_is_explained_of_another_tenant(server_of: ServerOf) -> None:
    async with clients(server_of) as (a, other_a, b):
        unseen = await b.explain(PROMPT)
        await a.ask(PROMPT)
        assert await b.explain(PROMPT) == unseen  # to the letter
        assert (unseen["cached_tokens"], unseen["device_tokens"]) == (0, 0)
        assert (await other_a.explain(PROMPT))["cached_tokens"] == 63
        assert set(unseen) == {"prompt_tokens", "cached_tokens", "device_tokens", "tier_tokens", "reason"}


@pytest.mark.asyncio
async def test_not_even_to_its_own_tenant_is_stored_text_shown(server_of: ServerOf) -> None:
    """Whoever shares a cache without keys must not read prompts in it."""
    async with clients(server_of) as (a, other_a, _):
        await a.ask("0123" + "CDEF" * 4)
        shown = str(await other_a.explain("0123" + "CDEG"))
        assert "position" not in shown
        assert "[" not in shown.replace("'tier_tokens': []", "")


@pytest.mark.asyncio
async def test_a_key_with_a_tenant_cannot_ask_for_another(server_of: ServerOf) -> None:
    async with server_of(settings=ServerSettings(keys=KEYS)) as server:
        server.headers = {"Authorization": "Bearer key-b"}
        for path in ("/v1/completions", "/v1/cache/explain"):
            error = await server.refused(path, model="fake", prompt="0123", cache_salt="a")
            assert error["param"] == "cache_salt"
