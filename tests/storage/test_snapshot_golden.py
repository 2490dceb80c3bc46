"""Snapshots of every version that there has been stay readable, byte for byte.

They were made by ``golden_snapshot.py``, each when its format was new. They are never made again: when this fails, the
reader is wrong.
"""

from __future__ import annotations

from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from octavo.errors import CorruptBlock
from octavo.storage.base import Meta, TierGeometry
from octavo.storage.files.filesystem import Filesystem
from octavo.storage.identity import Identity
from octavo.storage.naming import Namespace, Shelf
from octavo.storage.record import RecordCodec
from octavo.storage.snapshot.files import OpenSnapshot, open_snapshot
from octavo.storage.snapshot.verify import verify_snapshot

GOLDEN = Path(__file__).parent / "golden"
NOTES = {1: None, 2: b'{"what":"was learned"}'}
IDENTITY = Identity((("weights", "sample"),), 4, 256, "octavo-block-1")
CODEC = RecordCodec(block_size=4, payload_bytes=256, run=bytes(8))
PUBLIC = Namespace(IDENTITY.digest).shelf()
SECRET = Namespace(IDENTITY.digest, "adapter", "tenant").shelf()
BLOCKS = [  # name, start, hits, and SHA-256 of the record, as they were written
    (PUBLIC, "e980ebe1296facea61a4e36e839b8aa6196bf69d42a72e529a0d9aea3f9e1de4", 0, 7, "79232f24190742f7"),
    (PUBLIC, "f9d38be2fae11bd9cbe79af9e35d497ebf444c3f9dbbd78939c061233dfe84a7", 4, 7, "179eb3bedadfd5ab"),
    (PUBLIC, "d6d4f83f27b1c3a065d4eac18df1c03247c9f69ee523d9b65fa63862588f5bc2", 8, 7, "80ce0ce3cada6da6"),
    (PUBLIC, "b0794745b1143b0af8bcb14ecdc0b738b695518fa1e84552244f70b1a201f9f9", 4, 0, "ad81e12b8f89eb71"),
    (SECRET, "f2d2e5718ce96f7c39ee2f79cdaf83932e4d097144371304d66c3496c0aef7eb", 4, 0, "c8c4837bf90e5d51"),
    (SECRET, "3de08850fdc9d6a16ec55b1ba637eb9b3371520d6581ee817ff9a38d99d4b5c4", 8, 0, "ddd1e662ff471a8a"),
]


def contents(snapshot: OpenSnapshot) -> list[tuple[Shelf, str, int, int, str]]:
    rows = list(snapshot.tree.rows())
    found = []
    for row, item in zip(rows, snapshot.read(rows), strict=True):
        assert not isinstance(item, CorruptBlock)
        shelf, head = snapshot.tree.shelf(row), snapshot.tree.head(row)
        assert CODEC.open(shelf, head.name, item.data).head == head
        found.append((shelf, head.name.hex(), head.start, item.meta.hits, sha256(item.data).hexdigest()[:16]))
    return found


@pytest.mark.parametrize("version", NOTES)
def test_every_version_is_read(version: int) -> None:
    location = GOLDEN / f"snapshot-{version}"
    assert f'"version":{version},'.encode() in (location / "manifest.json").read_bytes()
    with closing(open_snapshot(Filesystem(), location, TierGeometry(IDENTITY, 512))) as snapshot:
        assert snapshot.manifest.notes == NOTES[version]
        assert contents(snapshot) == BLOCKS
        assert snapshot.manifest.created == 1_700_000_000.0
        assert snapshot.tree.meta(1) == Meta(1_699_999_000.0, 2.5, 7, 3, 600.0, 0.25)
        assert snapshot.tree.meta(3) == Meta()


@pytest.mark.parametrize("version", NOTES)
def test_every_version_is_verified(version: int) -> None:
    assert verify_snapshot(GOLDEN / f"snapshot-{version}", Filesystem()) == (4, 6, 33519, 0, [])
