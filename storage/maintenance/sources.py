"""Stored blocks as tools meet them: a folder that may be a snapshot or a disk tier, and no engine at hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import StorageError
from ..base import Tier, TierGeometry
from ..disk.folder import read_identity
from ..disk.tier import DiskTier
from ..files.filesystem import Filesystem
from ..identity import Identity
from ..record import RecordCodec
from ..snapshot.files import read_manifest, resolved, storage_errors
from ..snapshot.format import MANIFEST
from ..snapshot.tier import SnapshotTier
from ..snapshot.writer import SnapshotSettings

UNBOUNDED: Final = 1 << 62
"""Bytes; as the bound of a disk tier: nothing is evicted."""
_MOST_TOKENS: Final = 1 << 20
_MOST_BYTES: Final = 1 << 40


class Found(NamedTuple):
    """The blocks of one identity in a folder."""

    kind: str
    """``snapshot`` or ``disk``."""
    path: Path
    """Folder of the snapshot, or the disk tier's ``path``."""
    identity: Identity
    version: int
    """Of the format."""
    created: float | None
    """Wall clock; ``None`` for a disk tier, which is written all the time."""

    @property
    def geometry(self) -> TierGeometry:
        """What a tier for these blocks is made with."""
        return geometry_of(self.identity)


def geometry_of(identity: Identity) -> TierGeometry:
    """What an engine of this identity gives to its tiers."""
    return TierGeometry(identity, codec_of(identity).record_bytes)


def codec_of(identity: Identity, key: bytes | None = None) -> RecordCodec:
    """Opens the records of an engine of this identity, and of no run in particular.

    :raises StorageError: when an identity has a geometry that no engine can have.
    """
    if not (0 < identity.block_size <= _MOST_TOKENS and 0 <= identity.payload_bytes <= _MOST_BYTES):
        raise StorageError("the identity of the blocks has a geometry that cannot be")
    return RecordCodec(block_size=identity.block_size, payload_bytes=identity.payload_bytes, run=bytes(8), key=key)


def find(fs: Filesystem, path: Path) -> list[Found]:
    """What is stored at ``path``: one snapshot, or a disk tier with one identity or more. Blocks.

    :raises StorageError: when it is neither.
    """
    path = resolved(path)
    with storage_errors(f"looking at {path}"):
        names = [item.name for item in fs.list_folder(path)]
        if MANIFEST in names:
            manifest = read_manifest(fs, path)
            return [Found("snapshot", path, manifest.identity, manifest.version, manifest.created)]
        if "identity.json" in names:  # the folder of one identity inside of a disk tier
            names, path = [path.name], path.parent
        homes = [(name, identified) for name in names if (identified := read_identity(fs, path / name)) is not None]
    found = [
        Found("disk", path, identified.identity, identified.format, None)
        for name, identified in homes
        if name == identified.identity.digest[: len(name)]
    ]
    if not found:
        raise StorageError(f"{path} holds neither a snapshot nor a disk tier of Octavo")
    return found


def only(found: list[Found], model: str | None) -> Found:
    """The one whose identity's digest starts with ``model``, or the only one there is.

    :raises StorageError: when that is not exactly one; the message lists them.
    """
    chosen = [each for each in found if model is None or each.identity.digest.startswith(model)]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(each.identity.digest[:16] for each in found)
    raise StorageError(
        f"{found[0].path} holds blocks of {len(found)} models ({there}), and {len(chosen)} of them fit; name one "
        "by its first digits"
    )


@asynccontextmanager
async def opened(found: Found, settings: SnapshotSettings) -> AsyncIterator[Tier]:
    """Its blocks as an open tier that is only read; closed at the end.

    :raises StorageError: when it cannot be opened.
    """
    tier: Tier
    if found.kind == "snapshot":
        tier = SnapshotTier(found.path, found.geometry, settings)
    else:
        options = {"path": str(found.path), "bytes": UNBOUNDED, "read_only": True, "strict": True}
        tier = DiskTier.create(options, found.geometry)
    try:
        await tier.open()
        yield tier
    finally:
        await tier.close()
