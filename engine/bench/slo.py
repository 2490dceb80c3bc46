"""Objectives as they are given on the command line: ``ttft:0.5,tpot:0.05``."""

from __future__ import annotations

from ...errors import InvalidRequest
from .rows import METRICS


def parse_slo(text: str) -> dict[str, float]:
    """Seconds by the name of a metric.

    :raises InvalidRequest: when a part is not NAME:SECONDS of a known metric, or one comes twice.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, seconds = part.partition(":")
        if name not in METRICS or name in found:
            raise InvalidRequest(f"--slo {part!r:.40}: give each of {', '.join(METRICS)} at most once, as ttft:0.5")
        found[name] = _positive(part, seconds)
    return found


def _positive(part: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(f"--slo {part!r:.40}: the limit must be a number of seconds above 0, as ttft:0.5")
    return seconds
