"""What sampling reads of scores: the seam between its rules and whoever does the reading."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from .peaks import Float32Array, Float64Array, IntArray, Peaks, find_peaks

CHUNK = 256
"""Weights per block of the two-level search in :meth:`TorchScores.draw`."""


class Survey(Protocol):
    """The model's distribution of some rows."""

    @property
    def peaks(self) -> Peaks:
        """Of the logits themselves."""

    @property
    def sound(self) -> list[bool]:
        """Which rows are good: a NaN, an infinity or nothing but ``-inf`` spoils one."""

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities of some cells, each named by row and id. Shapes: [N] and [N] -> [N]."""

    def logprobs(self) -> Tensor:
        """All of them, shape [R, V]."""


class ScoreOps(Protocol):
    """Reads scores, float32, shape [R, V]."""

    def survey(self, raw: Tensor) -> Survey:
        """The distribution that logits mean."""

    def peaks(self, scores: Tensor) -> Peaks:
        """The maxima of blocks."""

    def draw(
        self,
        scores: Tensor,
        rows: IntArray,
        bests: Float32Array,
        temperatures: Float32Array,
        uniforms: Float64Array,
    ) -> tuple[IntArray, Float64Array]:
        """Where in the cumulative sum of a row's weights, exp((score - best) / temperature), each uniform falls, and
        the sum of the weights. A weight of 0 is never hit.

        :param rows: which rows of the scores, shape [S]; each has a finite maximum and no NaN.
        :param bests: the greatest score of each, shape [S].
        :param temperatures: of each, shape [S].
        :param uniforms: below 1, shape [S, n]; n may be 0. All arrays are C-contiguous.
        :returns: shapes [S, n] and [S].
        """


class TorchScores:
    """The reference, on any device."""

    def survey(self, raw: Tensor) -> Survey:
        return TorchSurvey(raw)

    def peaks(self, scores: Tensor) -> Peaks:
        return find_peaks(scores)

    def draw(
        self,
        scores: Tensor,
        rows: IntArray,
        bests: Float32Array,
        temperatures: Float32Array,
        uniforms: Float64Array,
    ) -> tuple[IntArray, Float64Array]:
        index = torch.from_numpy(rows).to(scores.device)
        part = scores if len(rows) == len(scores) else scores.index_select(0, index)
        best, temperature = (torch.from_numpy(each).to(scores.device)[:, None] for each in (bests, temperatures))
        # the best goes first: a tiny temperature then scales gaps to zero and below, and nothing overflows
        weights = (part - best).div_(temperature).exp_()
        found, masses = invert(weights, torch.from_numpy(uniforms).to(scores.device))
        return found.cpu().numpy(), masses.cpu().numpy()


class TorchSurvey:
    """By torch's softmax."""

    def __init__(self, raw: Tensor) -> None:
        self._raw = raw
        self._logprobs = raw.log_softmax(dim=-1)

    @cached_property
    def peaks(self) -> Peaks:
        return find_peaks(self._raw)

    @property
    def sound(self) -> list[bool]:
        found: list[bool] = (~self._logprobs[:, 0].isnan()).tolist()  # whatever is wrong makes a whole row NaN
        return found

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        return self._logprobs[rows, ids]

    def logprobs(self) -> Tensor:
        return self._logprobs


def invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the cumulative sum of the weights, taken in float64, each uniform falls; and the sums.

    Shapes: [S, K] and [S, n] -> [S, n] and [S]. Blocks are summed first and only the block that is hit is looked into.
    """
    missing = -weights.shape[1] % CHUNK
    blocks = (pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, CHUNK)
    upto = pad(blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1), (1, 0))
    # a uniform is at most 1 - 2**-53, so its product with the total rounds to less than the total: a block is found
    target = uniforms * upto[:, -1:]
    block = torch.searchsorted(upto, target, right=True) - 1
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, CHUNK)).cumsum(dim=-1, dtype=torch.float64)
    rest = (target - upto.gather(1, block))[:, :, None]
    # two ways to sum a block may differ in the last bit, so the rest may lie past its end
    last = torch.searchsorted(inside, inside[:, :, -1:].contiguous())
    offset = torch.minimum(torch.searchsorted(inside, rest, right=True), last)
    return block * CHUNK + offset[:, :, 0], upto[:, -1]
