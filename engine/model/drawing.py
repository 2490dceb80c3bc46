"""Draws: temperature, ``top_k``, ``top_p``, ``min_p``, then the inverse of the cumulative distribution.

A draw is a pure function of the seed, the position and the scores. It does not depend on the neighbours in the batch,
on preemption or on how often the row was computed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .peaks import Float32Array, Float64Array, IntArray, Peaks, starts
from .processors import to_device
from .randomness import uniform
from .runner import RowSampling
from .scores import ScoreOps, invert

FIRST_WIDTH = 64
"""How much of the vocabulary is sorted first for ``top_p`` and ``min_p``; 4 times more where that was not enough."""

BoolArray = npt.NDArray[np.bool_]


class _Candidates(NamedTuple):
    """What may be drawn, by row in ascending id order, padded with weight 0."""

    ids: Tensor
    """Shape [S, K], on the CPU."""
    weights: Tensor
    """Unnormalised probabilities, shape [S, K], float64."""


class _Filters(NamedTuple):
    """The filters of some rows, a column for each; every array has shape [S]."""

    rows: IntArray
    """Which rows of the scores."""
    best: Float32Array
    """Greatest score."""
    temperature: Float32Array
    top_k: IntArray
    """At most the size of the vocabulary, which is no filter."""
    top_p: Float64Array
    min_p: Float64Array
    mass: Float64Array
    """Sum of all weights, where ``top_p`` needs it: without ``top_k``."""

    def weights(self, scores: Float32Array, owners: IntArray | slice) -> Float64Array:
        """exp((score - best) / temperature), scores of the rows ``owners`` along the first axis."""
        shape = (-1, *[1] * (scores.ndim - 1))
        gaps = (scores - self.best[owners].reshape(shape)) / self.temperature[owners].reshape(shape)
        weights: Float64Array = np.exp(gaps, dtype=np.float64)
        return weights

    def part(self, index: IntArray) -> _Filters:
        """Some of the rows."""
        return _Filters._make(column[index] for column in self)


def draw(scores: Tensor, peaks: Peaks, rows: Mapping[int, RowSampling], ops: ScoreOps) -> dict[int, list[int]]:
    """Draw one id per seed of each row named.

    :param scores: processed logits, float32, shape [R, V]; each row named has a finite maximum and no NaN.
    :param peaks: of the scores.
    """
    whole = [i for i, row in rows.items() if not _has_filter(row, scores.shape[1])]
    filtered = [i for i, row in rows.items() if _has_filter(row, scores.shape[1])]
    drawn: dict[int, list[int]] = {}
    if whole:
        part = [rows[i] for i in whole]
        index = np.array(whole, dtype=np.int64)
        bests: Float32Array = peaks.bests.cpu().numpy()
        ids, _ = ops.draw(scores, index, bests[index], _temperatures(part), _uniforms(part))
        drawn |= zip(whole, _by_seed(ids.tolist(), part), strict=True)
    if filtered:
        part = [rows[i] for i in filtered]
        candidates = _filtered(peaks, _filters(scores, peaks, filtered, part, ops))
        drawn |= zip(filtered, _draw(candidates, part), strict=True)
    return drawn


def _has_filter(row: RowSampling, vocab: int) -> bool:
    return 0 < row.params.top_k < vocab or row.params.top_p < 1.0 or row.params.min_p > 0.0


def _temperatures(rows: Sequence[RowSampling]) -> Float32Array:
    return np.array([row.params.temperature for row in rows], dtype=np.float32)


def _uniforms(rows: Sequence[RowSampling]) -> Float64Array:
    """One for each seed, shape [S, n], filled up with 0."""
    uniforms = np.zeros((len(rows), max(len(row.seeds) for row in rows)))
    for i, row in enumerate(rows):
        uniforms[i, : len(row.seeds)] = [uniform(seed, len(row.history)) for seed in row.seeds]
    return uniforms


def _by_seed(ids: Sequence[list[int]], rows: Sequence[RowSampling]) -> list[list[int]]:
    return [found[: len(row.seeds)] for found, row in zip(ids, rows, strict=True)]


def _draw(candidates: _Candidates, rows: Sequence[RowSampling]) -> list[list[int]]:
    places, _ = invert(candidates.weights, torch.from_numpy(_uniforms(rows)))
    return _by_seed(candidates.ids.gather(1, places).tolist(), rows)


def _filters(
    scores: Tensor, peaks: Peaks, index: Sequence[int], rows: Sequence[RowSampling], ops: ScoreOps
) -> _Filters:
    vocab = scores.shape[1]
    limits = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    open_ended = [i for i, row in enumerate(rows) if limits[i] == vocab and row.params.top_p < 1.0]
    mass = np.zeros(len(rows))
    chosen, temperatures = np.array(index, dtype=np.int64), _temperatures(rows)
    bests: Float32Array = peaks.bests.cpu().numpy()[chosen]
    if open_ended:
        asked, each = chosen[open_ended], np.empty((len(open_ended), 0))
        _, mass[open_ended] = ops.draw(scores, asked, bests[open_ended], temperatures[open_ended], each)
    return _Filters(
        rows=chosen,
        best=bests,
        temperature=temperatures,
        top_k=np.array(limits, dtype=np.int64),
        top_p=np.array([row.params.top_p for row in rows], dtype=np.float64),
        min_p=np.array([row.params.min_p for row in rows], dtype=np.float64),
        mass=mass,
    )


def _filtered(peaks: Peaks, filters: _Filters) -> _Candidates:
    """Apply ``top_k``, ``top_p`` and ``min_p``.

    Each keeps a head of the tokens sorted by score, so the shortest head is the result; equal scores at its end are cut
    by id, lowest kept.
    """
    counts, floors = _heads(peaks, filters, FIRST_WIDTH)
    cells = peaks.at_least(to_device(filters.rows, peaks.maxima), to_device(floors, peaks.maxima))
    owners, tokens, values = (column.cpu().numpy() for column in cells)
    kept = _without_surplus(owners, values == floors[owners], counts)
    owners, tokens, values = owners[kept], tokens[kept], values[kept]
    places = np.arange(len(owners)) - starts(counts)[owners]
    ids = np.zeros((len(counts), int(counts.max())), dtype=np.int64)
    weights = np.zeros(ids.shape)
    ids[owners, places] = tokens
    weights[owners, places] = filters.weights(values, owners)
    return _Candidates(torch.from_numpy(ids), torch.from_numpy(weights))


def _without_surplus(owners: IntArray, ties: BoolArray, counts: IntArray) -> BoolArray:
    """Which cells stay when each row keeps ``counts`` of its own, all but the last ones of its ``ties``."""
    tied = np.bincount(owners[ties], minlength=len(counts))
    surplus = np.bincount(owners, minlength=len(counts)) - counts
    rank = np.cumsum(ties) - starts(tied)[owners]
    return ~ties | (rank <= (tied - surplus)[owners])


def _heads(peaks: Peaks, filters: _Filters, width: int) -> tuple[IntArray, Float32Array]:
    """How many tokens each row keeps and the score of the last one. Sorts no more of the vocabulary than needed."""
    width = min(peaks.vocab, int(np.where(filters.top_k < peaks.vocab, filters.top_k, width).max()))
    head: Float32Array = peaks.top(to_device(filters.rows, peaks.maxima), width).cpu().numpy()
    weights = filters.weights(head, slice(None))
    weights[np.arange(width) >= filters.top_k[:, None]] = 0.0
    # summed one after the other: how much more of the vocabulary a neighbour needs then makes no difference
    mass = np.where(filters.top_k < peaks.vocab, np.cumsum(weights, axis=1)[:, -1], filters.mass)
    counts = _lengths(weights, mass, filters)
    floors: Float32Array = head[np.arange(len(counts)), counts - 1]
    open_end = np.flatnonzero((counts == width) & (width < filters.top_k))
    if len(open_end):
        counts[open_end], floors[open_end] = _heads(peaks, filters.part(open_end), width * 4)
    return counts, floors


def _lengths(weights: Float64Array, mass: Float64Array, filters: _Filters) -> IntArray:
    """Length of the kept head of each row of ``weights`` (descending, the best is 1, 0 after ``top_k``), at least 1.

    ``top_p`` keeps a token while the probability of all better ones is below it: Holtzman et al. 2020. ``min_p`` is a
    share of the best token's probability: Nguyen et al. 2024.

    :param mass: sum of the weights that ``top_k`` allows, also of those beyond the end of ``weights``.
    """
    allowed = (weights >= filters.min_p[:, None]) & (weights > 0.0)
    better = np.cumsum(weights, axis=1) - weights
    inside = (better < (filters.top_p * mass)[:, None]) | (filters.top_p >= 1.0)[:, None]
    lengths: IntArray = np.maximum(1, np.count_nonzero(allowed & inside, axis=1))
    return lengths
