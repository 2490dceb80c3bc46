"""What is known about a block as bytes, for tiers that keep it beside their records: a checksum, then msgpack."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from ..errors import CorruptBlock
from .base import Head, Meta
from .naming import NAME_BYTES, BlockName, name_after

META_BYTES = 96
"""No packed :class:`Meta` is longer."""
ABOUT_BYTES = 1 << 20
"""No packed head with meta is longer: room for a block of 260,000 tokens."""
_CHECK_BYTES = 8
_MOST = 2**62

_T = TypeVar("_T")


class About(NamedTuple):
    """What is known about a block."""

    head: Head
    meta: Meta


def pack_meta(meta: Meta) -> bytes:
    """``meta`` in at most ``META_BYTES`` bytes. What is not finite becomes 0, what is too large the largest number."""
    return _pack(_plain(meta))


def unpack_meta(data: bytes | memoryview) -> Meta:
    """The inverse.

    :raises CorruptBlock: for anything that ``pack_meta`` did not write; nothing is trusted before its checksum.
    """
    return _unpack(data, Meta, META_BYTES)


def pack_about(head: Head, meta: Meta) -> bytes:
    """``head`` and ``meta`` in at most ``ABOUT_BYTES`` bytes, for tiers that have no index of their own."""
    return _pack(About(head, _plain(meta)))


def unpack_about(data: bytes | memoryview, name: BlockName) -> About:
    """The inverse, for what was found under ``name``.

    :raises CorruptBlock: for anything that ``pack_about`` did not write, or wrote for another block.
    """
    about = _unpack(data, About, ABOUT_BYTES)
    head = about.head
    if head.name != name or len(head.parent) != NAME_BYTES or name_after(head.parent, head.tokens) != name:
        raise CorruptBlock("what is known about a stored block belongs to another one")
    return about


def _pack(value: object) -> bytes:
    packed = msgspec.msgpack.encode(value)
    return xxhash.xxh3_64_digest(packed) + packed


def _unpack(data: bytes | memoryview, kind: type[_T], most: int) -> _T:
    if not _CHECK_BYTES < len(data) <= most:
        raise CorruptBlock(f"what is known about a stored block has {len(data)} bytes")
    packed = bytes(data[_CHECK_BYTES:])
    if xxhash.xxh3_64_digest(packed) != bytes(data[:_CHECK_BYTES]):
        raise CorruptBlock("the checksum of what is known about a stored block is wrong")
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptBlock("what is known about a stored block cannot be read") from error


def _plain(meta: Meta) -> Meta:
    return Meta(
        written=_finite(meta.written),
        idle=_finite(meta.idle),
        hits=_whole(meta.hits),
        priority=_whole(meta.priority),
        ttl=None if meta.ttl is None else _finite(meta.ttl),
        recompute_seconds=_finite(meta.recompute_seconds),
    )


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


def _whole(value: int) -> int:
    return max(-_MOST, min(int(value), _MOST))
