"""What ``octavo serve`` does with its options."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from opentelemetry.trace import TracerProvider

from ... import telemetry
from ...telemetry.logging import get_logger
from ..async_engine import AsyncEngine
from ..config import EngineConfig
from ..following import follow, follows
from ..model_thread import MODEL_THREAD
from .access import Keys
from .keys_file import load_keys
from .lifecycle import Ending, MakeEngine, Stop, heeding_signals, serve
from .options import ServeOptions
from .running import Address, listening
from .service import Service
from .settings import ServerSettings
from .transport import ACCEPTED_AT_ONCE, LINGERING

SPARE_FILES: Final = 256 + LINGERING + 4 * ACCEPTED_AT_ONCE
"""File descriptors that are needed beside those of connections: the engine's, and those of connections that are about
to be refused, which must not take the engine's."""


class Plan:
    """The options, all of them checked, before anything is opened."""

    def __init__(self, given: Mapping[str, object], engine: Mapping[str, object]) -> None:
        """``given``: options by name. ``engine``: more fields of :class:`EngineConfig`.

        :raises InvalidRequest: when something does not fit, or a file cannot be read.
        """
        self.options = options = msgspec.convert(given, ServeOptions)
        telemetry.configure_logging("console" if sys.stderr.isatty() else "json", options.log_level)
        self.logger = get_logger("octavo.server")
        keys = Keys() if options.api_keys is None else load_keys(options.api_keys, self.logger)
        self.admin_token = options.admin_token
        self.is_token_random = self.admin_token is None and options.is_local
        if self.is_token_random:
            self.admin_token = secrets.token_urlsafe(24)
        self.config: EngineConfig = options.engine_config(engine, keys)
        self.settings: ServerSettings = options.server_settings(keys, self.admin_token)
        self.ending: Ending = options.ending()
        self.chat_template = options.template_text()

    def maker(self, tracer_provider: TracerProvider | None) -> MakeEngine:
        def make(progress: Callable[[str, float], None]) -> AsyncEngine:
            return AsyncEngine.open(
                self.options.model,
                self.config,
                restore=self.options.restore,
                tracer_provider=tracer_provider,
                progress=progress,
                chat_template=self.chat_template,
            )

        return make

    def warn(self) -> None:
        """Say what is allowed and seldom wanted."""
        if not self.options.is_local and not len(self.settings.keys):
            self.logger.warning("open_to_everybody", host=self.options.host, advice="--api-keys, or a proxy that asks")
        if not _make_room_for(self.settings.max_connections + SPARE_FILES):
            self.logger.warning("too_few_files", needed=self.settings.max_connections + SPARE_FILES, advice="ulimit -n")

    def greeting(self, address: Address) -> str:
        """Where it is, for people; the token is behind ``#``, which browsers keep to themselves."""
        lines = [f"Serving {self.options.model} at {address.url}"]
        if address.path is None:
            token = f"#token={self.admin_token}" if self.is_token_random else ""
            lines.append(f"  its cache, live: {address.url}/ui{token}")
        return "\n".join(lines)


def run(given: Mapping[str, object], engine: Mapping[str, object]) -> bool:
    """Serve until a signal; whether all went well. Arguments as for :class:`Plan`.

    Of a model that is split, only rank 0 has a server. The others end with it.

    :raises InvalidRequest: as :class:`Plan`, or when it cannot listen.
    :raises ModelError: on another rank, as :func:`~octavo.engine.following.follow`.
    """
    plan = Plan(given, engine)
    if follows(plan.config):
        _follow(plan)
        return True
    went_well = asyncio.run(_run(plan))
    if any(thread.name == MODEL_THREAD for thread in threading.enumerate()):
        _leave(0 if went_well else 1)  # a step hangs; the interpreter would wait for it, or crash on it
    return went_well


def _follow(plan: Plan) -> None:
    """Signals go to all ranks at once, and rank 0 still needs the others to finish what is under way."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(plan.options.model, plan.config)


async def _run(plan: Plan) -> bool:
    options = plan.options
    with listening(options.host, options.port, options.uds) as (listener, address), heeding_signals() as stop:
        plan.warn()
        sys.stderr.write(plan.greeting(address) + "\n")
        service = Service(plan.settings)
        impatience = asyncio.create_task(_leave_a_load(service, stop, address))
        try:
            async with _tracing(options.otlp_endpoint) as provider:
                make, service.tracer_provider = plan.maker(provider), provider
                root_path = options.root_path
                return await serve(service, make, listener, plan.ending, stop, root_path=root_path, on_open=_settle)
        finally:
            impatience.cancel()


def _settle() -> None:
    """What was loaded stays: the collector need not look through it, for a third of a second, again and again."""
    gc.collect()
    gc.freeze()


async def _leave_a_load(service: Service, stop: Stop, address: Address) -> None:
    """A load cannot be interrupted, and there is nothing to save yet."""
    await stop.gently.wait()
    if service.is_loading:
        service.logger.info("stopped", phase=service.progress.phase)
        _leave(0, address)


def _leave(status: int, address: Address | None = None) -> NoReturn:
    """End the process without waiting for threads that cannot be stopped."""
    if address is not None and address.path is not None:
        Path(address.path).unlink(missing_ok=True)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


@asynccontextmanager
async def _tracing(endpoint: str | None) -> AsyncIterator[TracerProvider | None]:
    if endpoint is None:
        yield None
        return
    async with telemetry.setup(endpoint=endpoint) as exported:
        yield exported.tracer_provider


def _make_room_for(files: int) -> bool:
    """Raise the process's soft limit of open files, if it is lower; whether there is room then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or soft >= files
