"""Records: the sealed form of a block, the same in every tier. A header, then K and V as the runner exports them.

The header says which block it is, and a checksum covers header and payload. With a key the checksum is a MAC (BLAKE2b
instead of XXH3), so that only engines which know the key can write blocks that others accept. Nothing is unpickled; no
length in a record is trusted before it is compared with what this engine expects.

Layout, little-endian, ``header_bytes`` a multiple of 64::

    magic 4s, version u16, flags u16, header_bytes u32, block_tokens u32, start u64, payload_bytes u64,
    created f64 (wall clock), run 8s, namespace 32s, tenant 32s, parent 32s, name 32s, check 16s,
    tokens i32 * block_tokens, zeros up to header_bytes, payload
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptBlock
from .base import Head
from .naming import TOKEN_BYTES, BlockName, Shelf, name_after

MAGIC = b"OCTB"
VERSION = 1
KEYED = 1
_FIXED = struct.Struct("<4sHHIIQQd8s32s32s32s32s16s")
_CHECK_AT = _FIXED.size - 16
_ALIGN = 64

UInt8Array = npt.NDArray[np.uint8]


class Opened(NamedTuple):
    """What a record held, checked."""

    head: Head
    payload: memoryview
    """K and V of the block, ``payload_bytes`` long."""
    own: bool
    """Whether this very run of this engine sealed it; otherwise an earlier run or another engine did."""


class RecordCodec:
    """Seals and opens the records of one engine. Stateless apart from its settings; safe in any thread."""

    def __init__(self, *, block_size: int, payload_bytes: int, run: bytes, key: bytes | None = None) -> None:
        """``run``: 8 random bytes that name this run of the engine. ``key``: up to 64 bytes that all who may write
        share; ``None``: whoever can write to a tier is trusted not to forge, only accidents are found.
        """
        self.block_size = block_size
        self.payload_bytes = payload_bytes
        self.header_bytes = -(-(_FIXED.size + block_size * TOKEN_BYTES) // _ALIGN) * _ALIGN
        self.record_bytes = self.header_bytes + payload_bytes
        self._run = run
        self._key = key

    def buffer(self, count: int) -> UInt8Array:
        """Memory for ``count`` records, not initialised. Shape [count, record_bytes]."""
        return np.empty((count, self.record_bytes), dtype=np.uint8)

    def payloads(self, buffer: UInt8Array) -> UInt8Array:
        """The part of each record that a runner exports into. A view, shape [count, payload_bytes]."""
        return buffer[:, self.header_bytes :]

    def seal(self, row: UInt8Array, shelf: Shelf, head: Head, created: float) -> memoryview:
        """Write the header in front of the payload that is in ``row`` already; returns the whole record."""
        flags = 0 if self._key is None else KEYED
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            flags,
            self.header_bytes,
            self.block_size,
            head.start,
            self.payload_bytes,
            created,
            self._run,
            shelf.namespace,
            shelf.tenant,
            head.parent,
            head.name,
            bytes(16),
        )
        header = (fixed + head.tokens).ljust(self.header_bytes, b"\x00")
        record = row.data
        record[: self.header_bytes] = header
        record[_CHECK_AT : _CHECK_AT + 16] = self._check(record)
        return record

    def open(self, shelf: Shelf, name: BlockName, data: memoryview) -> Opened:
        """The block ``name`` of ``shelf``, if ``data`` is that very block, whole and unaltered.

        :raises CorruptBlock: otherwise; the message says what is wrong.
        """
        if len(data) != self.record_bytes:
            raise CorruptBlock(f"a stored block has {len(data)} bytes instead of {self.record_bytes}")
        (magic, version, flags, header_bytes, tokens, start, payload_bytes, _, run, *names, check) = _FIXED.unpack_from(
            data
        )
        if (magic, version) != (MAGIC, VERSION):
            raise CorruptBlock(f"a stored block has magic {magic!r} and version {version}")
        if (header_bytes, tokens, payload_bytes) != (self.header_bytes, self.block_size, self.payload_bytes):
            raise CorruptBlock("a stored block has another geometry than this engine")
        if flags != (0 if self._key is None else KEYED):
            raise CorruptBlock("a stored block is signed and no key is set, or the other way round")
        if not hmac.compare_digest(check, self._check(data)):
            raise CorruptBlock("the checksum of a stored block is wrong")
        head = Head(names[3], names[2], start, bytes(data[_FIXED.size : _FIXED.size + self.block_size * TOKEN_BYTES]))
        if head.name != name or tuple(names[:2]) != shelf or name_after(head.parent, head.tokens) != name:
            raise CorruptBlock("a stored block is another one than was asked for")
        return Opened(head, data[self.header_bytes :], run == self._run)

    def _check(self, record: memoryview) -> bytes:
        """Over the whole record, the place of the checksum itself read as if it were not there."""
        digest = xxhash.xxh3_128() if self._key is None else hashlib.blake2b(digest_size=16, key=self._key)
        digest.update(record[:_CHECK_AT])
        digest.update(record[_CHECK_AT + 16 :])
        return digest.digest()
