"""The reference backend: gather, then scaled dot-product attention. Runs wherever torch runs.

Rows of one token go into one padded call, longer rows into one call each. Blocks in one run are read as a view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..runner import Int64Array, Row
from .base import AttentionOptions, StepAttention


class TorchBackend:
    """Attention by ``torch.nn.functional.scaled_dot_product_attention``, or spelled out for softcap and sinks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, rows: Sequence[Row], block_size: int) -> StepAttention:
        """Sort the rows into parts; indices and masks are made when a layer first needs them."""
        singles = [row for row in rows if row.length == 1]
        parts = [_Part(singles, block_size, self._device)] if singles else []
        parts += [_Part([row], block_size, self._device) for row in rows if row.length > 1]
        return _TorchStep(parts)


class _TorchStep:
    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0].attend(query, keys, values, options)
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        for part in self._parts:
            output[part.tokens] = part.attend(query[part.tokens], keys, values, options)
        return output


class _Part:
    """Rows that share one call: any number of single tokens, or one chunk."""

    def __init__(self, rows: Sequence[Row], block_size: int, device: torch.device) -> None:
        self._rows = rows
        self._block_size = block_size
        self._device = device
        self._views: dict[int | None, _KeyView] = {}
        start, length = rows[0].start, rows[0].length
        starts = np.array([row.start for row in rows], dtype=np.int64)
        self.tokens: slice | Tensor = (
            slice(start, start + length) if len(rows) == 1 else torch.from_numpy(starts).to(device)
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """:param query: the part's own tokens, shape [T, H, Dk]. :returns: shape [T, H, Dv]."""
        view = self._views.get(options.window)
        if view is None:
            view = _KeyView(self._rows, self._block_size, options.window, query.dtype, self._device)
            self._views[options.window] = view
        call = _attend_singles if self._rows[0].length == 1 else _attend_chunk
        return call(query, view.read(keys), view.read(values), view.mask, options)


class _KeyView:
    """Which slots the rows of a part read under one window, and which of those each query may see."""

    def __init__(
        self, rows: Sequence[Row], block_size: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        length = rows[0].length
        ends = np.array([row.context for row in rows], dtype=np.int64)
        firsts = np.zeros_like(ends) if window is None else np.maximum(ends - length - window + 1, 0)
        positions = firsts[:, None] + np.arange((ends - firsts).max())
        queries = ends[:, None] - length + np.arange(length)
        # Padding reads the row's newest slot again: always written, so never NaN, and masked anyway.
        slots = _slots(rows, np.minimum(positions, ends[:, None] - 1), block_size)
        is_run = len(rows) == 1 and bool((np.diff(slots[0]) == 1).all())
        self._run = slice(int(slots[0, 0]), int(slots[0, -1]) + 1) if is_run else None
        self._slots = None if is_run else torch.from_numpy(slots.ravel()).to(device)
        self._shape = slots.shape
        self.mask = _additive_mask(queries[:, None, :, None], positions[:, None, None, :], window, dtype, device)
        """What to add to the scores: 0 or -inf, shape [rows, 1, T, L]; ``None`` when every query sees every key."""

    def read(self, pool: Tensor) -> Tensor:
        """:returns: shape [rows, L, Hkv, D]; a view of ``pool`` when the slots lie in one run."""
        flat = pool.flatten(0, 1)
        read = flat[self._run] if self._slots is None else flat.index_select(0, self._slots)
        return read.view(*self._shape, *pool.shape[2:])


def _additive_mask(
    queries: Int64Array, keys: Int64Array, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if seen.all():
        return None
    hidden = torch.from_numpy(~seen).to(device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _slots(rows: Sequence[Row], positions: Int64Array, block_size: int) -> Int64Array:
    """Slots of ``positions``, shape [rows, L]."""
    table = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int64)
    for blocks, row in zip(table, rows, strict=True):
        blocks[: len(row.blocks)] = row.blocks
    slots: Int64Array = np.take_along_axis(table, positions // block_size, axis=1) * block_size
    slots += positions % block_size
    return slots


def _attend_singles(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Rows of one token. The query heads of a KV head become its query length, so K and V are not repeated."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    folded = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    sinks = None if options.sinks is None else options.sinks.view(1, kv_heads, -1, 1)
    out = _softmax_attention(folded, keys.transpose(1, 2), values.transpose(1, 2), mask, options, sinks)
    return out.reshape(rows, heads, -1)


def _attend_chunk(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """One row of many tokens. KV heads become the batch, and their query heads see K and V by a stride of zero."""
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    grouped = query.reshape(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
    keys, values = (t[0].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for t in (keys, values))
    sinks = None if options.sinks is None else options.sinks.view(kv_heads, group, 1, 1)
    out = _softmax_attention(grouped, keys, values, mask, options, sinks)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def _softmax_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """:param sinks: broadcastable to the scores with a last dimension of 1."""
    if options.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scaling)
    scores = query.matmul(keys.transpose(2, 3)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype).matmul(values)
