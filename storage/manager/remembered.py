"""Remembered: what tiers that have to be asked said last, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..naming import BlockName, Shelf

MOST_NAMES = 32_768


class Remembered:
    """Names that a tier said it has. May be out of date: whoever relies on it must be ready for a miss.

    Only presence is remembered; others may have stored a name since it was found absent.
    """

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._names: OrderedDict[tuple[Shelf, BlockName], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def has(self, shelf: Shelf, name: BlockName) -> bool:
        return (shelf, name) in self._names

    def note(self, shelf: Shelf, names: Iterable[BlockName], there: Iterable[bool]) -> None:
        """What a tier answered. Of too many names the one noted longest ago goes."""
        for name, present in zip(names, there, strict=True):
            self._names.pop((shelf, name), None)
            if present:
                self._names[shelf, name] = None
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def forget(self, shelf: Shelf, names: Iterable[BlockName]) -> None:
        for name in names:
            self._names.pop((shelf, name), None)

    def erase(self, tenant: bytes) -> None:
        for key in [key for key in self._names if key[0].tenant == tenant]:
            del self._names[key]
