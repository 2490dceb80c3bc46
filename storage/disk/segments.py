"""The segment files of the disk tier: which there are, how much of each is of use, and the one being written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..files.filesystem import Filesystem
from ..files.frame import ALIGN, Frame, frame_bytes
from ..files.segment import Location, SegmentReader, SegmentWriter


class Mark(NamedTuple):
    """Where writing stood."""

    number: int
    end: int


class SegmentSet:
    """One thread at a time, but for ``reader``. What is appended counts once it is synced and ``keep`` is called."""

    def __init__(self, fs: Filesystem, folder: Path, *, identity: str, segment_bytes: int) -> None:
        self.sizes: dict[int, int] = {}
        """Length of each file, in bytes."""
        self.live: dict[int, int] = {}
        """Bytes of each that hold blocks which the index knows."""
        self._fs = fs
        self._folder = folder
        self._identity = identity
        self._segment_bytes = segment_bytes
        self._writer: SegmentWriter | None = None
        self._next = 1

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())

    def path(self, number: int) -> Path:
        """The file of a segment."""
        return self._folder / segment_name(number)

    def found(self, number: int, size: int) -> None:
        """There is such a file, nothing in it known to be of use so far."""
        self.sizes[number] = size
        self.live[number] = 0
        self.taken(number)

    def taken(self, number: int) -> None:
        """Never use ``number`` again: somebody may still believe that his block is there."""
        self._next = max(self._next, number + 1)

    def keep(self, location: Location) -> None:
        """A block that counts lies at ``location``."""
        self.live[location.segment] += location.length

    def release(self, location: Location) -> None:
        """It does not count any more."""
        if location.segment in self.live:
            self.live[location.segment] -= location.length

    def reader(self, number: int) -> SegmentReader:
        """:raises OSError: when the file cannot be opened."""
        return SegmentReader(self._fs, self.path(number), number=number, identity=self._identity)

    def append(self, frames: Sequence[Frame]) -> list[Location]:
        """Write ``frames``; a new file is begun when they would make the present one too long. Call ``sync`` next.

        :raises OSError: call ``roll_back`` then.
        """
        writer = self._writer_for(sum(frame_bytes(len(each.head.tokens), len(each.data)) for each in frames))
        locations = writer.append(frames)
        self.sizes[writer.number] = writer.end
        return locations

    def sync(self) -> None:
        """Return when what was appended is durable.

        :raises OSError: call ``roll_back`` then.
        """
        if self._writer is not None:
            self._writer.sync()

    def mark(self) -> Mark:
        """Where writing stands, for ``roll_back``."""
        return Mark(self._next, 0) if self._writer is None else Mark(self._writer.number, self._writer.end)

    def roll_back(self, mark: Mark) -> None:
        """Remove what was appended since ``mark``, as far as the system lets us, and begin another file next time:
        after a failed write or fsync this one is not to be relied on.
        """
        self.seal()
        for number in [each for each in self.sizes if each > mark.number or (each == mark.number and not mark.end)]:
            with contextlib.suppress(OSError):
                self.drop(number)
        if mark.end and self.sizes.get(mark.number, 0) > mark.end:
            with contextlib.suppress(OSError), self._fs.open_write(self.path(mark.number)) as file:
                self._fs.truncate(file, mark.end)
        for number in [each for each in self.sizes if each >= mark.number]:
            with contextlib.suppress(OSError):
                self.sizes[number] = self._fs.file_bytes(self.path(number))

    def seal(self) -> None:
        """Write no further in the present file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def drop(self, number: int) -> None:
        """Remove a file.

        :raises OSError: it is still there then, and still counted.
        """
        if self._writer is not None and self._writer.number == number:
            self.seal()
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(self.path(number))
        self.sizes.pop(number, None)
        self.live.pop(number, None)

    def dead(self) -> list[int]:
        """Segments in which nothing is of use."""
        return [number for number, live in self.live.items() if not live and not self._is_fresh(number)]

    def waste(self, number: int) -> int:
        """Bytes of a segment that are of no use, its header aside."""
        return self.sizes[number] - ALIGN - self.live[number]

    def _is_fresh(self, number: int) -> bool:
        """Being written, and nothing is in it yet."""
        return self._writer is not None and self._writer.number == number and self._writer.end == ALIGN

    def _writer_for(self, length: int) -> SegmentWriter:
        if self._writer is not None and self._writer.end > ALIGN and self._writer.end + length > self._segment_bytes:
            self.seal()
        if self._writer is None:
            number = self._next
            self.taken(number)
            self.found(number, ALIGN)  # before it is made: what a failure leaves is counted, and removed
            self._writer = SegmentWriter(self._fs, self.path(number), number=number, identity=self._identity)
            self._fs.fsync_folder(self._folder)
        return self._writer


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"blocks-{number:08d}.seg"


def segment_number(name: str) -> int | None:
    """The number in a file name; ``None`` when it is none of ours."""
    digits = name.removeprefix("blocks-").removesuffix(".seg")
    is_ours = digits.isascii() and digits.isdecimal() and len(digits) <= 18
    return int(digits) if is_ours and segment_name(int(digits)) == name else None


def by_segment(locations: Iterable[Location]) -> dict[int, list[Location]]:
    """Sorted, so that neighbours are read together."""
    groups: dict[int, list[Location]] = {}
    for each in sorted(locations):
        groups.setdefault(each.segment, []).append(each)
    return groups
