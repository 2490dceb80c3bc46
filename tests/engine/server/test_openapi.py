"""``/openapi.json``: every route is in it, with what it takes and gives, and its doors are as it says."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import TypeAlias

import jsonschema_rs
import msgspec
import pytest
from starlette.routing import Route

from octavo.engine.server.access import Caller, Door, Keys
from octavo.engine.server.app import app_of
from octavo.engine.server.endpoint import Endpoint
from octavo.engine.server.openapi import Described, described, document
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.server.http_rig import ServerOf

Json: TypeAlias = dict[str, "object"]
ROUTES = app_of(Service(ServerSettings())).routes
DESCRIBED = list(described(ROUTES))
ADMIN = "admin token"
KEYS = Keys({hashlib.sha256(b"key").digest(): Caller()})


def made(*, needs_key: bool = False) -> Json:
    found = json.loads(msgspec.json.encode(document(ROUTES, needs_key=needs_key)))
    assert isinstance(found, dict)
    return found


def operation_of(found: Json, route: Described) -> Json:
    operation = found["paths"][route.path][route.method]  # type: ignore[index]
    assert isinstance(operation, dict)
    return operation


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([str(value["$ref"])] if "$ref" in value else [])
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def resolved(found: Json, reference: str) -> object:
    target: object = found
    for part in reference.removeprefix("#/").split("/"):
        assert isinstance(target, dict)
        target = target[part]
    return target


def test_it_has_the_apps_routes_and_no_others() -> None:
    served = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in ROUTES
        if isinstance(route, Route) and isinstance(route.endpoint, Endpoint)
        for method in route.methods or ()
    }
    paths = made()["paths"]
    assert isinstance(paths, dict)
    listed = {(path, method) for path, methods in paths.items() for method in methods}
    assert listed == {pair for pair in served if pair[1] != "head"}
    assert ("/v1/responses/{response_id}", "delete") in listed


def test_every_route_is_described() -> None:
    found = made()
    names = [str(operation_of(found, route)["operationId"]) for route in DESCRIBED]
    assert len(set(names)) == len(names)
    for route in DESCRIBED:
        operation = operation_of(found, route)
        assert str(operation["summary"]).endswith((".", ":")) or operation["summary"], route
        assert ("requestBody" in operation) == (route.endpoint.forms.takes is not None)
        if route.method in ("post", "put") and not route.parameters:
            assert "requestBody" in operation, route
        assert route.endpoint.forms.gives != "application/json" or route.path == "/openapi.json", route


def test_all_references_lead_somewhere_and_the_schemas_are_schemas() -> None:
    found = made()
    for reference in set(references(found)):
        assert resolved(found, reference)
    schemas = resolved(found, "#/components/schemas")
    assert isinstance(schemas, dict)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)


def test_simple_truths_are_in_the_schemas() -> None:
    found = made()
    form = resolved(found, "#/components/schemas/ResponseForm")
    assert isinstance(form, dict)
    temperature = {"type": "number", "minimum": 0, "maximum": 100}
    assert form["properties"]["temperature"] == {"anyOf": [temperature, {"type": "null"}], "default": None}
    assert form["required"] == ["input"]


def test_streams_are_described_event_by_event() -> None:
    found = made()
    for path, names in (("/v1/responses", ["event", "data"]), ("/v1/chat/completions", ["data"])):
        content = found["paths"][path]["post"]["responses"]["200"]["content"]  # type: ignore[index]
        assert set(content) == {"application/json", "text/event-stream"}
        assert content["text/event-stream"]["schema"]["required"] == names


@pytest.mark.parametrize("needs_key", [True, False])
def test_keys_are_asked_for_where_they_are_needed(*, needs_key: bool) -> None:
    found = made(needs_key=needs_key)
    wanted: dict[Door, list[Json]] = {
        Door.OPEN: [],
        Door.CLIENT: [{"api_key": []}] if needs_key else [{"api_key": []}, {}],
        Door.ADMIN: [{"admin_token": []}],
    }
    for route in DESCRIBED:
        assert operation_of(found, route)["security"] == wanted[route.endpoint.door]


@pytest.mark.asyncio
async def test_doors_are_as_described(server_of: ServerOf) -> None:
    """Without credentials, and with the wrong ones, every route answers as it says."""
    async with server_of(settings=ServerSettings(keys=KEYS, admin_token=ADMIN)) as server:
        answer = await server.client.get("/openapi.json")
        assert answer.json() == made(needs_key=True)
        for route in DESCRIBED:
            for headers in ({}, {"Authorization": "Bearer other"}):
                path = re.sub(r"{\w+}", "0", route.path)
                refused = await server.client.request(route.method, path, headers=headers)
                if route.endpoint.door is Door.OPEN:
                    assert refused.status_code == 200
                else:
                    assert refused.status_code == (401 if route.endpoint.door is Door.CLIENT else 403)
                    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
                assert str(refused.status_code) in operation_of(answer.json(), route)["responses"]  # type: ignore[operator]


@pytest.mark.asyncio
async def test_an_engine_that_is_not_there_yet_changes_nothing(server_of: ServerOf) -> None:
    async with server_of() as server:
        assert (await server.client.get("/openapi.json")).json() == made()
        assert (await server.client.get("/openapi.json")).json()["openapi"] == "3.1.0"
