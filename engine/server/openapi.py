"""OpenAPI: the document that describes the routes, made of the routes and of the structs that they take and give.

Format: https://spec.openapis.org/oas/v3.1.0. The schemas are msgspec's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version as version_of
from typing import Final, NamedTuple, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from .access import Door
from .call import Call
from .endpoint import Endpoint
from .wire.errors import ErrorBody

Json: TypeAlias = dict[str, object]
REFERENCE: Final = "#/components/schemas/{name}"
PARAMETER: Final = re.compile(r"{(\w+)(?::\w+)?}")
ALWAYS: Final = (400, 500, 503)
"""Statuses of errors that any route may answer with: each needs the engine or its state."""
OF_BODIES: Final = (408, 413)
ERRORS: Final[Mapping[int, str]] = {
    400: "The request is malformed; `param` names the field at fault.",
    401: "An API key is needed.",
    403: "The admin token is needed.",
    404: "There is no such model, or no such thing.",
    408: "The body came too slowly.",
    409: "It does not go with the state or the model of this engine.",
    413: "The body is too long.",
    429: "There is no room now; come again after `Retry-After` seconds.",
    500: "The server or the model failed on this request.",
    503: "The server is starting, ending or broken; come again after `Retry-After` seconds.",
}


class Described(NamedTuple):
    """A route, for its description."""

    path: str
    """With parameters as OpenAPI writes them."""
    method: str
    parameters: tuple[str, ...]
    endpoint: Endpoint


class OpenApi:
    """The handler of ``/openapi.json``. The document is made once, when it is first asked for."""

    def __init__(self) -> None:
        self._document: bytes | None = None

    async def __call__(self, call: Call) -> ASGIApp:
        """This document."""
        if self._document is None:
            needs_key = len(call.service.settings.keys) > 0
            self._document = msgspec.json.encode(document(call.scope["app"].routes, needs_key=needs_key))
        return Response(self._document, media_type="application/json")


def described(routes: Iterable[BaseRoute]) -> Iterator[Described]:
    """The routes that go through an :class:`Endpoint`, one per path and method."""
    for route in routes:
        if isinstance(route, Route) and isinstance(route.endpoint, Endpoint):
            path = PARAMETER.sub(r"{\1}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield Described(path, method.lower(), tuple(PARAMETER.findall(route.path)), route.endpoint)


def document(routes: Iterable[BaseRoute], *, needs_key: bool) -> Json:
    """The whole document. ``needs_key``: whether client routes ask for a key."""
    all_routes = list(described(routes))
    types = _Types(all_routes)
    paths: dict[str, Json] = {}
    for route in all_routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route, types, needs_key=needs_key)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": version_of("octavo"),
            "description": "Text generation on a paged, prefix-shared KV cache, with the OpenAI API.",
        },
        "paths": paths,
        "components": {"schemas": types.components, "responses": _error_answers(types), "securitySchemes": _schemes()},
    }


class _Types:
    """Schemas of all structs that the routes name."""

    def __init__(self, routes: Iterable[Described]) -> None:
        named: list[object] = [ErrorBody]
        for route in routes:
            forms = route.endpoint.forms
            named += [form for form in (forms.takes, forms.gives, forms.streams, forms.queries) if _is_type(form)]
        schemas, self.components = msgspec.json.schema_components(named, schema_hook=_anything, ref_template=REFERENCE)
        self._pairs = list(zip(named, schemas, strict=True))

    def schema(self, form: object) -> Mapping[str, object]:
        """Where to find the schema of ``form``, one of the structs."""
        return next(schema for each, schema in self._pairs if each is form)


def _operation(route: Described, types: _Types, *, needs_key: bool) -> Json:
    handler, forms = route.endpoint.handler, route.endpoint.forms
    documented = handler if inspect.isfunction(handler) else type(handler).__call__
    summary, _, description = (inspect.getdoc(documented) or "").partition("\n")
    operation: Json = {
        "operationId": getattr(handler, "__name__", type(handler).__name__),
        "summary": summary,
        "tags": [route.endpoint.door.value],
        "security": _security(route.endpoint.door, needs_key=needs_key),
        "responses": {str(forms.status): _answer(forms.gives, forms.streams, types), **_errors(route)},
    }
    if description.strip():
        operation["description"] = description.strip()
    if parameters := [*_path_parameters(route), *_query_parameters(forms.queries, types)]:
        operation["parameters"] = parameters
    if forms.takes is not None:
        operation["requestBody"] = {"required": True, "content": _json_content(types.schema(forms.takes))}
    return operation


def _answer(gives: type[msgspec.Struct] | str, streams: object, types: _Types) -> Json:
    content = {gives: {}} if isinstance(gives, str) else _json_content(types.schema(gives))
    if streams is not None:  # OpenAPI 3.1 has no words for streams; tools read the schema as that of one event
        content["text/event-stream"] = {"schema": _event(streams, types)}
    return {"description": "Done.", "content": content}


def _event(streams: object, types: _Types) -> Json:
    """The schema of one event, by its fields."""
    if not isinstance(streams, type):
        names = {"event": {"type": "string"}, "data": _json_text(types.schema(streams))}
        return {"type": "object", "properties": names, "required": ["event", "data"]}
    data = [{"const": "[DONE]"}, *(_json_text(types.schema(form)) for form in (streams, ErrorBody))]
    return {"type": "object", "properties": {"data": {"anyOf": data}}, "required": ["data"]}


def _json_text(schema: Mapping[str, object]) -> Json:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def _errors(route: Described) -> Json:
    statuses = set(ALWAYS if route.endpoint.door is Door.OPEN else ALWAYS + OF_BODIES)
    if route.endpoint.door is Door.CLIENT:
        statuses |= {401}
    if route.endpoint.door is Door.ADMIN:
        statuses |= {403, 404, 409}
    if route.endpoint.forms.takes is not None:
        statuses |= {404, 429}
    if route.parameters:
        statuses |= {404}
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}


def _error_answers(types: _Types) -> Json:
    content = _json_content(types.schema(ErrorBody))
    return {str(status): {"description": words, "content": content} for status, words in ERRORS.items()}


def _path_parameters(route: Described) -> Iterator[Json]:
    for name in route.parameters:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(queries: type[msgspec.Struct] | None, types: _Types) -> Iterator[Json]:
    if queries is None:
        return
    component = types.components[queries.__name__]
    for name, schema in component["properties"].items():
        yield {"name": name, "in": "query", "required": name in component.get("required", ()), "schema": schema}


def _json_content(schema: Mapping[str, object]) -> Json:
    return {"application/json": {"schema": schema}}


def _security(door: Door, *, needs_key: bool) -> list[Json]:
    if door is Door.OPEN:
        return []
    if door is Door.ADMIN:
        return [{"admin_token": []}]
    return [{"api_key": []}] if needs_key else [{"api_key": []}, {}]


def _schemes() -> Json:
    return {name: {"type": "http", "scheme": "bearer"} for name in ("api_key", "admin_token")}


def _anything(kind: type) -> Json:
    """The schema of values that are only passed on."""
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError


def _is_type(form: object) -> bool:
    return form is not None and not isinstance(form, str)
