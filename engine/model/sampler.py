"""From logits to tokens: processors, filters and draws, vectorised over the rows of a step.

The order is fixed: output format, logit bias, bans, repetition penalty (prompt and output), presence and frequency
penalties (output only), temperature, ``top_k``, ``top_p``, ``min_p``, draw. Greedy rows take the best token after the
penalties. Beam rows apply the same processors to log-probabilities, as Hugging Face's beam search does; temperature and
filters have no effect on them.

The reported log-probabilities are those of the model's raw distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import ModelError
from .bias import BiasTable
from .drawing import draw
from .guided_rows import consult
from .peaks import Peaks, starts
from .processors import process, to_index
from .runner import Int32Array, PromptScore, RowOutput, RowSampling, SampledToken, TokenScore
from .scores import ScoreOps, Survey, TorchScores

_NOT_FINITE = "the model's logits are not finite (NaN or infinite); the weights or the chosen dtype are at fault"
_NONE_LEFT = "no token is left to choose: all are banned; loosen logit_bias, min_tokens or output_format"


class Sampler:
    """Chooses tokens. The same rows and logits give the same answer on every call: what it keeps is made from the
    parameters of requests and saves time, no more."""

    def __init__(self, *, vocab_limit: int | None = None, ops: ScoreOps | None = None) -> None:
        """
        :param vocab_limit: ids from here on (padding of the model's head) never come out and have no probability.
        :param ops: who reads the scores; ``None``: torch.
        """
        self._limit = vocab_limit
        self._ops = ops or TorchScores()
        self._biases = BiasTable()

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[RowOutput]:
        """One output per row, in order.

        :param logits: shape [R, V], any floating dtype and device, one row per element of ``rows``; left unchanged.

        A row whose logits are not finite, or whose guide fails, gets ``RowOutput.error``, one that may draw nothing
        ``RowOutput.refusal``; others are unaffected.
        """
        if not rows:
            return []
        with torch.inference_mode():
            raw = self._visible(logits)
            survey = self._ops.survey(raw)
            rows, masks, faults, refusals = consult(rows, raw.shape[1])
            scores = process(raw, survey.logprobs, rows, masks, self._biases)
            peaks = survey.peaks if scores is raw else self._ops.peaks(scores)
            spoilt = _spoilt(survey, peaks, faults, refusals)
            chosen = _choose(scores, peaks, rows, spoilt, self._ops)
            found = _gather(survey, chosen, raw)
            asked = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs and row.seeds}
            tops = _top(survey.peaks, survey.at, asked) if asked else {}
            beams = {i: row.beam_candidates for i, row in enumerate(rows) if row.beam_candidates > 0}
            offered = _top(peaks, lambda rows, ids: scores[rows, ids], beams) if beams else {}
        return [
            spoilt.get(i) or _output(row, chosen[i], found[i], tops.get(i, ()), offered.get(i, ()))
            for i, row in enumerate(rows)
        ]

    def prompt_scores(self, logits: Tensor, targets: Int32Array, top: int) -> tuple[PromptScore, ...]:
        """Log-probability of each target under the logits of the position before it.

        :param logits: shape [n, V], any floating dtype.
        :param targets: shape [n]. A target beyond the vocabulary limit has log-probability ``-inf``.
        :param top: how many of the likeliest alternatives to add, 0 for none.
        :raises ModelError: when a row of the logits is not finite.
        """
        if len(targets) == 0:
            return ()
        with torch.inference_mode():
            raw = self._visible(logits)
            survey = self._ops.survey(raw)
            if not all(survey.sound):
                raise ModelError(f"prompt log-probabilities: {_NOT_FINITE}")
            ids = torch.as_tensor(targets, dtype=torch.int64, device=raw.device)
            inside = ids < raw.shape[1]
            found = survey.at(torch.arange(len(ids), device=ids.device), ids.clamp(max=raw.shape[1] - 1))
            values: list[float] = found.masked_fill(~inside, -torch.inf).tolist()
            tops = _top(survey.peaks, survey.at, dict.fromkeys(range(len(targets)), top)) if top else {}
        return tuple(
            PromptScore(token, logprob, tops.get(i, ()))
            for i, (token, logprob) in enumerate(zip(targets.tolist(), values, strict=True))
        )

    def _visible(self, logits: Tensor) -> Tensor:
        """The logits that count, float32, shape [R, limit]; may share memory with the input."""
        return (logits if self._limit is None else logits[:, : self._limit]).float()


def _spoilt(
    survey: Survey, peaks: Peaks, faults: Mapping[int, str], refusals: Mapping[int, str]
) -> dict[int, RowOutput]:
    """The rows that nothing can be drawn for, and why. Where the model is at fault nobody else is."""
    dead = [i for i, best in enumerate(peaks.bests.tolist()) if not best > -torch.inf]
    found = {i: RowOutput(refusal=refusals.get(i, _NONE_LEFT)) for i in (*dead, *refusals)}
    found |= {i: RowOutput(error=fault) for i, fault in faults.items()}
    return found | {i: RowOutput(error=_NOT_FINITE) for i, sound in enumerate(survey.sound) if not sound}


def _choose(
    scores: Tensor, peaks: Peaks, rows: Sequence[RowSampling], spoilt: Container[int], ops: ScoreOps
) -> list[list[int]]:
    """The chosen ids of each row, one per seed; none for spoilt rows and for beams."""
    live = [i for i, row in enumerate(rows) if row.seeds and i not in spoilt and row.beam_candidates == 0]
    drawing = {i: rows[i] for i in live if not rows[i].params.greedy}
    best: list[int] = peaks.ids.tolist()
    chosen = {i: [best[i]] * len(rows[i].seeds) for i in live if i not in drawing}
    if drawing:
        chosen |= draw(scores, peaks, drawing, ops)
    return [chosen.get(i, []) for i in range(len(rows))]


def _gather(survey: Survey, chosen: Sequence[Sequence[int]], like: Tensor) -> list[list[float]]:
    """Log-probabilities of the chosen ids, in the same shape."""
    rows = to_index((i for i, ids in enumerate(chosen) for _ in ids), like)
    values = iter(survey.at(rows, to_index((token for ids in chosen for token in ids), like)).tolist())
    return [[next(values) for _ in ids] for ids in chosen]


def _top(
    peaks: Peaks, shown: Callable[[Tensor, Tensor], Tensor], counts: Mapping[int, int]
) -> dict[int, tuple[TokenScore, ...]]:
    """The best ``counts[row]`` ids, at least 1, of each row named, best first and equal ones by id, with what ``shown``
    says of them by rows and ids. What is ``-inf`` is left out."""
    rows, wanted = (to_index(each, peaks.maxima) for each in (counts, counts.values()))
    wanted.clamp_(max=peaks.vocab)
    best = peaks.top(rows, int(wanted.max()))
    floors = best.gather(1, wanted[:, None] - 1)[:, 0].clamp_(min=torch.finfo(best.dtype).min)
    cells = peaks.at_least(rows, floors)
    scores = shown(rows[cells.owners], cells.ids).tolist()
    owners, ids, values = (column.cpu().numpy() for column in cells)
    order = np.lexsort((ids, -values, owners))
    found = [TokenScore(token, scores[at]) for token, at in zip(ids[order].tolist(), order.tolist(), strict=True)]
    lengths = np.bincount(owners, minlength=len(counts))
    return {
        row: tuple(found[start : start + min(count, length)])
        for (row, count), start, length in zip(counts.items(), starts(lengths).tolist(), lengths.tolist(), strict=True)
    }


def _output(
    row: RowSampling,
    chosen: Sequence[int],
    logprobs: Sequence[float],
    top: tuple[TokenScore, ...],
    beam: tuple[TokenScore, ...],
) -> RowOutput:
    if row.beam_candidates > 0:
        return RowOutput(beam=beam)
    return RowOutput(
        sampled=tuple(SampledToken(token, logprob, top) for token, logprob in zip(chosen, logprobs, strict=True))
    )
