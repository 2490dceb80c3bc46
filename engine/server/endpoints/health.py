"""Is it alive, is it ready, what is it, how busy is it."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import version as version_of
from typing import Final

import anyio
from starlette.types import ASGIApp

from ....errors import OctavoError
from ...async_engine import AsyncEngine
from ...request import SamplingParams
from ...warming import Readiness as Warmth
from ..call import Call
from ..endpoint import json_response
from ..service import Service
from ..wire.health import Health, Readiness, ServerLoad, Version

DEAD_AFTER: Final = 5
"""Steps in a row of which nothing came out: by then it is hardly the requests, and a plain one is tried."""
PLAIN: Final = SamplingParams(max_tokens=1, temperature=0.0)
TRIAL_SECONDS: Final = 5.0


async def health(call: Call) -> ASGIApp:
    """Whether to leave the process running: 503 when the engine has ended, its model is dead or a step hangs.

    A model that is being loaded is no reason to start anew, nor is a server that is draining.
    """
    found = await examined(call.service)
    good = found.status in ("ok", "loading")
    return json_response(found, HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE)


async def ready(call: Call) -> ASGIApp:
    """Whether to send requests here: 503 before and after, with how far it is."""
    found = _readiness(call.service, await examined(call.service))
    return json_response(found, HTTPStatus.OK if found.status == "ready" else HTTPStatus.SERVICE_UNAVAILABLE)


async def version(call: Call) -> ASGIApp:  # noqa: ARG001  # every handler takes the call
    """Of the distribution."""
    return json_response(Version(version_of("octavo")))


async def load(call: Call) -> ASGIApp:
    """How many requests there are, for balancers that know vLLM."""
    return json_response(ServerLoad(len(call.service.engine.requests())))


async def examined(service: Service) -> Health:
    """How the engine is, by a trial if it looks dead: all that came may be from one client, whose requests no model
    could take, and a restart would not help against those.
    """
    signs, engine = vital_signs(service), service.known_engine
    if signs.status != "dead" or engine is None or not engine.is_open:
        return signs
    async with service.trial:  # one at a time: anybody may ask
        if vital_signs(service).status == "dead":
            with anyio.move_on_after(TRIAL_SECONDS), suppress(OctavoError):
                await engine.complete([0], PLAIN)
        return vital_signs(service)


def vital_signs(service: Service) -> Health:
    """How the engine is, as far as this process can tell."""
    engine = service.known_engine
    if engine is None:
        return Health("loading") if service.is_loading else Health("failed", "the model could not be loaded")
    if not engine.is_open:
        return Health("dead", "the engine has ended")
    stats = engine.stats()
    if stats.stuck_seconds > 0:
        return Health("stuck", f"a step has been running for {stats.stuck_seconds:.0f} s longer than it may")
    if stats.failed_in_a_row >= DEAD_AFTER:
        return Health("dead", f"the last {stats.failed_in_a_row} steps of the model have failed")
    return Health("ok")


def _readiness(service: Service, signs: Health) -> Readiness:
    engine = service.known_engine
    if signs.status == "loading":
        return Readiness("loading", service.progress.phase, service.progress.share)
    if engine is None or signs.status != "ok":
        return Readiness(signs.status)
    return _restored(engine, is_draining=service.is_draining)


def _restored(engine: AsyncEngine, *, is_draining: bool) -> Readiness:
    restore = engine.stats().restore
    is_warm = restore.readiness == Warmth.READY
    return Readiness(
        "draining" if is_draining else "ready" if is_warm else "warming",
        stored_blocks=restore.stored_blocks,
        planned_blocks=restore.planned_blocks,
        warmed_blocks=restore.warmed_blocks,
        saved_tokens=restore.saved_tokens,
        refused=restore.refused,
    )
