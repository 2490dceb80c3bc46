"""The news of a replica's cache, for routers on other nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ....telemetry.logging import get_logger
from ...async_engine import AsyncEngine


class News(NamedTuple):
    """Where a replica tells what is cached there."""

    endpoint: str
    replay_endpoint: str | None


@asynccontextmanager
async def publishing(engine: AsyncEngine, address: str) -> AsyncIterator[News | None]:
    """Publish KV events, names only, on ports of ``address`` that are free; gives where. ``None``: the extra ``zmq`` is
    not there, and routers go by summaries.

    :raises TelemetryError: when nothing can be bound there.
    """
    try:
        from ....telemetry.events.zmq_publisher import ZmqPublisher  # noqa: PLC0415  # of an extra
    except ImportError:
        get_logger("octavo.fleet").warning("no_kv_events", advice="pip install 'octavo[zmq]'")
        yield None
        return
    publisher = ZmqPublisher(f"tcp://{address}:*", replay_endpoint=f"tcp://{address}:*", form="names")
    await engine.name_cache()  # what was restored
    async with publisher.serving(engine):
        yield News(publisher.endpoint, publisher.replay_endpoint)
