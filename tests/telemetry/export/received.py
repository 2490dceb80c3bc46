"""What an OTLP receiver took, decoded from the bytes that came over the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Attribute: TypeAlias = "str | bool | int | float | bytes | list[Attribute] | dict[str, Attribute] | None"


class ReceivedEvent(NamedTuple):
    name: str
    when: int
    """Nanoseconds since the epoch."""
    attributes: Mapping[str, Attribute]


class ReceivedLink(NamedTuple):
    trace_id: str
    span_id: str
    attributes: Mapping[str, Attribute]


class ReceivedSpan(NamedTuple):
    trace_id: str
    """Hex, as are the ids of spans."""
    span_id: str
    parent_id: str | None
    name: str
    kind: str
    """``INTERNAL``, ``SERVER``, ..."""
    start: int
    end: int
    attributes: Mapping[str, Attribute]
    events: tuple[ReceivedEvent, ...]
    links: tuple[ReceivedLink, ...]
    status: str
    """``UNSET``, ``OK`` or ``ERROR``."""
    status_text: str
    dropped_attributes: int
    dropped_events: int
    dropped_links: int
    trace_state: str
    scope: str
    resource: Mapping[str, Attribute]

    def encloses(self, other: ReceivedSpan) -> bool:
        return self.start <= other.start <= other.end <= self.end


@dataclass
class Received:
    """All requests that came, in order. Filled by a receiver's threads, read by the test's."""

    raw: list[bytes] = field(default_factory=list)
    """The messages, unpacked but not decoded."""
    headers: list[Mapping[str, str]] = field(default_factory=list)
    attempts: int = 0
    """Requests that came, those that were answered with a fault too."""
    _spans: list[ReceivedSpan] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def attempted(self) -> None:
        with self._changed:
            self.attempts += 1
            self._changed.notify_all()

    def take(self, message: bytes, headers: Mapping[str, str]) -> None:
        spans = decode(message)
        with self._changed:
            self.raw.append(message)
            self.headers.append(headers)
            self._spans += spans
            self._changed.notify_all()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._changed:
            return list(self._spans)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """The spans of each trace, in order of their start."""
        found: dict[str, list[ReceivedSpan]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            found.setdefault(span.trace_id, []).append(span)
        return found

    def tree(self, trace_id: str) -> dict[str | None, list[ReceivedSpan]]:
        """The children of each span of a trace by its id; the roots, and those of a foreign parent, under ``None``."""
        spans = self.traces().get(trace_id, [])
        known = {span.span_id for span in spans}
        below: dict[str | None, list[ReceivedSpan]] = {}
        for span in spans:
            below.setdefault(span.parent_id if span.parent_id in known else None, []).append(span)
        return below

    def wait_for(self, predicate: Callable[[Received], bool], deadline: float = 30.0) -> None:
        """Block until ``predicate(self)`` holds; fails after ``deadline`` seconds. Not from an event loop that sends.

        It is asked again whenever a request came.
        """
        with self._changed:  # it can be taken twice, so the predicate may ask for the spans
            if not self._changed.wait_for(lambda: predicate(self), deadline):
                raise AssertionError(f"not in {deadline} s; {self.attempts} attempts, {len(self._spans)} spans")


def decode(message: bytes) -> list[ReceivedSpan]:
    """The spans of one ``ExportTraceServiceRequest``."""
    request = ExportTraceServiceRequest.FromString(message)
    return [
        _span(span, scoped.scope.name, _attributes(part.resource.attributes))
        for part in request.resource_spans
        for scoped in part.scope_spans
        for span in scoped.spans
    ]


def _span(span: Span, scope: str, resource: Mapping[str, Attribute]) -> ReceivedSpan:
    return ReceivedSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(
            ReceivedEvent(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events
        ),
        links=tuple(
            ReceivedLink(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links
        ),
        status={0: "UNSET", 1: "OK", 2: "ERROR"}[int(span.status.code)],
        status_text=span.status.message,
        dropped_attributes=span.dropped_attributes_count,
        dropped_events=span.dropped_events_count,
        dropped_links=span.dropped_links_count,
        trace_state=span.trace_state,
        scope=scope,
        resource=resource,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Attribute]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Attribute:  # noqa: PLR0911  # one for each kind
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bytes_value":
            return value.bytes_value
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
    return None
