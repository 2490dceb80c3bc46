"""An engine whose events a test decides, for publisher and subscriber."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Sequence

from octavo.telemetry.events.log import EventLog, KvEvent, Stored, Subscription

ANY = "tcp://127.0.0.1:*"
SPACE, TENANT = bytes(32), bytes(range(32))
PATIENCE = 20.0
"""Seconds after which a test that hangs is told so."""


def digest(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def stored(*numbers: int, parent: int | None = None, tier: str = "device", is_private: bool = False) -> Stored:
    names = tuple(map(digest, numbers))
    tokens = array("i", [at for number in numbers for at in (number, 1000 * number)]).tobytes()
    above = None if parent is None else digest(parent)
    return Stored(names, above, tokens, 2, tier, SPACE, TENANT, is_private=is_private)


class Engine:
    """Says what a test lets it say."""

    def __init__(self) -> None:
        self.standing_now: list[KvEvent] = []
        self.places: Sequence[str] = ()
        self.log = EventLog(
            self, most=100, wall=lambda: 12.5, soon=lambda call: asyncio.get_running_loop().call_soon(call)
        )

    def kv_events(self, *, replay_from: int | None = None) -> Subscription:
        return self.log.subscribe(replay_from)

    def turn(self, *, on: bool) -> None:
        """Whatever."""

    def standing(self) -> list[KvEvent]:
        return self.standing_now

    async def survey(self, tier: str, note: Callable[[Sequence[KvEvent]], None]) -> None:
        note([stored(99, tier=tier)])
