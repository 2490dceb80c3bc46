"""Forwarding: one request to one replica, and to another one when that cannot take it."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ...errors import ReplicaLost
from ...policies.routing.base import ReplicaId, RoutedRequest
from ...telemetry import names
from ...telemetry.logging import get_logger
from ...telemetry.metrics.fleet import FleetMeasures, Sent
from ...telemetry.tracing import parent_of
from ..server.call import Call
from ..server.errors import ApiError, unavailable
from .base import AnswerHead, Fleet, HttpRequest, Wanted, WholeAnswer

BUSY: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Statuses of replicas that have no room now, are starting or are about to end: another one may do."""
ABORTED: Final = re.compile(rb'"code": ?"aborted"')
"""Somebody has ended this request on purpose; it must not begin anew elsewhere."""
TRACE_HEADERS: Final = frozenset({b"traceparent", b"tracestate"})
UNNAMED: Final = ""
"""Stands for a replica that was lost before anybody knew which one it was. There may have been none: that is tried
twice at most."""
ONLY: Final = "only"
"""Reason of those that had no choice."""

Answer = AsyncGenerator[AnswerHead | bytes, None]


class Begun(NamedTuple):
    """An answer that has begun."""

    head: AnswerHead
    pieces: Answer
    """Its body; to be closed."""


class Forwarding:
    """Sends requests to the replicas of one fleet. All calls from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        most_tries: int,
        tracer_provider: TracerProvider | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``most_tries``: replicas that one request may be sent to. ``clock``: seconds, monotonic."""
        self.measures = FleetMeasures()
        self.clock = clock
        self._fleet = fleet
        self._logger = get_logger("octavo.fleet")
        self._most_tries = most_tries
        self._tracer = None if tracer_provider is None else tracer_provider.get_tracer(names.TRACER)

    @contextmanager
    def routing(self, call: Call) -> Iterator[Span]:
        """A span around the choice of a replica, below that of ``call``, until its answer begins."""
        if self._tracer is None:
            yield trace.INVALID_SPAN
            return
        span = self._tracer.start_span(names.ROUTE, parent_of(call.headers), SpanKind.CLIENT)
        try:
            yield span
        except Exception as error:
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        except BaseException:  # the client has left
            span.set_attribute(names.OUTCOME, "cancelled")
            raise
        finally:
            span.end()

    async def begin(self, request: HttpRequest, wanted: Wanted, span: Span) -> Begun:
        """The answer of the first replica that takes the request, up to its head.

        :raises ApiError: 503 when there is none.
        """
        request = below(span, request)
        for number in range(1, self._most_tries + 1):
            is_last = number == self._most_tries or wanted.only is not None
            found = await self._try(request, wanted, is_last=is_last)
            if isinstance(found, Begun):
                self._note(found.head, wanted.request, span, number)
                return found
            span.add_event("retry", {names.FLEET_REPLICA: found})
            wanted = wanted._replace(request=_avoiding(wanted.request, found))
        raise no_replica()

    async def _try(self, request: HttpRequest, wanted: Wanted, *, is_last: bool) -> Begun | ReplicaId:
        """The answer, or the replica that has none."""
        pieces = self._fleet.send(request, wanted)
        try:
            head = await head_of(pieces)
            if head.status not in BUSY:
                return Begun(head, pieces)
            refusal = await whole_of(head, pieces)
        except ReplicaLost as error:
            lost = error.replica or UNNAMED
            if lost is not UNNAMED:
                self.lost(error)
            if is_last or error.has_waited or lost in wanted.request.avoid:
                raise no_replica(error) from error
            self.measures.retried("lost")
            return lost
        if is_last or head.replica in wanted.request.avoid or ABORTED.search(refusal.body) is not None:
            return Begun(head, _again(refusal.body))
        self.measures.retried("busy")
        return head.replica

    def lost(self, error: ReplicaLost) -> None:
        """A replica did not finish its answer."""
        self.measures.lost(error.replica)
        self._logger.warning("replica_lost", replica=error.replica)  # what the error says may quote a prompt

    def _note(self, head: AnswerHead, request: RoutedRequest, span: Span, tries: int) -> None:
        routed = head.routed
        reason = ONLY if routed is None or routed.reason is None else str(routed.reason)
        matched = 0 if routed is None else min(routed.matched * request.block_tokens, request.prompt_tokens)
        self.measures.sent(Sent(head.replica, reason, matched, request.prompt_tokens))
        span.set_attributes(
            {
                names.FLEET_REPLICA: head.replica,
                names.FLEET_REASON: reason,
                names.FLEET_MATCHED: matched,
                names.FLEET_TRIES: tries,
            }
        )
        if routed is not None:
            span.set_attribute(names.FLEET_LOAD, routed.load)


async def head_of(pieces: Answer) -> AnswerHead:
    """What comes first; what is left is closed if that fails.

    :raises ReplicaLost: when nothing comes, or no head.
    """
    try:
        first = await anext(pieces, None)
    except BaseException:
        await pieces.aclose()
        raise
    if isinstance(first, AnswerHead):
        return first
    await pieces.aclose()
    raise ReplicaLost("a replica has ended without an answer")


async def whole_of(head: AnswerHead, pieces: Answer) -> WholeAnswer:
    """An answer that has begun, to its end.

    :raises ReplicaLost: when it breaks off.
    """
    async with aclosing(pieces):
        return WholeAnswer(head, b"".join([piece async for piece in pieces if isinstance(piece, bytes)]))


def no_replica(error: ReplicaLost | None = None) -> ApiError:
    """What a client is told when nobody has taken its request."""
    if error is None or error.replica is None:
        return unavailable("no replica is there to take this request; try again", "no_replica", 2.0)
    return unavailable("the replica was lost before it answered; try again", "replica_lost", 1.0)


def silent(replica: ReplicaId, what: str) -> WholeAnswer:
    """Stands for the answer of one of several that were asked, which did not give any. ``what`` became of it."""
    error = unavailable(f"the replica {what}", "replica_lost", 1.0)
    headers = [(b"content-type", b"application/json")]
    return WholeAnswer(AnswerHead(error.status, headers, replica), msgspec.json.encode(error.body))


def below(span: Span, request: HttpRequest) -> HttpRequest:
    """``request`` with a traceparent that makes what the replica does a part of ``span``."""
    if not span.get_span_context().is_valid:
        return request
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span, Context()))
    kept = [(name, value) for name, value in request.headers if name.lower() not in TRACE_HEADERS]
    return request._replace(headers=(*kept, *((name.encode(), value.encode()) for name, value in carrier.items())))


def _avoiding(request: RoutedRequest, replica: ReplicaId) -> RoutedRequest:
    return request._replace(avoid=request.avoid | {replica})


async def _again(body: bytes) -> Answer:
    yield body
