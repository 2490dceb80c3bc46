"""The gateway is transparent: what comes through it is what a single server says."""

from __future__ import annotations

import json
from typing import Final

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Message

from octavo.engine.fleet import in_process
from octavo.engine.server.app import app_of
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.fleet.gateway_rig import (
    ADMIN,
    CHAT,
    COMPLETIONS,
    FORM,
    PROMPT,
    RESPONSES,
    DoorOf,
    Ordered,
    replica_of,
    steady,
    the,
)
from octavo.tests.engine.server.http_rig import Exchange, read_events, read_stream

MESSAGES: Final = [{"role": "system", "content": "0123"}, {"role": "user", "content": "abcdefgh"}]
TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BODIES: Final = (
    (CHAT, {"messages": MESSAGES, "max_tokens": 9, "temperature": 0}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "n": 3, "seed": 7, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5, "seed": 1, "tools": [TOOL], "tool_choice": "none"}),
    (COMPLETIONS, dict(FORM)),
    (COMPLETIONS, {"prompt": ["abcd", "efghij"], "max_tokens": 5, "temperature": 0, "echo": True}),
    (COMPLETIONS, {"prompt": [1, 2, 3, 4, 5, 6], "max_tokens": 5, "temperature": 0}),
    (RESPONSES, {"input": "abcdefgh", "max_output_tokens": 6, "temperature": 0}),
    (COMPLETIONS, {"prompt": "", "max_tokens": 5}),
    (COMPLETIONS, {"prompt": "abcd", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "ü", "max_tokens": 1}),
    (CHAT, {"messages": [], "max_tokens": 5}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (RESPONSES, {"input": "abcd", "previous_response_id": "resp_nobody"}),
    (CHAT, {"messages": MESSAGES, "model": "another"}),
)
OWN: Final = {"x-octavo-replica", "x-request-id", "content-length"}


def plain(raw: bytes) -> object:
    """A body without what differs each time; of a stream what it says, whatever the parts that it came in."""
    if raw.startswith(b"event:"):
        return steady(json.loads(read_events(raw)[-1].data)["response"])
    if raw.startswith(b"data:"):
        stream = read_stream(raw)
        return stream.error, [(stream.text(index), stream.finish_reasons(index)) for index in range(4)]
    return steady(json.loads(raw))


async def whole(exchange: Exchange) -> tuple[int, dict[str, str], object]:
    async with exchange:
        raw = await exchange.whole()
        assert exchange.is_whole
        headers = {name: value for name, value in exchange.headers.items() if name not in OWN}
        return exchange.status, headers, plain(raw)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_that_of_a_single_server(
    path: str, body: dict[str, object], stream: bool, door_of: DoorOf
) -> None:
    asked = {**body, "stream": stream}
    async with door_of(count=1) as alone:
        expected = await whole(Exchange(app_of(alone.services["r0"]), path, asked))
    async with door_of() as door:
        assert await whole(door.open(path, asked)) == expected
        assert sum(engine.stats().submitted for engine in door.engines.values()) <= 2


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_comes_as_it_was_sent_byte_for_byte(
    path: str, body: dict[str, object], door_of: DoorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Message] = []
    run = in_process.Replica._run

    async def recorded(self: in_process.Replica, client: in_process._Client) -> None:
        send = client.send

        async def noted(message: Message) -> None:
            sent.append(message)
            await send(message)

        monkeypatch.setattr(client, "send", noted)
        await run(self, client)

    monkeypatch.setattr(in_process.Replica, "_run", recorded)
    async with door_of() as door, door.open(path, {**body, "stream": True}) as exchange:
        raw = await exchange.whole()
        heads = [message for message in sent if message["type"] == "http.response.start"]
        if path != RESPONSES or len(heads) == 1:  # a response that nobody has is asked for first
            assert raw == b"".join(message.get("body", b"") for message in sent)
        assert raw.endswith(b"".join(message.get("body", b"") for message in sent[sent.index(heads[-1]) :]))
        own = {name: value for name, value in heads[-1]["headers"] if name != b"x-octavo-replica"}
        got = dict(exchange.messages[0]["headers"])
        assert got == {**own, b"x-octavo-replica": got[b"x-octavo-replica"]}


@pytest.mark.asyncio
async def test_a_conversation_stays_where_its_cache_is(door_of: DoorOf) -> None:
    """Each of several conversations goes on on the replica that has it, and finds all of its whole blocks there."""
    async with door_of(count=3) as door:
        homes: dict[str, str] = {}
        for turn in range(4):
            for name in "abcdef":
                prompt = name * 12 + PROMPT[: 4 * turn]
                answer = await door.post(COMPLETIONS, prompt=prompt, max_tokens=1, temperature=0)
                assert replica_of(answer) == homes.setdefault(name, replica_of(answer))
                cached = the(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]  # JSON
                assert cached >= (12 + 4 * (turn - 1) if turn else 0)
        assert len(set(homes.values())) > 1


@pytest.mark.asyncio
async def test_a_request_keeps_its_id_on_the_way(door_of: DoorOf) -> None:
    async with door_of() as door:
        own = await door.client.post(COMPLETIONS, json=dict(FORM), headers={"x-request-id": "mine"})
        assert own.headers.get_list("x-request-id") == ["mine"]
        other = await door.post(COMPLETIONS, **FORM)
        assert other.json()["id"] == f"cmpl-{other.headers['x-request-id']}"


@pytest.mark.asyncio
async def test_what_any_replica_knows(door_of: DoorOf) -> None:
    async with door_of() as door:
        assert the(await door.get("/v1/models"))["data"][0]["id"] == "fake"  # type: ignore[index]  # JSON
        assert the(await door.get("/v1/models/fake"))["id"] == "fake"
        assert (await door.get("/v1/models/other")).status_code == 404
        assert the(await door.post("/tokenize", prompt="0123"))["tokens"] == [0, 1, 2, 3]
        assert the(await door.post("/detokenize", tokens=[0, 1]))["prompt"] == "01"
        assert set(the(await door.get("/version"))) == {"version"}
        assert the(await door.get("/openapi.json"))["openapi"] == "3.1.0"
        assert "<html" in (await door.get("/ui")).text
        missing = await door.get("/v1/nowhere")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.asyncio
async def test_an_explanation_comes_from_who_has_the_prompt(door_of: DoorOf) -> None:
    async with door_of(count=3) as door:
        home = replica_of(await door.post(COMPLETIONS, **FORM))
        answer = await door.post("/v1/cache/explain", prompt=PROMPT)
        assert (replica_of(answer), the(answer)["device_tokens"]) == (home, 24)


# what lies on one replica


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("remembers", [True, False])
async def test_a_stored_response_is_found_where_it_is(stream: bool, remembers: bool, door_of: DoorOf) -> None:
    async with door_of(count=3) as door:
        made = []
        for name in "abcdefgh":
            form = {"input": name * 9, "max_output_tokens": 3, "stream": stream, "temperature": 0}
            async with door.open(RESPONSES, form) as exchange:
                raw = await exchange.whole()
                data = json.loads(read_events(raw)[-1].data)["response"] if stream else json.loads(raw)
                made.append((data, replica_of(exchange)))
        assert len({replica for _, replica in made}) > 1
        owners = door.gateway._somebody._owners
        for data, replica in made:
            assert owners.find(data["id"]) == replica
            if not remembers:
                owners.forget(data["id"])
            found = await door.get(f"{RESPONSES}/{data['id']}")
            assert (the(found), replica_of(found)) == (data, replica)
            follower = await door.post(RESPONSES, input="0", previous_response_id=data["id"], max_output_tokens=2)
            assert (follower.status_code, replica_of(follower)) == (200, replica)
            gone = await door.client.delete(f"{RESPONSES}/{data['id']}")
            assert (the(gone)["deleted"], replica_of(gone)) == (True, replica)
            assert (await door.get(f"{RESPONSES}/{data['id']}")).status_code == 404


@pytest.mark.asyncio
async def test_only_so_many_owners_are_remembered(door_of: DoorOf) -> None:
    async with door_of(settings=ServerSettings(max_responses=3)) as door:
        for number in range(8):
            await door.post(RESPONSES, input=f"{number}abc", max_output_tokens=1)
        assert len(door.gateway._somebody._owners) == 3


# for operators


@pytest.mark.asyncio
async def test_operators_ask_one_or_all(door_of: DoorOf) -> None:
    settings = ServerSettings(admin_token=ADMIN)
    async with door_of(count=3, settings=settings, policy=Ordered()) as door:
        await door.post(COMPLETIONS, **FORM)
        assert (await door.get("/admin/stats")).status_code == 403
        door.headers["authorization"] = f"Bearer {ADMIN}"
        every = the(await door.get("/admin/stats"))["replicas"]
        assert {each: stats["submitted"] for each, stats in every.items()} == {"r0": 1, "r1": 0, "r2": 0}  # type: ignore[attr-defined]
        one = await door.get("/admin/stats", **{"x-octavo-replica": "r1"})
        assert (the(one)["submitted"], replica_of(one)) == (0, "r1")
        nobody = await door.get("/admin/stats", **{"x-octavo-replica": "r9"})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "no_replica")
        erased = the(await door.post("/admin/erase", tenant=None))["replicas"]
        assert {each: found["blocks"] > 0 for each, found in erased.items()} == {"r0": True, "r1": False, "r2": False}  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_the_worst_status_shows_unless_others_have_what_one_lacks(door_of: DoorOf) -> None:
    async with door_of(settings=ServerSettings(admin_token=ADMIN)) as door:
        door.headers["authorization"] = f"Bearer {ADMIN}"
        pinned = await door.client.post(
            "/admin/pins", json={"prompt": PROMPT}, headers={**door.headers, "x-octavo-replica": "r1"}
        )
        number = the(pinned)["id"]
        assert (await door.client.delete(f"/admin/pins/{number}", headers=door.headers)).status_code == 200
        assert (await door.client.delete(f"/admin/pins/{number}", headers=door.headers)).status_code == 404
        assert (await door.client.put("/admin/policy", json={}, headers=door.headers)).status_code == 400


@pytest.mark.asyncio
async def test_the_fleet_is_well_while_one_replica_is(door_of: DoorOf) -> None:
    async with door_of() as door:
        assert set(the(await door.get("/health"))["replicas"]) == {"r0", "r1"}  # type: ignore[call-overload]  # JSON
        assert the(await door.get("/load"))["replicas"] == {"r0": {"server_load": 0}, "r1": {"server_load": 0}}
        door.services["r0"].is_draining = True
        ready = await door.get("/ready")
        assert ready.status_code == 200
        assert {each: found["status"] for each, found in ready.json()["replicas"].items()} == {
            "r0": "draining",
            "r1": "ready",
        }
        door.services["r1"].is_draining = True
        assert (await door.get("/ready")).status_code == 503
        door.fleet.lose("r0")
        assert set(the(await door.get("/health"))["replicas"]) == {"r1"}  # type: ignore[call-overload]  # JSON
        door.fleet.lose("r1")
        gone = await door.get("/health")
        assert (gone.status_code, gone.json()) == (503, {"replicas": {}})
        door.services["r0"].is_draining = door.services["r1"].is_draining = False


@pytest.mark.asyncio
async def test_it_can_be_mounted_below_a_path(door_of: DoorOf) -> None:
    async with door_of() as door:
        app = Starlette(routes=[Mount("/fleet", door.gateway.app)])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://octavo") as client:
            assert (await client.post(f"/fleet{COMPLETIONS}", json=dict(FORM))).status_code == 200
            assert (await client.get("/fleet/v1/models")).status_code == 200
