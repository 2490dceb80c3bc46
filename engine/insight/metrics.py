"""EngineMetrics: the way from a scrape, in whatever thread, to one consistent reading of an engine.

The engine's numbers belong to its event loop, so they are read there, all at once. A scrape from another thread asks
the loop and waits a moment; when the loop does not answer, because it hangs or has ended, the last reading is shown.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, NamedTuple

from opentelemetry.metrics import MeterProvider
from prometheus_client import CollectorRegistry

from ...telemetry.metrics.exposition import Collector, Readings, collector_in
from ...telemetry.metrics.genai import GenAiHistograms
from .measures import Measures, OnFault
from .readings import Observed, at_rest, readings

PATIENCE = 1.0
"""Seconds that a scrape waits for the event loop."""
_REGISTERING: Final = threading.Lock()
"""Engines of several threads may come into one registry, and leave it, at once."""


class _Followed(NamedTuple):
    """An engine that is open."""

    home: asyncio.AbstractEventLoop
    observe: Callable[[], Observed]


class EngineMetrics:
    """The metrics of one engine, from before it is opened until after it is closed."""

    def __init__(
        self,
        registry: CollectorRegistry | None,
        meter_provider: MeterProvider | None,
        labels: Mapping[str, str],
        *,
        patience: float = PATIENCE,
    ) -> None:
        """``registry``: where they are shown while the engine is open; ``None``: in one of its own, also afterwards.
        ``meter_provider``: gets the histograms of the GenAI conventions; ``None``: nobody does. ``labels``: on every
        sample.
        """
        self.registry = CollectorRegistry() if registry is None else registry
        self._is_own = registry is None
        self._meter_provider = meter_provider
        self._labels = labels
        self._patience = patience
        self._followed: _Followed | None = None
        self._last = Readings()
        self._lock = threading.Lock()
        self._asked: Future[Readings] | None = None
        self._collector: Collector | None = None
        self._leave: Callable[[], None] | None = None
        if self._is_own:
            self.enter()

    # from the engine's event loop

    def enter(self) -> None:
        """Show the engine in the registry. Harmless when it is there already.

        :raises TelemetryError: when the registry has metrics of these names, or an engine with the same labels.
        """
        if self._leave is None:
            with _REGISTERING:
                self._collector = collector_in(self.registry)
                self._leave = self._collector.add(self.read, self._labels)

    def measures(self, model: str, wall: Callable[[], float], on_fault: OnFault) -> Measures:
        """The histograms of the engine that runs ``model``. ``wall``: seconds since the epoch."""
        sink = None
        if self._meter_provider is not None:
            try:
                sink = GenAiHistograms(self._meter_provider, model)
            except Exception as error:  # noqa: BLE001  # foreign code: the engine opens without its histograms
                on_fault("metrics", error)
        return Measures(wall, sink, on_fault=on_fault)

    def follow(self, observe: Callable[[], Observed]) -> None:
        """The engine is open: read what ``observe`` sees, in this event loop."""
        self._followed = _Followed(asyncio.get_running_loop(), observe)

    def end(self) -> None:
        """The engine is closed, or did not open: take the last reading and let go of it. Idempotent; never raises."""
        with suppress(Exception):  # what cannot be read any more stays as it was
            self._take()
        self._followed = None
        self._last = at_rest(self._last)
        if not self._is_own:
            self._withdraw()

    def _withdraw(self) -> None:
        """Take the engine out of a registry that others use, and the collector with the last of them."""
        with _REGISTERING:
            if self._leave is not None:
                self._leave()
                self._leave = None
            if self._collector is not None and not len(self._collector):
                with suppress(KeyError):  # the host was faster
                    self.registry.unregister(self._collector)
            self._collector = None

    # from any thread

    def read(self) -> Readings:
        """How the engine stands now, or as far as is known. Waits ``patience`` seconds at most.

        :raises Exception: whatever a tier or policy raises that cannot tell its numbers.
        """
        followed = self._followed
        if followed is None:
            return self._last
        if _running_loop() is followed.home:
            return self._take()
        return self._asked_of(followed.home)

    def _asked_of(self, home: asyncio.AbstractEventLoop) -> Readings:
        with self._lock:  # scrapes that come while one waits share its answer: a loop that hangs collects one question
            asked = self._asked
            if asked is None or asked.done():
                asked = self._asked = Future()
                try:
                    home.call_soon_threadsafe(self._answer, asked)
                except RuntimeError:  # the event loop was closed
                    self._asked = None
                    return self._last
        try:
            return asked.result(self._patience)
        except TimeoutError:
            return self._last

    def _answer(self, asked: Future[Readings]) -> None:
        try:
            asked.set_result(self._take())
        except Exception as error:  # noqa: BLE001  # it belongs to who asked
            asked.set_exception(error)

    def _take(self) -> Readings:
        if self._followed is not None:
            self._last = readings(self._followed.observe())
        return self._last


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
