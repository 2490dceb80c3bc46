"""Service: what all routes share. The engine, once it is there, and how far it is until then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import anyio
from opentelemetry.trace import TracerProvider

from ...telemetry.logging import Logger, get_logger
from ...telemetry.metrics.http import HttpMeasures
from ..async_engine import AsyncEngine
from .errors import unavailable
from .response_store import ResponseStore
from .settings import ServerSettings
from .tools.base import ToolFormat
from .tools.choosing import choose_format


class Progress(NamedTuple):
    """How far the start is."""

    phase: str = "starting"
    share: float = 0.0
    """From 0 to 1."""


class Service:
    """State of one app. All calls from the engine's event loop, but for ``note_progress``."""

    def __init__(
        self, settings: ServerSettings, engine: AsyncEngine | None = None, *, wall: Callable[[], float] = time.time
    ) -> None:
        """``engine``: one that is open, or will be before requests come; ``None``: it is attached when it is.
        ``wall``: seconds since the epoch, for what clients are told.
        """
        self.settings = settings
        self.wall = wall
        self.created = int(wall())
        """Seconds since the epoch: when the model came to be served."""
        self.logger: Logger = get_logger("octavo.server")
        self.is_draining = False
        """Whether it is about to end: what runs may finish, nothing new comes in."""
        self.progress = Progress()
        self.failure: str | None = None
        """Why there will be no engine."""
        self.under_way: Counter[str | None] = Counter()
        """Generating requests by :attr:`~.access.Caller.counted_as`."""
        self.http = HttpMeasures()
        self.scrapes = anyio.CapacityLimiter(2)
        """Expositions of metrics that are written at a time."""
        self.tracer_provider: TracerProvider | None = None
        """Gets a span of every request, around the engine's own; to be set before the app is made."""
        self.trial = anyio.Lock()
        """Held while it is tried whether the model gives anything."""
        self.responses = ResponseStore(settings.max_responses, settings.max_response_bytes)
        self._engine = engine

    def attach(self, engine: AsyncEngine) -> None:
        """The engine is open."""
        self._engine = engine

    def note_progress(self, phase: str, share: float) -> None:
        """From any thread."""
        self.progress = Progress(phase, share)

    @property
    def known_engine(self) -> AsyncEngine | None:
        """The engine, open or closed, for those who tell how it is; ``None`` while there is none."""
        return self._engine

    @property
    def is_loading(self) -> bool:
        return self._engine is None and self.failure is None

    @property
    def engine(self) -> AsyncEngine:
        """The engine.

        :raises ApiError: 503 while it is being loaded, when loading failed, and after it was closed.
        """
        if self._engine is None and self.failure is not None:
            raise unavailable("the model could not be loaded; the server's log says why", "model_failed", 60.0)
        if self._engine is None:
            phase, share = self.progress
            raise unavailable(f"the model is being loaded ({phase}, {share:.0%})", "loading", 5.0)
        if not self._engine.is_open:
            raise unavailable("the engine is closed", "shutting_down", 5.0)
        return self._engine

    @property
    def working_engine(self) -> AsyncEngine:
        """The engine, for new work.

        :raises ApiError: 503 as for ``engine``, and while the server is draining.
        """
        if self.is_draining:
            raise unavailable("the server is shutting down and takes no new requests", "shutting_down", 5.0)
        return self.engine

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls, by the settings or by its chat template; ``None``: nobody knows.

        :raises PluginError: when the one in the settings cannot be had.
        """
        template = getattr(self.engine.codec, "chat_template", None)  # of codecs that work with one
        return choose_format(self.settings.tool_format, template if isinstance(template, str) else None)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Under which names the model is served."""
        return self.settings.model_names or (self.engine.model.name,)

    def retry_after(self) -> float:
        """Seconds after which a place in the queue may be free: by how fast requests were done so far."""
        if self._engine is None or not self._engine.is_open:
            return 1.0
        stats = self._engine.stats()
        done = sum(stats.finished.values())
        if done == 0:
            return 1.0
        return min(60.0, max(1.0, stats.step_seconds / done))
