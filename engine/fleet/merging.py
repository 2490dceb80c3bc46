"""Merging: the metrics of all replicas, and the gateway's own, as one exposition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.samples import Sample

from ...policies.routing.base import ReplicaId

LABEL = "replica"


class Merged(PrometheusCollector):
    """Families by name, each with the samples of all who have it."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def describe(self) -> Iterable[Family]:
        """Nothing in advance: what replicas show is known when they have shown it."""
        return ()

    def collect(self) -> Iterator[Family]:
        """All of them."""
        yield from self._families.values()

    def add(self, families: Iterable[Family], labels: Mapping[str, str]) -> None:
        """Samples get those of ``labels`` that they have not. A family of another type than the first of its name is
        left out: two types under one name are no exposition.
        """
        for family in families:
            written = family.name + ("_total" if family.type == "counter" else "")
            known = self._families.setdefault(written, Family(family.name, family.documentation, family.type))
            if known.type == family.type:
                known.samples += [_labelled(sample, labels) for sample in family.samples]


def merged(expositions: Mapping[ReplicaId, bytes], own: Iterable[PrometheusCollector]) -> bytes:
    """In the text format of Prometheus. ``expositions``: those of replicas, in the same format; one that is malformed
    is left out. ``own``: the gateway's, which have no label ``replica`` unless by themselves.
    """
    found = Merged()
    for replica, text in expositions.items():
        try:
            families = list(text_string_to_metric_families(text.decode()))
        except (ValueError, KeyError, IndexError):  # as the parser finds things
            continue
        found.add(families, {LABEL: replica})
    for collector in own:
        found.add(collector.collect(), {})
    registry = CollectorRegistry()
    registry.register(found)
    return generate_latest(registry)


def _labelled(sample: Sample, labels: Mapping[str, str]) -> Sample:
    return sample._replace(labels={**labels, **sample.labels})
