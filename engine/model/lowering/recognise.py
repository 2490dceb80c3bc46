"""Turns a Transformers decoder into a program, where each of its layers computes what the program's does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ..attention import AttentionOptions
from ..attention.kv_tensors import LayerGeometry
from ..decoder import Decoder
from ..probe import usable_context
from .anatomy import LayerParts, NotLowered, Parts, close, dissect, read_norm
from .linear import DenseProduct
from .ops import Ops
from .program import Layer, Pass, Program
from .turns import Turns
from .witness import Bench, Testimony, lay_out, observe


def recognise(model: PreTrainedModel, decoder: Decoder, layers: Sequence[LayerGeometry], ops: Ops) -> Program:
    """Find the parts by name, then hold every piece against the model's own, from what the model gave it.

    Names only say where to look. A multiplier, a norm or an order of operations that the program does not know shows as
    a difference in the very layer that has it.

    :param decoder: the model's own forward pass over a paged cache.
    :returns: a program over the model's own weights, shared.
    :raises NotLowered: with the reason, when anything is missing, left over or different.
    """
    parts = dissect(model)
    bench = lay_out(model, layers)
    seen = observe(decoder, [*(layer.norm for layer in parts.layers), parts.norm], bench)
    if not len(seen.options) == len(parts.layers) == len(layers):
        raise NotLowered("its layers and its attention calls are not one to one")
    _require(bool(functional.embedding(bench.tokens.ids, parts.embedding.weight).equal(seen.entered[0])), "embedding")
    fitted = [_fit(i, parts, seen, bench, layers[i], ops) for i in range(len(layers))]
    norm, head = read_norm(parts.norm, ops), DenseProduct.of((parts.head,))
    _require(close(head(ops.rms_norm(seen.entered[-1], *norm)), seen.logits), "head")
    embedding = parts.embedding.weight.detach()
    turns = Turns(parts.rotary, embedding, usable_context(model.config))
    return Program(embedding, fitted, norm, head, turns, ops)


def _fit(i: int, parts: Parts, seen: Testimony, bench: Bench, geometry: LayerGeometry, ops: Ops) -> Layer:
    """The layer with or without rotation, whichever computes what the model did."""
    layer = _layer(parts.layers[i], seen.options[i], geometry, ops)
    x, expected = seen.entered[i : i + 2]
    cos, sin = (table[0] for table in parts.rotary(x[None], bench.tokens.positions[None]))
    _require(
        cos.dtype == sin.dtype == x.dtype and cos.shape == sin.shape and cos.shape[-1] <= geometry.key_dim, "rotation"
    )
    step = Pass(cos, sin, bench.tokens.slots, bench.attention())
    for each in (layer, replace(layer, rotates=False)):
        if _same_update(each.run(x, step, bench.kv.keys(i), bench.kv.values(i), None, ops), expected, x):
            return each
    raise NotLowered(f"its layer {i} computes something else")


def _layer(parts: LayerParts, options: AttentionOptions, geometry: LayerGeometry, ops: Ops) -> Layer:
    kv_heads, dim, value_dim = geometry
    widths = sum(linear.out_features for linear in parts.qkv)
    _require(dim == value_dim and widths % dim == 0 and widths == parts.out.in_features + 2 * kv_heads * dim, "heads")
    head_norms = [read_norm(norm, ops) for norm in parts.head_norms]
    _require(all(len(norm.weight) == dim for norm in head_norms), "norms of heads")
    return Layer(
        norm=read_norm(parts.norm, ops),
        qkv=DenseProduct.of(parts.qkv),
        head_norms=(head_norms[0], head_norms[1]) if len(head_norms) == 2 else None,
        rotates=True,
        options=options,
        out=DenseProduct.of((parts.out,)),
        mlp_norm=read_norm(parts.mlp_norm, ops),
        gate_up=DenseProduct.of(parts.gate_up),
        down=DenseProduct.of((parts.down,)),
    )


def _same_update(got: Tensor, expected: Tensor, x: Tensor) -> bool:
    """Compare what a layer added to its input, for the median token: rounding may tip single ones (an attention that is
    nearly one-hot). The sum itself may carry far larger numbers, whose rounding is forgiven on top."""
    spacing = torch.finfo(expected.dtype).eps
    error = (got.float() - expected.float()).norm(dim=-1)
    update, total = (expected.float() - x.float()).norm(dim=-1), expected.float().norm(dim=-1)
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.03
    return bool((error - tolerance * update - spacing * total).median() <= 0)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise NotLowered(f"its {what} computes something else, or has another shape")
