"""Holdings: which blocks an engine has somewhere near, by its KV events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import anyio.lowlevel

from ...telemetry.events.log import Cleared, KvEvent, Stored

BREATH: Final = 1024
"""Names that are taken between two looks at what else is to be done in the event loop: about a millisecond."""


class Listener(Protocol):
    """Hears of every change, once. No method may raise."""

    def add(self, names: Sequence[bytes], /) -> None:
        """These are somewhere now, and were nowhere."""

    def remove(self, names: Sequence[bytes], /) -> None:
        """These are nowhere any more."""

    def clear(self) -> None:
        """There are none."""


class Holdings:
    """Applies events in their order. A block counts while any place has it."""

    def __init__(self, room: Mapping[str, int], listener: Listener) -> None:
        """``room``: the places that count, and how many names are kept of each. When one is full, what comes there is
        passed over: it goes on from what is kept, which would be of no use without its beginning.
        """
        self._room = room
        self._listener = listener
        self._places: dict[str, dict[bytes, bytes]] = {place: {} for place in room}
        """Names, each with the digest of its tenant."""
        self._out_of_breath = 0

    async def take(self, events: Iterable[KvEvent]) -> None:
        """Apply ``events``, all of them even if it is cancelled meanwhile; others have their turn in between."""
        for event in events:
            self.apply(event)
            self._out_of_breath += 1 if isinstance(event, Cleared) else len(event.names)
            if self._out_of_breath >= BREATH:
                self._out_of_breath = 0
                await anyio.lowlevel.cancel_shielded_checkpoint()

    def apply(self, event: KvEvent) -> None:
        """Take one event."""
        if isinstance(event, Stored):
            self._stored(event)
        elif isinstance(event, Cleared):
            self._cleared(event)
        else:
            self._remove(event.tier, event.names)

    def _stored(self, event: Stored) -> None:
        place = self._places.get(event.tier)
        if place is None:
            return
        fresh = [name for name in event.names if name not in place][: self._room[event.tier] - len(place)]
        place.update(dict.fromkeys(fresh, event.tenant))
        added = self._nowhere_else(event.tier, fresh)
        if added:
            self._listener.add(added)

    def _cleared(self, event: Cleared) -> None:
        if event == Cleared():
            for place in self._places.values():
                place.clear()
            self._listener.clear()
            return
        for tier, place in self._places.items():
            if event.tier in (None, tier):
                self._remove(tier, [name for name, tenant in place.items() if event.tenant in (None, tenant)])

    def _remove(self, tier: str, names: Iterable[bytes]) -> None:
        place = self._places.get(tier, {})
        gone = [name for name in names if place.pop(name, None) is not None]
        gone = self._nowhere_else(tier, gone)
        if gone:
            self._listener.remove(gone)

    def _nowhere_else(self, tier: str, names: list[bytes]) -> list[bytes]:
        for other, place in self._places.items():
            if other != tier and place:
                names = [name for name in names if name not in place]
        return names
