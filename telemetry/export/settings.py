"""What a queue of spans is set to, and the account of what it lost: plain values, without the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from ..logging import Logger

N = TypeVar("N", int, float)


class SpanLosses(NamedTuple):
    """How many ended spans never arrived, by why."""

    queue_full: int
    """There was no room: the exporter is slower than the engine, or hangs."""
    failed: int
    """The exporter gave up on their batch, after its own retries."""
    closing: int
    """They were not known to have arrived when the time for closing was over, or ended later still."""


class BatchSettings(NamedTuple):
    """How spans are gathered. Requests end in bursts, so the queue is longer than the SDK's own default."""

    max_queue: int = 8192
    """Spans that wait; some kilobytes each."""
    max_batch: int = 512
    """Spans in one message."""
    delay: float = 5.0
    """Seconds after which a smaller batch goes, too."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], logger: Logger) -> BatchSettings:
        """As ``OTEL_BSP_*`` say. A value that is no positive number is told and not used, as the specification asks."""
        read = _Reader(environ, logger)
        max_queue = read("OTEL_BSP_MAX_QUEUE_SIZE", int, cls().max_queue)
        max_batch = read("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", int, cls().max_batch)
        millis = read("OTEL_BSP_SCHEDULE_DELAY", float, cls().delay * 1000.0)
        return cls(max_queue, min(max_batch, max_queue), millis / 1000.0)


class _Reader(NamedTuple):
    environ: Mapping[str, str]
    logger: Logger

    def __call__(self, name: str, kind: Callable[[str], N], default: N) -> N:
        text = self.environ.get(name, "").strip()
        if not text:
            return default
        try:
            value = kind(text)
        except ValueError:
            value = default * 0
        if 0 < value < float("inf"):
            return value
        self.logger.warning("a setting of the environment is no positive number", name=name, used=default)
        return default
