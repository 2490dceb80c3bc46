"""Which blocks found no room lately: what comes after them is of no use without them, and must not push others out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from ..base import Record
from ..naming import BlockName

_REMEMBERED = 16_384
_SECONDS = 60.0  # afterwards there may be room again


class Refused:
    """A chain longer than the tier keeps its beginning: without this its end would evict it, block by block."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._names: OrderedDict[BlockName, float] = OrderedDict()

    def without_followers(self, records: Mapping[BlockName, Record]) -> list[Record]:
        """Those of ``records`` that do not come after a refused block, in their order."""
        since = self._clock() - _SECONDS
        taken: list[Record] = []
        refused: set[BlockName] = set()
        for name, record in records.items():
            parent = record.head.parent
            if parent in refused or (parent not in records and self._names.get(parent, since - 1) >= since):
                refused.add(name)
            else:
                taken.append(record)
        return taken

    def note(self, records: Iterable[Record], kept: Iterable[bool]) -> None:
        """What became of ``records`` just now."""
        now = self._clock()
        for record, is_kept in zip(records, kept, strict=True):
            self._names.pop(record.head.name, None)
            if not is_kept:
                self._names[record.head.name] = now
        while len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)
