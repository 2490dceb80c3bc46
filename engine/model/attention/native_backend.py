"""The fast CPU backend: C++ kernels that read the blocks in place, and common prefixes once for all their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..native.library import DTYPES, LANES, MAX_GROUP, Kernels, NativePlan
from ..runner import Row
from .base import AttentionOptions, StepAttention
from .torch_backend import TorchBackend


class NativeBackend:
    """What the kernels do not know (softcap, sinks, windows shorter than a row, odd head sizes) is left to torch.

    :param shares: whether rows with common blocks read and score them once.
    """

    def __init__(self, kernels: Kernels, *, shares: bool) -> None:
        self._kernels = kernels
        self._shares = shares
        self._torch = TorchBackend(torch.device("cpu"))

    def plan(self, rows: Sequence[Row], block_size: int) -> StepAttention:
        """Nothing is prepared yet: how depends on the layers' heads."""
        return NativeStep(self._kernels, self._torch, rows, block_size, self._shares)


class NativeStep:
    """One step; made by :class:`NativeBackend`."""

    def __init__(
        self, kernels: Kernels, reference: TorchBackend, rows: Sequence[Row], block_size: int, shares: bool
    ) -> None:
        self._kernels = kernels
        self._reference = reference
        self._other: StepAttention | None = None
        self._rows = rows
        self._block_size = block_size
        self._shares = shares
        self._longest = max(row.context for row in rows)
        self._plans: dict[int, NativePlan] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        if not self._takes(query, keys, values, options):
            self._other = self._other or self._reference.plan(self._rows, self._block_size)
            return self._other.attend(query, keys, values, options)
        tokens, heads, key_dim = query.shape
        kv_heads, value_dim = values.shape[2:]
        if query.stride(2) != 1 or query.stride(1) != key_dim:
            query = query.contiguous()
        out = query.new_empty(tokens, heads, value_dim)
        failed = self._kernels.function("attend", query.dtype)(
            self._plan(heads // kv_heads).handle,
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            heads,
            kv_heads,
            key_dim,
            value_dim,
            options.scaling,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention of {tokens} tokens")
        return out

    def plan_for(self, heads: int, kv_heads: int, dim: int, options: Sequence[AttentionOptions]) -> NativePlan | None:
        """For layers of this geometry in a dtype of the kernels, the plan; ``None`` where some are left to torch."""
        simple = all(self._is_plain(each) for each in options)
        fits = dim % LANES == 0 and heads <= MAX_GROUP * kv_heads
        return self._plan(heads // kv_heads) if simple and fits else None

    def _takes(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> bool:
        return (
            query.dtype == keys.dtype == values.dtype
            and query.dtype in DTYPES
            and self._is_plain(options)
            and keys.shape[3] % LANES == 0
            and values.shape[3] % LANES == 0
            and query.shape[1] <= MAX_GROUP * keys.shape[2]
        )

    def _is_plain(self, options: AttentionOptions) -> bool:
        if options.softcap is not None or options.sinks is not None:
            return False
        return options.window is None or options.window >= self._longest

    def _plan(self, group: int) -> NativePlan:
        plan = self._plans.get(group)
        if plan is None:
            plan = NativePlan(self._kernels, self._rows, self._block_size, group, shares=self._shares)
            self._plans[group] = plan
        return plan
