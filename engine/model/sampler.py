"""From logits to tokens: processors, filters and draws, vectorised over the rows of a step.

The order is fixed: output format, logit bias, bans, repetition penalty (prompt and output), presence and frequency
penalties (output only), temperature, ``top_k``, ``top_p``, ``min_p``, draw. Greedy rows take the best token after the
penalties. Beam rows apply the same processors to log-probabilities, as Hugging Face's beam search does; temperature and
filters have no effect on them.

The reported log-probabilities are those of the model's raw distribution.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import ModelError
from .drawing import draw
from .guided_rows import consult
from .processors import process
from .runner import Int32Array, PromptScore, RowOutput, RowSampling, SampledToken, TokenScore

_NOT_FINITE = "the model's logits are not finite (NaN or infinite); the weights or the chosen dtype are at fault"
_NONE_LEFT = "no token is left to choose: all are banned; loosen logit_bias, min_tokens or output_format"


class Sampler:
    """Chooses tokens. Stateless: the same rows and logits give the same answer on every call."""

    def __init__(self, *, vocab_limit: int | None = None) -> None:
        """``vocab_limit``: ids from here on (padding of the model's head) never come out and have no probability."""
        self._limit = vocab_limit

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
            norm = raw.logsumexp(dim=-1)
            rows, masks, faults, refusals = consult(rows, raw.shape[1])
            scores = process(raw, norm, rows, masks)
            spoilt = _spoilt(norm, scores, faults, refusals)
            chosen = _choose(scores, rows, spoilt)
            logprobs = _gather_logprobs(raw, norm, chosen)
            tops = _top_logprobs(raw, norm, {i: r.params.logprobs or 0 for i, r in enumerate(rows) if r.seeds})
            beams = _top_logprobs(scores, None, {i: row.beam_candidates for i, row in enumerate(rows)})
        return [
            spoilt.get(i) or _output(row, chosen[i], logprobs[i], tops.get(i, ()), beams.get(i, ()))
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
            norm = raw.logsumexp(dim=-1)
            if not bool(norm.isfinite().all()):
                raise ModelError(f"prompt log-probabilities: {_NOT_FINITE}")
            ids = torch.as_tensor(targets, dtype=torch.int64, device=raw.device)
            inside = ids < raw.shape[1]
            found = raw.gather(1, ids.clamp(max=raw.shape[1] - 1)[:, None])[:, 0] - norm
            logprobs: list[float] = found.masked_fill(~inside, -torch.inf).tolist()
            tops = _top_logprobs(raw, norm, dict.fromkeys(range(len(targets)), top))
        return tuple(
            PromptScore(token, logprob, tops.get(i, ()))
            for i, (token, logprob) in enumerate(zip(targets.tolist(), logprobs, strict=True))
        )

    def _visible(self, logits: Tensor) -> Tensor:
        """The logits that count, float32, shape [R, limit]; may share memory with the input."""
        return (logits if self._limit is None else logits[:, : self._limit]).float()


def _spoilt(
    norm: Tensor, scores: Tensor, faults: Mapping[int, str], refusals: Mapping[int, str]
) -> dict[int, RowOutput]:
    """The rows that nothing can be drawn for, and why. Where the model is at fault nobody else is."""
    sound: list[bool] = norm.isfinite().tolist()
    alive: list[bool] = (scores.amax(dim=-1) > -torch.inf).tolist()
    found = {i: RowOutput(refusal=refusals.get(i, _NONE_LEFT)) for i, a in enumerate(alive) if not a or i in refusals}
    found |= {i: RowOutput(error=fault) for i, fault in faults.items()}
    return found | {i: RowOutput(error=_NOT_FINITE) for i, s in enumerate(sound) if not s}


def _choose(scores: Tensor, rows: Sequence[RowSampling], spoilt: Container[int]) -> list[list[int]]:
    """The chosen ids of each row, one per seed; none for spoilt rows and for beams."""
    live = [i for i, row in enumerate(rows) if row.seeds and i not in spoilt and row.beam_candidates == 0]
    greedy = [i for i in live if rows[i].params.greedy]
    drawing = [i for i in live if not rows[i].params.greedy]
    chosen: list[list[int]] = [[] for _ in rows]
    if greedy:
        best: list[int] = _part(scores, greedy).argmax(dim=-1).tolist()
        for i, token in zip(greedy, best, strict=True):
            chosen[i] = [token] * len(rows[i].seeds)
    if drawing:
        for i, tokens in zip(drawing, draw(_part(scores, drawing), [rows[i] for i in drawing]), strict=True):
            chosen[i] = tokens
    return chosen


def _part(scores: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows; without a copy when it is all of them."""
    return scores if len(rows) == len(scores) else scores[rows]


def _gather_logprobs(raw: Tensor, norm: Tensor, chosen: Sequence[Sequence[int]]) -> list[list[float]]:
    """Raw log-probabilities of the chosen ids, in the same shape."""
    rows = torch.tensor([i for i, ids in enumerate(chosen) for _ in ids], dtype=torch.int64, device=raw.device)
    flat = torch.tensor([token for ids in chosen for token in ids], dtype=torch.int64, device=raw.device)
    values = iter((raw[rows, flat] - norm[rows]).tolist())
    return [[next(values) for _ in ids] for ids in chosen]


def _top_logprobs(scores: Tensor, norm: Tensor | None, counts: dict[int, int]) -> dict[int, tuple[TokenScore, ...]]:
    """The best ``counts[row]`` ids of each row that asks for any, best first, minus ``norm``; ``-inf`` is left out."""
    asking = [row for row, count in counts.items() if count > 0]
    if not asking:
        return {}
    width = min(scores.shape[1], max(counts[row] for row in asking))
    values, ids = scores[asking].topk(width, dim=-1)
    logprobs: list[list[float]] = (values if norm is None else values - norm[asking, None]).tolist()
    tokens: list[list[int]] = ids.tolist()
    return {
        row: tuple(
            TokenScore(token, logprob)
            for token, logprob in zip(tokens[i][: counts[row]], logprobs[i], strict=False)
            if logprob > -torch.inf
        )
        for i, row in enumerate(asking)
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
