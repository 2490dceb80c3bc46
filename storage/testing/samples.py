"""Blocks for tests of tiers."""

from __future__ import annotations

from hashlib import shake_128

from ..base import Head, Meta, Record, TierGeometry
from ..identity import Identity
from ..naming import Namespace, Shelf, name_after
from ..record import RecordCodec


class SampleBlocks:
    """Sealed blocks for tests. A block's payload is a function of its name, so that a wrong byte is always noticed."""

    def __init__(self, *, block_size: int = 4, payload_bytes: int = 512) -> None:
        self.codec = RecordCodec(block_size=block_size, payload_bytes=payload_bytes, run=b"sample--")
        self.identity = Identity.of({"weights": "sample"}, block_size=block_size, payload_bytes=payload_bytes)
        self.geometry = TierGeometry(self.identity, self.codec.record_bytes)

    def shelf(self, tenant: str | None = None, *, adapter: str | None = None) -> Shelf:
        """The shelf of a tenant; another one for each adapter."""
        return Namespace(self.identity.digest, adapter, tenant).shelf()

    def chain(
        self, shelf: Shelf, count: int, *, seed: int = 0, after: Head | None = None, meta: Meta | None = None
    ) -> list[Record]:
        """``count`` blocks, one after the other, from the start of a prompt or ``after`` a block."""
        size = self.codec.block_size
        parent, start = (shelf.namespace, 0) if after is None else (after.name, after.start + size)
        records = []
        for at in range(count):
            tokens = shake_128(f"tokens {seed} {at}".encode()).digest(4 * size)
            head = Head(name_after(parent, tokens), parent, start + at * size, tokens)
            records.append(Record(head, self.sealed(shelf, head), meta or Meta()))
            parent = head.name
        return records

    def sealed(self, shelf: Shelf, head: Head) -> memoryview:
        """The one right record of a block, in memory of its own."""
        row = self.codec.buffer(1)
        payload = shake_128(head.name).digest(self.codec.payload_bytes)
        self.codec.payloads(row)[0].data[:] = payload
        return self.codec.seal(row[0], shelf, head, 0.0)
