"""Tracing: from notes to OpenTelemetry spans, on the API alone.

Spans are made after the fact, with the times that were noted, in small slices of the event loop's time while the model
computes. Nothing is ever made the current span, so nothing has to be detached where a generator is left. Only the
request's own span is begun when the request comes: that decides whether it is sampled.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from . import names
from .record import (
    MOST_LINKS,
    NO_TRACE,
    Act,
    Attributes,
    Link,
    NotedRequest,
    Origin,
    RequestTrace,
    Stage,
    Step,
    Track,
    Value,
)

SLICE_SECONDS = 0.0002
"""How long spans are made before the event loop gets its turn."""
MOST_WAITING = 8192
"""Requests, steps and acts whose spans are still to be made; those beyond are dropped and counted."""

Headers = Mapping[str, str]


def parent_of(headers: Headers | None) -> Context:
    """The caller's place in a trace: ``traceparent`` and ``tracestate`` of ``headers``, or else the current context.

    A span that is current and belongs to the same trace wins: it is that of the server which took the headers.
    """
    current = otel_context.get_current()
    if headers is None:
        return current
    try:
        lowered = {name.lower(): value for name, value in headers.items()}
        found = TraceContextTextMapPropagator().extract(lowered, context=current)
    except Exception:  # noqa: BLE001  # headers of a kind that nobody expects cost their trace, not the request
        return current
    return current if _trace_id(current) == _trace_id(found) else found


class Tracing:
    """The spans of one engine. All calls from its event loop."""

    def __init__(
        self,
        provider: TracerProvider | None,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        version: str = "",
        shows_text: bool = False,
    ) -> None:
        """``provider``: ``None`` is the global one, whenever it is set. ``clock``: seconds, monotonic, in which all
        notes are; ``wall``: seconds since the epoch. ``shows_text``: put prompts and answers into spans.
        """
        self.dropped: Counter[str] = Counter()
        """Spans that were not made: ``queue`` (too many waited), ``bound`` (too many of one request), ``error``; and
        links of steps to requests (``link``).
        """
        self.live = 0
        """Requests under way that are traced."""
        self.background = _Background(self)
        """Where acts go that no request caused."""
        self.block_bytes = 0
        self.step_number = 0
        """Of the newest step that was committed."""
        self.clock = clock
        self._provider = None if isinstance(provider, ProxyTracerProvider) else provider
        self._version = version
        self._shows_text = shows_text
        self._wall = wall
        self._spans: dict[NotedRequest, _Begun] = {}
        self._made: tuple[TracerProvider, Tracer] | None = None
        self._waiting: deque[NotedRequest | Step | _Alone] = deque()
        self._is_scheduled = False
        self._under_way: Iterator[None] | None = None
        """Makes the spans of what waits first, one at a time: a request may have a thousand."""

    @property
    def is_on(self) -> bool:
        """Whether there is anybody who makes spans."""
        return not isinstance(self._found_provider(), ProxyTracerProvider | NoOpTracerProvider)

    def _found_provider(self) -> TracerProvider:
        if self._provider is not None:
            return self._provider
        try:
            return trace.get_tracer_provider()
        except Exception:  # noqa: BLE001  # the environment names one that cannot be loaded: OpenTelemetry has logged it
            self.dropped["error"] += 1
            self._provider = NoOpTracerProvider()
            return self._provider

    def begin(self, parent: Context, operation: str, model: str, forked_from: Origin | None = None) -> RequestTrace:
        """A request came. Its span is named and sampled now."""
        if not self.is_on:
            return NO_TRACE
        offset = self._offset()
        attributes = {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: model,
            names.RESPONSE_MODEL: model,
        }
        try:
            span = self._tracer().start_span(
                f"{operation} {model}",
                parent,
                SpanKind.INTERNAL,
                attributes,
                links=_links([] if forked_from is None else [Link(forked_from, "forked_from")]),
                start_time=_ns(self.clock(), offset),
            )
            origin = span.get_span_context()
            if not span.is_recording():
                return RequestTrace(origin if origin.is_valid else None)
        except Exception:  # noqa: BLE001  # a faulty exporter or sampler costs spans, never a request
            self.dropped["error"] += 1
            return NO_TRACE
        noted = NotedRequest(origin, self, shows_text=self._shows_text)
        self._spans[noted] = _Begun(span, offset)
        self.live += 1
        return noted

    def step(self, start: float, end: float, attributes: Attributes, requests: Sequence[RequestTrace]) -> Step:
        """The newest step, in which these requests took part; all of them are traced."""
        origins = [request.origin for request in requests[:MOST_LINKS] if request.origin is not None]
        dropped = len(requests) - len(origins)
        self.dropped["link"] += dropped
        step = Step(self.step_number, start, end, {**attributes, names.LINKS_DROPPED: dropped}, origins)
        self._later(step)
        return step

    def flush(self) -> None:
        """Make all spans now; those of requests under way are lost unless they end before."""
        while self._waiting:
            self._go_on()

    # inside

    def _tracer(self) -> Tracer:
        """That of the provider, made once: it costs as much as a span."""
        provider = self._found_provider()
        if self._made is None or self._made[0] is not provider:
            self._made = provider, provider.get_tracer(names.TRACER, self._version)
        return self._made[1]

    def _offset(self) -> float:
        """From the engine's clock to seconds since the epoch. One request has one, whatever the wall clock does."""
        return self._wall() - self.clock()

    def finished(self, request: NotedRequest) -> None:
        """``request`` is over: make its spans soon."""
        self.live -= 1
        self.dropped["bound"] += request.dropped
        self._later(request)

    @contextmanager
    def acting(self, name: str, parent: Context | None = None) -> Iterator[dict[str, Value]]:
        """A span of an act that no request caused, below the span of ``parent`` if there is one. What is put into the
        yielded attributes by its end is shown; what is raised is shown and raised.
        """
        attributes: dict[str, Value] = {}
        start = self.clock()
        try:
            yield attributes
        except Exception as error:
            attributes[names.ERROR_TYPE] = type(error).__name__
            raise
        except BaseException:  # nobody waits for it any more
            attributes[names.OUTCOME] = "cancelled"
            raise
        finally:
            if self.is_on:
                self._later(_Alone(Act(name, start, self.clock(), attributes), parent or Context()))

    def note(self, act: Act) -> None:
        """An act that no request caused, or whose request is over."""
        self._later(_Alone(act, Context()))

    def _later(self, item: NotedRequest | Step | _Alone) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._drop(item)
            return
        self._waiting.append(item)
        if not self._is_scheduled:
            self._schedule()

    def _drop(self, item: NotedRequest | Step | _Alone) -> None:
        """Too much waits. A request keeps its own span, which was begun."""
        if not isinstance(item, NotedRequest):
            self.dropped["queue"] += 1
            return
        self.dropped["queue"] += item.spans - 1
        item.dropped += item.spans - 1
        item.stages.clear()
        item.acts.clear()
        for _ in self._write(item):
            """No span below it is left to be made."""

    def _schedule(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop, nobody to keep waiting
            self.flush()
            return
        self._is_scheduled = True
        loop.call_soon(self._slice)

    def _slice(self) -> None:
        self._is_scheduled = False
        until = perf_counter() + SLICE_SECONDS
        while self._waiting and perf_counter() < until:
            self._go_on()
        if self._waiting:
            self._schedule()

    def _go_on(self) -> None:
        """Make one span more of what waits first."""
        if self._under_way is None:
            self._under_way = self._write(self._waiting[0])
        for _ in self._under_way:
            return
        self._waiting.popleft()
        self._under_way = None

    def _write(self, item: NotedRequest | Step | _Alone) -> Iterator[None]:
        try:
            if isinstance(item, _Alone):
                self._write_act(item.act, item.parent, self._offset())
            elif isinstance(item, Step):
                self._write_step(item, self._offset())
            else:
                yield from self._write_request(item, *self._spans.pop(item))
        except Exception:  # noqa: BLE001  # a faulty exporter or processor costs spans, never a request
            self.dropped["error"] += 1

    def _write_request(self, request: NotedRequest, span: Span, offset: float) -> Iterator[None]:
        try:
            _complete(span, request, offset)
            below = trace.set_span_in_context(span, Context())
            for sample, stage in request.stages:
                yield
                yield from self._write_stage(sample, stage, below, offset)
            yield from self._write_acts(request.acts, below, offset)
        finally:
            span.end(_ns(request.end, offset))

    def _write_stage(self, sample: int, stage: Stage, above: Context, offset: float) -> Iterator[None]:
        is_chunk = stage.name == names.PREFILL and len(stage.chunks) == 1
        alone = stage.chunks[0].step if is_chunk else None
        attributes = {**_with_step(stage.attributes, alone)}
        if sample >= 0:
            attributes[names.SAMPLE] = sample
        if stage.name in (names.PREFILL, names.DECODE):
            attributes[names.FIRST_STEP] = stage.first_step
            attributes[names.LAST_STEP] = max(stage.first_step, stage.last_step)
        if stage.name == names.PREFILL:
            attributes[names.TOKENS] = stage.tokens
        try:
            span = self._tracer().start_span(
                stage.name,
                above,
                attributes=attributes,
                links=_links(_step_links(alone)),
                start_time=_ns(stage.start, offset),
            )
            acts = stage.acts if alone else (*stage.chunks, *stage.acts)
            yield from self._write_acts(acts, trace.set_span_in_context(span, Context()), offset)
            span.end(_ns(stage.end, offset))
        except Exception:  # noqa: BLE001  # a faulty sampler or processor costs this span and no other
            self.dropped["error"] += 1

    def _write_acts(self, acts: Sequence[Act], above: Context, offset: float) -> Iterator[None]:
        for act in acts:
            yield
            try:
                self._write_act(act, above, offset)
            except Exception:  # noqa: BLE001  # as above
                self.dropped["error"] += 1

    def _write_act(self, act: Act, above: Context, offset: float) -> None:
        attributes = dict(_with_step(act.attributes, act.step))
        blocks = attributes.get(names.BLOCKS)
        if isinstance(blocks, int) and self.block_bytes:
            attributes.setdefault(names.BYTES, blocks * self.block_bytes)
        links = [*act.links, *_step_links(act.step)]
        span = self._tracer().start_span(
            act.name,
            above,
            attributes=attributes,
            links=_links(links),
            start_time=_ns(act.start, offset),
        )
        if (error := attributes.get(names.ERROR_TYPE)) is not None:
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(_ns(act.end, offset))

    def _write_step(self, step: Step, offset: float) -> None:
        span = self._tracer().start_span(
            names.STEP,
            Context(),  # a root: it belongs to no request more than to another
            attributes={names.STEP_NUMBER: step.number, **step.attributes},
            links=[trace.Link(origin) for origin in step.origins],  # what they are is plain, and attributes cost
            start_time=_ns(step.start, offset),
        )
        if span.is_recording():
            step.origin = span.get_span_context()
        span.end(_ns(step.end, offset))


class _Begun(NamedTuple):
    """The span of a request under way, and from the engine's clock to the time of day, for all its spans."""

    span: Span
    offset: float


class _Alone(NamedTuple):
    """An act without a request."""

    act: Act
    parent: Context


class _Background(Track):
    """Notes acts that belong to no request, each a trace of its own."""

    __slots__ = ("_tracing",)

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    @property
    def is_on(self) -> bool:
        return self._tracing.is_on

    def act(self, name: str, start: float, end: float, attributes: Attributes, links: Sequence[Link] = ()) -> None:
        if self._tracing.is_on:
            self._tracing.note(Act(name, start, end, attributes, links))


def _trace_id(context: Context) -> int:
    return trace.get_current_span(context).get_span_context().trace_id


def _ns(seconds: float, offset: float) -> int:
    """Nanoseconds since the epoch."""
    return int((seconds + offset) * 1e9)


def _complete(span: Span, request: NotedRequest, offset: float) -> None:
    """All that the request's own span says, but its end."""
    span.set_attributes(request.attributes)
    if request.dropped:
        span.set_attribute(names.SPANS_DROPPED, request.dropped)
    if request.events_dropped:
        span.set_attribute(names.EVENTS_DROPPED, request.events_dropped)
    if request.error_type is not None:
        span.set_attribute(names.ERROR_TYPE, request.error_type)
        span.set_status(Status(StatusCode.ERROR, request.error_text or None))
    for event in request.events:
        span.add_event(event.name, _with_step(event.attributes, event.step), _ns(event.when, offset))


def _links(links: Sequence[Link]) -> list[trace.Link]:
    return [trace.Link(link.to, {names.RELATION: link.relation}) for link in links]


def _step_links(step: Step | None) -> list[Link]:
    return [Link(step.origin, "step")] if step is not None and step.origin is not None else []


def _with_step(attributes: Attributes, step: Step | None) -> Attributes:
    """With the ids of the step's span too: not every backend shows links."""
    if step is None:
        return attributes
    known: dict[str, Value] = {**attributes, names.STEP_NUMBER: step.number}
    if step.origin is not None:
        known[names.STEP_TRACE_ID] = trace.format_trace_id(step.origin.trace_id)
        known[names.STEP_SPAN_ID] = trace.format_span_id(step.origin.span_id)
    return known


__all__ = [
    "Context",
    "Headers",
    "TracerProvider",
    "Tracing",
    "parent_of",
]
