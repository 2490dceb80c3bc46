"""Pins: prefixes that must stay on the device, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .kv import CacheManager, Lease

NOT_HELD = -1
"""The id of what was given a priority only."""


class Pin(NamedTuple):
    """A prefix that is kept until it is unpinned or its time is over."""

    pin_id: int
    tokens: int
    """Length of what is kept: the whole blocks of the prefix."""
    expires: float | None
    """On the engine's monotonic clock; ``None``: not before it is released."""
    tenant: str | None


class Pins:
    """The pins of one engine. All calls at step edges."""

    def __init__(self, cache: CacheManager, new_id: Callable[[], int]) -> None:
        self._cache = cache
        self._new_id = new_id
        self._leases: dict[int, tuple[Pin, Lease]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def held(self) -> tuple[Pin, ...]:
        """All of them, the oldest first."""
        return tuple(pin for pin, _ in self._leases.values())

    def add(self, lease: Lease, expires: float | None) -> Pin:
        """Take over a lease of the cache."""
        pin = Pin(self._new_id(), lease.tokens, expires, lease.namespace.salt)
        self._leases[pin.pin_id] = pin, lease
        return pin

    def release(self, pin_id: int) -> bool:
        """Let a pin go; False when it has gone already."""
        found = self._leases.pop(pin_id, None)
        if found is not None:
            self._cache.unpin(found[1])
        return found is not None

    def expire(self, now: float) -> None:
        """Let those go whose time is over."""
        if self._leases:
            for pin, _ in list(self._leases.values()):
                if pin.expires is not None and pin.expires <= now:
                    self.release(pin.pin_id)

    def release_tenant(self, tenant: str | None) -> None:
        """Let all pins of a tenant go."""
        for pin, _ in list(self._leases.values()):
            if pin.tenant == tenant:
                self.release(pin.pin_id)
