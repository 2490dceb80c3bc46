"""How blocks come back from the disk. Many threads at a time, also while blocks are written, moved and evicted."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...errors import CorruptBlock, StorageError, describe
from ...telemetry.logging import Logger, RateLimited
from ..base import Stored
from ..files.compression import Compression
from ..files.frame import COMPRESSED, Frame
from ..files.segment import Location
from ..naming import BlockName, Shelf
from .entries import Entry
from .segments import SegmentSet, by_segment
from .state import DiskState

_MOVES = 3  # how often a block may be moved between look-up and read before it counts as a miss


class _Place(NamedTuple):
    location: Location
    entry: Entry


class DiskReader:
    """Reads and checks blocks. What is damaged is forgotten and counted."""

    def __init__(
        self, state: DiskState, unpacker: Compression, record_bytes: int, logger: Logger, log: RateLimited
    ) -> None:
        """``record_bytes``: length of every record; nothing else is accepted."""
        self._state = state
        self._unpacker = unpacker
        self._record_bytes = record_bytes
        self._logger = logger
        self._log = log

    def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """What is there under ``names``.

        :raises StorageError: when the folder cannot be read any more.
        """
        found: dict[BlockName, Stored] = {}
        wanted: Iterable[BlockName] = dict.fromkeys(names)
        for _ in range(_MOVES):
            wanted = self._round(shelf, wanted, found)
            if not wanted:
                break
        return [found.get(name) for name in names]

    def _round(self, shelf: Shelf, names: Iterable[BlockName], found: dict[BlockName, Stored]) -> list[BlockName]:
        """Read each from where it lies now; returns the names of those that were moved meanwhile."""
        places = {
            entry.location: entry for name in names if (entry := self._state.entries.get(shelf, name)) is not None
        }
        moved = []
        for place, frame in self._frames(places):
            stored = self._checked(place.entry, frame)
            name = place.entry.head.name
            if not isinstance(stored, CorruptBlock):
                found[name] = stored
                self._state.entries.used(place.entry)
                self._state.dirty[place.entry.row] = place.entry
            elif place.entry.location != place.location:
                moved.append(name)
            else:
                self._lose(place.entry, stored)
        return moved

    def _frames(self, places: Mapping[Location, Entry]) -> Iterable[tuple[_Place, Frame | CorruptBlock]]:
        for number, locations in by_segment(places).items():
            try:
                frames = read_frames(self._state.segments, number, locations)
            except OSError as err:
                raise StorageError(f"the disk tier cannot read its folder: {describe(err)}") from err
            yield from ((_Place(at, places[at]), frame) for at, frame in zip(locations, frames, strict=True))

    def _checked(self, entry: Entry, frame: Frame | CorruptBlock) -> Stored | CorruptBlock:
        if isinstance(frame, CorruptBlock):
            return frame
        if (frame.shelf, frame.head) != (entry.shelf, entry.head):
            return CorruptBlock("there is another block than the index says")
        if frame.raw_bytes != self._record_bytes:
            return CorruptBlock(f"a stored block has {frame.raw_bytes} bytes instead of {self._record_bytes}")
        try:
            is_packed = frame.flags & COMPRESSED
            data = self._unpacker.unpack(frame.data, self._record_bytes, frame.itemsize) if is_packed else frame.data
        except CorruptBlock as err:
            return err
        return Stored(data, self._state.entries.meta_outside(entry))

    def _lose(self, entry: Entry, why: CorruptBlock) -> None:
        if not self._state.entries.remove(entry):
            return  # evicted or erased meanwhile
        self._state.lost.append(entry)
        self._state.counters.corrupt += 1
        self._log.log(self._logger.warning, "disk_block_dropped", problem=str(why), segment=entry.location.segment)


def read_frames(segments: SegmentSet, number: int, locations: Sequence[Location]) -> list[Frame | CorruptBlock]:
    """The frames at ``locations`` of one segment. What lies on a bad spot of the disk, or in a file that is gone,
    counts as damaged.

    :raises OSError: when the file is there and cannot be read at all.
    """
    try:
        with segments.reader(number) as reader:
            return reader.read_many(locations)
    except FileNotFoundError:
        return [CorruptBlock("the segment is gone")] * len(locations)
    except OSError as err:
        if err.errno != errno.EIO:
            raise
        if len(locations) == 1:
            return [CorruptBlock(f"the disk cannot read it: {describe(err)}")]
        return [each for location in locations for each in read_frames(segments, number, [location])]
