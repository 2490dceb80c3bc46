"""The start of a replica: its engine, its app, and what routers hear of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from opentelemetry.trace import TracerProvider

from .... import telemetry
from ....policies.routing.base import ReplicaId
from ...async_engine import AsyncEngine
from ...config import EngineConfig
from ...server.access_log import AccessLog
from ...server.app import app_of
from ...server.service import Service
from ..in_process import Replica as Answering
from ..status import StatusBoard
from .publishing import News, publishing
from .slots import SNAPSHOT, claimed
from .spec import ReplicaSpec


class Parts(NamedTuple):
    """What a replica is made of."""

    engine: AsyncEngine
    service: Service
    app: Answering
    board: StatusBoard
    news: News | None
    snapshot: Path | None
    """Where it leaves its cache; ``None``: nowhere."""


@asynccontextmanager
async def started(spec: ReplicaSpec, replica: ReplicaId, address: str) -> AsyncIterator[Parts]:
    """Arguments as for :meth:`~octavo.engine.fleet.ray.host.Host.opened`. Everything is closed in the end.

    :raises OctavoError: when the engine cannot be opened.
    """
    async with AsyncExitStack() as life:
        provider = await _traced(life, spec.otlp_endpoint, replica)
        snapshot = None if spec.snapshots is None else life.enter_context(claimed(Path(spec.snapshots))) / SNAPSHOT
        engine = _engine(spec, _own(spec.engine, replica, life), snapshot, provider)
        await life.enter_async_context(engine)
        service = Service(spec.server, engine)
        service.tracer_provider = provider
        board = StatusBoard(engine)
        life.callback(board.close)
        news = await life.enter_async_context(publishing(engine, address)) if spec.publishes_kv_events else None
        app = Answering(replica, AccessLog(app_of(service), service))
        yield Parts(engine, service, app, board, news, snapshot)


async def _traced(life: AsyncExitStack, endpoint: str | None, replica: ReplicaId) -> TracerProvider | None:
    if endpoint is None:
        return None
    exported = await life.enter_async_context(telemetry.setup(endpoint=endpoint, instance=replica))
    return exported.tracer_provider


def _own(config: EngineConfig, replica: ReplicaId, life: AsyncExitStack) -> EngineConfig:
    """With what no two replicas may have in common."""
    labels = {**config.metric_labels, "replica": replica}
    if config.disk_path is None:
        return replace(config, metric_labels=labels)
    folder = life.enter_context(claimed(Path(config.disk_path)))
    return replace(config, metric_labels=labels, disk_path=folder / "blocks")


def _engine(
    spec: ReplicaSpec, config: EngineConfig, snapshot: Path | None, provider: TracerProvider | None
) -> AsyncEngine:
    restore = snapshot if snapshot is not None and snapshot.exists() else None
    if spec.load is not None:
        return AsyncEngine(load=spec.load, config=config, restore=restore, tracer_provider=provider)
    return AsyncEngine.open(
        spec.model, config, restore=restore, tracer_provider=provider, chat_template=spec.chat_template
    )
