"""Identity: everything that must agree before stored K and V may be used, in parts that can be named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Self

import msgspec

BLOCK_FORMAT = "octavo-block-1"
"""Layout of a block's payload: for each layer K, then V, each ``[block_size, kv_heads, head_dim]``, in that order."""


class Identity(msgspec.Struct, frozen=True):
    """What the bytes of a stored block depend on. Two engines share blocks exactly when their identities are equal."""

    parts: tuple[tuple[str, str], ...]
    """(what, value), sorted: digests of weights, configuration and tokenizer, dtype, geometry, positions, ..."""
    block_size: int
    payload_bytes: int
    """K and V of one block over all layers."""
    block_format: str = BLOCK_FORMAT

    @classmethod
    def of(cls, parts: Mapping[str, str], *, block_size: int, payload_bytes: int) -> Self:
        """From the parts of a loaded model and the geometry of a cache."""
        return cls(tuple(sorted(parts.items())), block_size, payload_bytes)

    @property
    def digest(self) -> str:
        """SHA-256 in hex; the ``model`` of every :class:`~octavo.storage.naming.Namespace`."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def differences(self, other: Identity) -> list[str]:
        """Why blocks stored under ``other`` are of no use here: what differs, one phrase each; empty when nothing."""
        mine, theirs = self._named(), other._named()
        return [
            f"{what} is {mine.get(what, 'absent')} here and {theirs.get(what, 'absent')} there"
            for what in sorted(mine.keys() | theirs.keys())
            if mine.get(what) != theirs.get(what)
        ]

    def _named(self) -> dict[str, str]:
        own = {"block size": str(self.block_size), "block bytes": str(self.payload_bytes), "format": self.block_format}
        return {**dict(self.parts), **own}
