"""What sampling reads of scores, by the kernels: each score once or twice, and nothing of their size is written."""

from __future__ import annotations

from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ..peaks import BLOCK, Float32Array, Float64Array, IntArray, Peaks, in_blocks
from .library import Kernels


class NativeScores:
    """A :class:`~octavo.engine.model.scores.ScoreOps` for float32 on the CPU.

    What comes out for a row depends on nothing but that row: one thread reads it, and others read others.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._survey = kernels.function("survey", torch.float32)
        self._draw = kernels.function("draw", torch.float32)

    def survey(self, raw: Tensor) -> NativeSurvey:
        raw = _readable(raw)
        masses = torch.empty(len(raw), dtype=torch.float32)
        return NativeSurvey(raw, self._peaks(raw, masses), masses)

    def peaks(self, scores: Tensor) -> Peaks:
        return self._peaks(_readable(scores), None)

    def draw(
        self,
        scores: Tensor,
        rows: IntArray,
        bests: Float32Array,
        temperatures: Float32Array,
        uniforms: Float64Array,
    ) -> tuple[IntArray, Float64Array]:
        scores = _readable(scores)
        ids, masses = np.empty(uniforms.shape, dtype=np.int64), np.empty(len(rows))
        failed = self._draw(
            scores.data_ptr(),
            scores.stride(0),
            scores.shape[1],
            rows.ctypes.data,
            len(rows),
            bests.ctypes.data,
            temperatures.ctypes.data,
            uniforms.ctypes.data,
            uniforms.shape[1],
            masses.ctypes.data,
            ids.ctypes.data,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the draws of {len(rows)} rows")
        return ids, masses

    def _peaks(self, scores: Tensor, masses: Tensor | None) -> Peaks:
        rows, vocab = scores.shape
        maxima = torch.empty(rows, -(-vocab // BLOCK), dtype=torch.float32)
        bests, ids = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
        self._survey(
            scores.data_ptr(),
            scores.stride(0),
            rows,
            vocab,
            maxima.data_ptr(),
            bests.data_ptr(),
            ids.data_ptr(),
            None if masses is None else masses.data_ptr(),
            torch.get_num_threads(),
        )
        return Peaks(in_blocks(scores), maxima, bests, ids, vocab)


class NativeSurvey:
    """A :class:`~octavo.engine.model.scores.Survey`: the best score and the mass of each row stand for its softmax."""

    def __init__(self, raw: Tensor, peaks: Peaks, masses: Tensor) -> None:
        self.peaks = peaks
        self._raw = raw
        self._masses = masses

    @property
    def sound(self) -> list[bool]:
        return [isfinite(mass) for mass in self._masses.tolist()]  # whatever is wrong makes the mass NaN

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        raw, bests, masses = self._raw.numpy(), self.peaks.bests.numpy(), self._masses.numpy()
        row, token = rows.numpy(), ids.numpy()
        return torch.from_numpy(raw[row, token] - bests[row] - masses[row])  # in a third of torch's time for few

    def logprobs(self) -> Tensor:
        return (self._raw - self.peaks.bests[:, None]).sub_(self._masses[:, None])


def _readable(scores: Tensor) -> Tensor:
    """As the kernels take them: a row is a run of memory."""
    return scores if scores.stride(1) == 1 else scores.contiguous()
