"""How blocks get onto the disk: frames, fsync, then the index. Also compaction, which is the same for blocks that are
there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ...errors import StorageError
from ..base import Record
from ..files.compression import Compression
from ..files.frame import COMPRESSED, Frame, frame_bytes
from ..naming import Shelf
from .entries import Entry
from .index import DiskIndex, Row
from .reader import read_frames
from .state import DiskState

BATCH_ROWS = 64
"""Blocks per commit: so many that the fsync does not count, so few that the log of the database stays short."""


class DiskWriter:
    """Writes batches of blocks, each whole or not at all. One thread at a time."""

    def __init__(self, state: DiskState, compression: Compression, batch_bytes: int) -> None:
        self._state = state
        self._compression = compression
        self._batch_bytes = batch_bytes

    def frames(self, shelf: Shelf, records: Sequence[Record]) -> list[Frame]:
        """``records`` as they will be written."""
        return [self._frame(shelf, record) for record in records]

    def batches(self, frames: Sequence[Frame]) -> Iterator[list[Frame]]:
        """Cut into what is written at once."""
        batch: list[Frame] = []
        size = 0
        for frame in frames:
            length = bytes_of(frame)
            if batch and (size + length > self._batch_bytes or len(batch) == BATCH_ROWS):
                yield batch
                batch, size = [], 0
            batch.append(frame)
            size += length
        if batch:
            yield batch

    def write(self, frames: Sequence[Frame]) -> None:
        """Add blocks. When it returns, they are durable and in the index.

        :raises OSError, sqlite3.Error: nothing was changed then.
        """
        state = self._state
        rows = self._write(range(state.next_row, state.next_row + len(frames)), frames)
        state.next_row += len(rows)
        inside = state.entries.meta_inside
        state.entries.add(Entry(row.shelf, row.head, row.location, row.id, inside(row.meta)) for row in rows)

    def compact(self, number: int) -> None:
        """Move what is of use out of a segment and remove it. Readers find a block in its old place or in its new one.

        :raises OSError, sqlite3.Error: what was moved so far is moved; nothing is lost.
        """
        state = self._state
        state.segments.seal()  # nothing may be moved into the segment that goes
        waiting = iter(state.entries.in_segment(number))
        while batch := list(islice(waiting, BATCH_ROWS)):
            self._move(number, batch)
        state.settle()
        state.segments.drop(number)
        state.fs.fsync_folder(state.folder.home)

    def flush(self) -> None:
        """Write to the index what has changed since: what policies know, and what is gone.

        :raises sqlite3.Error: nothing is forgotten then.
        """
        state = self._state
        index = writable(state)
        state.settle()
        rows = list(state.dirty)
        while state.removed or rows:
            index.tidy()
            some = [entry for row in rows[:1024] if (entry := state.dirty.pop(row, None)) is not None]
            del rows[:1024]
            try:  # what changes from here on is dirty again
                index.commit(removed=state.removed, noted=[(e.row, state.entries.meta_outside(e)) for e in some])
            except BaseException:
                state.dirty.update({entry.row: entry for entry in some})
                raise
            state.removed.clear()

    def _move(self, number: int, entries: Sequence[Entry]) -> None:
        state = self._state
        found = read_frames(state.segments, number, [entry.location for entry in entries])
        good = [
            (entry, frame._replace(meta=state.entries.meta_outside(entry)))
            for entry, frame in zip(entries, found, strict=True)
            if isinstance(frame, Frame) and frame.head == entry.head
        ]
        kept = {id(entry) for entry, _ in good}
        for entry in entries:
            if id(entry) not in kept and state.forget(entry):
                state.counters.corrupt += 1
        for batch in self.batches([frame for _, frame in good]):
            moved, good = good[: len(batch)], good[len(batch) :]
            self._relocate([entry for entry, _ in moved], batch)

    def _relocate(self, entries: Sequence[Entry], frames: Sequence[Frame]) -> None:
        state = self._state
        rows = self._write([entry.row for entry in entries], frames)
        for entry, row in zip(entries, rows, strict=True):
            state.segments.release(entry.location)
            entry.location = row.location

    def _write(self, numbers: Sequence[int], frames: Sequence[Frame]) -> list[Row]:
        """The order that everything rests on: data, fsync, index. ``numbers`` are those of the rows."""
        state, segments = self._state, self._state.segments
        index = writable(state)
        mark = segments.mark()
        try:
            locations = segments.append(frames)
            segments.sync()
            rows = [
                Row(number, frame.shelf, frame.head, location, frame.meta)
                for number, frame, location in zip(numbers, frames, locations, strict=True)
            ]
            index.tidy()
            index.commit(put=rows, removed=state.removed)
        except BaseException:
            segments.roll_back(mark)
            raise
        state.removed.clear()
        for location in locations:
            segments.keep(location)
        return rows

    def _frame(self, shelf: Shelf, record: Record) -> Frame:
        plain = Frame.of(shelf, record)
        packed = self._compression.pack(plain.data)
        if packed is None:
            return plain
        smaller = plain._replace(data=packed, flags=COMPRESSED | self._compression.itemsize << 8)
        return smaller if bytes_of(smaller) < bytes_of(plain) else plain


def bytes_of(frame: Frame) -> int:
    """Length of a frame on disk."""
    return frame_bytes(len(frame.head.tokens), len(frame.data))


def writable(state: DiskState) -> DiskIndex:
    """The index, to change it.

    :raises StorageError: when the tier is open for reading only.
    """
    if state.index is None:
        raise StorageError("the disk tier is open for reading only")
    return state.index
