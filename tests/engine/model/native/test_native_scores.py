"""What the kernels read of scores, against torch, and the sampler over either."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.engine.model.native.scores import NativeScores
from octavo.engine.model.peaks import Float32Array, Float64Array, IntArray
from octavo.engine.model.randomness import uniform
from octavo.engine.model.runner import RowOutput, RowSampling
from octavo.engine.model.sampler import Sampler
from octavo.engine.model.scores import TorchScores
from octavo.engine.request import SamplingParams
from octavo.tests.engine.model.native.native_rig import WatchedKernels, threads

SIZES = (1, 15, 16, 63, 64, 65, 255, 256, 257, 1_000, 49_152)
TORCH = TorchScores()


@pytest.fixture
def ops(kernels: WatchedKernels) -> NativeScores:
    return NativeScores(kernels)


def scores_of(rows: int, vocab: int, scale: float = 4.0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(vocab).normal(0.0, scale, (rows, vocab)).astype(np.float32))


def all_rows(scores: Tensor) -> IntArray:
    return np.arange(len(scores), dtype=np.int64)


def bests(scores: Tensor) -> Float32Array:
    found: Float32Array = scores.amax(dim=-1).numpy()
    return found


def tempered(count: int) -> Float32Array:
    return np.resize(np.array([1.0, 0.3, 2.5, 0.01], dtype=np.float32), count)


def numbers(rows: int, each: int) -> Float64Array:
    return np.array([[uniform(row, place) for place in range(each)] for row in range(rows)])


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("count", [1, 3, 32])
def test_a_survey_is_what_torch_finds(ops: NativeScores, vocab: int, count: int) -> None:
    """In float64, as far as something is added up: torch's own float32 sums differ from processor to processor."""
    scores = scores_of(count, vocab)
    scores[:, ::7] = -torch.inf
    scores[:, -1] = 1.0
    logprobs = scores.double().log_softmax(dim=-1).float()
    for team in (1, 2):
        with threads(team):
            survey, expected = ops.survey(scores), TORCH.survey(scores)
            assert survey.sound == expected.sound == [True] * count
            assert torch.equal(survey.peaks.maxima, expected.peaks.maxima)
            assert torch.equal(survey.peaks.blocks, expected.peaks.blocks)
            assert torch.equal(ops.peaks(scores).maxima, expected.peaks.maxima)
            assert torch.equal(survey.peaks.bests, expected.peaks.bests)
            assert torch.equal(survey.peaks.ids, expected.peaks.ids)
            rows, ids = torch.arange(count), torch.full((count,), vocab - 1)
            torch.testing.assert_close(survey.at(rows, ids), logprobs[rows, ids], rtol=1e-6, atol=2e-6)
            torch.testing.assert_close(survey.logprobs(), logprobs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, "nothing but bans"])
@pytest.mark.parametrize("place", [0, 70, 299])
def test_a_row_that_is_spoilt_is_known_and_spoils_no_other(ops: NativeScores, bad: float | str, place: int) -> None:
    scores = scores_of(3, 300)
    if isinstance(bad, str):
        scores[1] = -torch.inf
    else:
        scores[1, place] = bad
    survey = ops.survey(scores)
    assert survey.sound == TORCH.survey(scores).sound == [True, False, True]
    assert survey.peaks.maxima[1].isnan().tolist() == TORCH.peaks(scores).maxima[1].isnan().tolist()


@pytest.mark.parametrize("vocab", SIZES)
def test_a_draw_falls_where_the_cumulative_sum_says(ops: NativeScores, vocab: int) -> None:
    """In float64 by hand; a number so near to a border that rounding decides may fall on either side of it."""
    scores = scores_of(5, vocab)
    scores[2, : vocab // 2] = -torch.inf
    temperatures, drawn = tempered(5), numbers(5, 40)
    ids, masses = ops.draw(scores, all_rows(scores), bests(scores), temperatures, drawn)
    gaps = scores.double() - scores.double().amax(-1, keepdim=True)
    weights = (gaps / torch.from_numpy(temperatures).double()[:, None]).exp().numpy()
    upto = weights.cumsum(-1)
    np.testing.assert_allclose(masses, upto[:, -1], rtol=2e-6)
    for row in range(5):
        share, border = upto[row] / upto[row, -1], 2e-6
        for token, number in zip(ids[row].tolist(), drawn[row].tolist(), strict=True):
            assert weights[row, token] > 0
            assert share[token] + border > number
            assert token == 0 or share[token - 1] - border <= number


@pytest.mark.parametrize("vocab", [300, 49_152])
def test_the_same_tokens_as_by_torch(ops: NativeScores, vocab: int) -> None:
    """Thousands of draws: the two differ by a rounding, which none of these numbers sees."""
    scores = scores_of(32, vocab)
    scores[:, ::5] = -torch.inf
    drawn = numbers(32, 60)
    ids, masses = ops.draw(scores, all_rows(scores), bests(scores), tempered(32), drawn)
    expected, weights = TORCH.draw(scores, all_rows(scores), bests(scores), tempered(32), drawn)
    assert (ids == expected).mean() > 0.999
    np.testing.assert_allclose(masses, weights, rtol=2e-6)


def test_a_row_draws_the_same_in_any_company(ops: NativeScores) -> None:
    """Of any size, in any place, by any number of threads, in a view as in a copy."""
    whole = scores_of(33, 5_003)
    scores, drawn, temperatures = whole[:, :4_999], numbers(33, 8), tempered(33)
    alone = [
        ops.draw(scores[[row]], np.zeros(1, np.int64), bests(scores[[row]]), temperatures[[row]], drawn[[row]])
        for row in range(33)
    ]
    for team in (1, 2):
        with threads(team):
            for order in (np.arange(33), np.arange(33)[::-1].copy(), np.array([7, 7, 3])):
                ids, masses = ops.draw(
                    scores, order.astype(np.int64), bests(scores)[order], temperatures[order], drawn[order]
                )
                for at, row in enumerate(order):
                    assert ids[at].tolist() == alone[row][0][0].tolist()
                    assert masses[at] == alone[row][1][0]


@pytest.mark.parametrize("place", [0, 15, 16, 255, 256, 698, 699])
@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_what_has_no_weight_is_never_drawn(ops: NativeScores, place: int, number: float) -> None:
    scores = torch.full((1, 700), -torch.inf)
    scores[0, place] = -3.0
    for temperature in (1e-30, 1.0, 1e30):
        ids, masses = ops.draw(
            scores, np.zeros(1, np.int64), bests(scores), np.array([temperature], np.float32), np.array([[number]])
        )
        assert (ids.tolist(), masses.tolist()) == ([[place]], [1.0])


def test_masses_alone_need_no_numbers(ops: NativeScores) -> None:
    scores = scores_of(4, 1_000)
    rows = np.array([3, 1], dtype=np.int64)
    ids, masses = ops.draw(scores, rows, bests(scores)[rows], tempered(2), np.empty((2, 0)))
    assert ids.shape == (2, 0)
    np.testing.assert_allclose(
        masses, TORCH.draw(scores, rows, bests(scores)[rows], tempered(2), np.empty((2, 0)))[1], rtol=2e-6
    )


def test_the_samplers_agree(ops: NativeScores, kernels: WatchedKernels) -> None:
    """All kinds of rows in one batch, with a vocabulary whose end is cut off."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 30, "logprobs": 4},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {3: 100.0}},
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(700), -100.0)},
    ]
    history = np.arange(40, dtype=np.int32)
    rows = [
        RowSampling(SamplingParams.from_mapping(kind), (at, at + 50, at + 99), history, 20)
        for at, kind in enumerate(kinds * 3)
    ]
    rows.append(RowSampling(SamplingParams(temperature=0.0), (), history, 20, beam_candidates=5))
    logits = scores_of(len(rows), 1_030)
    logits[4, 9] = torch.nan
    found = Sampler(vocab_limit=700, ops=ops).sample(logits, rows)
    expected = Sampler(vocab_limit=700).sample(logits, rows)
    assert kernels.asked["draw"] > 0
    for one, other in zip(found, expected, strict=True):
        assert (one.error, one.refusal) == (other.error, other.refusal)
        assert shown(one) == pytest.approx(shown(other), abs=1e-5)


def shown(output: RowOutput) -> list[float]:
    """Every number in it, in order."""
    sampled = [[each.token_id, each.logprob, *(part for top in each.top for part in top)] for each in output.sampled]
    return [float(part) for group in (*sampled, *output.beam) for part in group]


def test_prompt_scores_agree(ops: NativeScores) -> None:
    logits = scores_of(20, 1_000).bfloat16()
    targets = np.array([*range(0, 950, 50), 999], dtype=np.int32)
    found = Sampler(vocab_limit=990, ops=ops).prompt_scores(logits, targets, 3)
    expected = Sampler(vocab_limit=990).prompt_scores(logits, targets, 3)
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-5)
    assert [top.token_id for each in found for top in each.top] == [t.token_id for each in expected for t in each.top]
