"""Guides in the sampler: the mask, what comes after it, and faults that stay with their row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.model.guides import UInt32Array
from octavo.engine.model.runner import RowOutput, RowSampling
from octavo.engine.model.sampler import Sampler
from octavo.engine.request import SamplingParams
from octavo.errors import CannotContinue, ModelError

GREEDY = SamplingParams(temperature=0.0)


class Allowing:
    """A guide that allows some ids, in words for ``vocab`` of them."""

    def __init__(self, ids: set[int], vocab: int) -> None:
        bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
        bits[sorted(ids)] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.uint32)
        self._words.setflags(write=False)

    def allowed(self) -> UInt32Array:
        return self._words


class Failing:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def allowed(self) -> UInt32Array:
        raise self._error


def row(
    guide: Allowing | Failing | None = None,
    params: SamplingParams = GREEDY,
    *,
    banned: frozenset[int] = frozenset(),
    seeds: tuple[int, ...] = (1,),
) -> RowSampling:
    return RowSampling(
        params=params, seeds=seeds, history=np.array([1, 2], np.int32), prompt_length=1, banned=banned, guide=guide
    )


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32))


@given(st.data())
def test_only_allowed_tokens_come_out_and_neighbours_see_nothing(data: st.DataObject) -> None:
    """Widths of mask and head differ in both directions, with and without a limit to the vocabulary."""
    vocab, width = data.draw(st.integers(2, 80)), data.draw(st.integers(2, 100))
    limit = data.draw(st.none() | st.integers(1, vocab))
    allowed = data.draw(st.sets(st.integers(0, width - 1), min_size=1))
    drawing = SamplingParams(temperature=1.5)
    scores = logits(3, vocab, data.draw(st.integers(0, 99)))
    sampler, plain = Sampler(vocab_limit=limit), row(None, drawing, seeds=(3, 4))
    alone = sampler.sample(scores[1:2], [plain])
    guide = Allowing(allowed, width)
    guided = [row(guide, drawing, seeds=(1, 2, 5)), plain, row(guide)]
    first, neighbour, best = sampler.sample(scores, guided)
    assert [neighbour] == alone
    possible = allowed & set(range(limit or vocab))
    if not possible:
        assert first.refusal is not None
        assert best.refusal is not None
        return
    assert {sampled.token_id for sampled in first.sampled} <= possible
    [chosen] = best.sampled
    assert chosen.token_id == max(possible, key=lambda token: float(scores[2, token]))
    raw = scores[2, :limit].log_softmax(-1)
    assert chosen.logprob == pytest.approx(float(raw[chosen.token_id]), abs=1e-5)


@pytest.mark.parametrize("error", [ModelError("the format ended here"), RuntimeError("boom"), MemoryError()])
def test_a_guide_that_fails_takes_its_row_alone_with_it(error: Exception) -> None:
    scores = logits(2, 40)
    bad, good = Sampler().sample(scores, [row(Failing(error)), row()])
    assert bad.error is not None
    assert str(error) in bad.error
    assert (bad.sampled, [good]) == ((), Sampler().sample(scores[1:], [row()]))


def test_a_guide_that_cannot_go_on_is_no_fault_of_the_model() -> None:
    scores = logits(2, 40)
    bad, good = Sampler().sample(scores, [row(Failing(CannotContinue("too complex"))), row()])
    assert (bad, [good]) == (RowOutput(refusal="too complex"), Sampler().sample(scores[1:], [row()]))
    scores[0, 3] = float("nan")
    bad, good = Sampler().sample(scores, [row(Failing(CannotContinue("too complex"))), row()])
    assert (bad.refusal, "not finite" in (bad.error or "")) == (None, True)


def test_bias_and_bans_come_after_the_mask() -> None:
    guide = Allowing({3, 7}, 40)
    scores = torch.zeros(1, 40)
    scores[0, 3] = 5.0
    cases = [
        (row(guide), 3),
        (row(guide, banned=frozenset({3})), 7),
        (row(guide, SamplingParams(temperature=0.0, logit_bias={3: -100.0})), 7),
        (row(guide, SamplingParams(temperature=0.0, logit_bias={7: 100.0})), 7),
        (row(guide, SamplingParams(temperature=0.0, logit_bias={9: 99.0})), 3),
        (row(guide, SamplingParams(temperature=0.0, logit_bias={9: 100.0})), None),
        (row(guide, SamplingParams(temperature=0.0, logit_bias={3: -100.0, 7: -100.0})), None),
        # what is banned for now may come where the format allows nothing else
        (row(guide, banned=frozenset({3, 7, 8})), 3),
        (row(Allowing({3, 45}, 64), banned=frozenset({3})), 3),  # an id that the model has not is none
        (row(guide, SamplingParams(temperature=0.0, logit_bias={3: -100.0}), banned=frozenset({3, 7})), 7),
    ]
    for asked, expected in cases:
        [output] = Sampler().sample(scores, [asked])
        if expected is None:
            assert output.refusal is not None
            assert "output_format" in output.refusal
        else:
            assert [sampled.token_id for sampled in output.sampled] == [expected]
