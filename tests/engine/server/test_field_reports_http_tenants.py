"""Field reports over HTTP, "cross-tenant isolation and side channels".

Which report is tested where is in ``test_field_reports_http.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import anyio
import pytest

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.tests.engine.server.http_rig import Json, Server, ServerOf, read_events
from octavo.tests.engine.tier_rig import cool, settled

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
SECRET: Final = "0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmno"  # noqa: S105  # 64 tokens
TOKEN: Final = "operators-only"  # noqa: S105  # of tests
OF: Final = {name: {"Authorization": f"Bearer key-{name}"} for name in ("a", "b", "c")}
SETTINGS: Final = ServerSettings(
    keys=Keys({digest(f"key-{name}"): Caller(name, name=name) for name in OF}), admin_token=TOKEN
)


async def asked(server: Server, who: Mapping[str, str], path: str, body: Json) -> Json:
    answer = await server.client.post(path, json=body, headers=who)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


async def cached(server: Server, who: str, prompt: str) -> int:
    answer = await asked(server, OF[who], COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]  # JSON
    assert isinstance(found, int)
    return found


# TENANT-01


@pytest.mark.asyncio
@pytest.mark.parametrize("tiers", [("host",), ("disk",), ("host", "disk")])
async def test_below_the_device_tenants_share_nothing_either(
    tiers: tuple[str, ...], server_of: ServerOf, tmp_path: Path
) -> None:
    """In the host's memory and on disk, in this life of the server and the next: no token, no difference."""
    below: dict[str, object] = {"tiers": tiers, "num_blocks": 24, "demotion": "write_through", "promotion": "wait"}
    below |= {"host_bytes": 2**20} if "host" in tiers else {}
    below |= {"disk_path": str(tmp_path / "disk"), "disk_bytes": 2**22} if "disk" in tiers else {}
    for life, other in enumerate("bc" if "disk" in tiers else "b"):
        runner = FakeRunner()
        async with server_of(settings=SETTINGS, runner=runner, tier_deadline=30.0, **below) as server:
            unseen = await asked(server, OF[other], "/v1/cache/explain", {"prompt": SECRET})
            assert (unseen["cached_tokens"], unseen["tier_tokens"]) == (0, [])
            if life == 0:
                assert await cached(server, "a", SECRET) == 0
                await cool(server.engine)
            assert await asked(server, OF[other], "/v1/cache/explain", {"prompt": SECRET}) == unseen
            for length, most in ((8, 0), (32, 8), (64, 32)):  # of its own probes
                before = runner.tokens_computed
                found = await cached(server, other, SECRET[:length])
                assert found <= most
                assert found + runner.tokens_computed - before == length
            assert await cached(server, "a", SECRET) > 32
            shown = (await asked(server, OF["a"], "/v1/cache/explain", {"prompt": SECRET}))["cached_tokens"]
            assert isinstance(shown, int)
            assert shown > 32
            await settled(server.engine)


@pytest.mark.asyncio
async def test_tenants_share_no_other_traces_either(server_of: ServerOf) -> None:
    """Neither responses by their ids, nor what others do: no route for clients tells of it."""
    async with server_of(settings=SETTINGS) as server:
        told = await asked(server, OF["a"], RESPONSES, {"input": SECRET, "store": True})
        name = str(told["id"])
        for method, path, body in (
            ("GET", f"/v1/responses/{name}", None),
            ("DELETE", f"/v1/responses/{name}", None),
            ("POST", RESPONSES, {"input": "0", "previous_response_id": name}),
        ):
            found = await server.client.request(method, path, json=body, headers=OF["b"])
            never = {**body, "previous_response_id": "resp_0"} if body else None
            other = await server.client.request(method, path.replace(name, "resp_0"), json=never, headers=OF["b"])
            assert found.status_code == other.status_code == 404
            assert found.text.replace(name, "resp_0") == other.text
        for path in ("/admin/requests", "/admin/cache", "/admin/stats", "/admin/pins"):
            assert (await server.client.get(path, headers=OF["b"])).status_code == 403
        for path in ("/metrics", "/load", "/ready", "/health", "/v1/models"):
            answer = await server.client.get(path, headers=OF["b"])
            assert SECRET[:8] not in answer.text
            assert name not in answer.text
        assert (await server.client.get(f"/v1/responses/{name}", headers=OF["a"])).status_code == 200


@pytest.mark.asyncio
async def test_an_operator_sees_each_tenants_cache_as_its_own(server_of: ServerOf) -> None:
    admin = {"Authorization": f"Bearer {TOKEN}"}
    async with server_of(settings=SETTINGS) as server:
        await cached(server, "a", SECRET)
        for tenant, tokens in (("a", 63), ("b", 0), (None, 0)):
            found = await asked(server, admin, "/admin/explain", {"prompt": SECRET, "tenant": tenant})
            assert found["cached_tokens"] == tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("extra", [{"n": 3}, {"echo": True, "logprobs": 1}, {"best_of": 2}, {"use_beam_search": True}])
async def test_no_way_of_asking_crosses_over(extra: Json, server_of: ServerOf) -> None:
    """Samples, beams and log-probabilities of prompts find their blocks in ways of their own."""
    body: Json = {"prompt": [SECRET, SECRET[:32]], "max_tokens": 4, **extra}
    async with server_of(settings=SETTINGS, num_blocks=512) as server:
        cold = (await asked(server, OF["a"], COMPLETIONS, body))["usage"]
        await asked(server, OF["a"], COMPLETIONS, body)
        assert (await asked(server, OF["b"], COMPLETIONS, body))["usage"] == cold


# TENANT-04


@pytest.mark.asyncio
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES])
async def test_twenty_clients_with_the_same_ids_everywhere(route: str, server_of: ServerOf) -> None:
    """In headers and in bodies, streaming or not, of two tenants: each gets its own text."""
    same: Json = {"id": "1", "request_id": "1", "user": "1", "metadata": {"id": "1"}, "prompt_cache_key": "1"}
    names = {"X-Request-Id": "1", "Idempotency-Key": "1", "traceparent": f"00-{'1' * 32}-{'1' * 16}-01"}

    def body(number: int) -> Json:
        words = chr(48 + number) * (4 + number)
        asks: Json = {"input": words, "max_output_tokens": 16} if route == RESPONSES else {"max_tokens": 16}
        asks |= {"messages": [{"role": "user", "content": words}]} if route == CHAT else {}
        asks |= {"prompt": words} if route == COMPLETIONS else {}
        return {**asks, "temperature": 0}

    async with server_of(settings=SETTINGS, num_blocks=512) as server:
        alone = [texts(await asked(server, OF["a"], route, body(number))) for number in range(20)]
        found: dict[int, list[str]] = {}

        async def ask(number: int) -> None:
            headers = {**names, **OF["ab"[number % 2]]}
            sent = {**body(number), **same, "stream": number % 3 == 0}
            answer = await server.client.post(route, json=sent, headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "1")
            found[number] = streamed(answer.content) if number % 3 == 0 else texts(answer.json())

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(ask, number)
        assert [found[number] for number in range(20)] == alone
        assert len({text for (text,) in alone}) == 20


def texts(answer: object) -> list[str]:
    """What the model said, in any form of answer."""
    if isinstance(answer, list):
        return [text for value in answer for text in texts(value)]
    if not isinstance(answer, dict):
        return []
    own = [answer[name] for name in ("text", "content") if isinstance(answer.get(name), str)]
    return own + [text for value in answer.values() for text in texts(value)]


def streamed(raw: bytes) -> list[str]:
    events = [event for event in read_events(raw) if event.data != "[DONE]"]
    if events[0].name is not None:
        return texts(json.loads(events[-1].data))
    return ["".join(text for event in events for text in texts(json.loads(event.data)))]


# TENANT-05


@pytest.mark.asyncio
async def test_what_is_no_text_never_takes_the_place_of_text(server_of: ServerOf) -> None:
    """Images and the like are refused, so that two of them cannot have the same tokens."""
    parts: list[Json] = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "1"}},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    ]
    async with server_of() as server:
        for part in parts:
            content = [{"type": "text", "text": "abc"}, part]
            error = await server.refused(CHAT, messages=[{"role": "user", "content": content}])
            assert str(error["param"]).startswith("messages")
            assert str(
                (await server.refused(RESPONSES, input=[{"role": "user", "content": content}]))["param"]
            ).startswith("input")
        for field in ("prompt_embeds", "lora", "adapter", "control_vector", "rope_scaling"):  # as other servers have
            answer = await server.post(COMPLETIONS, prompt="abcdefgh", max_tokens=1, **{field: "x"})
            assert answer["usage"]["prompt_tokens"] == 8  # type: ignore[index]  # JSON


# TENANT-07


@pytest.mark.asyncio
async def test_what_others_have_planted_in_a_shared_store_is_not_served(server_of: ServerOf, tmp_path: Path) -> None:
    """Two servers on one folder, of which one signs what it stores and the other has no key, or another one."""
    how: dict[str, object] = {"tiers": ("disk",), "disk_path": str(tmp_path / "disk"), "disk_bytes": 2**22}
    how |= {"settings": SETTINGS, "demotion": "write_through", "promotion": "wait", "tier_deadline": 30.0}
    async with server_of(**how) as planter:
        assert await cached(planter, "a", SECRET) == 0
        await settled(planter.engine)
    async with server_of(**how) as believer:
        assert await cached(believer, "a", SECRET) > 32
        await settled(believer.engine)
    async with server_of(**how, storage_key=b"k" * 32) as careful:
        assert await cached(careful, "a", SECRET) == 0
        assert (await careful.client.get("/health")).status_code == 200
        await settled(careful.engine)
