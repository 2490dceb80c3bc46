"""What the router hears of the caches, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ...routing.base import ReplicaId
from ...routing.fleet_view import FleetView


class _Item(NamedTuple):
    due: float
    replica: ReplicaId
    is_stored: bool
    names: Sequence[bytes]


class News:
    """On its way to a view, each piece for the same time. In memory: what happened within one delay."""

    def __init__(self, view: FleetView, delay: float | None) -> None:
        """``delay``: seconds; ``None``: nothing ever comes."""
        self._view = view
        self._delay = delay
        self._items: deque[_Item] = deque()

    def stored(self, replica: ReplicaId, names: Sequence[bytes], now: float) -> None:
        """Blocks are in its cache."""
        self._tell(replica, True, names, now)

    def removed(self, replica: ReplicaId, names: Sequence[bytes], now: float) -> None:
        """Blocks have left its cache."""
        self._tell(replica, False, names, now)

    def deliver(self, now: float) -> None:
        """Everything that is due by now."""
        items = self._items
        while items and items[0].due <= now:
            item = items.popleft()
            if item.is_stored:
                self._view.stored(item.replica, item.names)
            else:
                self._view.removed(item.replica, item.names)

    def forget(self, replica: ReplicaId) -> None:
        """It is gone; what it had to say does not come any more."""
        self._items = deque(item for item in self._items if item.replica != replica)

    def _tell(self, replica: ReplicaId, is_stored: bool, names: Sequence[bytes], now: float) -> None:
        if self._delay is not None and names:
            self._items.append(_Item(now + self._delay, replica, is_stored, names))
