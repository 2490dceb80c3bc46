"""The manifest of a snapshot, and where its files lie. See ``FORMAT.md`` for the whole format.

A snapshot is a folder::

    manifest.json           what belongs to it; replacing this one file is what makes a snapshot the current one
    manifest.json.new       the next one, for a moment
    lock                    held by whoever writes here
    <generation>/           16 hex digits, another one for every snapshot that was ever written here
        tree                which blocks there are
        blocks-00000.seg    their records

Nothing in a manifest is trusted: it is parsed into a fixed shape, compared with its checksum, and names no path: files
are called by number, and the generation is 16 hex digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

import msgspec
import xxhash

from ...errors import FingerprintMismatch, StorageError, describe
from ..base import MOST_NOTES, TierGeometry
from ..identity import Identity

FORMAT: Final = "octavo-snapshot"
VERSION: Final = 2
"""Of a snapshot with notes. One without is what version 1 was, and is still written as that."""
MANIFEST: Final = "manifest.json"
STAGED: Final = "manifest.json.new"
"""The manifest before it is moved to its place."""
LOCK: Final = "lock"
TREE: Final = "tree"
MAX_MANIFEST_BYTES: Final = 64 << 20
"""A larger file is no manifest, and is not read."""
Notes: TypeAlias = bytes  # which means something else inside of ``Manifest``
_S = TypeVar("_S")
_GENERATION = re.compile(r"[0-9a-f]{16}")
_CHECK = re.compile(r"[0-9a-f]{32}")
_MOST_BLOCKS = 1 << 31


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a generation."""

    bytes: int
    """Its length."""
    xxh3_128: str
    """Of all its bytes, in hex."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What belongs to a snapshot, and to which engines it may be shown."""

    generation: str
    """Name of the folder that its files lie in: 16 hex digits."""
    created: float
    """Wall clock, seconds since the epoch."""
    identity: Identity
    record_bytes: int
    """Length of every record."""
    blocks: int
    tree: FileEntry
    segments: tuple[FileEntry, ...]
    """In order of their numbers, from 0."""
    notes: Notes | None = None
    """What the engine has learned of the blocks, in a form of its own; not in version 1."""

    @property
    def version(self) -> int:
        """Of the format that it needs."""
        return 1 if self.notes is None else VERSION

    @property
    def bytes(self) -> int:
        """Of all its files, without the manifest itself."""
        return self.tree.bytes + sum(segment.bytes for segment in self.segments)

    def files(self) -> list[tuple[str, FileEntry]]:
        """Name and entry of every file, the tree first."""
        return [(TREE, self.tree), *((segment_name(number), entry) for number, entry in enumerate(self.segments))]

    def admit(self, geometry: TierGeometry) -> None:
        """:raises FingerprintMismatch: when an engine of ``geometry`` must not use the blocks; it says what differs."""
        differences = geometry.identity.differences(self.identity)
        if differences:
            raise FingerprintMismatch(
                f"the snapshot belongs to another model or cache: {'; '.join(differences)}. Start cold, or load the "
                "model and settings that it was made with."
            )
        if self.record_bytes != geometry.record_bytes:
            raise FingerprintMismatch(
                f"the snapshot has records of {self.record_bytes} bytes, this engine has {geometry.record_bytes}"
            )


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    check: str
    snapshot: msgspec.Raw


def segment_name(number: int) -> str:
    """Of the ``number``-th file with records."""
    return f"blocks-{number:05d}.seg"


def is_generation(name: str) -> bool:
    """Whether a folder of this name is one that snapshots are written to."""
    return _GENERATION.fullmatch(name) is not None


def encode_manifest(manifest: Manifest) -> bytes:
    """The file ``manifest.json``: one line of JSON."""
    body, version = msgspec.json.encode(manifest), manifest.version
    return _enclosed(_Envelope(FORMAT, version, _check(version, body), msgspec.Raw(body)))


def decode_manifest(data: bytes) -> Manifest:
    """The inverse, for every version that there has been.

    :raises StorageError: when ``data`` is something else, was altered, or has a version from the future.
    """
    envelope = _decoded(data, _Envelope, "has no manifest of Octavo")
    if envelope.format != FORMAT:
        raise StorageError(
            f"the manifest is of format {envelope.format!r}, not {FORMAT!r}; it is no snapshot of Octavo"
        )
    read = _READERS.get(envelope.version)
    if read is None:
        raise StorageError(
            f"the snapshot has format version {envelope.version}, this Octavo reads {', '.join(map(str, _READERS))}; "
            "use the release that wrote it, or a newer one"
        )
    body = bytes(envelope.snapshot)
    if envelope.check != _check(envelope.version, body) or _enclosed(envelope) != data:
        raise StorageError("the manifest of the snapshot was altered: its checksum is wrong; delete the snapshot")
    return read(body)


def _read_1(body: bytes) -> Manifest:
    manifest = _read_2(body)
    if manifest.notes is not None:
        raise StorageError("the manifest of the snapshot has what its version has not; delete the snapshot")
    return manifest


def _read_2(body: bytes) -> Manifest:
    manifest = _decoded(body, Manifest, "has a manifest that cannot be read")
    entries = [entry for _, entry in manifest.files()]
    sane = (
        is_generation(manifest.generation)
        and manifest.record_bytes > 0
        and 0 <= manifest.blocks < _MOST_BLOCKS
        and 0 < manifest.identity.block_size < _MOST_BLOCKS
        and len(manifest.notes or b"") <= MOST_NOTES
        and all(entry.bytes >= 0 and _CHECK.fullmatch(entry.xxh3_128) for entry in entries)
    )
    if not sane:
        raise StorageError("the manifest of the snapshot has values out of range; delete the snapshot")
    return manifest


_READERS: Mapping[int, Callable[[bytes], Manifest]] = MappingProxyType({1: _read_1, 2: _read_2})


def _check(version: int, body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(f"{FORMAT} {version} ".encode() + body)


def _enclosed(envelope: _Envelope) -> bytes:
    """The only spelling that is accepted, so that every altered byte shows."""
    return msgspec.json.encode(envelope) + b"\n"


def _decoded(data: bytes, kind: type[_S], problem: str) -> _S:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StorageError(f"the snapshot {problem}: {describe(error)}") from error
