"""Linear layers over weights in the kernels' own layout."""

from __future__ import annotations

import torch
from torch import Tensor

from ..huge_pages import prefer_huge_pages
from .library import DTYPES, Kernels


class NativeProduct:
    """A :class:`~octavo.engine.model.lowering.linear.Product` of the kernels.

    A float32 weight whose numbers are all bfloat16's, as those of most checkpoints are, is kept as such and multiplied
    as float32: the same sums from half of the memory, which is what a step of few rows waits for.

    :param weight: shape [N, K], on the CPU, such that :func:`can_lay_out`; copied.
    """

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        self._run = kernels.function("product", weight.dtype)
        kept = _narrowed(weight).contiguous()
        width = kernels.panel_width
        self.panels = kept.new_empty(-(-self.outputs // width) * width, self.inputs)
        prefer_huge_pages(self.panels)
        kernels.function("lay_out", kept.dtype)(
            self.panels.data_ptr(), kept.data_ptr(), self.outputs, self.inputs, torch.get_num_threads()
        )

    @property
    def taken(self) -> int:
        """Inputs of an output that lie in one word of the panels, which has four bytes."""
        return 4 // self.panels.itemsize

    def settled(self, pack: object) -> NativeProduct:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._multiply(x, residual.contiguous())

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), self.outputs)
        failed = self._run(
            x.data_ptr(),
            x.stride(0),
            len(x),
            self.panels.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.inputs,
            self.outputs,
            self.taken,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a product of {len(x)} rows")
        return out


def can_lay_out(kernels: Kernels, weight: Tensor) -> bool:
    """Whether the kernels are the better choice for ``weight``. Inputs are taken in pairs where dtypes are narrow."""
    is_known = weight.device.type == "cpu" and weight.dtype in DTYPES
    return is_known and kernels.has_products and weight.shape[1] % 2 == 0


def _narrowed(weight: Tensor) -> Tensor:
    """As bfloat16 where that loses nothing."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight
