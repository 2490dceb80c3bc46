"""Access: which key opens which door, and as which tenant its requests run."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

from ...errors import InvalidRequest
from .errors import AUTHENTICATION, PERMISSION, ApiError


class Door(Enum):
    """Who may use a route."""

    OPEN = "open"
    """Anybody: what load balancers and Prometheus ask."""
    CLIENT = "client"
    """Anybody if there are no keys, else who has one."""
    ADMIN = "admin"
    """Who has the admin token."""


class Caller(NamedTuple):
    """As whom a request runs."""

    tenant: str | None = None
    """Requests share cached prefixes only within a tenant; quotas and fair shares go by it, too."""
    priority: int = 0
    """Of its requests, unless they ask for less."""
    max_concurrent: int | None = None
    """Requests that may be under way at the same time; one more is answered with 429. ``None``: no bound."""
    name: str | None = None
    """Of its key, for people and for counting; ``None``: there is none."""

    @property
    def counted_as(self) -> str | None:
        """What its requests are counted by: callers without a name by their tenant, not all of them together."""
        return self.tenant if self.name is None else self.name


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys, known by their SHA-256 only: what is not kept cannot leak.

    :raises InvalidRequest: when some callers have a tenant and others have none: those may name one in a request, and
        it could be that of somebody else.
    """

    callers: Mapping[bytes, Caller] = field(default_factory=dict)
    """Digest of the key -> as whom it runs."""
    quotas: Mapping[str, float] = field(default_factory=dict)
    """Shares of the pool by tenant, for ``EngineConfig(tenant_quotas=...)``."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By tenant, for the scheduling policy ``fair``: ``EngineConfig(scheduling_options={"weights": ...})``."""

    def __post_init__(self) -> None:
        if len({caller.tenant is None for caller in self.callers.values()}) > 1:
            raise InvalidRequest("either all API keys have a tenant or none has")

    def __len__(self) -> int:
        return len(self.callers)

    def caller(self, key: str) -> Caller | None:
        """Who has this key; ``None``: nobody."""
        return self.callers.get(digest(key))


def is_sendable(key: str) -> bool:
    """Whether a key comes out of a header as it went in: ASCII, with no spaces or line breaks around it."""
    return key.isascii() and key.isprintable() and key == key.strip()


def digest(key: str) -> bytes:
    """SHA-256 of a key, by which it is known."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def admit(door: Door, authorization: str | None, keys: Keys, admin_token: str | None) -> Caller:
    """As whom a request comes in. ``authorization``: its header, ``Bearer KEY``.

    :raises ApiError: 401 without a key that is known, 403 for admin routes without the token, or where there is none.
    """
    if door is Door.OPEN or (door is Door.CLIENT and not len(keys)):
        return Caller()
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    if door is Door.ADMIN:
        if admin_token is None:
            raise _closed("this server has no admin token: its admin routes are closed")
        if not hmac.compare_digest(key.encode("utf-8", "surrogatepass"), admin_token.encode()):
            raise _closed("admin routes need `Authorization: Bearer ADMIN_TOKEN`")
        return Caller()
    caller = keys.caller(key) if key else None
    if caller is None:
        message = "no such API key" if key else "an API key is needed: send `Authorization: Bearer KEY`"
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(HTTPStatus.UNAUTHORIZED, message, kind=AUTHENTICATION, code="invalid_api_key", headers=headers)
    return caller


def _closed(message: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, kind=PERMISSION)
