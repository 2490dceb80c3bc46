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

from .processors import Float64Array, IntArray, to_device
from .randomness import uniform
from .runner import RowSampling

FIRST_WIDTH = 256
"""How much of the vocabulary is sorted at first for ``top_p`` and ``min_p``; it grows when that was not enough."""


class _Candidates(NamedTuple):
    """What may be drawn, by row in ascending id order, padded with weight 0."""

    ids: Tensor | None
    """Shape [S, K]; ``None`` when column j is id j."""
    weights: Tensor
    """Unnormalised probabilities, float64, shape [S, K]."""


def draw(scores: Tensor, rows: Sequence[RowSampling]) -> list[list[int]]:
    """Draw one id per seed of each row.

    :param scores: processed logits, shape [S, V], floating; each row has a finite maximum and no NaN.
    """
    temperatures = to_device(np.array([row.params.temperature for row in rows], dtype=np.float64), scores)
    # the maximum goes first: a tiny temperature then scales gaps to zero and below, and nothing overflows
    scaled = (scores.double() - scores.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    filtered = [i for i, row in enumerate(rows) if _has_filter(row, scores.shape[1])]
    whole = sorted(set(range(len(rows))) - set(filtered))
    drawn: dict[int, list[int]] = {}
    if whole:
        weights = (scaled if not filtered else scaled[whole]).exp()
        drawn |= zip(whole, _invert(_Candidates(None, weights), [rows[i] for i in whole]), strict=True)
    if filtered:
        part = [rows[i] for i in filtered]
        candidates = _filtered(scaled if not whole else scaled[filtered], part)
        drawn |= zip(filtered, _invert(candidates, part), strict=True)
    return [drawn[i] for i in range(len(rows))]


def _has_filter(row: RowSampling, vocab: int) -> bool:
    return 0 < row.params.top_k < vocab or row.params.top_p < 1.0 or row.params.min_p > 0.0


def _invert(candidates: _Candidates, rows: Sequence[RowSampling]) -> list[list[int]]:
    """The ids in whose slice of the cumulative distribution each row's uniforms fall. A weight of 0 is never hit."""
    uniforms = np.zeros((len(rows), max(len(row.seeds) for row in rows)))
    for i, row in enumerate(rows):
        uniforms[i, : len(row.seeds)] = [uniform(seed, len(row.history)) for seed in row.seeds]
    cumulative = candidates.weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, to_device(uniforms, total) * total, right=True)
    # rounding may carry a uniform close to 1 to the total itself, past the last weight that is not 0
    found = torch.minimum(found, torch.searchsorted(cumulative, total))
    ids: list[list[int]] = (found if candidates.ids is None else candidates.ids.gather(1, found)).tolist()
    return [ids[i][: len(row.seeds)] for i, row in enumerate(rows)]


def _filtered(scaled: Tensor, rows: Sequence[RowSampling]) -> _Candidates:
    """Apply ``top_k``, ``top_p`` and ``min_p``. Each keeps a head of the tokens sorted by score, so the shortest head
    is the result; equal scores at its end are cut by id, lowest kept."""
    counts, floors = _heads(scaled, rows)
    cells = (scaled >= to_device(floors, scaled)[:, None]).nonzero()
    values = scaled[cells[:, 0], cells[:, 1]].cpu().numpy()
    bounds = np.searchsorted(cells[:, 0].cpu().numpy(), np.arange(len(rows) + 1))
    columns = cells[:, 1].cpu().numpy()
    ids = np.zeros((len(rows), int(counts.max())), dtype=np.int64)
    weights = np.zeros(ids.shape)
    for i, (start, end) in enumerate(pairwise(bounds)):
        kept = _without_surplus(values[start:end], floors[i], counts[i])
        ids[i, : counts[i]] = columns[start:end][kept]
        weights[i, : counts[i]] = np.exp(values[start:end][kept])
    return _Candidates(torch.from_numpy(ids), torch.from_numpy(weights))


def _without_surplus(values: Float64Array, floor: float, count: int) -> IntArray:
    """Indices of ``count`` values, ascending, leaving out the last ones that equal ``floor``."""
    ties = np.flatnonzero(values == floor)
    surplus = len(values) - count
    return np.delete(np.arange(len(values)), ties[len(ties) - surplus :])


def _heads(scaled: Tensor, rows: Sequence[RowSampling]) -> tuple[IntArray, Float64Array]:
    """How many tokens each row keeps and the score of the last one. Sorts no more of the vocabulary than needed."""
    vocab = scaled.shape[1]
    totals: Float64Array = scaled.exp().sum(dim=-1).cpu().numpy()
    limits = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    width = min(vocab, max([FIRST_WIDTH, *(limit for limit in limits if limit < vocab)]))
    while True:
        head: Float64Array = scaled.topk(width, dim=-1).values.cpu().numpy()
        counts = np.zeros(len(rows), dtype=np.int64)
        for i, row in enumerate(rows):
            weights = np.exp(head[i, : limits[i]])
            mass = float(totals[i] if limits[i] == vocab else weights.sum())
            counts[i] = _head(weights, mass, row.params.top_p, row.params.min_p)
        if width == vocab or all(count < width or limit <= width for count, limit in zip(counts, limits, strict=True)):
            return counts, head[np.arange(len(rows)), counts - 1]
        width = min(vocab, width * 16)


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
