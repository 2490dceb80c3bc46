"""What operators do over HTTP has the effect that it has in the engine, and needs the token."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import anyio.lowlevel
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.engine.choosing import EVICTION_POLICIES
from octavo.engine.server.access import Door
from octavo.engine.server.app import app_of
from octavo.engine.server.endpoint import Endpoint
from octavo.engine.server.operations import run_length
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.server.wire import admin
from octavo.engine.server.wire import operations as ops
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.server.http_rig import Exchange, Server, ServerOf

ONE = SamplingParams(max_tokens=1, temperature=0.0)
T = TypeVar("T", bound=msgspec.Struct)
TOKEN = "operators-only"  # noqa: S105  # of tests
STREAM = {"model": "fake", "prompt": "0123", "max_tokens": 200, "stream": True}
AS_ADMIN = {"Authorization": f"Bearer {TOKEN}"}


class AdminOf(Protocol):
    """``async with admin_of(snapshot_dir=, **config) as server``: requests come with the admin token."""

    def __call__(self, snapshot_dir: Path | None = None, **options: object) -> AbstractAsyncContextManager[Server]: ...


@pytest.fixture
def admin_of(server_of: ServerOf) -> AdminOf:
    @asynccontextmanager
    async def opened(snapshot_dir: Path | None = None, **options: object) -> AsyncIterator[Server]:
        settings = ServerSettings(admin_token=TOKEN, snapshot_dir=snapshot_dir)
        async with server_of(settings=settings, **options) as server:
            server.headers = AS_ADMIN
            yield server

    return opened


async def got(server: Server, path: str, form: type[T]) -> T:
    answer = await server.client.get(path, headers=server.headers)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=form)


async def first_bytes(exchange: Exchange) -> None:
    while not exchange.body:
        assert await exchange.read() is not None


def admin_routes() -> list[tuple[str, str]]:
    """Method and path of all routes that have to be behind the token."""
    found = []
    for route in app_of(Service(ServerSettings())).routes:
        endpoint = getattr(route, "endpoint", None)
        if isinstance(endpoint, Endpoint) and endpoint.door is Door.ADMIN:
            path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or set()
            found += [(method, re.sub("{.*?}", "1", path)) for method in methods - {"HEAD"}]
    return found


# the door


@pytest.mark.asyncio
async def test_every_admin_route_needs_the_token(admin_of: AdminOf, server_of: ServerOf) -> None:
    routes = admin_routes()
    assert len(routes) >= 18
    async with admin_of() as guarded, server_of() as closed:
        for method, path in routes:
            for server, headers in ((guarded, {}), (guarded, {"Authorization": "Bearer other"}), (closed, AS_ADMIN)):
                answer = await server.client.request(method, path, headers=headers, json={})
                assert answer.status_code == 403, (method, path)
                assert answer.json()["error"]["type"] == "permission_error"
        assert not closed.engine.stats().submitted


def test_whatever_is_below_admin_is_behind_the_token() -> None:
    paths = {getattr(route, "path", "") for route in app_of(Service(ServerSettings())).routes}
    behind = {path for _, path in admin_routes()}
    assert {re.sub("{.*?}", "1", path) for path in paths if path.startswith("/admin")} == behind


# looking


def same(shown: msgspec.Struct, meant: object, without: Collection[str] = ()) -> None:
    for name in set(shown.__struct_fields__) - set(without):
        assert getattr(shown, name) == getattr(meant, name), name


@pytest.mark.asyncio
async def test_stats_are_the_engines(admin_of: AdminOf) -> None:
    async with admin_of(tenant_quotas={"a": 0.5}) as server:
        await server.engine.complete("01234567", ONE, tenant="a")
        await server.engine.complete("0123456789", ONE, tenant="a")
        shown, stats = await got(server, "/admin/stats", admin.Stats), server.engine.stats()
        nested = {"cache", "tiers", "transfers", "restore", "saved"}
        same(shown, stats, without=nested)
        for part in nested - {"tiers"}:
            same(getattr(shown, part), getattr(stats, part))
        assert shown.tenant_blocks == {"*": 0, "a": 2}
        assert (shown.cache.prefix_hit_tokens, shown.finished) == (8, {"length": 2})


@pytest.mark.asyncio
async def test_the_cache_is_shown_as_the_page_wants_it(admin_of: AdminOf) -> None:
    async with admin_of(codec=None) as plain, admin_of() as server:
        for each in (plain, server):
            await each.engine.complete([1] * 8, ONE, tenant="a")
            await each.engine.complete([1] * 4 + [2] * 4, ONE, tenant="a")
            await each.engine.evict([1] * 8, tenant="a")
        view = await got(server, "/admin/cache?text=true&nodes=5", admin.CacheView)
        assert view.pool.map.startswith("i")
        assert (view.pool.idle, view.pool.free, view.pool.total) == (2, 62, 64)
        assert [(node.text, node.tenant, node.depth) for node in view.nodes] == [("1111", "a", 4), ("2222", "a", 8)]
        assert view.nodes[1].parent == view.nodes[0].id
        assert [(each.blocks, each.reason) for each in view.evictions] == [(1, "forget")]
        assert view.counters.prefix_query_tokens == 16
        for each, query, texts in (
            (plain, "?text=1", [None, None]),
            (server, "", [None, None]),
            (server, "?nodes=0", []),
        ):
            view = await got(each, f"/admin/cache{query}", admin.CacheView)
            assert [node.text for node in view.nodes] == texts
        assert len((await got(server, "/admin/cache?nodes=1", admin.CacheView)).nodes) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("query", ["nodes=-1", "nodes=x", "nodes=10001", "text=maybe", "nodes="])
async def test_a_query_that_is_wrong_is_told(query: str, admin_of: AdminOf) -> None:
    async with admin_of() as server:
        answer = await server.client.get(f"/admin/cache?{query}", headers=AS_ADMIN)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]


@given(st.lists(st.tuples(st.sampled_from("fihpt"), st.integers(1, 300)), max_size=30))
def test_the_map_can_be_read_back(runs: list[tuple[str, int]]) -> None:
    states = "".join(letter * count for letter, count in runs)
    told = run_length(states.encode())
    read = re.findall(r"([a-z])(\d*)", told)
    assert "".join(letter * int(count or 1) for letter, count in read) == states
    assert all(count != "1" for _, count in read)
    assert all(one[0] != two[0] for one, two in pairwise(read))


@pytest.mark.asyncio
async def test_explain_tells_what_there_is_and_why_not_more(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        await server.engine.complete("0123456789AB", ONE, tenant="a")
        found = await server.post("/admin/explain", prompt="01234567CCCC", tenant="a")
        assert (found["prompt_tokens"], found["cached_tokens"], found["missing_from"]) == (12, 8, 8)
        assert found["nearest"] == {"position": 8, "start": 0, "stored": [*range(10), 17, 18]}
        assert found["other_has_more"] is None
        stranger = await server.post("/admin/explain", prompt="0123456789AB", tenant="b", others=True)
        assert (stranger["cached_tokens"], stranger["other_has_more"]) == (0, True)
        await server.engine.evict("0123456789AB", tenant="a")
        gone = await server.post("/admin/explain", prompt=list(range(10)), tenant="a")
        assert gone["evicted"] is None  # what was to be forgotten is
        chat = await server.post("/admin/explain", messages=[{"role": "user", "content": "0123"}])
        assert chat["cached_tokens"] == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/admin/explain", "/admin/evict", "/admin/pins", "/v1/cache/explain"])
async def test_a_prompt_is_needed_and_one_only(path: str, admin_of: AdminOf) -> None:
    async with admin_of() as server:
        assert (await server.refused(path))["param"] == "prompt"
        both = await server.refused(path, prompt="0", messages=[{"role": "user", "content": "0"}])
        assert both["param"] == "messages"
        assert (await server.refused(path, prompt=5))["param"] == "prompt"
        await server.refused(path, prompt="")


@pytest.mark.asyncio
async def test_requests_are_listed_by_the_names_that_clients_know(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        assert await got(server, "/admin/requests", ops.RequestList) == ops.RequestList([])
        async with server.open("/v1/completions", {**STREAM, "cache_salt": "a", "priority": -2}) as exchange:
            await first_bytes(exchange)
            (shown,) = (await got(server, "/admin/requests", ops.RequestList)).requests
            assert f'"cmpl-{shown.id}"'.encode() in exchange.body
            assert (shown.priority, shown.state) == (-2, "running")
            assert shown.tenant is not None
            assert shown.tenant.endswith("a")
            assert (shown.prompt_tokens, shown.cached_tokens, shown.samples) == (4, 0, 1)
            assert shown.generated_tokens >= 1
            assert await server.post(f"/admin/requests/{shown.id}/abort") == {"id": shown.id, "aborted": True}
            ended = await exchange.whole()
            assert b"[DONE]" not in ended
            assert b'"error"' in ended
        await server.refused("/admin/requests/nobody/abort", 404)


# keeping and forgetting


@pytest.mark.asyncio
async def test_pins_come_and_go(admin_of: AdminOf) -> None:
    clock = FakeClock()
    async with admin_of(clock=clock) as server:
        kept = await server.post("/admin/pins", prompt="01234567", tenant="a")
        assert (kept["tokens"], kept["seconds_left"], kept["tenant"]) == (8, None, "a")
        timed = await server.post("/admin/pins", prompt="CCCC", ttl=10)
        assert timed["seconds_left"] == 10
        clock.now += 4
        shown = await got(server, "/admin/pins", ops.PinList)
        assert [(pin.id, pin.seconds_left) for pin in shown.pins] == [(kept["id"], None), (timed["id"], 6)]
        assert server.engine.stats().cache.pinned == 3
        path = f"/admin/pins/{kept['id']}"
        answer = await server.client.delete(path, headers=AS_ADMIN)
        assert answer.json() == {"id": kept["id"], "unpinned": True}
        assert (await server.client.delete(path, headers=AS_ADMIN)).status_code == 404
        assert (await server.client.delete("/admin/pins/abc", headers=AS_ADMIN)).status_code == 404
        ranked = await server.post("/admin/pins", prompt="DDDD", priority=7)
        assert (ranked["id"], server.engine.stats().pins) == (-1, 1)
        clock.now += 100
        await server.engine.complete([1] * 4, ONE)
        assert await got(server, "/admin/pins", ops.PinList) == ops.PinList([])


@pytest.mark.asyncio
async def test_a_pin_that_is_refused_is_told(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        assert "at least 4 tokens" in str((await server.refused("/admin/pins", prompt="012"))["message"])
        await server.refused("/admin/pins", prompt="0123", ttl=0)
        assert (await server.refused("/admin/pins", prompt="0123", ttl="x"))["param"] == "ttl"
        error = await server.refused("/admin/pins", 429, prompt="0123" * 40)
        assert error["code"] == "out_of_blocks"


@pytest.mark.asyncio
async def test_what_is_evicted_is_gone_and_the_rest_is_not(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        for tenant in ("a", None):
            await server.engine.complete("01234567", ONE, tenant=tenant)
        assert await server.post("/admin/evict", prompt="0123", tenant="a") == {"device_blocks": 2, "tier_blocks": 0}
        assert (await server.engine.explain("01234567", tenant="a")).cached_tokens == 0
        assert (await server.engine.explain("01234567")).cached_tokens == 7


@pytest.mark.asyncio
async def test_a_tenant_is_erased_everywhere(admin_of: AdminOf, tmp_path: Path) -> None:
    async with admin_of(tmp_path) as server:
        for tenant in ("a", None):
            await server.engine.complete("01234567", ONE, tenant=tenant)
        await server.post("/admin/snapshots", name="one")
        assert "tenant" in str((await server.refused("/admin/erase"))["message"])
        assert await server.post("/admin/erase", tenant="a", snapshots=["one"]) == {"blocks": 4}
        assert (await server.engine.explain("01234567", tenant="a")).cached_tokens == 0
        assert (await server.engine.explain("01234567")).cached_tokens == 7
        assert await server.post("/admin/erase", tenant=None) == {"blocks": 2}
        error = await server.refused("/admin/erase", 409, tenant="a", snapshots=["nothing"])
        assert error["code"] == "storage_error"


# snapshots


@pytest.mark.asyncio
async def test_snapshots_are_written_by_name_and_listed(admin_of: AdminOf, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "no-snapshot").mkdir()
    (folder / "file").write_text("x")
    async with admin_of(folder) as server:
        assert await got(server, "/admin/snapshots", ops.SnapshotList) == ops.SnapshotList([])
        await server.engine.complete("01234567CCCC", ONE, tenant="a")
        whole = await server.post("/admin/snapshots", name="whole.1")
        assert whole == {"name": "whole.1", "blocks": 3, "device_blocks": 3, "lost": 0}
        part = await server.post("/admin/snapshots", name="part", prompt="01234567", tenant="a", tiers=False)
        assert part["blocks"] == 2
        shown = (await got(server, "/admin/snapshots", ops.SnapshotList)).snapshots
        assert [each.name for each in shown] == ["part", "whole.1"]
        assert all(each.bytes > 0 for each in shown)
    async with admin_of(restore=folder / "whole.1") as server:
        assert server.engine.stats().restore.stored_blocks == 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/x", "a/b", "a\\b", ".hidden", "a\x00", "x" * 129, "é", None, 5]
)
async def test_a_name_is_no_path(name: object, admin_of: AdminOf, tmp_path: Path) -> None:
    async with admin_of(tmp_path) as server:
        assert (await server.refused("/admin/snapshots", name=name))["param"] == "name"
        await server.refused("/admin/erase", tenant="a", snapshots=[name])
    assert not any(tmp_path.glob("*"))  # noqa: ASYNC240  # the loop has nothing else to do


@pytest.mark.asyncio
async def test_without_a_folder_there_are_no_snapshots(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        error = await server.refused("/admin/snapshots", 409, name="one")
        assert error["code"] == "no_snapshot_dir"
        assert (await server.client.get("/admin/snapshots", headers=AS_ADMIN)).status_code == 409


# who decides


async def put(server: Server, path: str, **body: object) -> httpx.Response:
    return await server.client.put(path, json=body, headers=server.headers)


@pytest.mark.asyncio
async def test_the_policy_is_switched(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        assert (await got(server, "/admin/policy", ops.Policies)).eviction_policy == "Lru"
        answer = await put(server, "/admin/policy", eviction_policy="sieve")
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "eviction_policy": "Sieve",
            "set_aside": None,
            "scheduling_policy": "Fcfs",
            "installed": EVICTION_POLICIES.names(),
            "before": "Lru",
        }
        assert server.engine.stats().cache.policy == "Sieve"
        for wrong in ("nothing-like-it", "os:system", "octavo.policies.eviction.lru:Lru", ""):
            assert (await put(server, "/admin/policy", eviction_policy=wrong)).status_code == 400
        assert server.engine.stats().cache.policy == "Sieve"


@pytest.mark.asyncio
async def test_shadows_come_and_go(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        assert await got(server, "/admin/shadows", ops.ShadowList) == ops.ShadowList([])
        await server.post("/admin/shadows", policy="sieve")
        for _ in range(2):
            await server.engine.complete([1] * 8, ONE)
        (shadow,) = (await got(server, "/admin/shadows", ops.ShadowList)).shadows
        (report,) = server.engine.shadows()
        assert (shadow.policy, shadow.uses, shadow.hits) == ("sieve", report.uses, report.hits)
        assert shadow.uses > 0
        await server.refused("/admin/shadows", policy="sieve")
        await server.refused("/admin/shadows", policy="os:system")
        answer = await server.client.delete("/admin/shadows/sieve", headers=AS_ADMIN)
        assert answer.json() == {"shadows": []}
        assert (await server.client.delete("/admin/shadows/sieve", headers=AS_ADMIN)).status_code == 404


# the end


@pytest.mark.asyncio
async def test_draining_waits_and_then_nothing_new_comes_in(admin_of: AdminOf) -> None:
    async with admin_of() as server:
        body = {"model": "fake", "prompt": "0123", "max_tokens": 30}
        async with server.open("/v1/completions", body) as exchange:
            while not server.engine.requests():
                await anyio.lowlevel.checkpoint()
            assert await server.post("/admin/drain") == {"in_time": True}
            await exchange.whole()
            assert exchange.status == 200
        error = await server.refused("/v1/completions", 503, **body)
        assert error["code"] == "shutting_down"
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 503
        assert (await got(server, "/admin/stats", admin.Stats)).running == 0


@pytest.mark.asyncio
async def test_draining_has_an_end(admin_of: AdminOf) -> None:
    async with admin_of() as server, server.open("/v1/completions", STREAM) as exchange:
        await first_bytes(exchange)
        assert await server.post("/admin/drain", timeout=0) == {"in_time": False}
        assert b"[DONE]" not in await exchange.whole()
