"""Who may come in through the gateway, and as whom: what it names is what the replicas keep for that tenant."""

from __future__ import annotations

from typing import Final

import pytest

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.fleet.gateway_rig import ADMIN, COMPLETIONS, FORM, PROMPT, DoorOf, Ordered, replica_of, the
from octavo.tests.engine.server.http_rig import read_stream

KEYS: Final = Keys(
    {
        digest("the key of one"): Caller("one", name="one"),
        digest("the key of two"): Caller("two", name="two"),
    }
)
SETTINGS: Final = ServerSettings(keys=KEYS, admin_token=ADMIN, max_body_bytes=4096)
ONE: Final = {"authorization": "Bearer the key of one"}


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer nobody's"}, {"authorization": f"Bearer {ADMIN}"}])
async def test_strangers_are_refused_at_the_door(headers: dict[str, str], door_of: DoorOf) -> None:
    policy = Ordered()
    async with door_of(settings=SETTINGS, policy=policy) as door:
        for path in (COMPLETIONS, "/v1/responses", "/tokenize"):
            answer = await door.client.post(path, json=dict(FORM), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert "x-octavo-replica" not in answer.headers
        assert policy.asked == []


@pytest.mark.asyncio
async def test_clients_are_no_operators(door_of: DoorOf) -> None:
    async with door_of(settings=SETTINGS) as door:
        for path in ("/admin/stats", "/admin/pins"):
            assert (await door.client.get(path, headers=ONE)).status_code == 403
    async with door_of() as door:  # without a token they are closed
        assert (await door.get("/admin/stats")).status_code == 403


@pytest.mark.asyncio
async def test_who_knows_nothing_still_may_ask_how_it_is(door_of: DoorOf) -> None:
    async with door_of(settings=SETTINGS) as door:
        for path in ("/health", "/ready", "/load", "/metrics", "/version", "/openapi.json", "/ui"):
            assert (await door.get(path)).status_code == 200


@pytest.mark.asyncio
async def test_tenants_have_caches_of_their_own(door_of: DoorOf) -> None:
    """What one tenant has cached draws nobody else's requests there, and is told to nobody else."""
    async with door_of(settings=SETTINGS) as door:
        door.headers = dict(ONE)
        home = replica_of(await door.post(COMPLETIONS, **FORM))
        for _ in range(3):
            again = await door.post(COMPLETIONS, **FORM)
            assert replica_of(again) == home
        assert the(again)["usage"]["prompt_tokens_details"]["cached_tokens"] == 24  # type: ignore[index]  # JSON
        door.headers = {"authorization": "Bearer the key of two"}
        other = await door.post(COMPLETIONS, **FORM)
        assert replica_of(other) != home
        assert the(other)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[index]  # JSON


@pytest.mark.asyncio
async def test_a_salt_is_a_tenant_for_those_without_one(door_of: DoorOf) -> None:
    async with door_of() as door:
        homes = {}
        for salt in ("a", "b", None):
            form = {**FORM, "cache_salt": salt}
            homes[salt] = [replica_of(await door.post(COMPLETIONS, **form)) for _ in range(3)]
        assert all(len(set(home)) == 1 for home in homes.values())
        assert len({home[0] for home in homes.values()}) == 2
    async with door_of(settings=SETTINGS) as door:
        door.headers = dict(ONE)
        refused = await door.post(COMPLETIONS, **FORM, cache_salt="a")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.asyncio
async def test_a_body_that_is_too_long_goes_nowhere(door_of: DoorOf) -> None:
    policy = Ordered()
    async with door_of(settings=SETTINGS, policy=policy) as door:
        answer = await door.client.post(COMPLETIONS, content=b"x" * 5000, headers=ONE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert policy.asked == []


@pytest.mark.asyncio
async def test_one_tenants_response_is_not_anothers(door_of: DoorOf) -> None:
    async with door_of(settings=SETTINGS) as door:
        door.headers = dict(ONE)
        made = the(await door.post("/v1/responses", input=PROMPT, max_output_tokens=1))
        door.headers = {"authorization": "Bearer the key of two"}
        assert (await door.get(f"/v1/responses/{made['id']}")).status_code == 404
        follower = await door.post("/v1/responses", input="0", previous_response_id=made["id"])
        assert follower.status_code in (400, 404)


@pytest.mark.asyncio
async def test_a_key_has_no_more_under_way_than_it_may_however_many_replicas_there_are(door_of: DoorOf) -> None:
    settings = ServerSettings(keys=Keys({digest("a good key"): Caller("t", max_concurrent=1, name="k")}))
    async with door_of(count=2, settings=settings, policy=Ordered()) as door:
        door.headers["authorization"] = "Bearer a good key"
        async with door.open(COMPLETIONS, {**FORM, "max_tokens": 60, "stream": True}) as one:
            await one.read()
            second = await door.post(COMPLETIONS, **FORM)
            assert (second.status_code, second.json()["error"]["code"]) == (429, "too_many_concurrent")
            assert int(second.headers["retry-after"]) >= 1
            assert (await door.post("/v1/cache/explain", prompt=PROMPT)).status_code == 200  # computes nothing
            read_stream(await one.whole())
        assert (await door.post(COMPLETIONS, **FORM)).status_code == 200
        assert not door.gateway.service.under_way
