"""The sampler against a plain numpy reading of its rules and against Hugging Face's processors and warpers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.engine.model import drawing
from octavo.engine.model.peaks import find_peaks
from octavo.engine.model.randomness import derive_seed, uniform
from octavo.engine.model.runner import RowOutput, RowSampling, TokenScore
from octavo.engine.model.sampler import Sampler
from octavo.engine.model.scores import TorchScores, invert
from octavo.engine.request import SamplingParams
from octavo.errors import ModelError

Float64Array = npt.NDArray[np.float64]
VOCAB = 24


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def row(
    params: SamplingParams | None = None,
    *,
    seeds: Sequence[int] = (1,),
    history: Sequence[int] = (1, 2, 3),
    prompt_length: int | None = None,
    banned: frozenset[int] = frozenset(),
    beam_candidates: int = 0,
) -> RowSampling:
    return RowSampling(
        params=params or SamplingParams(temperature=0.0),
        seeds=tuple(seeds),
        history=np.array(history, dtype=np.int32),
        prompt_length=len(history) if prompt_length is None else prompt_length,
        banned=banned,
        beam_candidates=beam_candidates,
    )


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    """Distinct values, so that no ties blur a comparison."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, scale, (rows, vocab)).astype(np.float32))


def tokens(output: RowOutput) -> list[int]:
    return [sampled.token_id for sampled in output.sampled]


def draw_one(logits: Tensor, asked: RowSampling, limit: int | None = None) -> int:
    [output] = Sampler(vocab_limit=limit).sample(logits, [asked])
    assert output.error is None
    [token] = tokens(output)
    return token


# --- a second reading of the rules ------------------------------------------------------------------------------------


def expected_scores(logits: Float64Array, asked: RowSampling) -> Float64Array:
    p, scores = asked.params, logits.copy()
    forced = [t for t, bias in p.logit_bias.items() if bias == 100 and t not in asked.banned and t < len(scores)]
    for token in range(len(scores)):
        bias = p.logit_bias.get(token, 0.0)
        scores[token] += bias if abs(bias) < 100 else 0.0
        if bias == -100 or token in asked.banned or (forced and token not in forced):
            scores[token] = -np.inf
        if token in asked.history:
            scores[token] *= p.repetition_penalty if scores[token] < 0 else 1 / p.repetition_penalty
        count = list(asked.history[asked.prompt_length :]).count(token)
        scores[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return scores


def expected_weights(scores: Float64Array, p: SamplingParams) -> Float64Array:
    weights: Float64Array = np.exp((scores - scores.max()) / p.temperature)
    order = sorted(range(len(weights)), key=lambda t: (-weights[t], t))
    if p.top_k:
        order = order[: p.top_k]
    mass, better = sum(weights[t] for t in order), 0.0
    kept: list[int] = []
    for token in order:
        if not kept or ((better < p.top_p * mass or p.top_p == 1) and weights[token] >= p.min_p):
            kept.append(token)
        better += weights[token]
    return np.where(np.isin(np.arange(len(weights)), kept), weights, 0.0)


def expected_token(weights: Float64Array, number: float) -> int:
    target, cumulative = number * weights.sum(), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > target:
            return token
    return int(np.flatnonzero(weights)[-1])


@st.composite
def sampling_rows(draw: st.DrawFn) -> RowSampling:
    history = draw(st.lists(st.integers(0, VOCAB + 3), min_size=1, max_size=12))
    biases = st.one_of(st.floats(-5, 5), st.just(-100.0), st.just(100.0))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 2.0, 10.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, VOCAB, VOCAB + 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.0, 1e-4, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.6])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB + 3), biases, max_size=4)),
    )
    return row(
        params,
        seeds=draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=3)),
        history=history,
        prompt_length=draw(st.integers(0, len(history))),
        banned=frozenset(draw(st.sets(st.integers(0, 5), max_size=2))),
    )


@settings(max_examples=150, deadline=None)
@given(asked=st.lists(sampling_rows(), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_draws_follow_the_rules_whatever_the_neighbours(asked: list[RowSampling], seed: int) -> None:
    logits = random_logits(seed, len(asked))
    outputs = Sampler().sample(logits, asked)
    for one, output, line in zip(asked, outputs, logits, strict=True):
        weights = expected_weights(expected_scores(line.double().numpy(), one), one.params)
        for token, stream in zip(tokens(output), one.seeds, strict=True):
            number = uniform(stream, len(one.history))
            # weights are float32: next to the edge of a slice either neighbour is right
            assert token in {expected_token(weights, n) for n in (max(0.0, number - 1e-6), number, number + 1e-6)}
        assert Sampler().sample(line[None], [one]) == [output]


@settings(max_examples=60, deadline=None)
@given(asked=sampling_rows(), seed=st.integers(0, 10**6))
def test_greedy_takes_the_best_after_the_processors(asked: RowSampling, seed: int) -> None:
    asked = asked._replace(params=replace(asked.params, temperature=0.0))
    logits = random_logits(seed)
    best = int(expected_scores(logits[0].double().numpy(), asked).argmax())
    assert tokens(Sampler().sample(logits, [asked])[0]) == [best] * len(asked.seeds)


# --- Hugging Face as the judge ----------------------------------------------------------------------------------------


def kept_by(warpers: Sequence[LogitsProcessor], logits: Tensor) -> set[int]:
    for warper in warpers:
        logits = warper(torch.zeros((1, 1), dtype=torch.long), logits)
    return set(torch.isfinite(logits[0]).nonzero()[:, 0].tolist())


def reachable(params: SamplingParams, logits: Tensor) -> set[int]:
    """Every token that some uniform number can hit."""
    peaks = find_peaks(logits)
    candidates = drawing._filtered(peaks, drawing._filters(logits, peaks, [0], [row(params)], TorchScores()))
    assert candidates.ids is not None
    return {int(t) for t, w in zip(candidates.ids[0], candidates.weights[0], strict=True) if w > 0}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("values", "warpers"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.2}, [TopPLogitsWarper(0.2)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.7, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
            [TemperatureLogitsWarper(1.7), TopKLogitsWarper(9), TopPLogitsWarper(0.7), MinPLogitsWarper(0.05)],
        ),
    ],
)
def test_filters_keep_what_hugging_face_keeps(
    seed: int, values: Mapping[str, object], warpers: Sequence[LogitsProcessor]
) -> None:
    logits = random_logits(seed, vocab=1000)
    assert reachable(SamplingParams.from_mapping(values), logits) == kept_by(warpers, logits)


@pytest.mark.parametrize("seed", range(8))
def test_processors_score_as_hugging_face_does(seed: int) -> None:
    logits = random_logits(seed)
    history = [3, 9, 9, 14, 3, 20]
    params = SamplingParams(logit_bias={3: 1.5, 7: -2.0}, repetition_penalty=1.4)
    expected = logits.log_softmax(dim=-1)
    for processor in (SequenceBiasLogitsProcessor([[[3], 1.5], [[7], -2.0]]), RepetitionPenaltyLogitsProcessor(1.4)):
        expected = processor(torch.tensor([history]), expected)
    [output] = Sampler().sample(logits, [row(params, seeds=(), history=history, beam_candidates=VOCAB)])
    order = expected[0].argsort(descending=True).tolist()
    assert [score.token_id for score in output.beam] == order
    assert [score.logprob for score in output.beam] == pytest.approx(expected[0, order].tolist(), abs=1e-5)


# --- filters at their edges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [5e-324, 1e-8, 1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize("top_p", [0.0, 1e-4, 1.0])
def test_tiny_temperatures_equal_greedy(dtype: torch.dtype, temperature: float, top_p: float) -> None:
    logits = random_logits(3, 6, vocab=200, scale=60.0).clamp(-60, 60)
    logits[torch.arange(6), torch.tensor([5, 0, 199, 77, 12, 100])] = 62.0
    params = SamplingParams(temperature=temperature, top_p=top_p)
    outputs = Sampler().sample(logits.to(dtype), [row(params, seeds=range(20))] * 6)
    assert [set(tokens(output)) for output in outputs] == [{5}, {0}, {199}, {77}, {12}, {100}]
    assert all(math.isfinite(sampled.logprob) for output in outputs for sampled in output.sampled)


@pytest.mark.parametrize("values", [{"top_p": 0.0}, {"top_p": 1e-4}, {"top_k": 1}])
def test_the_narrowest_filter_is_greedy_even_among_ties(values: Mapping[str, object]) -> None:
    logits = torch.zeros((1, VOCAB), dtype=torch.bfloat16)
    logits[0, [9, 4, 17]] = 2.0
    params = SamplingParams.from_mapping({"temperature": 1.0, **values})
    [output] = Sampler().sample(logits, [row(params, seeds=range(50))])
    assert set(tokens(output)) == {4} == {draw_one(logits, row())}


def test_ties_at_the_end_of_top_k_are_cut_by_id() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, 20] = 1.0
    params = SamplingParams(temperature=1.0, top_k=3)
    [output] = Sampler().sample(logits, [row(params, seeds=range(200))])
    assert set(tokens(output)) == {0, 1, 20}


def test_min_p_of_one_keeps_all_that_are_best() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, [3, 8]] = 1.0
    [output] = Sampler().sample(logits, [row(SamplingParams(min_p=1.0), seeds=range(100))])
    assert set(tokens(output)) == {3, 8}


@pytest.mark.parametrize("top_p", [0.5, 0.99, 0.999999])
def test_a_nucleus_wider_than_the_first_sort(top_p: float) -> None:
    """A flat distribution over 9000 ids: the kept head is longer than what is sorted at first."""
    logits = random_logits(5, vocab=9000, scale=0.01)
    weights = expected_weights(logits[0].double().numpy(), SamplingParams(top_p=top_p))
    assert int((weights > 0).sum()) > drawing.FIRST_WIDTH
    assert reachable(SamplingParams(top_p=top_p), logits) == set(np.flatnonzero(weights).tolist())


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("weight", [0.25, 0.5, 0.1, 0.4999999, 1e-30])
def test_the_extreme_numbers_hit_no_token_of_weight_zero(
    top_k: int, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.tensor([[0.0, weight, 0.5, 0.0, 0.0]]).log()
    for number, token in ((0.0, 1), (1.0 - 2.0**-53, 2)):
        monkeypatch.setattr(drawing, "uniform", lambda *_, number=number: number)
        assert draw_one(logits, row(SamplingParams(top_k=top_k))) == token


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 3000])
def test_the_search_in_blocks_equals_the_plain_one(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    weights = rng.random((40, vocab)) * rng.integers(0, 2, (40, vocab))
    weights[:, int(rng.integers(vocab))] = 0.5
    numbers = np.hstack([rng.random((40, 6)), np.zeros((40, 1)), np.full((40, 1), 1.0 - 2.0**-53)])
    found = invert(torch.from_numpy(weights), torch.from_numpy(numbers))[0].numpy()
    for line, wanted, got in zip(weights, numbers, found, strict=True):
        assert (line[got] > 0).all()
        low, high = np.cumsum(line)[got] - line[got], np.cumsum(line)[got]
        slack = 1e-12 * line.sum()
        assert ((low - slack <= wanted * line.sum()) & (wanted * line.sum() <= high + slack)).all()


def test_shares_of_draws_match_the_probabilities() -> None:
    """The numbers are fixed, so this is no statistics at run time: 4000 draws, each share within 3 points."""
    logits = random_logits(11, vocab=6, scale=1.0)
    [output] = Sampler().sample(logits, [row(SamplingParams(), seeds=[derive_seed(1, i) for i in range(4000)])])
    shares = np.bincount(tokens(output), minlength=6) / 4000
    assert np.abs(shares - logits[0].softmax(-1).numpy()).max() < 0.03


# --- bias and bans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_is_exact(temperature: float) -> None:
    logits = random_logits(2)
    logits[0, 6], logits[0, 13] = 900.0, -900.0
    params = SamplingParams(temperature=temperature, logit_bias={13: 100.0})
    assert draw_one(logits, row(params)) == 13
    params = SamplingParams(temperature=temperature, logit_bias={6: -100.0})
    [output] = Sampler().sample(logits, [row(params, seeds=range(50))])
    assert 6 not in tokens(output)


def test_several_forced_tokens_share_the_choice() -> None:
    params = SamplingParams(logit_bias={3: 100.0, 5: 100.0, 7: 100.0})
    [output] = Sampler().sample(torch.zeros((1, VOCAB)), [row(params, seeds=range(100), banned=frozenset({7}))])
    assert set(tokens(output)) == {3, 5}


def test_a_ban_is_stronger_than_force() -> None:
    """Forcing only the end token while it is banned (``min_tokens``) leaves the choice free."""
    logits = random_logits(4)
    params = SamplingParams(temperature=0.0, logit_bias={2: 100.0})
    order = logits[0].argsort(descending=True).tolist()
    expected = next(token for token in order if token != 2)
    assert draw_one(logits, row(params, banned=frozenset({2}))) == expected


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={VOCAB: 100.0, 500: -100.0, 501: 3.0}, repetition_penalty=1.1)
    asked = row(params, history=(VOCAB, 999), prompt_length=0, banned=frozenset({VOCAB + 1}))
    logits = random_logits(8)
    assert draw_one(logits, asked) == int(logits.argmax())


# --- padded heads -----------------------------------------------------------------------------------------------------


def test_ids_from_the_limit_on_have_no_part_in_anything() -> None:
    padded = torch.cat([random_logits(9), torch.full((1, 8), 50.0)], dim=1)
    params = SamplingParams(logprobs=VOCAB + 8, temperature=5.0)
    kinds = [
        row(params, seeds=range(30)),
        row(SamplingParams(temperature=0.0, logit_bias={VOCAB + 2: 100.0})),
        row(SamplingParams(), seeds=(), beam_candidates=VOCAB + 8),
        row(SamplingParams(top_p=0.5), seeds=range(30)),
    ]
    limited = Sampler(vocab_limit=VOCAB)
    outputs = limited.sample(padded.expand(4, -1), kinds)
    assert outputs == Sampler().sample(random_logits(9).expand(4, -1), kinds)
    assert len(outputs[2].beam) == VOCAB
    seen = {t for output in outputs for t in tokens(output)} | {s.token_id for s in outputs[0].sampled[0].top}
    assert max(seen) < VOCAB
    [score] = limited.prompt_scores(padded, np.array([VOCAB + 1], dtype=np.int32), 0)
    assert score.logprob == -math.inf


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_those_of_the_raw_distribution(dtype: torch.dtype) -> None:
    logits = random_logits(12, 2).to(dtype)
    raw = logits.double().log_softmax(dim=-1)
    params = SamplingParams(
        logprobs=4, temperature=3.0, top_k=5, logit_bias={1: 4.0}, repetition_penalty=1.5, frequency_penalty=1.0
    )
    outputs = Sampler().sample(logits, [row(params, seeds=range(8)), row(SamplingParams(temperature=0.0, logprobs=0))])
    for line, output in zip(raw, outputs, strict=True):
        for sampled in output.sampled:
            assert sampled.logprob == pytest.approx(float(line[sampled.token_id]), abs=1e-5)
    best = raw[0].argsort(descending=True, stable=True)[:4].tolist()
    top = outputs[0].sampled[0].top
    assert [score.logprob for score in top] == pytest.approx(raw[0, best].tolist(), abs=1e-5)
    assert outputs[1].sampled[0].top == ()


def test_top_is_best_first() -> None:
    logits = random_logits(13)
    [output] = Sampler().sample(logits, [row(SamplingParams(temperature=0.0, logprobs=3))])
    assert [score.token_id for score in output.sampled[0].top] == logits[0].argsort(descending=True)[:3].tolist()
    assert output.sampled[0].top[0] == TokenScore(output.sampled[0].token_id, output.sampled[0].logprob)


def test_prompt_scores() -> None:
    logits = random_logits(14, 3)
    raw = logits.double().log_softmax(dim=-1)
    targets = np.array([4, 0, 23], dtype=np.int32)
    scores = Sampler().prompt_scores(logits, targets, 2)
    assert [score.token_id for score in scores] == [4, 0, 23]
    assert [score.logprob for score in scores] == pytest.approx([float(raw[i, t]) for i, t in enumerate(targets)])
    for line, score in zip(raw, scores, strict=True):
        assert [alternative.token_id for alternative in score.top] == line.argsort(descending=True)[:2].tolist()
    assert [score.top for score in Sampler().prompt_scores(logits, targets, 0)] == [(), (), ()]
    assert Sampler().prompt_scores(logits[:0], targets[:0], 2) == ()


def test_prompt_scores_of_a_broken_model_are_an_error() -> None:
    logits = random_logits(15, 2)
    logits[1, 3] = math.nan
    with pytest.raises(ModelError, match="not finite"):
        Sampler().prompt_scores(logits, np.array([1, 2], dtype=np.int32), 1)


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_uniform_is_a_fixed_function() -> None:
    """Frozen values: another function would change the output of every seeded request."""
    assert [uniform(0, 0), uniform(42, 7)] == [0.9382582062516721, 0.21618394139837083]
    assert derive_seed(42, 1) == 3333815975161106753


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**31))
def test_uniform_is_in_range_and_never_repeats_itself(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0.0 <= number < 1.0
    assert number == uniform(seed, position)
    assert number not in (uniform(seed, position + 1), uniform(seed + 1, position))
    assert seed == position or number != uniform(position, seed)


def test_uniforms_fill_the_interval_evenly() -> None:
    numbers = np.array([uniform(derive_seed(5, i), p) for i in range(50) for p in range(40)])
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(200, abs=50)


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(root, index) for root in range(40) for index in range(40)}
    assert len(seeds) == 1600


def test_a_seed_draws_the_same_alone_and_with_neighbours_that_come_and_go() -> None:
    """Step by step, with drawn and greedy rows before it and beams behind it, so that its place moves too."""
    params = SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=0.3)

    def run(neighbours: Sequence[int]) -> list[int]:
        history = [3, 1, 4]
        for position in range(24):
            count = neighbours[position % len(neighbours)]
            others = [row(SamplingParams(temperature=float(i % 3)), seeds=(99 + i,)) for i in range(count)]
            beams = [row(seeds=(), beam_candidates=4)] * (count % 2)
            asked = [*others, row(params, seeds=(77,), history=history, prompt_length=3), *beams]
            logits = torch.cat([random_logits(1000 + i) for i in range(count)] + [random_logits(position)])
            logits = torch.cat([logits, *[random_logits(5000)] * len(beams)])
            history += tokens(Sampler().sample(logits, asked)[count])
        return history

    alone = run([0])
    assert len(set(alone)) > 5
    assert all(run(neighbours) == alone for neighbours in ([1], [3], [7], [0, 5, 2], [1, 0]))


def test_draws_of_one_row_equal_those_of_forked_rows() -> None:
    params, logits = SamplingParams(temperature=1.5), random_logits(16)
    seeds = [derive_seed(8, i) for i in range(6)]
    [together] = Sampler().sample(logits, [row(params, seeds=seeds)])
    apart = Sampler().sample(logits.expand(6, -1), [row(params, seeds=(seed,)) for seed in seeds])
    assert tokens(together) == [t for output in apart for t in tokens(output)]
    assert len(set(tokens(together))) > 1


def test_rows_with_several_numbers_of_seeds() -> None:
    params, logits = SamplingParams(), random_logits(17, 3)
    outputs = Sampler().sample(logits, [row(params, seeds=s) for s in ((), (1, 2, 3), (4,))])
    assert [len(output.sampled) for output in outputs] == [0, 3, 1]
    assert all(output.error is None for output in outputs)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=3)])
def test_a_row_that_is_not_finite_fails_alone(poison: float, params: SamplingParams) -> None:
    clean = random_logits(18, 3)
    dirty = clean.clone()
    dirty[1, 7] = poison
    asked = [row(params, seeds=(1, 2)), row(params), row(seeds=(), beam_candidates=3)]
    outputs, expected = Sampler().sample(dirty, asked), Sampler().sample(clean, asked)
    assert [outputs[0], outputs[2]] == [expected[0], expected[2]]
    assert "not finite" in (outputs[1].error or "")
    assert outputs[1].sampled == ()


@pytest.mark.parametrize("beam_candidates", [0, 4])
def test_a_row_without_allowed_tokens_fails_alone(beam_candidates: int) -> None:
    bans = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -100.0))
    outputs = Sampler().sample(random_logits(19, 2), [row(bans, beam_candidates=beam_candidates), row()])
    assert "banned" in (outputs[0].refusal or "")
    assert outputs[0].error is None
    assert outputs[1] == Sampler().sample(random_logits(19, 2)[1:], [row()])[0]


def test_minus_infinity_from_the_model_is_a_ban() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [2, 5]] = 1.0
    for params in (SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.99), SamplingParams(min_p=0.1)):
        [output] = Sampler().sample(logits, [row(params, seeds=range(60))])
        assert set(tokens(output)) == {2, 5}
    [output] = Sampler().sample(logits, [row(seeds=(), beam_candidates=4)])
    assert [score.token_id for score in output.beam] == [2, 5]


def test_the_logits_of_the_caller_stay_as_they_are() -> None:
    logits = random_logits(20, 2)
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 5.0, 2: -100.0}, repetition_penalty=2.0, presence_penalty=1.0)
    Sampler().sample(logits, [row(params), row(params, seeds=(), beam_candidates=2)])
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    assert Sampler().sample(torch.zeros((0, VOCAB)), []) == []
