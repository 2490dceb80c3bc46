"""Digests: what a replica has cached, in few bytes.

A Bloom filter (B. Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970) over the names of its
blocks: a name that it lacks is not cached, one that it has is, but for about one in a hundred. The positions of a name
come from two hashes (A. Kirsch, M. Mitzenmacher, "Less hashing, same performance", 2006).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_digest

Hashes: TypeAlias = npt.NDArray[np.uint64]
"""Two of each name, shape (names, 2)."""
Positions: TypeAlias = npt.NDArray[np.uint64]
"""Bits of each name, shape (names, hashes)."""

MOST_BYTES = 2**16
"""Of a digest's bits, unless something else is said: 1 % of false answers up to 54,000 blocks."""
_LARGEST = 2**24
"""Bits of the largest digest that is read."""
_BITS_PER_NAME = -math.log(0.01) / math.log(2) ** 2
_HEAD = struct.Struct("<4sBBxxIIQ")
_MAGIC = b"ODIG"
_VERSION = 1


class Geometry(NamedTuple):
    """Digests of the same one look for a name at the same places."""

    bits: int
    hashes: int

    @classmethod
    def of(cls, capacity: int, max_bytes: int) -> Geometry:
        """The best for ``capacity`` names in at most ``max_bytes``."""
        wanted = math.ceil(max(capacity, 1) * _BITS_PER_NAME / 8)
        bits = 8 * max(min(wanted, max_bytes), 1)
        return cls(bits, min(max(round(bits / max(capacity, 1) * math.log(2)), 1), 16))

    def positions(self, hashes: Hashes) -> Positions:
        steps = np.arange(self.hashes, dtype=np.uint64)
        return (hashes[:, :1] + steps * hashes[:, 1:]) % np.uint64(self.bits)


def name_hashes(names: Iterable[bytes]) -> Hashes:
    """Two hashes of each name. Names of 16 bytes or more are hashes already, and what they start with will do."""
    data = b"".join(name[:16] if len(name) >= 16 else xxh3_128_digest(name) for name in names)
    return np.frombuffer(data, np.uint64).reshape(-1, 2)


class Digest:
    """One that can be asked."""

    def __init__(self, geometry: Geometry, bits: bytes, blocks: int) -> None:
        """``bits``: packed, the lowest first. ``blocks``: how many names are in it."""
        self.geometry = geometry
        self.blocks = blocks
        self._bits = np.frombuffer(bits, np.uint8)

    def has(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Which names, given their positions in its geometry, are likely in it."""
        found = self._bits[positions >> np.uint64(3)] >> (positions & np.uint64(7)).astype(np.uint8) & np.uint8(1)
        every: npt.NDArray[np.bool_] = found.all(axis=1)
        return every

    def holds(self, names: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of ``names`` are likely in it."""
        return self.has(self.geometry.positions(name_hashes(names)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Digest:
        """Read what :meth:`DigestBuilder.to_bytes` wrote.

        :raises ValueError: when it is something else, of another version, or damaged.
        """
        if len(data) < _HEAD.size:
            raise ValueError(f"a digest has at least {_HEAD.size} bytes, not {len(data)}")
        magic, version, hashes, bits, blocks, checksum = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError(f"no digest of version {_VERSION}: it starts with {data[:5]!r}")
        if not (0 < bits <= _LARGEST and bits == 8 * len(body) and 1 <= hashes <= 16):
            raise ValueError(f"a digest of {bits} bits and {hashes} hashes does not come in {len(body)} bytes")
        if _checksum(hashes, bits, blocks, body) != checksum:
            raise ValueError("a digest was damaged on its way")
        return cls(Geometry(bits, hashes), body, blocks)


class DigestBuilder:
    """Keeps a digest up while blocks come and go: it counts the names at each bit.

    Telling it of a name twice is as good as once.
    """

    def __init__(self, capacity: int, max_bytes: int = MOST_BYTES) -> None:
        """For about ``capacity`` names; with more, false answers become more frequent."""
        self._geometry = Geometry.of(capacity, max_bytes)
        self._names: set[bytes] = set()
        self._counts = np.zeros(self._geometry.bits, np.uint32)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Iterable[bytes]) -> None:
        new = set(names) - self._names
        self._names |= new
        np.add.at(self._counts, self._positions(new), np.uint32(1))

    def remove(self, names: Iterable[bytes]) -> None:
        gone = self._names.intersection(names)
        self._names -= gone
        np.subtract.at(self._counts, self._positions(gone), np.uint32(1))

    def clear(self) -> None:
        self._names.clear()
        self._counts.fill(0)

    def to_bytes(self) -> bytes:
        """Versioned, with a checksum."""
        bits, hashes = self._geometry
        body = np.packbits(self._counts > 0, bitorder="little").tobytes()
        checksum = _checksum(hashes, bits, len(self._names), body)
        return _HEAD.pack(_MAGIC, _VERSION, hashes, bits, len(self._names), checksum) + body

    def _positions(self, names: Iterable[bytes]) -> Positions:
        return self._geometry.positions(name_hashes(names)).ravel()


def _checksum(hashes: int, bits: int, blocks: int, body: bytes) -> int:
    return xxh3_64_intdigest(_HEAD.pack(_MAGIC, _VERSION, hashes, bits, blocks, 0) + body)
