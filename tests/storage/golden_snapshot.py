"""Makes the folders under ``golden``. Each was made once, when its format was new; a new format gets one of its own.

``golden_snapshot.py LOCATION [NOTES]``: without notes it is version 1, with some version 2.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

from octavo.storage.base import Meta
from octavo.storage.snapshot.writer import SnapshotSettings, SnapshotWriter
from octavo.storage.testing.contract import SampleBlocks


def main(location: Path, notes: bytes) -> None:
    """Write it, and print what it holds."""
    samples = SampleBlocks(block_size=4, payload_bytes=256)
    public, secret = samples.shelf(), samples.shelf("tenant", adapter="adapter")
    settings = SnapshotSettings(wall=lambda: 1_700_000_000.0, generation=lambda: "0f" * 8, segment_bytes=4 * 4096)
    writer = SnapshotWriter(location, samples.geometry, settings)
    writer.begin()
    chain = samples.chain(public, 3, meta=Meta(1_699_999_000.0, 2.5, 7, 3, 600.0, 0.25))
    writer.add(public, chain)
    writer.add(public, samples.chain(public, 1, seed=1, after=chain[0].head))
    writer.add(secret, samples.chain(secret, 3)[1:])  # the first block of the prompt is missing
    writer.note(notes)
    writer.commit()
    writer.abandon()
    for shelf in (public, secret):
        for record in [
            *samples.chain(shelf, 3),
            *samples.chain(shelf, 1, seed=1, after=samples.chain(shelf, 1)[0].head),
        ]:
            sys.stdout.write(f'"{record.head.name.hex()}": "{sha256(record.data).hexdigest()}",\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]), "".join(sys.argv[2:]).encode())
