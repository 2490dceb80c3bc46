"""Writing a snapshot, so that a crash at any point leaves the old one or the new one. Everything here blocks.

All files go into a folder of their own, a *generation*, and are synced; so is the manifest, which names the generation.
Then one rename puts the manifest in its place, and the folder is synced. That rename is the whole commit: before it the
old manifest names the old generation, after it the new one the new. There is no moment without a manifest, as there is
when whole folders change places. The old generation goes only when the new manifest is durable; what a crash leaves
behind is a generation that no manifest names, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ...errors import StorageError
from ..base import MOST_NOTES, Record, TierGeometry
from ..files.filesystem import File, Filesystem
from ..files.frame import Frame, frame_bytes
from ..files.segment import SegmentWriter
from ..naming import Shelf
from .files import read_manifest, resolved, storage_errors
from .format import (
    LOCK,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STAGED,
    TREE,
    FileEntry,
    Manifest,
    encode_manifest,
    is_generation,
    segment_name,
)
from .tree import TreeWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How snapshots are written, and with what."""

    fs: Filesystem = field(default_factory=Filesystem)
    wall: Callable[[], float] = time.time
    generation: Callable[[], str] = lambda: secrets.token_hex(8)
    """Gives 16 hex digits, other ones each time."""
    segment_bytes: int = 256 << 20
    """Where a segment is full; it may be longer by one record."""
    free_floor: int = 256 << 20
    """Bytes that must stay free on the file system."""


class SnapshotWriter:
    """One snapshot on its way to ``location``. Its methods may come from any thread; they run one after the other."""

    def __init__(self, location: Path, geometry: TierGeometry, settings: SnapshotSettings) -> None:
        """Touches nothing; ``begin`` does."""
        generation = settings.generation()
        self._fs = settings.fs
        self._location = location
        self._folder = location / generation
        self._geometry = geometry
        self._generation = generation
        self._created = settings.wall()
        self._segment_bytes = settings.segment_bytes
        self._free_floor = settings.free_floor
        self._tree = TreeWriter()
        self._segments: list[FileEntry] = []
        self._segment: _Segment | None = None
        self._notes: bytes | None = None
        self._held: File | None = None
        self._working = threading.Lock()
        self._unwanted = False
        self._usable = False
        self._in_doubt = False
        """Whether it is not known which of two manifests the disk has: the files of both stay then."""

    def begin(self) -> None:
        """Claim the location.

        :raises StorageError: when somebody else writes there, it holds something else, or nothing can be written.
        """
        with self._working, self._failing("starting a snapshot"):
            if self._unwanted:
                raise StorageError("the snapshot was abandoned; begin another one")
            self._location = resolved(self._location)
            self._folder = self._location / self._generation
            _refuse_foreign(self._fs, self._location)
            self._fs.make_folder(self._location)
            try:
                self._held = self._fs.lock(self._location / LOCK)
            except BlockingIOError as error:
                raise StorageError(f"somebody else is writing the snapshot at {self._location}") from error
            self._set_aside(self._location / MANIFEST)
            self._remove_strays()
            self._fs.make_folder(self._folder)
            self._usable = True

    def add(self, shelf: Shelf, records: Sequence[Record]) -> None:
        """Write more blocks; those that it has already are passed over.

        :raises StorageError: when they cannot be written.
        """
        with self._working, self._failing("writing a snapshot"):
            self._check_usable()
            for record in records:
                if self._unwanted:
                    return
                if (shelf, record.head.name) not in self._tree:
                    self._append(shelf, record)

    def note(self, notes: bytes) -> None:
        """Put ``notes`` into the manifest.

        :raises StorageError: when they are too long, or nothing can be written any more.
        """
        with self._working, self._failing("writing a snapshot"):
            self._check_usable()
            if len(notes) > MOST_NOTES:
                raise StorageError(f"{len(notes)} bytes of notes are more than {MOST_NOTES}")
            self._notes = notes or None

    def commit(self) -> int:
        """Make it the snapshot at its location; returns how many blocks it has.

        :raises StorageError: when that cannot be done; the one before is still there then.
        """
        with self._working, self._failing("completing a snapshot"):
            self._check_usable()
            self._finish_segment()
            staged = self._write_manifest(self._write_tree())
            for folder in (self._folder, self._location, self._location.parent):
                self._fs.fsync_folder(folder)
            self._publish(staged)
            self._usable = False
            with contextlib.suppress(OSError):  # the snapshot is safe; the next writer removes what stays behind
                self._remove_strays()
            self._unlock()
            return len(self._tree)

    def stop(self) -> None:
        """Let a call of ``add`` that runs in another thread end soon."""
        self._unwanted = True

    def abandon(self) -> None:
        """Remove what was written, unless it is the snapshot by now. Idempotent; raises nothing."""
        self._unwanted = True
        with self._working, contextlib.suppress(OSError):
            self._usable = False
            if self._segment is not None:
                self._segment.close()
            if self._held is not None and not self._in_doubt:
                self._remove_strays()
        self._unlock()

    def _append(self, shelf: Shelf, record: Record) -> None:
        if len(record.data) != self._geometry.record_bytes:
            raise StorageError(f"a record has {len(record.data)} bytes instead of {self._geometry.record_bytes}")
        if len(record.head.tokens) != self._geometry.identity.block_size * 4:
            raise StorageError("a block has another number of tokens than the cache's blocks")
        needed = frame_bytes(len(record.head.tokens), len(record.data))
        if self._fs.free_bytes(self._location) < self._free_floor + needed:
            raise StorageError(
                f"less than {self._free_floor} bytes would stay free on the file system of {self._location}"
            )
        if self._segment is None:
            number = len(self._segments)
            self._segment = _Segment(self._fs, self._folder, number, self._geometry.identity.digest)
        [place] = self._segment.writer.append([Frame.of(shelf, record)])
        self._tree.add(shelf, record.head, record.meta, place)
        if self._segment.writer.end >= self._segment_bytes:
            self._finish_segment()

    def _finish_segment(self) -> None:
        if self._segment is not None:
            segment, self._segment = self._segment, None
            self._segments.append(segment.finish())

    def _write_tree(self) -> FileEntry:
        data = self._tree.encode()
        self._write_file(self._folder / TREE, data)
        return FileEntry(len(data), xxhash.xxh3_128_hexdigest(data))

    def _write_manifest(self, tree: FileEntry) -> Path:
        manifest = Manifest(
            generation=self._generation,
            created=self._created,
            identity=self._geometry.identity,
            record_bytes=self._geometry.record_bytes,
            blocks=len(self._tree),
            tree=tree,
            segments=tuple(self._segments),
            notes=self._notes,
        )
        staged = self._location / STAGED
        self._write_file(staged, encode_manifest(manifest))
        return staged

    def _write_file(self, path: Path, data: bytes) -> None:
        with self._fs.create(path) as file:
            self._fs.write(file, 0, [data])
            self._fs.fsync(file)

    def _publish(self, staged: Path) -> None:
        """The commit. When it may not last it is taken back, so that an error means what the contract says."""
        manifest = self._location / MANIFEST
        before = self._before(manifest)
        self._fs.rename(staged, manifest)
        try:
            self._fs.fsync_folder(self._location)
        except OSError:
            self._in_doubt = True
            with contextlib.suppress(OSError):
                self._take_back(manifest, staged, before)
                self._in_doubt = False
            raise

    def _take_back(self, manifest: Path, staged: Path, before: bytes | None) -> None:
        if before is None:
            self._fs.unlink(manifest)
        else:
            self._write_file(staged, before)
            self._fs.rename(staged, manifest)
        self._fs.fsync_folder(self._location)

    def _before(self, manifest: Path) -> bytes | None:
        try:
            return self._fs.read_file(manifest, MAX_MANIFEST_BYTES) or None
        except OSError:  # none, or none that anybody could read
            return None

    def _set_aside(self, manifest: Path) -> None:
        """A folder in place of the manifest would keep every later one from its place."""
        if any(item.name == MANIFEST and item.is_folder for item in self._fs.list_folder(self._location)):
            self._fs.rename(manifest, manifest.with_name(f"{MANIFEST}.broken-{self._generation}"))

    def _current(self) -> str | None:
        """The generation that the manifest names, empty when there is no manifest; ``None`` when it cannot be read, and
        with it what has to stay.
        """
        try:
            return read_manifest(self._fs, self._location).generation
        except StorageError as error:
            return "" if isinstance(error.__cause__, FileNotFoundError) else None

    def _remove_strays(self) -> None:
        """Remove all that no manifest names: what a crash left, what was given up, the snapshot before. Files that
        somebody has open stay readable.
        """
        current = self._current()
        for item in self._fs.list_folder(self._location):
            if item.name == STAGED:
                self._fs.unlink(self._location / STAGED)
            elif current is not None and item.is_folder and is_generation(item.name) and item.name != current:
                _remove_folder(self._fs, self._location / item.name)

    def _unlock(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _check_usable(self) -> None:
        if not self._usable or self._unwanted:
            raise StorageError("the snapshot was committed, was abandoned or has failed before; begin another one")

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """After an error nothing more is written: what was before it may not be on the disk."""
        try:
            with storage_errors(f"{doing} at {self._location}"):
                yield
        except BaseException:
            self._usable = False
            raise


class _Segment:
    """A segment that is being written, and the checksum of its file."""

    def __init__(self, fs: Filesystem, folder: Path, number: int, identity: str) -> None:
        self._fs = _Digesting(fs)
        self.writer = SegmentWriter(self._fs, folder / segment_name(number), number=number, identity=identity)

    def finish(self) -> FileEntry:
        try:
            self.writer.sync()
        finally:
            self.close()
        return FileEntry(self.writer.end, self._fs.digest.hexdigest())

    def close(self) -> None:
        self.writer.close()


class _Digesting(Filesystem):
    """Hands on to another one and reckons the checksum of the one file that is written through it, front to back."""

    def __init__(self, inner: Filesystem) -> None:
        self._inner = inner
        self.digest = xxhash.xxh3_128()

    def create(self, path: Path) -> File:
        return self._inner.create(path)

    def write(self, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        self._inner.write(file, offset, buffers)
        for buffer in buffers:
            self.digest.update(buffer)

    def fsync(self, file: File) -> None:
        self._inner.fsync(file)


def _remove_folder(fs: Filesystem, folder: Path) -> None:
    """Remove a folder, with whatever is in it.

    :raises OSError: when something cannot be removed.
    """
    for item in fs.list_folder(folder):
        if item.is_folder:
            _remove_folder(fs, folder / item.name)
        else:
            fs.unlink(folder / item.name)
    fs.remove_folder(folder)


def _refuse_foreign(fs: Filesystem, location: Path) -> None:
    """A folder with something else in it is not made ours: its mode would change, and files might go."""
    try:
        names = [item.name for item in fs.list_folder(location)]
    except FileNotFoundError:
        return
    if names and not any(name in {MANIFEST, LOCK} or is_generation(name) for name in names):
        raise StorageError(f"{location} holds something else than a snapshot; name an empty or a new folder")
