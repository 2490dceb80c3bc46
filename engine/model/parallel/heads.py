"""Bytes of whole blocks from the bytes of the ranks' heads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..attention.kv_tensors import LayerGeometry
from ..runner import UInt8Array


class _Piece(NamedTuple):
    """K or V of one layer."""

    whole: slice
    """Its bytes in a whole block."""
    local: slice
    """Its bytes in a rank's block."""
    width: int
    """Bytes of a token on a rank."""
    is_cut: bool
    """Whether each rank has its part of the heads, and not all of them."""


class HeadLayout:
    """Blocks are token by token, and in each token head by head, so each rank's part of a token is one run of bytes.

    :param whole: the layers of the model; ``local``: those of a rank.
    :param itemsize: bytes of a number.
    """

    def __init__(
        self,
        whole: Sequence[LayerGeometry],
        local: Sequence[LayerGeometry],
        *,
        ranks: int,
        block_size: int,
        itemsize: int,
    ) -> None:
        self._ranks = ranks
        self._block_size = block_size
        self._pieces: list[_Piece] = []
        self.whole_bytes = self.local_bytes = 0
        for layer, part in zip(whole, local, strict=True):
            for dim in (part.key_dim, part.value_dim):
                self._add(layer.kv_heads, part.kv_heads, dim * itemsize)

    def join(self, parts: Sequence[UInt8Array], out: UInt8Array) -> None:
        """Put the blocks of all ranks together.

        :param parts: by rank, each of shape [n, local_bytes].
        :param out: shape [n, whole_bytes]; the bytes of a row must follow each other.
        """
        for piece in self._pieces:
            if not piece.is_cut:
                out[:, piece.whole] = parts[0][:, piece.local]
                continue
            tokens = self._by_rank(out, piece)
            for rank, part in enumerate(parts):
                tokens[:, :, rank] = part[:, piece.local].reshape(len(out), self._block_size, piece.width)

    def part(self, rows: UInt8Array, rank: int) -> UInt8Array:
        """What ``rank`` keeps of whole blocks, shape [n, whole_bytes]; shape [n, local_bytes]."""
        found = np.empty((len(rows), self.local_bytes), dtype=np.uint8)
        for piece in self._pieces:
            if piece.is_cut:
                found[:, piece.local] = self._by_rank(rows, piece)[:, :, rank].reshape(len(rows), -1)
            else:
                found[:, piece.local] = rows[:, piece.whole]
        return found

    def _add(self, whole_heads: int, local_heads: int, head_bytes: int) -> None:
        width = local_heads * head_bytes
        whole, local = (heads * head_bytes * self._block_size for heads in (whole_heads, local_heads))
        at, here = self.whole_bytes, self.local_bytes
        self.whole_bytes, self.local_bytes = at + whole, here + local
        places = slice(at, self.whole_bytes), slice(here, self.local_bytes)
        self._pieces.append(_Piece(*places, width, whole_heads != local_heads))

    def _by_rank(self, rows: UInt8Array, piece: _Piece) -> UInt8Array:
        """A view of the piece, shape [n, block_size, ranks, width]."""
        return rows[:, piece.whole].reshape(len(rows), self._block_size, self._ranks, piece.width, copy=False)
