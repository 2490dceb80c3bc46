"""Spans in a file: one OTLP message in JSON a line, as the file exporter of the OpenTelemetry collector writes them.

``load.py --save`` writes such a file, ``picture.py`` reads it, and so does whatever else knows the format.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # comes without types
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

Value: TypeAlias = "str | bool | int | float | list[Value] | None"
IDS = frozenset({"traceId", "spanId", "parentSpanId"})
FAILED = 2
"""The code of a span's status."""


class Event(NamedTuple):
    """Something that happened at one moment."""

    name: str
    when: int
    """Nanoseconds since the epoch."""
    attributes: Mapping[str, Value]


class Link(NamedTuple):
    """Another span, and what it has to do with this one."""

    span: str
    """Its id."""
    relation: str


class Span(NamedTuple):
    """One span. Ids are hex, times are nanoseconds since the epoch."""

    trace: str
    id: str
    parent: str | None
    name: str
    start: int
    end: int
    attributes: Mapping[str, Value]
    events: tuple[Event, ...]
    links: tuple[Link, ...]
    failed: bool

    def number(self, name: str) -> int:
        """An attribute that counts something; 0 when it is absent."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) else 0

    def text(self, name: str) -> str:
        """An attribute in words; empty when it is absent."""
        value = self.attributes.get(name)
        return value if isinstance(value, str) else ""


class SpanFile(SpanExporter):
    """Appends what it is given to a file, for ``octavo.telemetry.setup(exporter=...)``."""

    def __init__(self, path: Path) -> None:
        """What ``path`` held before is lost."""
        self._file = path.open("w", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._file.write(f"{encode(spans)}\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self._file.flush()
        return True


def encode(spans: Sequence[ReadableSpan]) -> str:
    """One line."""
    message = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    return json.dumps(_with_hex_ids(message), separators=(",", ":"))


def decode(lines: Iterable[str]) -> list[Span]:
    """All spans, in the order of their beginning.

    :raises msgspec.DecodeError: a line is no OTLP message.
    """
    found = [
        _span(each)
        for line in lines
        if line.strip()
        for resource in msgspec.json.decode(line, type=_Message, strict=False).resource_spans
        for scope in resource.scope_spans
        for each in scope.spans
    ]
    return sorted(found, key=lambda span: (span.start, -span.end, span.id))


def read(path: Path) -> list[Span]:
    """The spans that ``path`` holds."""
    with path.open(encoding="utf-8") as lines:
        return decode(lines)


def _with_hex_ids(value: object, name: str = "") -> object:
    """OTLP in JSON has ids in hex, where JSON of other protocol buffers has base64."""
    if isinstance(value, dict):
        return {key: _with_hex_ids(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_hex_ids(each) for each in value]
    return base64.b64decode(value).hex() if name in IDS and isinstance(value, str) else value


# the format, as far as it is read


class _Json(msgspec.Struct, rename="camel"):
    pass


class _Array(_Json):
    values: list[_Any] = []


class _Any(_Json):
    string_value: str | msgspec.UnsetType = msgspec.UNSET  # with None, the text "null" would be taken for it
    bool_value: bool | None = None
    int_value: int | None = None
    double_value: float | None = None
    array_value: _Array | None = None

    def plain(self) -> Value:
        if not isinstance(self.string_value, msgspec.UnsetType):
            return self.string_value
        if self.array_value is not None:
            return [each.plain() for each in self.array_value.values]
        given = (self.bool_value, self.int_value, self.double_value)
        return next((value for value in given if value is not None), None)


class _Pair(_Json):
    key: str
    value: _Any = msgspec.field(default_factory=_Any)


class _Event(_Json):
    name: str
    time_unix_nano: int
    attributes: list[_Pair] = []


class _Link(_Json):
    span_id: str
    attributes: list[_Pair] = []


class _Status(_Json):
    code: int = 0


class _Span(_Json):
    trace_id: str
    span_id: str
    name: str
    start_time_unix_nano: int
    end_time_unix_nano: int
    parent_span_id: str = ""
    attributes: list[_Pair] = []
    events: list[_Event] = []
    links: list[_Link] = []
    status: _Status = msgspec.field(default_factory=_Status)


class _Scope(_Json):
    spans: list[_Span] = []


class _Resource(_Json):
    scope_spans: list[_Scope] = []


class _Message(_Json):
    resource_spans: list[_Resource] = []


def _span(each: _Span) -> Span:
    return Span(
        each.trace_id,
        each.span_id,
        each.parent_span_id or None,
        each.name,
        each.start_time_unix_nano,
        each.end_time_unix_nano,
        _attributes(each.attributes),
        tuple(Event(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in each.events),
        tuple(Link(link.span_id, str(_attributes(link.attributes).get("octavo.relation", ""))) for link in each.links),
        each.status.code == FAILED,
    )


def _attributes(pairs: list[_Pair]) -> dict[str, Value]:
    return {pair.key: pair.value.plain() for pair in pairs}
