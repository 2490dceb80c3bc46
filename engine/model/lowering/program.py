"""A decoder as a flat program: one loop over layers, about eight calls in each, no modules in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, ones_like, zeros_like
from torch.nn import functional

from ..attention import AttentionOptions, StepAttention
from ..attention.kv_tensors import KVTensors
from ..decoder import PackedTokens
from .linear import Pack, Product
from .ops import Ops
from .turns import Turns


class Norm(NamedTuple):
    """A root mean square norm."""

    weight: Tensor
    eps: float


class Pass(NamedTuple):
    """What the layers of one step share."""

    cos: Tensor
    """Shape [T, D], like ``sin``."""
    sin: Tensor
    slots: Tensor
    attention: StepAttention


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: attention, then a gated MLP (arXiv:2002.05202), each behind a norm and added to its input.

    Gate and up are one product: half the calls. Two with activation and factor inside measured slower up to 128 rows.
    """

    norm: Norm
    qkv: Product
    """Query heads, then key heads, then value heads."""
    head_norms: tuple[Norm, Norm] | None
    """Norms of each query head and each key head, before they are rotated (Qwen 3)."""
    rotates: bool
    """Whether positions rotate Q and K here (some families leave layers out)."""
    options: AttentionOptions
    out: Product
    mlp_norm: Norm
    gate_up: Product
    """The gate's columns, then up's."""
    down: Product

    def run(self, x: Tensor, step: Pass, keys: Tensor, values: Tensor, keep: Tensor | None, ops: Ops) -> Tensor:
        """:param x: shape [T, N]. :param keep: rows to go on with after the attention; ``None``: all.
        :returns: shape [T or len(keep), N]."""
        attended = self._attend(ops.rms_norm(x, *self.norm), step, keys, values, ops)
        if keep is not None:
            attended, x = attended.index_select(0, keep), x.index_select(0, keep)
        x = self.out.add(attended, x)
        return self.down.add(ops.silu_mul(self.gate_up(ops.rms_norm(x, *self.mlp_norm))), x)

    def settled(self, pack: Pack | None) -> Layer:
        """The same with its weights laid out for speed."""
        return replace(
            self,
            qkv=self.qkv.settled(pack),
            out=self.out.settled(pack),
            gate_up=self.gate_up.settled(pack),
            down=self.down.settled(pack),
        )

    def _attend(self, h: Tensor, step: Pass, keys: Tensor, values: Tensor, ops: Ops) -> Tensor:
        qkv = self.qkv(h)
        kv_heads, dim = keys.shape[2:]
        heads = qkv.view(len(qkv), -1, dim)
        queries = heads[:, : -2 * kv_heads]
        if self.head_norms is not None:
            _norm_heads(queries, self.head_norms[0], ops)
            _norm_heads(heads[:, -2 * kv_heads : -kv_heads], self.head_norms[1], ops)
        cos, sin = (step.cos, step.sin) if self.rotates else (ones_like(step.cos), zeros_like(step.sin))
        ops.rotate_store(qkv, cos, sin, step.slots, keys, values)
        return step.attention.attend(queries, keys, values, self.options).reshape(len(qkv), -1)


def _norm_heads(heads: Tensor, norm: Norm, ops: Ops) -> None:
    """:param heads: shape [T, H, D], normed in place."""
    heads.copy_(ops.rms_norm(heads.reshape(-1, heads.shape[-1]), *norm).view_as(heads))


class Program:
    """A :class:`~octavo.engine.model.decoder.Decoder` of fused operations.

    :param turns: what the model's own position encoding says.
    """

    def __init__(
        self, embedding: Tensor, layers: Sequence[Layer], norm: Norm, head: Product, turns: Turns, ops: Ops
    ) -> None:
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.turns = turns
        self._ops = ops

    def settled(self, pack: Pack | None) -> Program:
        """The same computation over weights that are stacked and laid out by ``pack``: copies of the
        model's own, which nothing here needs afterwards (except an embedding that is also the head)."""
        layers = [layer.settled(pack) for layer in self.layers]
        return Program(self.embedding, layers, self.norm, self.head.settled(pack), self.turns, self._ops)

    def logits(self, tokens: PackedTokens, kv: KVTensors, attention: StepAttention, keep: Tensor) -> Tensor:
        x = functional.embedding(tokens.ids, self.embedding)
        step = Pass(*self.turns.at(tokens.positions), tokens.slots, attention)
        last = len(self.layers) - 1  # its K and V are for all tokens, what follows only for those that are kept
        for i, layer in enumerate(self.layers):
            x = layer.run(x, step, kv.keys(i), kv.values(i), keep if i == last else None, self._ops)
        return self.head(self._ops.rms_norm(x, *self.norm))
