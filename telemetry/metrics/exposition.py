"""Exposition: the catalogue's families as prometheus_client shows them, read when somebody scrapes.

Whatever is scraped is one consistent reading of each engine. Label values come from the engine's own fixed lists and
from its configuration, never from a request: :class:`Readings` has no other way in.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.samples import Exemplar as ShownExemplar
from prometheus_client.utils import floatToGoString

from ...errors import TelemetryError, describe
from ..logging import Logger, RateLimited, get_logger
from .catalogue import CATALOGUE, Metric
from .histogram import Exemplar, HistogramState

LabelValues: TypeAlias = tuple[str, ...]
"""In the order of ``Metric.labels``."""
REPEAT_SECONDS = 10.0
RESERVED: Final = frozenset({"le", "trace_id", *(label for metric in CATALOGUE for label in metric.labels)})
_LABEL_NAME: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Readings:
    """Values of one engine at one moment; what is missing is shown without samples."""

    numbers: Mapping[Metric, Mapping[LabelValues, float]] = field(default_factory=dict)
    """Counters and gauges."""
    histograms: Mapping[Metric, Mapping[LabelValues, HistogramState]] = field(default_factory=dict)
    infos: Mapping[Metric, LabelValues] = field(default_factory=dict)


Read: TypeAlias = Callable[[], Readings]


class _Source:
    """One engine, as a collector sees it."""

    def __init__(self, read: Read, labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)
        self._read = read
        self._last = Readings()

    def readings(self, on_fault: Callable[[Exception], None]) -> Readings:
        """As they are, or the last ones when they cannot be had."""
        try:
            self._last = self._read()
        except Exception as error:  # noqa: BLE001  # the other collectors of the registry must be scraped all the same
            on_fault(error)
        return self._last


class Collector(PrometheusCollector):
    """The families of the catalogue, for one engine or for several with different constant labels.

    A prometheus_client collector: ``registry.register(Collector(read))``. Scrapes may come from any thread, and each
    calls every ``read`` once. One that raises is logged, at most every ten seconds, and its last readings are shown.
    """

    def __init__(
        self,
        read: Read | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        catalogue: Sequence[Metric] = CATALOGUE,
        clock: Callable[[], float] = time.monotonic,
        logger: Logger | None = None,
    ) -> None:
        """``labels``: on every sample of ``read``; see :func:`label_problem`. ``catalogue``: the families. ``clock``:
        seconds, monotonic.
        """
        self._sources: tuple[_Source, ...] = ()  # replaced, never changed: a scrape may be under way in another thread
        self._catalogue = catalogue
        self._logger = logger or get_logger("octavo.telemetry")
        self._limited = RateLimited(REPEAT_SECONDS, clock)
        if read is not None:
            self.add(read, labels or {})

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, read: Read, labels: Mapping[str, str]) -> Callable[[], None]:
        """Show one engine more; returns what takes it out again.

        :raises TelemetryError: when another one has the same ``labels``, or they are malformed.
        """
        if problem := label_problem(labels):
            raise TelemetryError(f"metric_labels {problem}")
        if any(other.labels == dict(labels) for other in self._sources):
            raise TelemetryError(
                f"another engine in this registry has the same metric_labels {dict(labels)!r:.80}; give each its own"
            )
        source = _Source(read, labels)
        self._sources = (*self._sources, source)

        def remove() -> None:
            self._sources = tuple(other for other in self._sources if other is not source)

        return remove

    def describe(self) -> Iterable[Family]:
        """The families without samples. Reads nothing."""
        return [_family(metric) for metric in self._catalogue]

    def collect(self) -> Iterator[Family]:
        """The families with the samples of all engines."""
        readings = [(source.readings(self._failed), source.labels) for source in self._sources]
        for metric in self._catalogue:
            family = _family(metric)
            for reading, labels in readings:
                _SHOW[metric.kind](family, metric, reading, labels)
            yield family

    def _failed(self, error: Exception) -> None:
        self._limited.log(
            self._logger.warning, "metrics could not be read; the last ones are shown", error=describe(error)
        )


def collector_in(registry: CollectorRegistry) -> Collector:
    """The collector for engines in ``registry``, registered there if it is the first.

    :raises TelemetryError: when something else in the registry has metrics of these names.
    """
    known: Mapping[object, object] = getattr(registry, "_collector_to_names", {})  # there is no public way to ask
    for each in list(known):
        if isinstance(each, Collector):
            return each
    collector = Collector()
    try:
        registry.register(collector)
    except ValueError as error:
        raise TelemetryError(f"the registry has metrics with Octavo's names already: {error!s:.200}") from error
    return collector


def label_problem(labels: Mapping[str, str]) -> str | None:
    """Why these cannot be put on every sample; ``None``: they can."""
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str) or not _LABEL_NAME.fullmatch(name):
            return f"must map names like 'engine' to strings, not {name!r:.40} to {value!r:.40}"
        if name in RESERVED:
            return f"cannot hold {name!r}, which is a label of Octavo's own; take another name"
    return None


def _family(metric: Metric) -> Family:
    name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
    return Family(name, metric.help, metric.kind)


def _show_numbers(family: Family, metric: Metric, reading: Readings, labels: Mapping[str, str]) -> None:
    for values, number in reading.numbers.get(metric, {}).items():
        family.add_sample(metric.name, _labelled(metric, values, labels), number)


def _show_histograms(family: Family, metric: Metric, reading: Readings, labels: Mapping[str, str]) -> None:
    for values, state in reading.histograms.get(metric, {}).items():
        own = _labelled(metric, values, labels)
        bounds = [*map(floatToGoString, state.bounds), "+Inf"]
        for index, (bound, count) in enumerate(zip(bounds, accumulate(state.counts), strict=True)):
            exemplar = _shown(state.exemplars.get(index))
            family.add_sample(f"{metric.name}_bucket", {**own, "le": bound}, count, exemplar=exemplar)
        family.add_sample(f"{metric.name}_count", own, state.observations)
        family.add_sample(f"{metric.name}_sum", own, state.sum)


def _show_info(family: Family, metric: Metric, reading: Readings, labels: Mapping[str, str]) -> None:
    values = reading.infos.get(metric)
    if values is not None:
        family.add_sample(f"{metric.name}_info", _labelled(metric, values, labels), 1)


_SHOW: Final = {
    "counter": _show_numbers,
    "gauge": _show_numbers,
    "histogram": _show_histograms,
    "info": _show_info,
}


def _labelled(metric: Metric, values: LabelValues, constant: Mapping[str, str]) -> dict[str, str]:
    return {**dict(zip(metric.labels, values, strict=True)), **constant}


def _shown(exemplar: Exemplar | None) -> ShownExemplar | None:
    if exemplar is None:
        return None
    return ShownExemplar({"trace_id": exemplar.trace_id}, exemplar.value, exemplar.when)
