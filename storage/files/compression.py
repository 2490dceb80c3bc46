"""Compression of stored blocks: none, or zstd over shuffled bytes.

The bytes of floating-point numbers compress badly as they lie; the first bytes of all numbers (sign and exponent)
together compress well. Lossless.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod

import numpy as np

from ...errors import CorruptBlock, InvalidRequest, describe

SCHEMES = ("none", "zstd")


class Compression(ABC):
    """Makes records smaller and brings them back. Safe in any thread."""

    itemsize: int = 1
    """Bytes of one number; at most 255."""

    @abstractmethod
    def pack(self, data: memoryview) -> memoryview | None:
        """``data``, smaller; ``None`` when it is not worth it."""

    @abstractmethod
    def unpack(self, data: memoryview, raw_bytes: int, itemsize: int) -> memoryview:
        """The inverse; ``raw_bytes`` is the length it must have, ``itemsize`` that of the one who packed it.

        :raises CorruptBlock: when ``data`` is not a packed record of that length.
        """


class NoCompression(Compression):
    """Leaves everything as it is."""

    def pack(self, data: memoryview) -> memoryview | None:
        """Never worth it."""
        return None

    def unpack(self, data: memoryview, raw_bytes: int, itemsize: int) -> memoryview:
        """:raises CorruptBlock: always; packed blocks of another setting are misses without the extra ``zstd``."""
        raise CorruptBlock("a stored block is compressed; install octavo[zstd] to read it")


class ShuffledZstd(Compression):
    """zstd over the bytes sorted by their place in the number. Needs the extra ``zstd``."""

    def __init__(self, *, itemsize: int = 2, level: int = 1) -> None:
        """``itemsize``: bytes of one number. ``level``: 1 is fastest."""
        self.itemsize = itemsize
        self._level = level

    def pack(self, data: memoryview) -> memoryview | None:
        """``data``, shuffled and compressed, when that is smaller."""
        import zstandard  # noqa: PLC0415  # an extra

        # a compressor serves one thread at a time; a new one costs microseconds
        packed = zstandard.ZstdCompressor(level=self._level).compress(_shuffled(data, self.itemsize))
        return memoryview(packed) if len(packed) < len(data) else None

    def unpack(self, data: memoryview, raw_bytes: int, itemsize: int) -> memoryview:
        """What was packed. No more than ``raw_bytes`` are ever produced, whatever ``data`` claims."""
        import zstandard  # noqa: PLC0415  # an extra

        if itemsize < 1:
            raise CorruptBlock("a compressed block does not say how long its numbers are")
        try:
            if zstandard.frame_content_size(data) != raw_bytes:
                raise CorruptBlock("a compressed block has another length inside than outside")
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_bytes)
        except zstandard.ZstdError as err:
            raise CorruptBlock(f"a compressed block cannot be unpacked: {describe(err)}") from err
        if len(plain) != raw_bytes:
            raise CorruptBlock("a compressed block is shorter than it claims")
        return _unshuffled(plain, itemsize)


def compression(scheme: str, itemsize: int) -> Compression:
    """The compression called ``scheme``. Without compression, what an earlier setting packed still can be read if the
    extra ``zstd`` is there.

    :raises InvalidRequest: for an unknown scheme, or one whose library is not installed.
    """
    if scheme not in SCHEMES:
        raise InvalidRequest(f"compression must be one of {', '.join(SCHEMES)}, not {scheme!r}")
    if scheme == "zstd" and not has_zstd():
        raise InvalidRequest("compression='zstd' needs an extra: pip install 'octavo[zstd]'")
    return ShuffledZstd(itemsize=itemsize) if scheme == "zstd" else NoCompression()


def unpacker() -> Compression:
    """What reads packed blocks, whatever the setting for new ones."""
    return ShuffledZstd() if has_zstd() else NoCompression()


def has_zstd() -> bool:
    """Whether the extra ``zstd`` is installed."""
    return importlib.util.find_spec("zstandard") is not None


def _shuffled(data: memoryview, itemsize: int) -> bytes:
    whole = len(data) // itemsize * itemsize
    numbers = np.frombuffer(data[:whole], dtype=np.uint8).reshape(-1, itemsize)
    return numbers.T.tobytes() + bytes(data[whole:])


def _unshuffled(data: bytes, itemsize: int) -> memoryview:
    whole = len(data) // itemsize * itemsize
    plain = np.empty(len(data), dtype=np.uint8)
    plain[:whole].reshape(-1, itemsize)[:] = np.frombuffer(data, dtype=np.uint8, count=whole).reshape(itemsize, -1).T
    plain[whole:] = np.frombuffer(data, dtype=np.uint8, offset=whole)
    return plain.data
