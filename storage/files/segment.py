"""Segments: append-only files of frames. See :mod:`octavo.storage.files.frame` for one frame.

The first ``ALIGN`` bytes are the file's header: magic, version, the identity's digest, XXH3-128 over both, zeros. A
frame begins at every multiple of ``ALIGN`` that the one before leaves free. What a crash left at the end is no frame
and is passed over; nothing is ever appended after it, since each writer begins a file of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import xxhash

from ...errors import CorruptBlock, FingerprintMismatch
from .filesystem import File, Filesystem
from .frame import ALIGN, HEADER_BYTES, Frame, FrameHead, decode, decode_head, encode, seed_of

MAGIC = b"OCTAVSEG"
VERSION = 1
_FILE_HEADER = struct.Struct("<8sHHI64s16s")
_CHECKED = _FILE_HEADER.size - 16
_RUN_BYTES = 32 << 20  # of neighbours that are read in one go: beyond this nothing gets faster


class Location(NamedTuple):
    """Where a frame lies. ``offset`` and ``length`` in bytes, multiples of ``ALIGN``."""

    segment: int
    offset: int
    length: int


class SegmentWriter:
    """Writes one new segment. One thread at a time."""

    def __init__(self, fs: Filesystem, path: Path, *, number: int, identity: str) -> None:
        """Creates the file. ``number`` goes into the locations; ``identity`` is the digest, 64 hex digits.

        :raises OSError: when it cannot be made, also because the name is taken.
        """
        self.number = number
        self.path = path
        self.end = ALIGN
        """Length of the file, in bytes."""
        self._fs = fs
        self._seed = seed_of(identity)
        self._file = fs.create(path)
        try:
            fs.write(self._file, 0, [_file_header(identity)])
        except BaseException:
            self._file.close()
            raise

    def append(self, frames: Sequence[Frame]) -> list[Location]:
        """Write ``frames`` one after the other. They are durable after the next ``sync``.

        :raises OSError: then none of them counts: ``end`` is where it was.
        """
        buffers: list[bytes | memoryview] = []
        locations = []
        at = self.end
        for frame in frames:
            parts = encode(frame, self._seed)
            length = sum(map(len, parts))
            buffers += parts
            locations.append(Location(self.number, at, length))
            at += length
        self._fs.write(self._file, self.end, buffers)
        self.end = at
        return locations

    def sync(self) -> None:
        """Return when the bytes are durable. The name is when its folder is synced.

        :raises OSError: then nothing since the last success can be relied on, and this file must not be used further.
        """
        self._fs.fsync(self._file)

    def cut(self) -> None:
        """Remove what a failed ``append`` may have left after ``end``."""
        self._fs.truncate(self._file, self.end)

    def close(self) -> None:
        """Idempotent. Does not sync."""
        self._file.close()


class SegmentReader:
    """Reads one segment, also while it is being written. Safe in any thread. Close it, or use it in ``with``."""

    def __init__(self, fs: Filesystem, path: Path, *, number: int, identity: str) -> None:
        """:raises OSError: when the file cannot be opened."""
        self.number = number
        self._fs = fs
        self._identity = identity
        self._seed = seed_of(identity)
        self._file = fs.open_read(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self) -> None:
        """Look at the file's header. Reading frames does not need it: each has checksums of its own.

        :raises CorruptBlock: when it is no segment, or its header is damaged.
        :raises FingerprintMismatch: when it has another version or belongs to another identity.
        """
        header = self._read(0, ALIGN)
        if len(header) < ALIGN or header[:8] != MAGIC:
            raise CorruptBlock("the file is no segment")
        _, version, _, _, identity, check = _FILE_HEADER.unpack_from(header)
        if xxhash.xxh3_128_digest(header[:_CHECKED]) != check or any(header[_FILE_HEADER.size :]):
            raise CorruptBlock("the header of the segment is damaged")
        if version != VERSION:
            raise FingerprintMismatch(f"the segment has format version {version}; this Octavo reads {VERSION}")
        if identity != self._identity.encode():
            raise FingerprintMismatch("the segment belongs to another model, geometry or format")

    def read(self, offset: int, length: int) -> Frame:
        """The frame there; its data is a view of memory of its own.

        :raises CorruptBlock: when it is not there whole and unaltered.
        :raises OSError: when the file cannot be read.
        """
        self._check_range(offset, length)
        return decode(self._read(offset, length), self._seed)

    def read_many(self, locations: Sequence[Location]) -> list[Frame | CorruptBlock]:
        """The frames at ``locations``, all of this segment, in their order; for each that is bad, why. Neighbours are
        read in one go, and their data are views of one buffer.

        :raises OSError: when the file cannot be read.
        """
        found: list[Frame | CorruptBlock] = []
        for run in _runs(locations):
            found += self._read_run(run)
        return found

    def walk(self) -> Iterator[tuple[Location, FrameHead | None]]:
        """What the headers say, without reading data: each frame whose header is good and whose length fits the file,
        and each stretch between them where there is none (``None``).
        """
        end = self._fs.size(self._file) // ALIGN * ALIGN
        at = gap = ALIGN
        while at < end:
            head = self._head_at(at, end)
            if head is None:
                at += ALIGN
                continue
            if gap < at:
                yield Location(self.number, gap, at - gap), None
            yield Location(self.number, at, head.length), head
            at = gap = at + head.length
        if gap < end:
            yield Location(self.number, gap, end - gap), None

    def tokens(self, location: Location, head: FrameHead) -> bytes:
        """The tokens of a frame that ``walk`` found; not checked, apart from their name."""
        return bytes(self._read(location.offset + HEADER_BYTES, head.tokens_bytes))

    def scan(self) -> Iterator[tuple[Location, Frame]]:
        """All good frames, read and checked, one at a time. Bad ones and a torn end are passed over."""
        for location, head in self.walk():
            if head is not None and isinstance(frame := self.read_many([location])[0], Frame):
                yield location, frame

    def close(self) -> None:
        """Idempotent. What was read stays valid."""
        self._file.close()

    def _head_at(self, at: int, end: int) -> FrameHead | None:
        head = decode_head(self._read(at, HEADER_BYTES), self._seed)
        return head if head is not None and at + head.length <= end else None

    def _read_run(self, run: Sequence[Location]) -> list[Frame | CorruptBlock]:
        try:
            self._check_range(run[0].offset, sum(each.length for each in run))
        except CorruptBlock as err:  # one of them reaches beyond the end: the others may be good
            return [err] if len(run) == 1 else [each for one in run for each in self._read_run([one])]
        begin = run[0].offset
        buffer = self._read(begin, sum(each.length for each in run))
        return [self._decode(buffer[each.offset - begin :][: each.length]) for each in run]

    def _decode(self, buffer: memoryview) -> Frame | CorruptBlock:
        try:
            return decode(buffer, self._seed)
        except CorruptBlock as err:
            return err

    def _check_range(self, offset: int, length: int) -> None:
        """A place that came from a file must lie in this one before memory is taken for it."""
        if offset < ALIGN or length < ALIGN or offset % ALIGN or length % ALIGN:
            raise CorruptBlock(f"there can be no frame of {length} bytes at {offset}")
        if offset + length > self._fs.size(self._file):
            raise CorruptBlock(f"a frame of {length} bytes at {offset} would reach beyond the end of its segment")

    def _read(self, offset: int, length: int) -> memoryview:
        buffer = np.empty(length, dtype=np.uint8).data  # not set to zero first
        return buffer[: self._fs.read_into(self._file, offset, buffer)]


def wipe(fs: Filesystem, file: File, location: Location) -> None:
    """Overwrite a frame with zeros; durable after an ``fsync`` of ``file``. Whoever reads it finds no frame."""
    zeros = bytes(min(location.length, 1 << 20))
    for at in range(location.offset, location.offset + location.length, len(zeros)):
        fs.write(file, at, [memoryview(zeros)[: location.offset + location.length - at]])


def _file_header(identity: str) -> bytes:
    checked = _FILE_HEADER.pack(MAGIC, VERSION, 0, 0, identity.encode(), bytes(16))[:_CHECKED]
    return (checked + xxhash.xxh3_128_digest(checked)).ljust(ALIGN, b"\x00")


def _runs(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """Cut into stretches in which each begins where the one before ends."""
    run: list[Location] = []
    total = 0
    for each in locations:
        follows = run and each.offset == run[-1].offset + run[-1].length and total + each.length <= _RUN_BYTES
        if not follows and run:
            yield run
            run, total = [], 0
        run.append(each)
        total += each.length
    if run:
        yield run
