"""Linear layers as plain callables: dense weights, and weights that oneDNN has laid out for its own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

_ROWS = 32
"""Rows that weights are packed for. Measured: a pack for 32 serves 1 to 512 rows about as well as their own."""


class Product(Protocol):
    """``x @ weight.T + bias``."""

    def __call__(self, x: Tensor) -> Tensor:
        """:param x: shape [T, K]; T may be 0. :returns: shape [T, N]."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """:param residual: shape [T, N], not modified. :returns: ``self(x) + residual``."""

    def settled(self, pack: Pack | None) -> Product:
        """The same over one weight, laid out by ``pack``. A pack that computes something else is left."""


Pack: TypeAlias = Callable[[Tensor, Tensor | None], Product]
"""Makes a product of a weight, shape [N, K], and perhaps a bias, shape [N], in a layout of its own."""


class DenseProduct:
    """Over weights as torch keeps them. Several are applied side by side, as if they were stacked in one.

    :param weights: one or more, shapes [N_i, K]; shared, not copied.
    :param biases: one for each weight or ``None``, shapes [N_i].
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._parts = tuple(zip(weights, biases, strict=True))

    @classmethod
    def of(cls, linears: Sequence[nn.Linear]) -> DenseProduct:
        """The weights of some modules, side by side."""
        return cls(
            [linear.weight.detach() for linear in linears],
            [None if linear.bias is None else linear.bias.detach() for linear in linears],
        )

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._parts) == 1:
            return functional.linear(x, *self._parts[0])
        return torch.cat([functional.linear(x, weight, bias) for weight, bias in self._parts], dim=-1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)

    def settled(self, pack: Pack | None) -> Product:
        weight, bias = self._stacked()
        dense = DenseProduct((weight,), (bias,))
        if pack is None:
            return dense
        made = pack(weight, bias)
        return made if _agree(made, dense, weight) else dense

    def _stacked(self) -> tuple[Tensor, Tensor | None]:
        """:returns: one weight [N, K] and one bias [N] or ``None``; a copy only where there are several weights."""
        if len(self._parts) == 1:
            return self._parts[0]
        weight = torch.cat([weight for weight, _ in self._parts])
        biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in self._parts]
        return weight, None if all(bias is None for _, bias in self._parts) else torch.cat(biases)


class PackedProduct:
    """Over oneDNN's own layout of a weight, made once. The sum with a residual happens inside the product.

    :param weight: shape [N, K], on the CPU, in a dtype that :func:`can_pack` allows; copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._width = len(weight)
        self._bias = bias
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)  # noqa: SLF001  # as below
        self._packed = packed
        self._run = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001  # what torch.compile calls; there is no other way

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self._width)
        out: Tensor = self._run.default(x, self._packed, self._bias, "none", [], "")
        return out

    def settled(self, pack: Pack | None) -> Product:
        return self

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if not len(x):
            return residual
        out: Tensor = self._run.binary(x, residual, self._packed, self._bias, "add")
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and computes in ``dtype`` on this processor."""
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # as torch has it
    if device.type != "cpu" or not available:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001  # asked nowhere else
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())  # noqa: SLF001  # asked nowhere else
    return dtype == torch.float32


def _agree(packed: Product, dense: DenseProduct, weight: Tensor) -> bool:
    """Compare on a few rows of a wave that meets every column."""
    wave = torch.arange(4 * weight.shape[1], device=weight.device).sin().view(4, -1).to(weight.dtype)
    got, expected = packed(wave).float(), dense(wave).float()
    return bool((got - expected).norm() <= (1e-4 if weight.dtype == torch.float32 else 0.03) * expected.norm())
