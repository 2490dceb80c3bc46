"""A program whose layers run in one call of the kernels, without Python between them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import StepAttention
from ..attention.kv_tensors import KVTensors
from ..attention.native_backend import NativeStep
from ..decoder import Decoder, PackedTokens
from ..native.library import Kernels, NativePlan
from ..native.product import NativeProduct
from .linear import Product
from .program import Layer, Norm, Program

# The structures of ``native/src/decoder.h``, field by field.


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float))


class _Weight(Structure):
    _fields_ = (("panels", c_void_p), ("bias", c_void_p), *((name, c_int64) for name in ("inputs", "outputs", "taken")))


class _Layer(Structure):
    _fields_ = (
        *((name, _Norm) for name in ("norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, _Weight) for name in ("qkv", "out", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("scale", c_float),
        ("rotates", c_int),
    )


class _Decoder(Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("norm", _Norm),
        ("head", _Weight),
        *((name, c_int) for name in ("count", "heads", "kv_heads", "dim", "turned")),
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "cos", "sin", "slots", "keep", "logits")),
        ("tokens", c_int64),
        ("kept", c_int64),
    )


class NativeDecoder:
    """A :class:`~octavo.engine.model.decoder.Decoder` that leaves to the program what the kernels do not know."""

    def __init__(self, program: Program, kernels: Kernels) -> None:
        self._program = program
        self._run = kernels.function("decoder", program.embedding.dtype)
        self._bound: tuple[KVTensors, _Bound] | None = None

    @classmethod
    def over(cls, program: Program, kernels: Kernels) -> Decoder:
        """The program in one call, if all of its products are the kernels'; else the program."""
        products: list[Product] = [program.head]
        for layer in program.layers:
            products += (layer.qkv, layer.out, layer.gate_up, layer.down)
        return cls(program, kernels) if all(isinstance(each, NativeProduct) for each in products) else program

    def logits(self, tokens: PackedTokens, kv: KVTensors, attention: StepAttention, keep: Tensor) -> Tensor:
        """:returns: shape [N, V], float32: not rounded to the model's dtype."""
        bound = self._binding(kv)
        plan = bound.plan(attention)
        if plan is None:
            return self._program.logits(tokens, kv, attention, keep)
        x = functional.embedding(tokens.ids, self._program.embedding)
        cos, sin = self._program.turns.at(tokens.positions)
        logits = torch.empty(len(keep), bound.vocabulary, dtype=torch.float32)
        arrays = (x, cos, sin, tokens.slots, keep, logits)
        step = _Step(*(array.data_ptr() for array in arrays), len(x), len(keep))
        decoder = bound.structure(cos.shape[1])
        if self._run(ctypes.addressof(decoder), ctypes.addressof(step), plan.handle, torch.get_num_threads()):
            raise MemoryError(f"no memory for a step of {len(x)} tokens")
        return logits

    def _binding(self, kv: KVTensors) -> _Bound:
        if self._bound is None or self._bound[0] is not kv:
            self._bound = (kv, _Bound(self._program, kv))
        return self._bound[1]


class _Bound:
    """A program bound to its cache: the structures that point into both."""

    def __init__(self, program: Program, kv: KVTensors) -> None:
        self._program = program  # keeps what is pointed to alive, like the cache
        self._kv_heads, self._dim = kv.keys(0).shape[2:]
        self._heads = _outputs(program.layers[0].qkv) // self._dim - 2 * self._kv_heads
        self._options = [layer.options for layer in program.layers]
        self._layers = (_Layer * len(program.layers))(
            *(_layer(layer, kv.keys(i), kv.values(i)) for i, layer in enumerate(program.layers))
        )
        self._same = all(
            _shapes(layer) == _shapes(program.layers[0]) and kv.keys(i).shape[2:] == (self._kv_heads, self._dim)
            for i, layer in enumerate(program.layers)
        )
        self.vocabulary = _outputs(program.head)

    def plan(self, attention: StepAttention) -> NativePlan | None:
        """Of a step whose attention is all native; ``None`` for others."""
        if not self._same or not isinstance(attention, NativeStep):
            return None
        return attention.plan_for(self._heads, self._kv_heads, self._dim, self._options)

    def structure(self, turned: int) -> _Decoder:
        """:param turned: how many dimensions of a head are rotated."""
        return _Decoder(
            ctypes.addressof(self._layers),
            _norm(self._program.norm),
            _weight(self._program.head),
            len(self._layers),
            self._heads,
            self._kv_heads,
            self._dim,
            turned,
        )


def _layer(layer: Layer, keys: Tensor, values: Tensor) -> _Layer:
    head_norms: Sequence[Norm | None] = layer.head_norms or (None, None)
    return _Layer(
        _norm(layer.norm),
        _norm(head_norms[0]),
        _norm(head_norms[1]),
        _norm(layer.mlp_norm),
        _weight(layer.qkv),
        _weight(layer.out),
        _weight(layer.gate_up),
        _weight(layer.down),
        keys.data_ptr(),
        values.data_ptr(),
        layer.options.scaling,
        layer.rotates,
    )


def _norm(norm: Norm | None) -> _Norm:
    return _Norm(None, 0.0) if norm is None else _Norm(norm.weight.data_ptr(), norm.eps)


def _weight(product: Product) -> _Weight:
    if not isinstance(product, NativeProduct):
        raise TypeError(f"{type(product).__name__} has no panels")
    bias = None if product.bias is None else product.bias.data_ptr()
    return _Weight(product.panels.data_ptr(), bias, product.inputs, product.outputs, product.taken)


def _shapes(layer: Layer) -> list[tuple[int, int]]:
    """Of the layer's products: one workspace serves all layers."""
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return [(each.inputs, each.outputs) for each in products if isinstance(each, NativeProduct)]


def _outputs(product: Product) -> int:
    return product.outputs if isinstance(product, NativeProduct) else 0
