"""What balancers and orchestrators are told."""

from __future__ import annotations

import msgspec


class Health(msgspec.Struct):
    """Whether the process should be left running."""

    status: str
    """``ok`` or ``loading`` with 200; with 503 ``failed`` (the model could not be loaded), ``dead`` (the engine has
    ended, or its model gives nothing but errors) or ``stuck`` (a step does not come back)."""
    detail: str = ""
    """What is wrong."""


class Readiness(msgspec.Struct):
    """Whether requests should be sent here, and how far the start is."""

    status: str
    """``ready`` with 200; with 503 ``loading``, ``warming`` (stored blocks are brought to the device), ``draining``,
    or one of the bad ones of ``/health``."""
    phase: str | None = None
    """While it loads: with what."""
    share: float | None = None
    """While it loads: how much of that is done, from 0 to 1."""
    stored_blocks: int | None = None
    """Blocks that persistent tiers and the snapshot held at the start."""
    planned_blocks: int | None = None
    """Of them to be warmed."""
    warmed_blocks: int | None = None
    saved_tokens: int | None = None
    """Tokens loaded so far that an earlier run, or another engine, had computed."""
    refused: str | None = None
    """Why the snapshot that was asked for is not used."""


class Version(msgspec.Struct):
    """Of the distribution."""

    version: str


class ServerLoad(msgspec.Struct):
    """How busy it is, under vLLM's name."""

    server_load: int
    """Requests that are generated, or wait."""
