"""Random numbers without a generator: each is a hash of its seed and its position, so there is no state to keep."""

from __future__ import annotations

import hashlib


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but ``seed`` (taken modulo 2**64) and ``position``.

    Counter-based: the first 53 bits of BLAKE2b over both.
    """
    return (_hash64(b"octavo-draw", seed, position) >> 11) * 2.0**-53


def derive_seed(root: int, index: int) -> int:
    """Seed of the ``index``-th independent stream below ``root``: the parallel samples of one request."""
    return _hash64(b"octavo-seed", root, index)


def _hash64(domain: bytes, root: int, index: int) -> int:
    message = (root % 2**64).to_bytes(8, "little") + (index % 2**64).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, person=domain).digest(), "little")
