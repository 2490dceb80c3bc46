"""The best of many scores without a sort over all of them.

The vocabulary is cut into blocks. Whatever reaches a floor lies in a block whose maximum does, and at least k scores
reach the k-th greatest of the maxima: all but a few blocks are read once, for their maxima.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

BLOCK = 64
"""Scores per block: so many that maxima are few, so few that looking into a block is cheap."""


class Cells(NamedTuple):
    """Some scores of some rows: by row, within a row by id."""

    owners: Tensor
    """Which of the rows asked for, shape [N], int64, ascending."""
    ids: Tensor
    """Shape [N], int64."""
    values: Tensor
    """Shape [N]."""


class Peaks(NamedTuple):
    """Scores in blocks, with the maximum of each. ``rows`` of the methods has shape [S], int64."""

    blocks: Tensor
    """Shape [R, B, BLOCK], padded with ``-inf``."""
    maxima: Tensor
    """Shape [R, B]; NaN where a block has one."""
    bests: Tensor
    """The greatest score of each row, shape [R]; NaN where a row has one."""
    ids: Tensor
    """Where it is, the lowest id where it is several times, shape [R], int64; anywhere where there is a NaN."""
    vocab: int
    """V, without the padding."""

    def top(self, rows: Tensor, count: int) -> Tensor:
        """The ``count`` greatest scores of each row, 1 to V, best first. Shape [S, count]."""
        if count > self.maxima.shape[1]:
            return self.blocks.flatten(1).index_select(0, rows).topk(count, dim=-1).values
        # so many blocks reach this floor, each with a score at least; few have many more
        floors = self.maxima.index_select(0, rows).topk(count, dim=-1).values[:, -1]
        owners, _, values = self.at_least(rows, floors.clamp_(min=torch.finfo(floors.dtype).min))
        lengths = owners.bincount(minlength=len(rows))
        places = torch.arange(len(owners), device=owners.device) - (lengths.cumsum(0) - lengths)[owners]
        candidates = values.new_full((len(rows), max(count, int(lengths.max()))), -torch.inf)
        candidates[owners, places] = values
        return candidates.topk(count, dim=-1).values

    def at_least(self, rows: Tensor, floors: Tensor) -> Cells:
        """All scores of each row that are not below its floor. ``floors``: shape [S], above ``-inf``."""
        owners, block = (self.maxima.index_select(0, rows) >= floors[:, None]).nonzero(as_tuple=True)
        values = self._inside(rows[owners], block)
        hit, inside = (values >= floors[owners, None]).nonzero(as_tuple=True)
        return Cells(owners[hit], block[hit] * BLOCK + inside, values[hit, inside])

    def _inside(self, rows: Tensor, block: Tensor) -> Tensor:
        """One block of each row named, which may be named again. Shapes: [P] and [P] -> [P, BLOCK]."""
        return self.blocks.flatten(0, 1).index_select(0, rows * self.blocks.shape[1] + block)


def find_peaks(scores: Tensor) -> Peaks:
    """Read all scores once. Shape [R, V]; they may share memory with the result."""
    blocks = in_blocks(scores)
    maxima = blocks.amax(dim=-1)
    bests, block = maxima.max(dim=-1)
    inside = blocks[torch.arange(len(block), device=block.device), block].argmax(dim=-1)
    return Peaks(blocks, maxima, bests, block * BLOCK + inside, scores.shape[1])


def in_blocks(scores: Tensor) -> Tensor:
    """Shape [R, V] -> [R, B, BLOCK], padded with ``-inf``; a view where there is nothing to pad."""
    whole = pad(scores, (0, -scores.shape[1] % BLOCK), value=-torch.inf) if scores.shape[1] % BLOCK else scores
    return whole.contiguous().view(len(scores), -1, BLOCK)


def starts(lengths: IntArray) -> IntArray:
    """Where each run begins when runs of these lengths lie one behind the other."""
    ends: IntArray = np.cumsum(lengths)
    return ends - lengths
