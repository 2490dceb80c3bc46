"""The SDK's parts, made as the standard variables say. Imported by ``setup`` alone: it needs the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from ...errors import InvalidRequest, OctavoError, TelemetryError, describe
from .. import names

TRACES_PATH = "/v1/traces"
PROTOCOLS = ("http/protobuf", "grpc")


def make_provider(service_name: str | None, sample: float | None, instance: str | None = None) -> TracerProvider:
    """Without an exporter. ``None``: as the environment says, else ``octavo`` and everything that has no parent."""
    sampler = None if sample is None else ParentBased(TraceIdRatioBased(sample))
    try:
        provider = TracerProvider(sampler=sampler, resource=_resource(service_name, instance))
    except ValueError as error:
        raise TelemetryError(f"a variable is not understood ({describe(error)}); check OTEL_*_LIMIT") from error
    provider.sampler = StepsToo(provider.sampler)
    return provider


class StepsToo(Sampler):
    """Takes every step: one is shown only when a traced request is in it, so it goes with that one."""

    def __init__(self, others: Sampler) -> None:
        """``others`` decides on everything else."""
        self._others = others

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if name == names.STEP:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return self._others.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return self._others.get_description()


def make_exporter(environ: Mapping[str, str], protocol: str | None, endpoint: str | None) -> SpanExporter | None:
    """The exporter that the arguments or else the standard variables name; ``None``: they want none.

    :raises InvalidRequest: an argument is not what it should be.
    :raises TelemetryError: an extra is missing, or a variable is not understood.
    """
    kind = "otlp" if protocol or endpoint else environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if kind == "none":
        return None
    if kind == "console":
        return ConsoleSpanExporter()
    if kind != "otlp":
        raise TelemetryError(f"OTEL_TRACES_EXPORTER is {kind!r}; this helper knows otlp, console and none")
    return _otlp(protocol or _protocol(environ), endpoint)


def _otlp(protocol: str, endpoint: str | None) -> SpanExporter:
    makers: dict[str, Callable[[str | None], SpanExporter]] = {"http/protobuf": _over_http, "grpc": _over_grpc}
    make = makers.get(protocol)
    if make is None:
        raise InvalidRequest(f"the OTLP protocol {protocol!r} is unknown; choose http/protobuf or grpc")
    if endpoint is not None and urlsplit(endpoint).scheme not in {"http", "https"}:
        raise InvalidRequest(f"endpoint is {endpoint!r}; it must begin with http:// or https://")
    try:
        return make(endpoint)
    except OctavoError:
        raise
    except Exception as error:
        raise TelemetryError(
            f"the OTLP exporter could not be made ({describe(error)}); check the OTEL_EXPORTER_OTLP_* variables"
        ) from error


def _protocol(environ: Mapping[str, str]) -> str:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = environ.get(name, "").strip()
        if value and value not in PROTOCOLS:
            raise TelemetryError(f"{name} is {value!r}; this helper knows {' and '.join(PROTOCOLS)}")
        if value:
            return value
    return "http/protobuf"


def _over_http(endpoint: str | None) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise TelemetryError("traces over OTLP/HTTP need an extra: pip install 'octavo[otlp]'") from error
    return OTLPSpanExporter(endpoint=None if endpoint is None else _with_path(endpoint))


def _over_grpc(endpoint: str | None) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise TelemetryError("traces over gRPC need an extra: pip install 'octavo[otlp-grpc]'") from error
    return OTLPSpanExporter(endpoint=endpoint)


def _with_path(endpoint: str) -> str:
    """With the path of traces, unless it has one of its own."""
    bare = urlsplit(endpoint).path in {"", "/"}
    return endpoint.removesuffix("/") + TRACES_PATH if bare else endpoint


def _resource(service_name: str | None, instance: str | None) -> Resource:
    told = {"service.name": service_name, "service.instance.id": instance}
    found = Resource.create({name: value for name, value in told.items() if value is not None})
    if not str(found.attributes["service.name"]).startswith("unknown_service"):
        return found  # the application's own name, and its own version if it gave one
    return Resource({"service.version": _own_version()}).merge(found).merge(Resource({"service.name": "octavo"}))


def _own_version() -> str:
    try:
        return version("octavo")
    except PackageNotFoundError:  # run from a tree that was never installed
        return "unknown"
