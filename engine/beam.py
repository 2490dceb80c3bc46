"""The decisions of beam search: which beams go on, which hypotheses are kept, when it is over.

Pure logic over scores, without cache and tensors. It decides as ``generate(num_beams=..., do_sample=False)`` of Hugging
Face transformers 5 does for one prompt, which differs from the textbook in three points:

* The best (1 + number of end tokens) * width continuations over all beams are looked at. Those that end are finished
  hypotheses only when they are among the best ``width``; the best ``width`` of the others go on.
* Scores are sum of log-probabilities / generated length ** length_penalty, where the end token counts as generated.
* When ``width`` hypotheses are finished and the best live beam cannot beat the worst of them any more, the search is
  over. What a live beam could still reach is estimated from its present length (``early_stopping=False``), or from the
  greatest length when that is better (``"never"``); ``True`` does not ask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .model.runner import TokenScore
from .request import FinishReason


class BeamContinuation(NamedTuple):
    """A live beam of the next step."""

    parent: int
    """Index of the live beam that it continues."""
    token_id: int


class BeamStep(NamedTuple):
    """What to do after a step."""

    next: tuple[BeamContinuation, ...]
    """The live beams of the next step, best first; the next step counts parents by this order. Empty at the end."""
    finished: bool
    """Whether the search is over."""


class BeamHypothesis(NamedTuple):
    """A finished continuation of the prompt."""

    token_ids: tuple[int, ...]
    """Generated ids, with the end token when it has one."""
    score: float
    """``sum_logprob`` / length ** length_penalty."""
    sum_logprob: float
    finish_reason: FinishReason
    """``stop`` when the last id is an end token, else ``length``."""


class _Beam(NamedTuple):
    token_ids: tuple[int, ...]
    sum_logprob: float


class BeamSearch:
    """The state of one search. It starts with one live beam: the prompt."""

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        n: int = 1,
    ) -> None:
        """
        :param width: beams that run side by side, at least 1.
        :param max_tokens: greatest generated length, at least 1.
        :param eos_token_ids: ids that end a hypothesis: end tokens of the model and ``stop_token_ids``.
        :param n: hypotheses to return, at most ``width``.
        """
        self._width = width
        self._max_tokens = max_tokens
        self._eos = eos_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._n = n
        self._live = [_Beam((), 0.0)]
        self._hypotheses: list[BeamHypothesis] = []
        """The best finished ones, best first, at most ``width``."""

    @property
    def candidates_per_beam(self) -> int:
        """How many of its best continuations each live beam must offer to :meth:`advance`. So many ends cannot crowd
        out the ``width`` beams that go on."""
        return max(2, 1 + len(self._eos)) * self._width

    @property
    def live(self) -> tuple[tuple[int, ...], ...]:
        """Generated ids of the live beams, best first."""
        return tuple(beam.token_ids for beam in self._live)

    def advance(self, candidates: Sequence[Sequence[TokenScore]]) -> BeamStep:
        """Take the continuations of all live beams and decide.

        :param candidates: for each live beam, in order, its best continuations: ``candidates_per_beam`` of them, fewer
            only when no more are allowed (small vocabulary, bans). The scores are log-probabilities.
        """
        pool = self._pool(candidates)
        ends = [self._ends(beam) for _, beam in pool]
        self._finish([beam for (_, beam), end in zip(pool[: self._width], ends, strict=False) if end])
        going_on = [entry for entry, end in zip(pool, ends, strict=True) if not end][: self._width]
        self._live = [beam for _, beam in going_on]
        if not going_on or self._is_over():
            self._live = []
            return BeamStep((), True)
        return BeamStep(tuple(BeamContinuation(parent, beam.token_ids[-1]) for parent, beam in going_on), False)

    def results(self) -> tuple[BeamHypothesis, ...]:
        """The ``n`` best hypotheses, best first. Fewer, perhaps none, before the search is over or when bans left no
        continuation."""
        return tuple(self._hypotheses[: self._n])

    def _pool(self, candidates: Sequence[Sequence[TokenScore]]) -> list[tuple[int, _Beam]]:
        """The best continuations over all beams with their parents, best first."""
        scored = [
            (beam.sum_logprob + candidate.logprob, parent, candidate.token_id)
            for parent, (beam, offered) in enumerate(zip(self._live, candidates, strict=True))
            for candidate in offered
        ]
        # the sort is stable: of equal scores the one of the better beam, then the one offered first, leads
        scored.sort(key=lambda entry: -entry[0])
        return [
            (parent, _Beam((*self._live[parent].token_ids, token), score))
            for score, parent, token in scored[: self.candidates_per_beam]
        ]

    def _ends(self, beam: _Beam) -> bool:
        return beam.token_ids[-1] in self._eos or len(beam.token_ids) >= self._max_tokens

    def _finish(self, beams: Sequence[_Beam]) -> None:
        """Keep the best ``width`` of the hypotheses and ``beams``; the older one leads when scores are equal."""
        for beam in beams:
            reason = FinishReason.STOP if beam.token_ids[-1] in self._eos else FinishReason.LENGTH
            score = self._score(beam.sum_logprob, len(beam.token_ids))
            self._hypotheses.append(BeamHypothesis(beam.token_ids, score, beam.sum_logprob, reason))
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self._hypotheses[self._width :]

    def _is_over(self) -> bool:
        """Whether no live beam can, or need, improve the hypotheses."""
        if len(self._hypotheses) < self._width:
            return False
        if self._early_stopping is True:
            return True
        hopeful = self._early_stopping == "never" and self._length_penalty > 0.0
        best = self._live[0]
        attainable = self._score(best.sum_logprob, self._max_tokens if hopeful else len(best.token_ids))
        return attainable <= self._hypotheses[-1].score

    def _score(self, sum_logprob: float, length: int) -> float:
        # the exponent is bounded: penalties up to 100 would overflow a float, and equal extremes still compare
        return sum_logprob * math.exp(min(max(-self._length_penalty * math.log(length), -600.0), 600.0))
