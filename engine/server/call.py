"""Call: one HTTP request on its way through the app, with its body read and its caller known."""

from __future__ import annotations

import gc
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from itertools import islice
from typing import NamedTuple, TypeVar

import anyio
import msgspec
from opentelemetry import trace
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from ..async_engine import AsyncEngine
from ..generation import Generation
from ..request import Prompt, SamplingParams
from .access import Caller
from .errors import NOT_FOUND, ApiError, invalid, too_many
from .service import Service

T = TypeVar("T", bound=msgspec.Struct)
MAX_UNKNOWN_SHOWN = 20
PLACE = re.compile(r"`\$\.?([^`]*)`$")
MISSING = re.compile(r"missing required field `([^`]*)`")
TRACE_HEADERS = frozenset({"traceparent", "tracestate"})


class Tokens(NamedTuple):
    """Of one request, for the access log."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Call:
    """What an endpoint is given."""

    def __init__(self, service: Service, scope: Scope, caller: Caller, body: bytes) -> None:
        self.service = service
        self.scope = scope
        self.caller = caller
        self.body = body
        self.headers = Headers(scope=scope)
        self.id = uuid.uuid4().hex
        """Unique, whatever ``X-Request-Id`` the client sent."""
        self._generations = 0
        self._has_place = False
        self.tokens: Tokens | None = None
        """What it came to, once the handler knows."""
        scope["octavo.call"] = self  # for what is around the app

    @property
    def engine(self) -> AsyncEngine:
        """:raises ApiError: 503 while there is none that takes work."""
        return self.service.working_engine

    @property
    def path_params(self) -> dict[str, str]:
        return dict(self.scope.get("path_params", {}))

    def read(self, form: type[T]) -> T:
        """The body as ``form``, a msgspec struct. Fields that it lacks are ignored, with one log line that names them.
        No body at all is one without fields.

        :raises ApiError: 400 when it is no JSON or does not fit.
        """
        self.body = self.body or b"{}"
        read = read_form(self.body, form)
        self._note_unknown(form)
        return read

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        :raises ApiError: 404 when no such model is served.
        """
        names = self.service.model_names
        if name is None or name in names:
            return name or names[0]
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"the model {name!r:.200} is not served here; served is {', '.join(names)}",
            kind=NOT_FOUND,
            param="model",
            code="model_not_found",
        )

    def generate(
        self, prompt: Prompt, params: SamplingParams, *, priority: int | None = None, tenant: str | None = None
    ) -> Generation:
        """A request to the engine as this caller, below the caller's trace. ``priority``: at most the caller's own.
        ``tenant``: for callers without one.

        :raises ApiError: 503 while there is no engine that takes work, 429 when too much of this caller is under way.
        """
        own, engine = self.caller, self.engine
        self.take_place()
        self._generations += 1
        number = self._generations
        return engine.generate(
            prompt,
            params,
            request_id=self.id if number == 1 else f"{self.id}-{number}",
            priority=own.priority if priority is None else min(priority, own.priority),
            tenant=own.tenant if own.tenant is not None else tenant,
            trace_headers=self._trace_headers(),
        )

    def end(self) -> None:
        """The request is over, however it ended: another one of this caller has its place."""
        self.body = b""  # the connection remembers its last request for as long as it is open
        if self._has_place:
            under_way, name = self.service.under_way, self.caller.counted_as
            under_way[name] -= 1
            if not under_way[name]:
                del under_way[name]

    def take_place(self) -> None:
        """One for all that is generated for this request, until it is over.

        :raises ApiError: 429 when too much of this caller is under way.
        """
        if self._has_place:
            return
        most, under_way, name = self.caller.max_concurrent, self.service.under_way, self.caller.counted_as
        if most is not None and under_way[name] >= most:
            message = f"{most} requests with this API key are under way, as many as it may have at once"
            raise too_many(message, "too_many_concurrent", self.service.retry_after())
        under_way[name] += 1
        self._has_place = True

    def _trace_headers(self) -> dict[str, str] | None:
        """The caller's headers, where nothing around the app has made a span of them already."""
        if "traceparent" not in self.headers or trace.get_current_span().get_span_context().is_valid:
            return None
        return {name: value for name, value in self.headers.items() if name in TRACE_HEADERS}

    def _note_unknown(self, form: type[msgspec.Struct]) -> None:
        known = {field.encode_name for field in msgspec.structs.fields(form)}
        sent = msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        unknown = list(islice((name for name in sent if name not in known), MAX_UNKNOWN_SHOWN))
        if unknown:
            names = sorted(name[:40] for name in unknown)
            self.service.logger.info("fields_ignored", path=self.scope["path"], fields=names)


def read_form(body: bytes, form: type[T]) -> T:
    """``body`` as ``form``. Fields that it lacks are skipped.

    :raises ApiError: 400 when it is no JSON or does not fit.
    """
    try:
        body.decode()  # also in what is skipped then
        with _without_collector():
            return msgspec.json.decode(body, type=form)  # skips what the form lacks: it may be much
    except msgspec.ValidationError as error:
        raise invalid(str(error), _field_at_fault(str(error))) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error


@contextmanager
def _without_collector() -> Iterator[None]:
    """For a body of a million small lists: the cyclic collector would go through them again and again while they are
    made, for seconds in which nobody else is served.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def read_body(scope: Scope, receive: Receive, *, limit: int, timeout: float) -> bytes:
    """The whole body, of at most ``limit`` bytes, within ``timeout`` seconds.

    :raises ApiError: 413 when it is longer, 408 when it comes too slowly.
    :raises ClientGone: when the client leaves before its end.
    """
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        with anyio.fail_after(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError as error:
        late = f"the body did not come within {timeout:g} s"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, late, headers={"Connection": "close"}) from error


def _field_at_fault(message: str) -> str | None:
    """The field that msgspec's ``message`` is about: ``a[0].b``, or ``None`` for the body itself."""
    missing = MISSING.search(message)
    place = PLACE.search(message)
    path = [place.group(1).removesuffix("[...]")] if place is not None else []
    path += [missing.group(1)] if missing is not None else []
    return ".".join(filter(None, path)) or None


class ClientGone(Exception):
    """The client has closed the connection; nobody is left to answer."""


def _too_large(limit: int) -> ApiError:
    message = f"the body is longer than {limit} bytes"
    headers = {"Connection": "close"}
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large", headers=headers)
