"""Frames: how one record lies in a segment file. A header that says what it is, its tokens, its data, zeros.

Two checksums: a short one over the header alone, so that a walk over a file can trust the lengths without reading the
data, and XXH3-128 over the whole frame, padding included, so that every flipped bit is seen. Both are seeded with the
identity, so that a frame of another model is no frame at all.

Layout, little-endian; a frame begins at a multiple of ``ALIGN`` and its length is one::

    magic 4s, version u16, flags u16, tokens_bytes u32, zero u32, start u64, stored_bytes u64, raw_bytes u64,
    written f64, idle f64, hits i64, priority i64, ttl f64 (NaN: none), recompute_seconds f64,
    namespace 32s, tenant 32s, parent 32s, name 32s, header_check 8s, check 16s,
    tokens, zeros up to a multiple of 64, data, zeros up to a multiple of ALIGN

``header_check`` covers all before it; ``check`` all but itself.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import xxhash

from ...errors import CorruptBlock
from ..base import Head, Meta, Record, Stored
from ..naming import Shelf

ALIGN = 4096
COMPRESSED = 1
"""Flag: the data is compressed; ``raw_bytes`` is its length before. The upper eight bits of the flags are the bytes of
one number then, by which they were sorted."""
MAGIC = b"OCTF"
VERSION = 1
_HEADER = struct.Struct("<4sHHIIQQQddqqdd32s32s32s32s")
_CHECKS = struct.Struct("<8s16s")
HEADER_BYTES = _HEADER.size + _CHECKS.size
_DATA_ALIGN = 64
_INT64 = 1 << 63
_ZEROS = bytes(ALIGN)


class Frame(NamedTuple):
    """One record, as it is written or was read."""

    shelf: Shelf
    head: Head
    meta: Meta
    data: memoryview
    raw_bytes: int
    """Length of the record; that of ``data`` unless it is compressed."""
    flags: int = 0

    @classmethod
    def of(cls, shelf: Shelf, record: Record) -> Frame:
        """``record`` as it is, not compressed."""
        return cls(shelf, record.head, record.meta, record.data, len(record.data))

    @property
    def itemsize(self) -> int:
        """Bytes of one number, if the data is compressed."""
        return self.flags >> 8

    @property
    def stored(self) -> Stored:
        """What a tier hands out for a frame that is not compressed."""
        return Stored(self.data, self.meta)


class FrameHead(NamedTuple):
    """What a frame's header says. Its checksum was right; the data was not looked at."""

    shelf: Shelf
    name: bytes
    parent: bytes
    start: int
    meta: Meta
    flags: int
    tokens_bytes: int
    stored_bytes: int
    raw_bytes: int

    @property
    def length(self) -> int:
        """Of the whole frame, in bytes."""
        return frame_bytes(self.tokens_bytes, self.stored_bytes)


def frame_bytes(tokens_bytes: int, stored_bytes: int) -> int:
    """Length of a frame, a multiple of ``ALIGN``."""
    return _up(_up(HEADER_BYTES + tokens_bytes, _DATA_ALIGN) + stored_bytes, ALIGN)


def seed_of(identity: str) -> int:
    """What the checksums of all frames of an identity are seeded with. ``identity``: its digest, in hex."""
    return int(identity[:16], 16)


def encode(frame: Frame, seed: int) -> list[bytes | memoryview]:
    """The frame as the buffers to write one after the other. The data is not copied."""
    shelf, head, data = frame.shelf, frame.head, memoryview(frame.data).cast("B")
    fixed = _HEADER.pack(
        MAGIC,
        VERSION,
        frame.flags,
        len(head.tokens),
        0,
        head.start,
        len(data),
        frame.raw_bytes,
        *_pack_meta(frame.meta),
        shelf.namespace,
        shelf.tenant,
        head.parent,
        head.name,
    )
    fixed += xxhash.xxh3_64_digest(fixed, seed)
    tokens = head.tokens.ljust(_up(HEADER_BYTES + len(head.tokens), _DATA_ALIGN) - HEADER_BYTES, b"\x00")
    padding = _ZEROS[: frame_bytes(len(head.tokens), len(data)) - HEADER_BYTES - len(tokens) - len(data)]
    check = xxhash.xxh3_128(seed=seed)
    for part in (fixed, tokens, data, padding):
        check.update(part)
    return [fixed + check.digest() + tokens, data, padding]


def decode_head(buffer: memoryview, seed: int) -> FrameHead | None:
    """The header at the start of ``buffer``; ``None`` when there is no whole and unaltered one."""
    if len(buffer) < HEADER_BYTES or buffer[:4] != MAGIC:
        return None
    short, _ = _CHECKS.unpack_from(buffer, _HEADER.size)
    if xxhash.xxh3_64_digest(buffer[: _HEADER.size], seed) != short:
        return None
    (_, version, flags, tokens_bytes, _, start, stored, raw, *meta, namespace, tenant, parent, name) = (
        _HEADER.unpack_from(buffer)
    )
    if version != VERSION:
        return None
    return FrameHead(
        Shelf(namespace, tenant), name, parent, start, _unpack_meta(*meta), flags, tokens_bytes, stored, raw
    )


def decode(buffer: memoryview, seed: int) -> Frame:
    """The frame that fills ``buffer``, its data a view of it.

    :raises CorruptBlock: when it is not one, whole and unaltered.
    """
    head = decode_head(buffer, seed)
    if head is None:
        raise CorruptBlock("a frame has no valid header")
    if head.length != len(buffer):
        raise CorruptBlock(f"a frame has {len(buffer)} bytes and claims {head.length}")
    at = HEADER_BYTES - 16
    check = xxhash.xxh3_128(seed=seed)
    check.update(buffer[:at])
    check.update(buffer[HEADER_BYTES:])
    if check.digest() != buffer[at:HEADER_BYTES]:
        raise CorruptBlock("the checksum of a frame is wrong")
    tokens = bytes(buffer[HEADER_BYTES : HEADER_BYTES + head.tokens_bytes])
    begin = _up(HEADER_BYTES + head.tokens_bytes, _DATA_ALIGN)
    return Frame(
        head.shelf,
        Head(head.name, head.parent, head.start, tokens),
        head.meta,
        buffer[begin : begin + head.stored_bytes],
        head.raw_bytes,
        head.flags,
    )


def _pack_meta(meta: Meta) -> tuple[float, float, int, int, float, float]:
    ttl = math.nan if meta.ttl is None else meta.ttl
    return meta.written, meta.idle, _int64(meta.hits), _int64(meta.priority), ttl, meta.recompute_seconds


def _unpack_meta(written: float, idle: float, hits: int, priority: int, ttl: float, seconds: float) -> Meta:
    return Meta(written, idle, hits, priority, None if math.isnan(ttl) else ttl, seconds)


def _int64(value: int) -> int:
    """The nearest one that fits: a policy's number must not keep a block from being written."""
    return max(-_INT64, min(value, _INT64 - 1))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
