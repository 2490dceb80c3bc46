"""ReplicaSpec: what a deployment of replicas is made of, plain data that Ray carries to where they run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from ....errors import InvalidRequest
from ...config import EngineConfig
from ...life import Load
from ...server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """Settings of every replica of a deployment. What must differ between them is made of these where they start: the
    metric label ``replica``, and folders of their own below ``engine.disk_path`` and ``snapshots``.

    :raises InvalidRequest: when a value is out of range; the message names the field.
    """

    model: str
    """As for ``AsyncEngine.open``: a directory, a hub id, a ``.gguf`` file, or ``smollm2``. Every node must have it."""
    load: Load | None = None
    """Loads something else than ``model``, which is then only a name: a function that every node can import."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerSettings = field(default_factory=ServerSettings)
    chat_template: str | None = None
    """A Jinja template, as text, in place of the model's own."""
    otlp_endpoint: str | None = None
    """Where spans go, such as ``http://localhost:4318``; ``None``: nowhere."""
    publishes_kv_events: bool = True
    """Tell routers what is cached as it changes, over ZeroMQ (extra ``zmq``). Off: they go by summaries, which come
    every few seconds."""
    snapshots: str | os.PathLike[str] | None = None
    """Folder for what replicas leave when they end and take up when they start; ``None``: they start cold. Shared by
    all nodes, or what one left is found on its node only."""
    drain_timeout: float = 20.0
    """Seconds that running requests get to finish once a replica is to end."""
    save_timeout: float = 30.0
    """Seconds after that to write the snapshot and to close the engine."""

    def __post_init__(self) -> None:
        for name in ("drain_timeout", "save_timeout"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise InvalidRequest(f"ReplicaSpec: {name} must be a number of seconds, not {value!r:.80}")
        if not self.model:
            raise InvalidRequest("ReplicaSpec: model must be a name")
