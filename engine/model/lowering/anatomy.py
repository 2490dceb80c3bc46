"""Finds the parts of a decoder in a module tree, by what its modules are called and are; proves nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....errors import ModelError
from .ops import Ops
from .program import Norm

_ACCURACY = {torch.float32: 1e-5}
_NARROW_ACCURACY = 0.02


class NotLowered(ModelError):
    """Why a model stays as it is; for the log, nobody else sees it."""


class LayerParts(NamedTuple):
    """The modules of one layer."""

    norm: nn.Module
    qkv: tuple[nn.Linear, ...]
    """One that gives Q, K and V, or three."""
    head_norms: tuple[nn.Module, ...]
    """Of Q and of K, or none."""
    out: nn.Linear
    mlp_norm: nn.Module
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear


class Parts(NamedTuple):
    """The modules of a decoder."""

    embedding: nn.Embedding
    layers: tuple[LayerParts, ...]
    norm: nn.Module
    rotary: nn.Module
    head: nn.Linear


def dissect(model: PreTrainedModel) -> Parts:
    """Find the parts.

    :raises NotLowered: unless all are there and hold every parameter of the model.
    """
    body = model.base_model
    parts = Parts(
        _typed(model.get_input_embeddings(), nn.Embedding, "embedding"),
        tuple(_layer(layer) for layer in _typed(getattr(body, "layers", None), nn.ModuleList, "layers")),
        _child(body, "norm"),
        _child(body, "rotary_emb"),
        _typed(model.get_output_embeddings(), nn.Linear, "head"),  # type: ignore[no-untyped-call]  # as Transformers has it
    )
    known = {id(parameter) for module in _modules(parts) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise NotLowered(f"it has {name}, which has no place in the program")
    return parts


def read_norm(module: nn.Module, ops: Ops) -> Norm:
    """Its weight and epsilon, when the module computes a root mean square norm with them and nothing else.

    :raises NotLowered: when it does not.
    """
    weights = [weight.detach() for weight in module.parameters()]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if len(weights) != 1 or not isinstance(eps, float):
        raise NotLowered(f"{type(module).__name__} is not a root mean square norm with one weight")
    norm = Norm(weights[0], eps)
    wave = _wave(norm.weight)
    for size in (1.0, eps**0.5):  # at the second one epsilon is half of what counts
        rows = wave * size
        if not close(ops.rms_norm(rows, *norm), module(rows)):
            raise NotLowered(f"{type(module).__name__} computes something else than a root mean square norm")
    return norm


def close(got: Tensor, expected: Tensor) -> bool:
    """Whether the difference of two tensors, as vectors, is what rounding in their dtype explains."""
    tolerance = _ACCURACY.get(expected.dtype, _NARROW_ACCURACY)
    return bool((got.float() - expected.float()).norm() <= tolerance * expected.float().norm())


def _layer(layer: nn.Module) -> LayerParts:
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    head_norms = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return LayerParts(
        norm=_child(layer, "input_layernorm"),
        qkv=_linears(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj")),
        head_norms=tuple(_child(attention, name) for name in head_norms),
        out=_linears(attention, ("o_proj",))[0],
        mlp_norm=_child(layer, "post_attention_layernorm"),
        gate_up=_linears(mlp, ("gate_up_proj",), ("gate_proj", "up_proj")),
        down=_linears(mlp, ("down_proj",))[0],
    )


def _linears(parent: nn.Module, *choices: tuple[str, ...]) -> tuple[nn.Linear, ...]:
    for names in choices:
        if all(hasattr(parent, name) for name in names):
            return tuple(_typed(_child(parent, name), nn.Linear, name) for name in names)
    raise NotLowered(f"{type(parent).__name__} has no {', '.join(choices[-1])}")


def _child(parent: nn.Module, name: str) -> nn.Module:
    return _typed(getattr(parent, name, None), nn.Module, f"{type(parent).__name__}.{name}")


_M = TypeVar("_M", bound=nn.Module)


def _typed(module: object, kind: type[_M], what: str) -> _M:
    """A subclass may compute something else (quantised, sharded, with an adapter), so only the class itself will do."""
    exact = kind is nn.Module or type(module) is kind
    if not (isinstance(module, kind) and exact):
        raise NotLowered(f"{what} is {type(module).__name__}, not {kind.__name__}")
    return module


def _modules(parts: Parts) -> Iterator[nn.Module]:
    yield from (parts.embedding, parts.norm, parts.head)
    for layer in parts.layers:
        yield from (layer.norm, *layer.qkv, *layer.head_norms, layer.out, layer.mlp_norm, *layer.gate_up, layer.down)


def _wave(weight: Tensor) -> Tensor:
    return torch.arange(3 * len(weight), device=weight.device).sin().view(3, -1).to(weight.dtype)
