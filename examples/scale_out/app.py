"""A deployment of your own: ``serve run examples.scale_out.app:app`` from the folder above ``examples``.

The same as ``serve run octavo.engine.fleet.ray:build_app model=smollm2 replicas=1-4 redis=redis://localhost:6379
snapshots=/var/cache/octavo``, with all settings at hand.
"""

from __future__ import annotations

import os

from octavo import EngineConfig
from octavo.engine.fleet.ray import Layout, ReplicaSpec, application
from octavo.engine.server.settings import ServerSettings

SHARED = os.environ.get("OCTAVO_REDIS", "redis://localhost:6379")

app = application(
    ReplicaSpec(
        model="smollm2",
        engine=EngineConfig(
            num_blocks=1024,
            tiers=("host", "redis"),
            host_bytes=256 * 2**20,
            tier_options={"redis": {"url": SHARED}},
            demotion="write_through",  # what one replica has computed is there for the others at once
        ),
        server=ServerSettings(model_names=("smollm2",)),
        snapshots=os.environ.get("OCTAVO_SNAPSHOTS"),
        otlp_endpoint=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
    ),
    Layout(replicas=1, most=4, cpus=1.0, waiting_tokens=2048),
)
