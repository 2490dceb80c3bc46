"""ServerSettings: every knob of the app that is not one of the engine, frozen, checked once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ...errors import InvalidRequest
from .access import Keys, is_sendable

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one app. Nothing is read from the environment.

    :raises InvalidRequest: when a value is out of range; the message names the field.
    """

    model_names: tuple[str, ...] = ()
    """Under which names the model is served, the first one first; none: the engine's own name for it."""
    keys: Keys = field(default_factory=Keys)
    """Who may come in, and as whom. Without keys everybody may, as nobody in particular."""
    admin_token: str | None = field(default=None, repr=False)
    """Opens the admin routes, and with them the cache on the page at ``/ui``; ``None``: they are closed."""
    snapshot_dir: str | os.PathLike[str] | None = None
    """Folder below which snapshots asked for over HTTP are written; ``None``: none can be asked for."""
    tool_format: str | None = None
    """How the model writes tool calls: a name in ``octavo.tool_formats``; ``None``: by its chat template."""

    # the doors
    max_body_bytes: int = 8 * MEBIBYTE
    """A longer body is answered with 413, before it is read to its end."""
    body_timeout: float = 30.0
    """Seconds that a client has to send its whole body; later it is answered with 408."""
    stall_timeout: float = 60.0
    """Seconds that a client may read nothing of an answer; then its request is aborted."""
    header_timeout: float = 10.0
    """Seconds from the connection, or from its first byte, to the end of a request's head."""
    max_header_bytes: int = 32 * 1024
    """A longer head is answered with 431."""
    keep_alive_timeout: float = 75.0
    """Seconds that a connection may wait for its next request. More than clients and proxies keep theirs, so that none
    is closed just when it is used."""
    max_connections: int = 900
    """Connections at the same time. One more takes the place of one that is idle, or is answered with 503."""
    max_prompts: int = 128
    """Prompts in one request for completions."""
    max_responses: int = 1000
    """Answers of ``/v1/responses`` that each tenant can go on from by ``previous_response_id``. They are kept in
    memory, the oldest go first; 0 keeps none."""
    max_response_bytes: int = 64 * MEBIBYTE
    """Of what is kept of each tenant's answers and of the conversations before them, roughly."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_prompts", "max_response_bytes", "max_header_bytes", "max_connections"):
            self._require(name, _is_count(getattr(self, name)), "must be a positive integer")
        self._require("max_responses", self.max_responses == 0 or _is_count(self.max_responses), "must not be negative")
        for name in ("body_timeout", "stall_timeout", "header_timeout", "keep_alive_timeout"):
            value = getattr(self, name)
            self._require(name, isinstance(value, int | float) and value > 0, "must be a number of seconds above 0")
        if self.admin_token is not None and len(self.admin_token) < 8:  # its value must not get into a log
            raise InvalidRequest("ServerSettings: admin_token must have at least 8 characters")
        if self.admin_token is not None and not is_sendable(self.admin_token):
            raise InvalidRequest("ServerSettings: admin_token must be ASCII, without spaces or line breaks around it")

    def _require(self, name: str, holds: bool, message: str) -> None:
        if not holds:
            raise InvalidRequest(f"ServerSettings: {name} {message}, not {getattr(self, name)!r:.80}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
