"""Metrics for Prometheus: the engine's, whatever else the host has in its registry, and those of HTTP."""

from __future__ import annotations

import anyio.to_thread
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response
from starlette.types import ASGIApp

from ....telemetry.metrics.exposition import Collector, Readings
from ....telemetry.metrics.http import HTTP_CATALOGUE
from ..call import Call


async def metrics(call: Call) -> ASGIApp:
    """The text format of Prometheus, or OpenMetrics, with exemplars, for those who accept it.

    Written in another thread: a registry of the host may have collectors that take their time. Not in many: anybody may
    ask, and prompts are encoded in such threads, too.
    """
    http, engine = call.service.http.readings(), call.service.known_engine
    accept = call.headers.get("accept", "")
    registry = None if engine is None else engine.registry
    body, media_type = await anyio.to_thread.run_sync(_exposition, registry, http, accept, limiter=call.service.scrapes)
    return Response(body, headers={"Content-Type": media_type})


def _exposition(registry: CollectorRegistry | None, http: Readings, accept: str) -> tuple[bytes, str]:
    joined = CollectorRegistry()
    if registry is not None:
        joined.register(registry)  # a registry is a collector itself
    joined.register(Collector(lambda: http, catalogue=HTTP_CATALOGUE))
    try:
        encode, media_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is none
        encode, media_type = choose_encoder("")
    encoded: bytes = encode(joined)
    return encoded, media_type
