"""Set-up: one call that an application makes to have traces sent to a collector. The library never makes it."""

from __future__ import annotations

import math
import os
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio.to_thread
from opentelemetry import trace

from ...errors import InvalidRequest, TelemetryError
from ..logging import get_logger
from .settings import BatchSettings, SpanLosses

if TYPE_CHECKING:  # they need the SDK, which is an extra
    from opentelemetry.sdk.trace.export import SpanExporter

    from .queue import ExportQueue


class Telemetry:
    """Where spans go. Close it when the engines are closed; a context manager, both ways, does."""

    def __init__(self, tracer_provider: trace.TracerProvider, queue: ExportQueue | None, close_timeout: float) -> None:
        self.tracer_provider = tracer_provider
        """For ``AsyncEngine.open(..., tracer_provider=)``."""
        self._queue = queue
        self._close_timeout = close_timeout

    @property
    def losses(self) -> SpanLosses:
        """Spans that ended and never arrived, by why."""
        return SpanLosses(0, 0, 0) if self._queue is None else self._queue.losses

    @property
    def spans_lost(self) -> int:
        """The sum of :attr:`losses`."""
        return sum(self.losses)

    @property
    def spans_exported(self) -> int:
        """Spans that the collector acknowledged."""
        return 0 if self._queue is None else self._queue.exported

    def flush(self, timeout: float | None = None) -> bool:
        """Send what has ended until now; blocks. False: not done within ``timeout`` seconds (that of closing)."""
        return self._queue is None or self._queue.flush(self._seconds(timeout))

    def close(self, timeout: float | None = None) -> bool:
        """Send what is left and stop; blocks. False: not done within ``timeout`` seconds, and the rest is lost."""
        done = self._queue is None or self._queue.close(self._seconds(timeout))
        shut = getattr(self.tracer_provider, "shutdown", None)
        if shut is not None:
            shut()  # its processor is closed already: this only makes it forget its hook at exit
        return done

    async def aclose(self, timeout: float | None = None) -> bool:
        """As :meth:`close`, beside the event loop."""
        own = anyio.CapacityLimiter(1)  # the shared one may be taken by whatever hangs
        return await anyio.to_thread.run_sync(self.close, timeout, limiter=own)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()

    def _seconds(self, timeout: float | None) -> float:
        return self._close_timeout if timeout is None else timeout


def setup(
    *,
    service_name: str | None = None,
    instance: str | None = None,
    sample: float | None = None,
    endpoint: str | None = None,
    protocol: str | None = None,
    exporter: SpanExporter | None = None,
    set_global: bool = False,
    close_timeout: float = 5.0,
) -> Telemetry:
    """Make a tracer provider whose spans go to an OpenTelemetry collector, and to nobody's harm if it is dead.

    What is not given is as the standard ``OTEL_*`` variables say: service and resource, ``OTEL_TRACES_SAMPLER``,
    ``OTEL_TRACES_EXPORTER`` (``otlp``, ``console`` or ``none``), ``OTEL_EXPORTER_OTLP_*``, of ``OTEL_BSP_*`` the size
    of the queue and of a batch and the delay, and the limits of spans. With ``OTEL_SDK_DISABLED=true`` there are no
    traces at all. Else the SDK's defaults hold: OTLP over HTTP to ``http://localhost:4318``, all requests traced
    unless their caller's trace is not. An exporter's call, retries included, ends after
    ``OTEL_EXPORTER_OTLP_TIMEOUT`` (10 seconds); 8192 other spans may wait meanwhile.

    ``instance``: which process of the service this is (``service.instance.id``), where there are several. ``sample``:
    share of the requests to trace, of those that do not come with a trace; a step is shown where a traced request is in
    it. ``endpoint``: the collector, with or without the path of traces. ``protocol``: ``http/protobuf`` or ``grpc``.
    ``exporter``: one of your own. ``set_global``: make it the process's provider, too. ``close_timeout``: seconds that
    closing may take.

    :raises InvalidRequest: an argument is out of range.
    :raises TelemetryError: an extra is missing, a variable is not understood, or there is a global provider already.
    """
    if sample is not None and not 0.0 <= sample <= 1.0:
        raise InvalidRequest(f"sample is {sample}; it must be from 0 to 1")
    if not 0.0 <= close_timeout < math.inf:
        raise InvalidRequest(f"close_timeout is {close_timeout}; it must be a number of seconds")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Telemetry(trace.NoOpTracerProvider(), None, close_timeout)
    try:
        from . import otlp, queue  # noqa: PLC0415  # they need the SDK, which is an extra
    except ImportError as error:
        raise TelemetryError("traces need the OpenTelemetry SDK: pip install 'octavo[otlp]'") from error
    logger = get_logger("octavo.telemetry")
    chosen = otlp.make_exporter(os.environ, protocol, endpoint) if exporter is None else exporter
    provider = otlp.make_provider(service_name, sample, instance)
    spans = None
    if chosen is not None:
        settings = BatchSettings.from_environment(os.environ, logger)
        spans = queue.ExportQueue(chosen, settings, logger, close_timeout=close_timeout)
        provider.add_span_processor(spans)
    made = Telemetry(provider, spans, close_timeout)
    if set_global:
        _make_global(made)
    return made


def _make_global(made: Telemetry) -> None:
    trace.set_tracer_provider(made.tracer_provider)
    if trace.get_tracer_provider() is not made.tracer_provider:
        made.close(0.0)
        raise TelemetryError("there is a global tracer provider already; pass set_global=False, or set it up only once")
