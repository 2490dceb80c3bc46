"""The files of the page at ``/ui``: what is served, with which headers, and that they need nothing else."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from octavo.engine.choosing import EVICTION_POLICIES
from octavo.engine.server.app import app_of
from octavo.engine.server.endpoints.ui import ASSETS, INDEX, MEDIA_TYPES
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.server.http_rig import ServerOf

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "engine" / "server" / "ui"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
SCRIPTS = sorted(name for name in TEXTS if name.endswith(".js"))
PATHS = {"/ui": INDEX} | {f"/ui/{name}": name for name in ASSETS}
ADMIN = "operators-only"


def client_of(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://octavo")


@pytest.fixture
def client() -> httpx.AsyncClient:
    """Of a server whose engine is not there yet: the page comes first."""
    return client_of(app_of(Service(ServerSettings())))


# serving


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_files_come_as_they_are_with_their_type(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.text == TEXTS[PATHS[path]]
    assert answer.headers["content-type"] == MEDIA_TYPES[PATHS[path].rpartition(".")[2]]


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_nothing_else_may_be_loaded_or_run(client: httpx.AsyncClient, path: str) -> None:
    headers = (await client.get(path)).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    own = {"script-src", "style-src", "img-src", "connect-src"}
    assert {name for name, sources in policy.items() if sources == "'self'"} == own
    assert {sources for name, sources in policy.items() if name not in own} == {"'none'"}
    assert {"default-src", "base-uri", "frame-ancestors", "form-action", "trusted-types"} <= set(policy)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.asyncio
async def test_a_file_that_is_the_same_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/ui/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/ui/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    other = await client.get("/ui/chat.js", headers={"If-None-Match": first.headers["etag"]})
    assert (other.status_code, other.text) == (200, TEXTS["chat.js"])


@pytest.mark.asyncio
@pytest.mark.parametrize("file", ["nothing.js", "index.html", "%2e%2e", "..%2f..%2fapp.py", "__init__.py", "%00"])
async def test_there_are_no_other_files(client: httpx.AsyncClient, file: str) -> None:
    answer = await client.get(f"/ui/{file}")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert (await client.post("/ui")).status_code == 405


@pytest.mark.asyncio
async def test_it_works_below_a_prefix() -> None:
    """All that the page asks for is relative to where it is."""
    app = Starlette(routes=[Mount("/models/a", app_of(Service(ServerSettings())))])
    async with client_of(app) as client:
        page = await client.get("/models/a/ui")
        assert page.text == TEXTS[INDEX]
        for link in re.findall(r'(?:src|href)="([^#"]+)"', page.text):
            assert (await client.get(str(page.url.join(link)))).status_code == 200


@pytest.mark.asyncio
async def test_it_is_no_part_of_the_api(server_of: ServerOf) -> None:
    async with server_of() as server:
        paths = (await server.client.get("/openapi.json")).json()["paths"]
    assert "/v1/models" in paths
    assert not [path for path in paths if path.startswith("/ui")]


# the files


def test_every_file_is_served_and_gets_into_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["octavo.engine.server"]
    assert sorted(TEXTS) == sorted([INDEX, *ASSETS])
    assert all(any(fnmatch(f"ui/{name}", pattern) for pattern in patterns) for name in TEXTS)


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in TEXTS.items():
        code = "\n".join(line for line in text.splitlines() if not re.match(r" *(//|\*|/\*)", line))
        links = set(re.findall(r"\w+://[^\s\"'`)]+", code))
        assert links <= {"http://www.w3.org/2000/svg"}, name  # the name of a namespace


def test_the_page_has_no_code_and_no_style_of_its_own() -> None:
    page = TEXTS[INDEX]
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="ui/app.js">']
    assert not re.search(r"<style| style=| on\w+=|javascript:", page)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_text_only(name: str) -> None:
    text = TEXTS[name]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\b|new Function", text)
    assert not re.search(r"setAttribute\(\s*\"style\"", text)  # the policy would not let it through
    assert len(text.splitlines()) <= 300


def test_scripts_find_what_they_ask_for() -> None:
    ids = re.findall(r'\bid="([^"]+)"', TEXTS[INDEX])
    assert len(ids) == len(set(ids))
    for name in SCRIPTS:
        assert set(re.findall(r'byId\("([^"]+)"\)', TEXTS[name])) <= set(ids), name
        for found in re.findall(r'from "\./([^"]+)"', TEXTS[name]):
            assert found in ASSETS, name
    for target in re.findall(r'(?:for|aria-labelledby)="([^"]+)"|href="#([^"]+)"', TEXTS[INDEX]):
        assert set(filter(None, target)) <= set(ids)


def test_every_script_is_used() -> None:
    reached, waiting = set(), ["app.js"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += re.findall(r'from "\./([^"]+)"', TEXTS[name])
    assert sorted(reached) == SCRIPTS


# what it needs of the server


@pytest.mark.asyncio
async def test_it_can_tell_which_policies_there_are(server_of: ServerOf) -> None:
    async with server_of(settings=ServerSettings(admin_token=ADMIN)) as server:
        server.headers = {"Authorization": f"Bearer {ADMIN}"}
        told = (await server.client.get("/admin/policy", headers=server.headers)).json()
        assert told["installed"] == [report.name for report in EVICTION_POLICIES.report()]
        assert {"lru", "adaptive", "s3_fifo"} <= set(told["installed"])


@pytest.mark.asyncio
@pytest.mark.parametrize("has_folder", [True, False])
async def test_it_can_tell_whether_there_can_be_snapshots(
    server_of: ServerOf, tmp_path: Path, *, has_folder: bool
) -> None:
    settings = ServerSettings(admin_token=ADMIN, snapshot_dir=tmp_path if has_folder else None)
    async with server_of(settings=settings) as server:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        assert (await server.client.get("/admin/cache", headers=headers)).json()["takes_snapshots"] is has_folder
        listing = await server.client.get("/admin/snapshots", headers=headers)
        assert (listing.status_code == 200) is has_folder
