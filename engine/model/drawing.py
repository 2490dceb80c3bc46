"""Draws: temperature, ``top_k``, ``top_p``, ``min_p``, then the inverse of the cumulative distribution.

A draw is a pure function of the seed, the position and the scores. It does not depend on the neighbours in the batch,
on preemption or on how often the row was computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .processors import Float64Array, IntArray, to_device
from .randomness import uniform
from .runner import Float32Array, RowSampling

BLOCK = 256
"""Weights per block of the two-level search in :func:`_invert`."""
FIRST_WIDTH = 256
"""How much of the vocabulary is sorted first for ``top_p`` and ``min_p``; 16 times more where that was not enough."""


class _Candidates(NamedTuple):
    """What may be drawn, by row in ascending id order, padded with weight 0."""

    ids: Tensor | None
    """Shape [S, K]; ``None`` when column j is id j."""
    weights: Tensor
    """Unnormalised probabilities, shape [S, K]."""


def draw(scores: Tensor, rows: Sequence[RowSampling]) -> list[list[int]]:
    """Draw one id per seed of each row.

    :param scores: processed logits, float32, shape [S, V]; each row has a finite maximum and no NaN.
    """
    temperatures = to_device(np.array([row.params.temperature for row in rows], dtype=np.float32), scores)
    # the maximum goes first: a tiny temperature then scales gaps to zero and below, and nothing overflows
    scaled = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    filtered = [i for i, row in enumerate(rows) if _has_filter(row, scores.shape[1])]
    whole = sorted(set(range(len(rows))) - set(filtered))
    drawn: dict[int, list[int]] = {}
    if whole:
        candidates = _Candidates(None, (scaled[whole] if filtered else scaled).exp())
        drawn |= zip(whole, _draw(candidates, [rows[i] for i in whole]), strict=True)
    if filtered:
        part = [rows[i] for i in filtered]
        candidates = _filtered(scaled[filtered] if whole else scaled, part)
        drawn |= zip(filtered, _draw(candidates, part), strict=True)
    return [drawn[i] for i in range(len(rows))]


def _has_filter(row: RowSampling, vocab: int) -> bool:
    return 0 < row.params.top_k < vocab or row.params.top_p < 1.0 or row.params.min_p > 0.0


def _draw(candidates: _Candidates, rows: Sequence[RowSampling]) -> list[list[int]]:
    uniforms = np.zeros((len(rows), max(len(row.seeds) for row in rows)))
    for i, row in enumerate(rows):
        uniforms[i, : len(row.seeds)] = [uniform(seed, len(row.history)) for seed in row.seeds]
    found = _invert(candidates.weights, to_device(uniforms, candidates.weights))
    ids: list[list[int]] = (found if candidates.ids is None else candidates.ids.gather(1, found)).tolist()
    return [ids[i][: len(row.seeds)] for i, row in enumerate(rows)]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Where in the cumulative sum of the weights, taken in float64, each uniform falls. A weight of 0 is never hit.

    Shapes: [S, K] and [S, n] -> [S, n]. Blocks are summed first and only the block that is hit is looked into.
    """
    blocks = pad(weights, (0, -weights.shape[1] % BLOCK)).reshape(len(weights), -1, BLOCK)
    upto = pad(blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1), (1, 0))
    # a uniform is at most 1 - 2**-53, so its product with the total rounds to less than the total: a block is found
    target = uniforms * upto[:, -1:]
    block = torch.searchsorted(upto, target, right=True) - 1
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).cumsum(dim=-1, dtype=torch.float64)
    rest = (target - upto.gather(1, block))[:, :, None]
    # two ways to sum a block may differ in the last bit, so the rest may lie past its end
    last = torch.searchsorted(inside, inside[:, :, -1:].contiguous())
    offset = torch.minimum(torch.searchsorted(inside, rest, right=True), last)
    return block * BLOCK + offset[:, :, 0]


def _filtered(scaled: Tensor, rows: Sequence[RowSampling]) -> _Candidates:
    """Apply ``top_k``, ``top_p`` and ``min_p``.

    Each keeps a head of the tokens sorted by score, so the shortest head is the result; equal scores at its end are cut
    by id, lowest kept.
    """
    counts, floors = _heads(scaled, rows, FIRST_WIDTH)
    cells = (scaled >= to_device(floors, scaled)[:, None]).nonzero()
    values = scaled[cells[:, 0], cells[:, 1]].cpu().numpy()
    bounds = np.searchsorted(cells[:, 0].cpu().numpy(), np.arange(len(rows) + 1))
    columns = cells[:, 1].cpu().numpy()
    ids = np.zeros((len(rows), int(counts.max())), dtype=np.int64)
    weights = np.zeros(ids.shape)
    for i, (start, end) in enumerate(pairwise(bounds)):
        kept = _without_surplus(values[start:end], floors[i], counts[i])
        ids[i, : counts[i]] = columns[start:end][kept]
        weights[i, : counts[i]] = np.exp(values[start:end][kept], dtype=np.float64)
    return _Candidates(torch.from_numpy(ids), torch.from_numpy(weights))


def _without_surplus(values: Float32Array, floor: np.float32, count: int) -> IntArray:
    """Indices of ``count`` values, ascending, leaving out the last ones that equal ``floor``."""
    ties = np.flatnonzero(values == floor)
    surplus = len(values) - count
    return np.delete(np.arange(len(values)), ties[len(ties) - surplus :])


def _heads(scaled: Tensor, rows: Sequence[RowSampling], width: int) -> tuple[IntArray, Float32Array]:
    """How many tokens each row keeps and the score of the last one. Sorts no more of the vocabulary than needed."""
    vocab = scaled.shape[1]
    limits = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    width = min(vocab, max(limit if limit < vocab else width for limit in limits))
    head: Float32Array = scaled.topk(width, dim=-1).values.cpu().numpy()
    masses = _masses(scaled) if vocab in limits else np.zeros(len(rows))
    counts = np.zeros(len(rows), dtype=np.int64)
    for i, row in enumerate(rows):
        weights = np.exp(head[i, : limits[i]], dtype=np.float64)
        mass = float(masses[i] if limits[i] == vocab else weights.sum())
        counts[i] = _head(weights, mass, row.params.top_p, row.params.min_p)
    floors = head[np.arange(len(rows)), counts - 1]
    open_end = [i for i, limit in enumerate(limits) if counts[i] == width < limit]
    if open_end:
        counts[open_end], floors[open_end] = _heads(scaled[open_end], [rows[i] for i in open_end], width * 16)
    return counts, floors


def _masses(scaled: Tensor) -> Float64Array:
    masses: Float64Array = scaled.exp().sum(dim=-1, dtype=torch.float64).cpu().numpy()
    return masses


def _head(weights: Float64Array, mass: float, top_p: float, min_p: float) -> int:
    """Length of the kept head of ``weights`` (descending, the best is 1, those after ``top_k`` cut off), at least 1.

    ``top_p`` keeps a token while the probability of all better ones is below it: Holtzman et al. 2020. ``min_p`` is a
    share of the best token's probability: Nguyen et al. 2024.

    :param mass: sum of the weights that ``top_k`` allows, also of those beyond the end of ``weights``.
    """
    kept = weights[(weights >= min_p) & (weights > 0.0)]
    better = np.cumsum(kept) - kept
    nucleus = len(kept) if top_p >= 1.0 else int(np.count_nonzero(better < top_p * mass))
    return max(1, nucleus)
