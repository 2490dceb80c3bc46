"""Reach: how far into a list of names one tier goes."""

from __future__ import annotations

from collections.abc import Sequence

from ..naming import BlockName, Shelf
from .mount import Mount


class Reach:
    """Which of ``names`` a mount has, its queue included, asked as seldom as possible: once for each run."""

    def __init__(self, mount: Mount, shelf: Shelf, names: Sequence[BlockName]) -> None:
        self._mount = mount
        self._shelf = shelf
        self._names = names
        self._end = 0
        """The names before it, back to where the run began, are there."""
        self._missing = -1
        """The last one known not to be there."""

    def covers(self, at: int) -> bool:
        """``at`` must not go down from call to call."""
        if at >= self._end and at > self._missing:
            self._extend(at)
        return at < self._end or self._mount.queue.find(self._shelf, self._names[at]) is not None

    def _extend(self, at: int) -> None:
        if at and not self._mount.run_at(self._shelf, (self._names[at],)):
            self._missing = at
            return
        self._end = at + self._mount.run_at(self._shelf, self._names[at:])
        self._missing = self._end
