"""How the object store tier lays out an object.

Object ``prefix/tenant/namespace/ab/name`` (digests in hex, ``ab`` the name's first two digits), little-endian::

    magic 4s, version u16, zero u16, about_bytes u32, zero u32, record_bytes u64, about (see meta_codec), record
"""

from __future__ import annotations

import struct

from ...errors import CorruptBlock
from ..base import Record
from ..meta_codec import ABOUT_BYTES, About, pack_about, unpack_about
from ..naming import NAME_BYTES, BlockName, Shelf

_MAGIC = b"OCTO"
_VERSION = 1
_FIXED = struct.Struct("<4sHHIIQ")
FIXED_BYTES = _FIXED.size
"""What comes before that which is known about the block."""


def framed(record: Record) -> bytes:
    """The object of a record, in memory of its own."""
    about = pack_about(record.head, record.meta)
    fixed = _FIXED.pack(_MAGIC, _VERSION, 0, len(about), 0, len(record.data))
    return b"".join((fixed, about, record.data))


def about_end(data: memoryview) -> int:
    """Where the record begins.

    :raises CorruptBlock: when ``data`` is no beginning of an object of this tier.
    """
    if len(data) < FIXED_BYTES:
        raise CorruptBlock(f"an object has {len(data)} bytes")
    magic, version, zero, about_bytes, also_zero, _ = _FIXED.unpack_from(data)
    if (magic, version, zero, also_zero) != (_MAGIC, _VERSION, 0, 0) or about_bytes > ABOUT_BYTES:
        raise CorruptBlock(f"an object has magic {magic!r} and version {version}")
    return FIXED_BYTES + int(about_bytes)


def about_in(data: memoryview, name: BlockName) -> tuple[About, int]:
    """What an object, or its beginning, says about the block, and where the record begins.

    :raises CorruptBlock: when it is broken or belongs to another name.
    """
    end = about_end(data)
    return unpack_about(data[FIXED_BYTES:end], name), end


def place_of(path: str) -> tuple[Shelf, BlockName] | None:
    """Which block lies at ``path``; ``None``: it is none of ours."""
    tenant, namespace, _, name = ["", "", "", "", *path.split("/")][-4:]
    if {len(tenant), len(namespace), len(name)} != {2 * NAME_BYTES}:
        return None
    try:
        return Shelf(bytes.fromhex(namespace), bytes.fromhex(tenant)), bytes.fromhex(name)
    except ValueError:
        return None
