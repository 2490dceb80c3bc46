"""What the parts of the disk tier share while it is open."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..files.filesystem import File, Filesystem
from ..naming import BlockName, Shelf
from .entries import Entries, Entry
from .folder import DiskFolder
from .index import DiskIndex
from .segments import SegmentSet


@dataclass(slots=True)
class Counters:
    """Since the tier was opened."""

    evicted: int = 0
    declined: int = 0
    corrupt: int = 0


@dataclass(slots=True, kw_only=True)
class DiskState:
    """One thread at a time may change it, except for ``lost``, ``dirty`` and the entries."""

    fs: Filesystem
    folder: DiskFolder
    entries: Entries
    segments: SegmentSet
    index: DiskIndex | None
    """``None``: read only."""
    lock: File | None
    next_row: int = 1
    removed: list[int] = field(default_factory=list)
    """Rows of blocks that are gone; deleted from the index with the next commit."""
    gone: list[tuple[Shelf, BlockName]] = field(default_factory=list)
    """Deleted while the folder could only be read: deleted from it when it can be written."""
    dirty: dict[int, Entry] = field(default_factory=dict)
    """By row: what is known about them has changed since it was written to the index."""
    lost: deque[Entry] = field(default_factory=deque)
    """Found damaged by a reader, removed from the entries, and not yet from the books."""
    notes_bytes: int = 0
    stray_bytes: int = 0
    other_bytes: int = 0
    """Of the folders of other identities that nobody uses."""
    counters: Counters = field(default_factory=Counters)

    @property
    def bytes(self) -> int:
        """What is used on the disk."""
        index = 0 if self.index is None else self.index.bytes
        return self.segments.bytes + index + self.notes_bytes + self.stray_bytes + self.other_bytes

    def forget(self, entry: Entry) -> bool:
        """Drop a block from memory and the books; whether it was there."""
        if not self.entries.remove(entry):
            return False
        self.strike(entry)
        return True

    def strike(self, entry: Entry) -> None:
        """Drop from the books what is gone from the entries."""
        self.segments.release(entry.location)
        self.removed.append(entry.row)
        self.dirty.pop(entry.row, None)

    def settle(self) -> None:
        """Take over what readers found damaged."""
        while self.lost:
            self.strike(self.lost.popleft())
