"""The gateway: one door for several engines. An ASGI app with the routes of the server, and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opentelemetry.trace import TracerProvider
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from ..server.access import Door
from ..server.app import OPERATIONS, app_with
from ..server.endpoint import Endpoint, Handler
from ..server.endpoints.ui import Page
from ..server.prompt_reader import PromptReader
from ..server.service import Service
from ..server.settings import ServerSettings
from .base import Fleet
from .everybody import Everybody
from .forwarding import Forwarding
from .naming import RESPONSES, PromptNaming
from .somebody import Somebody

TRIES: Final = 3
"""Replicas that one request is sent to at most."""
GENERATING: Final = ("/v1/chat/completions", "/v1/completions", RESPONSES)
OF_ANY: Final = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model:path}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
OPEN_OF_ANY: Final = ("/version", "/openapi.json")
OF_STATE: Final = ("/health", "/ready", "/load")


class Gateway:
    """What is behind one door.

    ::

        gateway = Gateway(fleet, TextReader.open("smollm2"), settings)
        async with serving_app(gateway.app, gateway.service) as address:
            client = openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="none")

    Every answer of one replica comes back as it is, with the replica's name in ``x-octavo-replica``.

    * What generates goes where the blocks of its prompt are, or where the fleet's policy sends it. When a replica is
      lost before its answer begins, or has no room, another one is asked. When it is lost later, a stream of events
      ends with an error of the code ``replica_lost``, and any other answer breaks off.
    * A stored response is found on the replica that has it, and so is what goes on from it.
    * ``/admin/...`` goes to the replica that the header ``x-octavo-replica`` names, or to all of them: the answer is
      ``{"replicas": {name: answer, ...}}`` then. So it is for ``/health`` and ``/ready``, with 200 while at least one
      replica answers so, and for ``/load``.
    * ``/metrics`` are those of all replicas, each with its label ``replica``, and the gateway's own.
    """

    def __init__(
        self,
        fleet: Fleet,
        reader: PromptReader | None,
        settings: ServerSettings | None = None,
        *,
        tracer_provider: TracerProvider | None = None,
        most_tries: int = TRIES,
    ) -> None:
        """``reader``: works out the tokens of prompts, as the replicas do (:class:`~octavo.engine.fleet.naming
        .TextReader`); ``None``: requests go by load alone. ``settings``: as the replicas have them; the keys and the
        admin token above all, which are passed on. ``tracer_provider``: gets a span of each request and one of its
        routing; ``None``: traces go through to the replicas as they are.
        """
        self.service = Service(settings or ServerSettings())
        """The server's side of the door: settings, log, HTTP metrics. It has no engine."""
        self.service.tracer_provider = tracer_provider
        self._forwarding = Forwarding(fleet, most_tries=most_tries, tracer_provider=tracer_provider)
        self._somebody = Somebody(fleet, self._forwarding, PromptNaming(reader), self.service.settings.max_responses)
        self._everybody = Everybody(fleet, self._forwarding)
        self.app: Starlette = app_with(self.service, self._routes())
        """To be served, or to be mounted."""

    def _routes(self) -> Iterator[BaseRoute]:
        one, all_ = self._somebody, self._everybody
        for path in OF_STATE:
            yield self._route("GET", path, all_.state, Door.OPEN)
        for path in OPEN_OF_ANY:
            yield self._route("GET", path, one.any, Door.OPEN)
        yield self._route("GET", "/metrics", all_.metrics, Door.OPEN)
        page = Page()
        yield Route("/ui", page, methods=["GET"])
        yield Route("/ui/{file}", page, methods=["GET"])
        for path in GENERATING:
            yield self._route("POST", path, one.generate)
        yield self._route("POST", "/v1/cache/explain", one.prompted)
        yield self._route("GET", f"{RESPONSES}/{{response_id}}", one.stored)
        yield self._route("DELETE", f"{RESPONSES}/{{response_id}}", one.stored)
        for method, path in OF_ANY:
            yield self._route(method, path, one.any)
        for method, path, _, _ in OPERATIONS:
            yield self._route(method, f"/admin/{path}", all_.operate, Door.ADMIN)

    def _route(self, method: str, path: str, handler: Handler, door: Door = Door.CLIENT) -> Route:
        return Route(path, Endpoint(self.service, handler, door), methods=[method])
