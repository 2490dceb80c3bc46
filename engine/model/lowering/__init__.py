"""Lowering: the same decoder with fewer, larger and better laid out operations.

Two ways, tried in order. A decoder whose structure is recognised becomes a flat :class:`~.program.Program`. One that is
not keeps its own forward pass, and its linear layers get packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....telemetry.logging import get_logger
from ..attention import AttentionBackend
from ..attention.kv_tensors import LayerGeometry
from ..attention.native_backend import NativeBackend
from ..decoder import Decoder, ModuleDecoder
from ..native.library import DTYPES, Kernels, NativeOps
from ..native.product import NativeProduct, can_lay_out
from ..probe import difference, trial
from .anatomy import NotLowered
from .linear import DenseProduct, Pack, PackedProduct, Product, can_pack
from .modules import pack_modules
from .native_decoder import NativeDecoder
from .ops import Ops
from .program import Program
from .recognise import recognise
from .torch_ops import TorchOps

__all__ = ["Ops", "Program", "TorchOps", "lower"]


def lower(
    model: PreTrainedModel,
    layers: Sequence[LayerGeometry],
    *,
    fused: bool,
    packed: bool,
    ops: Ops | None = None,
    kernels: Kernels | None = None,
) -> Decoder:
    """The fastest decoder over ``model`` that the switches allow and that gives the model's own logits.

    The result may share weights with ``model`` and, with ``packed``, replace modules in it. While weights are packed
    they exist twice; drop ``model`` afterwards.

    :param model: as :func:`~octavo.engine.model.probe.probe` leaves it.
    :param fused: recognise its structure and run it as a flat program.
    :param packed: lay weights out for the kernels or for oneDNN, as far as there are some for its device and dtype.
    :param ops: the small operations; ``None``: those of ``kernels``, or plain torch.
    :param kernels: the compiled ones, where they are there.
    """
    own_kernels = kernels if kernels is not None and model.dtype in DTYPES and model.device.type == "cpu" else None
    with torch.inference_mode():
        pack = _pack(model, own_kernels) if packed else None
        if not fused and pack is None:
            return ModuleDecoder(model)
        lowering = _Lowering(model, layers)
        small = ops or (TorchOps() if own_kernels is None else NativeOps(own_kernels, model.dtype))
        program = lowering.program(small) if fused else None
        if program is not None:
            settled = program.settled(pack)
            return settled if own_kernels is None else lowering.native(settled, own_kernels)
        return lowering.own if pack is None else lowering.packed(pack)


def _pack(model: PreTrainedModel, kernels: Kernels | None) -> Pack | None:
    """The best layout of weights that there is; ``None``: the one they have."""
    if kernels is None or not kernels.has_products:
        return PackedProduct if can_pack(model.device, model.dtype) else None

    def pack(weight: Tensor, bias: Tensor | None) -> Product:
        if can_lay_out(kernels, weight):
            return NativeProduct(kernels, weight, bias)
        by_torch = can_pack(weight.device, weight.dtype)
        return PackedProduct(weight, bias) if by_torch else DenseProduct((weight,), (bias,))

    return pack


class _Lowering:
    """Each way, tried against the model's own logits."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[LayerGeometry]) -> None:
        self.own = ModuleDecoder(model)
        self._model = model
        self._layers = layers
        self._expected = trial(self.own, model, layers)

    def program(self, ops: Ops) -> Program | None:
        try:
            program = recognise(self._model, self.own, self._layers, ops)
            self._verify(program)
        except Exception as reason:  # noqa: BLE001  # families are without number, and each fails in its own way
            self._report("model_not_fused", reason)
            return None
        return program

    def native(self, program: Program, kernels: Kernels) -> Decoder:
        """In one call of the kernels, with their attention, where that gives the same; else the program."""
        decoder = NativeDecoder.over(program, kernels)
        try:
            self._verify(decoder, NativeBackend(kernels, shares=True))
        except Exception as reason:  # noqa: BLE001  # the same
            self._report("model_not_native", reason)
            return program
        return decoder

    def packed(self, pack: Pack) -> Decoder:
        replaced = pack_modules(self._model, pack)
        try:
            self._verify(self.own)
        except Exception as reason:  # noqa: BLE001  # the same: one may read the weights of a linear layer, say
            for each in replaced:
                each.undo()
            self._report("model_not_packed", reason)
        return self.own

    def _verify(self, decoder: Decoder, attention: AttentionBackend | None = None) -> None:
        got = trial(decoder, self._model, self._layers, attention)
        error = difference(got.to(self._expected.dtype), self._expected)
        if error is not None:
            raise NotLowered(f"its logits would differ by {error:.2g}")

    def _report(self, event: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, NotLowered) else repr(error)
        get_logger("octavo.model").info(event, model=type(self._model).__name__, reason=reason)
