"""The files of a snapshot, opened for reading. Everything here blocks; callers run it in threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from ...errors import CorruptBlock, StorageError, describe
from ..base import Stored, TierGeometry
from ..files.filesystem import Filesystem
from ..files.frame import Frame
from ..files.segment import Location, SegmentReader
from .format import MANIFEST, MAX_MANIFEST_BYTES, TREE, Manifest, decode_manifest, segment_name
from .tree import Tree, decode_tree

_TRIES: Final = 8
"""How often the snapshot may be replaced while it is being opened."""


@contextlib.contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Errors of the system become :class:`StorageError`, which says that it happened while ``doing`` something."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{doing} failed: {describe(error)}") from error


def resolved(location: Path) -> Path:
    """The folder that ``location`` means; links are followed.

    :raises StorageError: when it cannot be a path.
    """
    if "\x00" in str(location):
        raise StorageError(f"{str(location)!r} cannot be the path of a snapshot")
    return Path(os.path.realpath(location))


def read_manifest(fs: Filesystem, location: Path) -> Manifest:
    """Of the snapshot at ``location``.

    :raises StorageError: when there is none, or one that cannot be used.
    """
    try:
        data = fs.read_file(location / MANIFEST, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(f"there is no snapshot at {location}") from error
    except OSError as error:
        raise StorageError(f"the manifest of the snapshot at {location} cannot be read: {describe(error)}") from error
    return decode_manifest(data)


class OpenSnapshot:
    """A snapshot whose files are open: it can be read to the end, also after another one has taken its place.

    Safe in any thread. Reads that run while it is closed are finished first.
    """

    def __init__(self, manifest: Manifest, tree: Tree, segments: Sequence[SegmentReader]) -> None:
        """Use :func:`open_snapshot`."""
        self.manifest = manifest
        self.tree = tree
        self._segments = segments
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False

    def read(self, rows: Sequence[int]) -> list[Stored | CorruptBlock]:
        """The records of ``rows`` of the tree, in order; for each that is bad, why.

        :raises StorageError: when the files cannot be read now, or are closed.
        """
        with self._reading(), storage_errors("reading a snapshot"):
            return self._read(rows)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
        self._release()

    def _read(self, rows: Sequence[int]) -> list[Stored | CorruptBlock]:
        by_segment: dict[int, list[tuple[Location, int]]] = defaultdict(list)
        for at, row in enumerate(rows):
            place = self.tree.place(row)
            by_segment[place.segment].append((place, at))
        found: dict[int, Stored | CorruptBlock] = {}
        for number, wanted in by_segment.items():
            wanted.sort()  # neighbours are read in one go
            frames = self._segments[number].read_many([place for place, _ in wanted])
            for (_, at), frame in zip(wanted, frames, strict=True):
                found[at] = self._stored(rows[at], frame)
        return [found[at] for at in range(len(rows))]

    def _stored(self, row: int, frame: Frame | CorruptBlock) -> Stored | CorruptBlock:
        if isinstance(frame, CorruptBlock):
            return frame
        if (frame.shelf, frame.head) != (self.tree.shelf(row), self.tree.head(row)):
            return CorruptBlock("the snapshot has another block where its tree expects this one")
        if frame.flags or len(frame.data) != self.manifest.record_bytes:
            return CorruptBlock("a block of the snapshot has another length than its manifest says")
        return Stored(frame.data, self.tree.meta(row))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StorageError("the snapshot is closed")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
            self._release()

    def _release(self) -> None:
        with self._lock:
            if self._closed and not self._readers:
                for segment in self._segments:
                    segment.close()


def open_snapshot(fs: Filesystem, location: Path, geometry: TierGeometry | None) -> OpenSnapshot:
    """Open what is at ``location`` and read its tree: one pass, and no record is touched.

    :param geometry: what the engine has; ``None``: tools take any.
    :raises FingerprintMismatch: when it was made by another model or with another geometry.
    :raises StorageError: when there is none, or its files are not those that its manifest lists.
    """
    location = resolved(location)
    for _ in range(_TRIES):
        manifest = read_manifest(fs, location)
        if geometry is not None:
            manifest.admit(geometry)
        try:
            return _open_files(fs, location, manifest)
        except (OSError, StorageError) as error:
            if read_manifest(fs, location).generation == manifest.generation:
                raise StorageError(f"the snapshot at {location} cannot be used: {describe(error)}") from error
    raise StorageError(f"the snapshot at {location} is being replaced all the time")


def _open_files(fs: Filesystem, location: Path, manifest: Manifest) -> OpenSnapshot:
    folder = location / manifest.generation
    tree = decode_tree(_read_tree(fs, folder / TREE, manifest), manifest.identity.block_size)
    if len(tree) != manifest.blocks:
        raise StorageError(f"its tree has {len(tree)} blocks instead of {manifest.blocks}")
    tree.check_places([entry.bytes for entry in manifest.segments])
    with contextlib.ExitStack() as stack:
        readers = []
        for number, entry in enumerate(manifest.segments):
            path = folder / segment_name(number)
            check_length(fs, path, entry.bytes)
            reader = SegmentReader(fs, path, number=number, identity=manifest.identity.digest)
            readers.append(stack.enter_context(reader))
        stack.pop_all()
        return OpenSnapshot(manifest, tree, readers)


def _read_tree(fs: Filesystem, path: Path, manifest: Manifest) -> bytes:
    check_length(fs, path, manifest.tree.bytes)
    data = fs.read_file(path, manifest.tree.bytes)
    if xxhash.xxh3_128_hexdigest(data) != manifest.tree.xxh3_128:
        raise StorageError("the checksum of its tree is wrong")
    return data


def check_length(fs: Filesystem, path: Path, length: int) -> None:
    """:raises StorageError: when the file is not there or not ``length`` bytes long."""
    found = fs.file_bytes(path)
    if found != length:
        raise StorageError(f"its file {path.name} has {found} bytes instead of {length}")
