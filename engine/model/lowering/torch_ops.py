"""The small operations in plain torch, which run wherever torch runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class TorchOps:
    """The reference for :class:`~octavo.engine.model.lowering.ops.Ops`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotate_store(self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        kv_heads, dim = keys.shape[2:]
        heads = qkv.view(len(qkv), -1, dim)
        turning, key, value = heads[:, :-kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
        first, second = turning.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
        torch.addcmul(turning * cos[:, None], crossed, sin[:, None], out=turning)
        keys.flatten(0, 1).index_copy_(0, slots, key)
        values.flatten(0, 1).index_copy_(0, slots, value)
