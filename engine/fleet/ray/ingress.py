"""Ingress: the gateway in a process of its own, which Ray's HTTP proxies send requests to."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import anyio.to_thread
from opentelemetry.trace import TracerProvider
from ray import serve
from starlette.types import ASGIApp

from .... import telemetry
from ...server.prompt_reader import PromptReader
from ..gateway import Gateway
from ..naming import TextReader
from .fleet import RayFleet
from .seams import Handle
from .spec import ReplicaSpec


class Ingress:
    """``serve.deployment(serve.ingress()(Ingress)).bind(replicas, spec)``, or better
    :func:`~octavo.engine.fleet.ray.build.application`.
    """

    async def __init__(self, replicas: Handle, spec: ReplicaSpec, patience: float) -> None:  # type: ignore[misc]  # as for Replica
        """``replicas``: of the deployment. ``patience``: seconds that a request waits for a replica."""
        self._life = AsyncExitStack()
        fleet = RayFleet(replicas, patience=patience)
        self._meeting = asyncio.create_task(fleet.meet(), name="octavo-meeting")
        provider = await self._traced(spec.otlp_endpoint)
        reader = await anyio.to_thread.run_sync(reader_of, spec)
        self._gateway = Gateway(fleet, reader, spec.server, tracer_provider=provider)

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray asks for it by this name
        return self._gateway.app

    async def __del__(self) -> None:
        self._meeting.cancel()
        await self._life.aclose()

    async def _traced(self, endpoint: str | None) -> TracerProvider | None:
        if endpoint is None:
            return None
        name = str(serve.get_replica_context().replica_id.unique_id)
        exported = await self._life.enter_async_context(telemetry.setup(endpoint=endpoint, instance=name))
        return exported.tracer_provider


def reader_of(spec: ReplicaSpec) -> PromptReader:
    """Works out the tokens of prompts as the replicas of ``spec`` do. Blocks.

    :raises ModelError: when the tokenizer cannot be had.
    """
    if spec.load is None:
        return TextReader.open(spec.model, spec.engine, chat_template=spec.chat_template)
    runner, codec = spec.load()
    try:
        return TextReader(runner.info, codec, spec.engine)
    finally:
        runner.close()
