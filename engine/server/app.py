"""The app: every route on one page."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..async_engine import AsyncEngine
from .access import Door
from .endpoint import Endpoint, Forms, Handler, error_response
from .endpoints import admin, chat, completions, health, metrics, models, responses, storing, tokens
from .endpoints.ui import Page
from .errors import INVALID, NOT_FOUND, ApiError
from .measuring import Measuring
from .openapi import OpenApi
from .service import Service
from .settings import ServerSettings
from .tracing import traced
from .wire import operations as ops
from .wire.admin import CacheQuery, CacheView, Stats
from .wire.chat import ChatChunk, ChatCompletion, ChatForm
from .wire.completions import Completion, CompletionForm
from .wire.health import Health, Readiness, ServerLoad, Version
from .wire.models import Model, ModelList
from .wire.response_events import StreamEvent
from .wire.response_form import ResponseForm
from .wire.responses import DeletedResponse
from .wire.responses import Response as ModelResponse
from .wire.tokens import Detokenized, DetokenizeForm, Tokenized, TokenizeForm


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> Starlette:
    """An ASGI app that serves ``engine``, to be run or to be mounted in another one.

    The engine is the caller's: it must be open, in the event loop of the app, before requests come, and is closed by
    who opened it.
    """
    return app_of(Service(settings or ServerSettings(), engine))


def app_of(service: Service) -> Starlette:
    """The app around ``service``, whose engine may come later."""
    return app_with(service, _routes(service))


def app_with(service: Service, routes: Iterable[BaseRoute]) -> Starlette:
    """An app of ``routes``, which are counted, timed and traced as ``service`` has it."""
    around = [Middleware(Measuring, service.http, time.monotonic)]
    if service.tracer_provider is not None:
        around.append(Middleware(traced, service.tracer_provider))
    app = Starlette(routes=list(routes), exception_handlers={HTTPException: _as_openai_error}, middleware=around)
    app.router.redirect_slashes = False  # behind a proxy that speaks TLS it would name an address without
    return app


def _routes(service: Service) -> Iterator[BaseRoute]:
    def route(method: str, path: str, handler: Handler, door: Door = Door.CLIENT, forms: Forms | None = None) -> Route:
        return Route(path, Endpoint(service, handler, door, forms), methods=[method])

    # what balancers, Prometheus and people ask
    yield route("GET", "/health", health.health, Door.OPEN, Forms(gives=Health))
    yield route("GET", "/ready", health.ready, Door.OPEN, Forms(gives=Readiness))
    yield route("GET", "/version", health.version, Door.OPEN, Forms(gives=Version))
    yield route("GET", "/openapi.json", OpenApi(), Door.OPEN)
    yield route("GET", "/metrics", metrics.metrics, Door.OPEN, Forms(gives="text/plain"))
    yield route("GET", "/load", health.load, Door.OPEN, Forms(gives=ServerLoad))

    # what people look at; no part of the API
    page = Page()
    yield Route("/ui", page, methods=["GET"])
    yield Route("/ui/{file}", page, methods=["GET"])

    # what clients use
    yield route("POST", "/v1/chat/completions", chat.chat_completions, forms=Forms(ChatForm, ChatCompletion, ChatChunk))
    yield route("POST", "/v1/completions", completions.completions, forms=Forms(CompletionForm, Completion, Completion))
    yield route(
        "POST", "/v1/responses", responses.create_response, forms=Forms(ResponseForm, ModelResponse, StreamEvent)
    )
    yield route("GET", "/v1/responses/{response_id}", responses.get_response, forms=Forms(gives=ModelResponse))
    yield route("DELETE", "/v1/responses/{response_id}", responses.delete_response, forms=Forms(gives=DeletedResponse))
    yield route("GET", "/v1/models", models.models, forms=Forms(gives=ModelList))
    yield route("GET", "/v1/models/{model:path}", models.model, forms=Forms(gives=Model))
    yield route("POST", "/tokenize", tokens.tokenize, forms=Forms(TokenizeForm, Tokenized))
    yield route("POST", "/detokenize", tokens.detokenize, forms=Forms(DetokenizeForm, Detokenized))
    yield route("POST", "/v1/cache/explain", admin.own_explain, forms=Forms(ops.OwnExplainForm, ops.OwnExplained))

    # what operators do
    for method, path, handler, forms in OPERATIONS:
        yield route(method, f"/admin/{path}", handler, Door.ADMIN, forms)


OPERATIONS: Final[tuple[tuple[str, str, Handler, Forms], ...]] = (
    ("GET", "stats", admin.stats, Forms(gives=Stats)),
    ("GET", "cache", admin.cache, Forms(gives=CacheView, queries=CacheQuery)),
    ("POST", "explain", admin.explain, Forms(ops.ExplainForm, ops.Explained)),
    ("GET", "pins", admin.pins, Forms(gives=ops.PinList)),
    ("POST", "pins", admin.pin, Forms(ops.PinForm, ops.PinState)),
    ("DELETE", "pins/{id}", admin.unpin, Forms(gives=ops.Unpinned)),
    ("POST", "evict", admin.evict, Forms(ops.EvictForm, ops.EvictedBlocks)),
    ("POST", "erase", storing.erase, Forms(ops.EraseForm, ops.Erased)),
    ("GET", "snapshots", storing.listing, Forms(gives=ops.SnapshotList)),
    ("POST", "snapshots", storing.take, Forms(ops.SnapshotForm, ops.SnapshotWritten)),
    ("POST", "drain", admin.drain, Forms(ops.DrainForm, ops.Drained)),
    ("GET", "policy", admin.policies, Forms(gives=ops.Policies)),
    ("PUT", "policy", admin.set_policy, Forms(ops.PolicyForm, ops.Policies)),
    ("GET", "shadows", admin.shadows, Forms(gives=ops.ShadowList)),
    ("POST", "shadows", admin.add_shadow, Forms(ops.ShadowForm, ops.ShadowList)),
    ("DELETE", "shadows/{policy}", admin.remove_shadow, Forms(gives=ops.ShadowList)),
    ("GET", "requests", admin.requests, Forms(gives=ops.RequestList)),
    ("POST", "requests/{id}/abort", admin.abort, Forms(gives=ops.Aborted)),
)
"""Below ``/admin/``, behind the admin token."""


async def _as_openai_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method: in the same form as all other errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = (error.headers if isinstance(error, HTTPException) else None) or {}
    kind = NOT_FOUND if status == 404 else INVALID
    paths = (route.path for route in request.app.routes if isinstance(route, Route))
    served = sorted({path for path in paths if path.startswith("/v1/")})
    message = f"{request.method} {request.url.path[:200]} is not served here; served is text: {', '.join(served)}"
    return error_response(ApiError(status, message, kind=kind, headers=headers))
