"""Looking at every byte of a snapshot. Everything here blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ...errors import CorruptBlock, FingerprintMismatch, StorageError, describe
from ..files.filesystem import Filesystem
from ..files.segment import SegmentReader
from ..naming import Shelf
from ..record import KEYED, RecordCodec
from .files import OpenSnapshot, open_snapshot, read_manifest, resolved
from .format import FileEntry, Manifest

_CHUNK: Final = 1 << 20
_BATCH: Final = 32


class VerifyReport(NamedTuple):
    """What a look at every byte found."""

    files: int
    blocks: int
    bytes: int
    """Of all files together."""
    unsigned: int
    """Blocks with a signature that could not be checked, for want of the key; everything else about them was."""
    problems: list[str]
    """One line each; empty when all is well."""


def verify_snapshot(location: Path, fs: Filesystem, key: bytes | None = None) -> VerifyReport:
    """Check the manifest, the checksum of every file, that there are no others, every frame, the tree against the
    segments, and every record. ``key``: what the engine signs records with, if it does.

    :raises StorageError: never for what is wrong with the snapshot; that is in the report.
    """
    try:
        location = resolved(location)
        manifest = read_manifest(fs, location)
    except StorageError as error:
        return VerifyReport(0, 0, 0, 0, [str(error)])
    problems = [*_wrong_files(fs, location / manifest.generation, manifest)]
    unsigned = 0
    try:
        with closing(open_snapshot(fs, location, None)) as snapshot:
            problems += _wrong_segments(fs, location, snapshot)
            for problem in _wrong_blocks(snapshot, key):
                if problem is None:
                    unsigned += 1
                else:
                    problems.append(problem)
    except (StorageError, OSError) as error:
        problems.append(describe(error))
    files = manifest.files()
    return VerifyReport(len(files) + 1, manifest.blocks, manifest.bytes, unsigned, problems)


def record_problem(codec: RecordCodec, shelf: Shelf, name: bytes, data: memoryview, *, has_key: bool) -> str | None:
    """What is wrong with a record; the empty string when it is signed and there is no key to tell."""
    if not has_key and len(data) >= 8 and int.from_bytes(data[6:8], "little") & KEYED:
        return ""
    try:
        codec.open(shelf, name, data)
    except CorruptBlock as error:
        return str(error)
    return None


def _wrong_files(fs: Filesystem, folder: Path, manifest: Manifest) -> Iterator[str]:
    expected = dict(manifest.files())
    try:
        there = {item.name for item in fs.list_folder(folder)}
    except OSError as error:
        yield f"the folder of its files: {describe(error)}"
        return
    for name in sorted(there - expected.keys()):
        yield f"{name}: does not belong to the snapshot"
    for name, entry in expected.items():
        problem = _wrong_file(fs, folder / name, entry)
        if problem:
            yield f"{name}: {problem}"


def _wrong_file(fs: Filesystem, path: Path, entry: FileEntry) -> str:
    digest, length = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with fs.open_read(path) as file:
            while got := fs.read_into(file, length, buffer):
                digest.update(buffer[:got])
                length += got
    except OSError as error:
        return describe(error)
    if length != entry.bytes:
        return f"has {length} bytes instead of {entry.bytes}"
    return "" if digest.hexdigest() == entry.xxh3_128 else "the checksum is wrong"


def _wrong_segments(fs: Filesystem, location: Path, snapshot: OpenSnapshot) -> Iterator[str]:
    manifest, tree = snapshot.manifest, snapshot.tree
    expected = {tree.place(row) for row in tree.rows()}
    for number, (name, _) in enumerate(manifest.files()[1:]):
        path = location / manifest.generation / name
        with SegmentReader(fs, path, number=number, identity=manifest.identity.digest) as reader:
            try:
                reader.check()
            except (CorruptBlock, FingerprintMismatch) as error:
                yield f"{name}: {error}"
            for place, head in reader.walk():
                if head is None:
                    yield f"{name}: {place.length} bytes at {place.offset} are no block"
                elif place not in expected:
                    yield f"{name}: the block at {place.offset} is not in the tree"


def _wrong_blocks(snapshot: OpenSnapshot, key: bytes | None) -> Iterator[str | None]:
    """What is wrong; ``None`` for a block whose signature cannot be checked."""
    tree, identity = snapshot.tree, snapshot.manifest.identity
    codec = RecordCodec(block_size=identity.block_size, payload_bytes=identity.payload_bytes, run=bytes(8), key=key)
    rows = list(tree.rows())
    for at in range(0, len(rows), _BATCH):
        batch = rows[at : at + _BATCH]
        for row, found in zip(batch, snapshot.read(batch), strict=True):
            shelf, name = tree.shelf(row), tree.name(row)
            if isinstance(found, CorruptBlock):
                yield f"block {name.hex()[:12]}: {found}"
                continue
            problem = record_problem(codec, shelf, name, found.data, has_key=key is not None)
            if problem is not None:
                yield f"block {name.hex()[:12]}: {problem}" if problem else None
