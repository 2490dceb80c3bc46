"""The small operations between the products of a decoder, as a protocol, so that a faster kind can take their place."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ops(Protocol):
    """What a lowered decoder computes beside its linear layers and its attention.

    All tensors of a call share one floating dtype and one device; rows may be strided (``stride(0)`` is free, the last
    dimension is dense). Calls come from the one model thread. ``T`` is the step's number of packed tokens.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm, ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (arXiv:1910.07467).

        Computed in float32. Where the dtype is narrower, an answer may be rounded before the weight is applied, too.

        :param x: shape [T, N]. Not modified.
        :param weight: shape [N].
        :returns: shape [T, N], dense.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``.

        :param gate_up: shape [T, 2 M]: the gate in columns [0, M), up in [M, 2 M). Not modified.
        :returns: shape [T, M], dense.
        """

    def rotate_store(  # the fused operation of a layer, with all that it touches
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Rotate Q and K in place and write K and V to the cache.

        With ``x1, x2`` the halves of a head: ``(x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)``, where the table's
        halves are ``cos1, cos2`` (rotary embedding, arXiv:2104.09864, in the half-split convention of Transformers).

        :param qkv: shape [T, (H + 2 Hkv) D]: query heads, then key heads, then value heads. Q and K are replaced by
            their rotated selves, V stays.
        :param cos: shape [T, D], one row per token of the step.
        :param sin: shape [T, D].
        :param slots: shape [T], int64; distinct. Slot s is row ``s % block_size`` of block ``s // block_size``.
        :param keys: the layer's K, shape [num_blocks, block_size, Hkv, D], dense.
        :param values: the layer's V, like ``keys``.
        """
