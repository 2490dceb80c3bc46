"""Scrapes a registry as Prometheus would, and reads what came."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families


def openmetrics(registry: CollectorRegistry) -> str:
    """What a scraper gets that accepts OpenMetrics."""
    shown: bytes = exposition.generate_latest(registry)  # type: ignore[no-untyped-call]  # the library's
    return shown.decode()


def text(registry: CollectorRegistry) -> str:
    """What others get."""
    return generate_latest(registry).decode()


def parse_openmetrics(shown: str) -> list[Family]:
    """The families, in order."""
    return list(parser.text_string_to_metric_families(shown))  # type: ignore[no-untyped-call]  # the library's


def parse_text(shown: str) -> list[Family]:
    """The families, in order."""
    return list(text_string_to_metric_families(shown))
