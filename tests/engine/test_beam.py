"""Beam search against Hugging Face's, token for token, and its rules on scripted scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.engine.beam import BeamContinuation, BeamHypothesis, BeamSearch
from octavo.engine.model.runner import RowSampling, TokenScore
from octavo.engine.model.sampler import Sampler
from octavo.engine.request import FinishReason, SamplingParams

EarlyStopping = bool | Literal["never"]
VOCAB = 48
PROMPT = (5, 17, 3, 40, 22)


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    """A random model with peaked and varied distributions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]  # the library has no types for it
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25)
    yield model
    torch.set_num_threads(threads)


def search(model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int]) -> BeamSearch:
    """Run to the end, every beam computed from scratch in every step."""
    beams = BeamSearch(
        width=params.beam_width,
        max_tokens=params.max_tokens or 0,
        eos_token_ids=frozenset(eos),
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        n=params.n,
    )
    sampler = Sampler()
    finished = False
    while not finished:
        texts = [[*prompt, *tokens] for tokens in beams.live]
        with torch.no_grad():
            logits = model(torch.tensor(texts), use_cache=False).logits[:, -1]
        banned = frozenset(eos) if len(beams.live[0]) < params.min_tokens else frozenset()
        rows = [
            RowSampling(
                params=params,
                seeds=(),
                history=np.array(text, dtype=np.int32),
                prompt_length=len(prompt),
                banned=banned,
                beam_candidates=beams.candidates_per_beam,
            )
            for text in texts
        ]
        step = beams.advance([output.beam for output in sampler.sample(logits, rows)])
        assert [(*texts[parent][len(prompt) :], token) for parent, token in step.next] == list(beams.live)
        finished = step.finished
    return beams


def reference(
    model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int]
) -> list[tuple[tuple[int, ...], float]]:
    """Hugging Face's answer: generated ids up to the end token, and score."""
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for ids, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        generated = ids[len(prompt) :]
        ends = [i for i, token in enumerate(generated) if token in eos]
        found.append((tuple(generated[: ends[0] + 1] if ends else generated), score))
    return found


def frequent_tokens(model: LlamaForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """Likely tokens some way into the continuation, so that beams do end."""
    params = SamplingParams(max_tokens=4, beam_width=6, n=6)
    hypotheses = search(model, prompt, params, ()).results()
    tokens = [hypothesis.token_ids[position] for position in (2, 1, 3) for hypothesis in hypotheses]
    return list(dict.fromkeys(token for token in tokens if token != 0))[:count]


def random_case(rng: np.random.Generator) -> tuple[list[int], SamplingParams, int]:
    width = int(rng.integers(2, 5))
    early: EarlyStopping = (False, True, "never")[int(rng.integers(3))]
    max_tokens = int(rng.integers(1, 13))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, 4)) % (max_tokens + 1) if rng.random() < 0.2 else 0,
        beam_width=width,
        n=int(rng.integers(1, width + 1)),
        length_penalty=float(rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0, round(float(rng.uniform(-2, 3)), 3)])),
        early_stopping=early,
        repetition_penalty=1.3 if rng.random() < 0.2 else 1.0,
    )
    prompt = [int(token) for token in rng.integers(1, VOCAB, size=int(rng.integers(1, 12)))]
    return prompt, params, int(rng.integers(0, 4))


@pytest.mark.parametrize("seed", range(12))
def test_equals_hugging_face(model: LlamaForCausalLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        prompt, params, ends = random_case(rng)
        eos = frequent_tokens(model, prompt, ends)
        ours = search(model, prompt, params, eos).results()
        theirs = reference(model, prompt, params, eos)
        assert [hypothesis.token_ids for hypothesis in ours] == [ids for ids, _ in theirs], (prompt, params, eos)
        assert [hypothesis.score for hypothesis in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)


def test_the_cases_do_end_early_and_in_both_ways(model: LlamaForCausalLM) -> None:
    """Guards the comparison above: it means little when no beam ever meets an end token."""
    reasons: list[FinishReason] = []
    lengths: list[int] = []
    rng = np.random.default_rng(0)
    for _ in range(20):
        prompt, params, _ = random_case(rng)
        for hypothesis in search(model, prompt, params, frequent_tokens(model, prompt, 2)).results():
            reasons.append(hypothesis.finish_reason)
            lengths.append((params.max_tokens or 0) - len(hypothesis.token_ids))
    assert min(reasons.count(FinishReason.STOP), reasons.count(FinishReason.LENGTH)) >= 3
    assert sum(left >= 2 for left in lengths) >= 3


@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_the_prompt_does_not_count_in_the_length(model: LlamaForCausalLM, length_penalty: float) -> None:
    prompt = [int(token) for token in np.random.default_rng(3).integers(1, VOCAB, size=50)]
    params = SamplingParams(max_tokens=6, beam_width=4, n=4, length_penalty=length_penalty)
    for hypothesis in search(model, prompt, params, frequent_tokens(model, prompt, 1)).results():
        assert hypothesis.score == pytest.approx(hypothesis.sum_logprob / len(hypothesis.token_ids) ** length_penalty)


def scripted(*scores: tuple[int, float]) -> list[TokenScore]:
    return [TokenScore(token, logprob) for token, logprob in scores]


def make(
    *,
    width: int = 2,
    max_tokens: int = 8,
    eos: frozenset[int] = frozenset({0}),
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
) -> BeamSearch:
    return BeamSearch(
        width=width,
        max_tokens=max_tokens,
        eos_token_ids=eos,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        n=width,
    )


def test_first_step_makes_width_children_of_the_prompt() -> None:
    step = make(width=3).advance([scripted((4, -0.5), (7, -1.0), (2, -2.0), (9, -3.0), (5, -4.0), (6, -5.0))])
    assert step.next == (BeamContinuation(0, 4), BeamContinuation(0, 7), BeamContinuation(0, 2))
    assert not step.finished


def test_an_end_below_the_best_width_is_no_hypothesis() -> None:
    beams = make()
    beams.advance([scripted((4, -0.5), (7, -1.0), (0, -1.5), (9, -3.0))])
    assert beams.results() == ()
    assert beams.live == ((4,), (7,))


def test_an_end_among_the_best_width_is_kept_and_the_next_best_goes_on() -> None:
    beams = make()
    step = beams.advance([scripted((4, -0.5), (0, -1.0), (7, -1.5), (9, -3.0))])
    assert beams.results() == (BeamHypothesis((0,), -1.0, -1.0, FinishReason.STOP),)
    assert step.next == (BeamContinuation(0, 4), BeamContinuation(0, 7))


def test_siblings_may_come_from_one_parent_and_parents_may_die() -> None:
    beams = make()
    beams.advance([scripted((4, -0.5), (7, -1.0))])
    step = beams.advance([scripted((1, -3.0), (2, -4.0)), scripted((3, -0.1), (5, -0.2))])
    assert step.next == (BeamContinuation(1, 3), BeamContinuation(1, 5))
    assert beams.live == ((7, 3), (7, 5))


def test_early_stopping_true_ends_with_the_width_th_hypothesis() -> None:
    scores = [scripted((0, -0.1), (4, -0.2), (5, -0.3), (6, -0.4))]
    both = [scripted((0, -0.1), (7, -0.2), (8, -0.9), (9, -1.0)), scripted((3, -9.0))]
    eager, patient = make(early_stopping=True), make(early_stopping="never")
    assert [beams.advance(scores).finished for beams in (eager, patient)] == [False, False]
    assert [beams.advance(both).finished for beams in (eager, patient)] == [True, False]
    assert eager.live == ()


def test_never_uses_the_greatest_length_and_false_the_present_one() -> None:
    """The best live beam has -1.3 after two tokens: -0.65 now, which loses, but up to -0.1625 at length 8."""
    first = [scripted((0, -0.5), (4, -1.0), (5, -1.1), (6, -1.2))]
    second = [scripted((0, -0.02), (7, -0.3), (8, -4.0), (9, -5.0)), scripted((3, -9.0))]
    present, greatest = make(early_stopping=False), make(early_stopping="never")
    for beams in (present, greatest):
        beams.advance(first)
    assert present.advance(second).finished
    assert not greatest.advance(second).finished


def test_never_uses_the_present_length_when_penalties_are_negative() -> None:
    """Longer is worse then: the best live beam beats -1.8 now, with -0.8 * 2, and could not with -0.8 * 8."""
    first = [scripted((0, -0.5), (4, -0.6), (5, -1.1), (6, -1.2))]
    second = [scripted((0, -0.3), (7, -0.2), (8, -4.0), (9, -5.0)), scripted((3, -9.0))]
    beams = make(early_stopping="never", length_penalty=-1.0)
    beams.advance(first)
    assert not beams.advance(second).finished
    assert [hypothesis.score for hypothesis in beams.results()] == pytest.approx([-0.5, -1.8])


@pytest.mark.parametrize(("logprob", "finished"), [(-0.5, True), (-0.375, False)])
def test_a_live_beam_must_beat_the_worst_hypothesis(logprob: float, *, finished: bool) -> None:
    """The worst has -1 in the end; the best live beam equals it, or is better."""
    beams = make(length_penalty=0.0)
    beams.advance([scripted((0, -0.25), (4, -0.5), (5, -4.0))])
    step = beams.advance([scripted((0, -0.5), (7, logprob)), scripted((3, -9.0))])
    assert step.finished is finished


def test_last_token_finishes_ends_and_open_beams_alike() -> None:
    beams = make(max_tokens=1)
    step = beams.advance([scripted((4, -0.5), (0, -1.0), (7, -1.5))])
    assert step == ((), True)
    assert [(h.token_ids, h.finish_reason) for h in beams.results()] == [
        ((4,), FinishReason.LENGTH),
        ((0,), FinishReason.STOP),
    ]


def test_every_end_token_asks_for_more_candidates() -> None:
    counts = [make(width=3, eos=frozenset(range(ends))).candidates_per_beam for ends in (0, 1, 2, 5)]
    assert counts == [6, 6, 9, 18]


def test_fewer_candidates_than_width_make_fewer_beams() -> None:
    beams = make(width=4)
    assert beams.advance([scripted((4, -0.5))]).next == (BeamContinuation(0, 4),)
    assert beams.advance([scripted((1, -0.5), (2, -0.7))]).next == (BeamContinuation(0, 1), BeamContinuation(0, 2))


def test_no_candidates_at_all_end_the_search() -> None:
    beams = make()
    assert beams.advance([[]]) == ((), True)
    assert beams.results() == ()


def test_candidates_must_fit_the_live_beams() -> None:
    beams = make()
    beams.advance([scripted((4, -0.5), (7, -1.0))])
    with pytest.raises(ValueError, match="shorter"):
        beams.advance([scripted((1, -0.5))])


def test_equal_scores_keep_the_order_of_beams_and_candidates() -> None:
    beams = make()
    beams.advance([scripted((4, -1.0), (7, -1.0))])
    step = beams.advance([scripted((9, -1.0), (1, -1.0)), scripted((2, -1.0))])
    assert step.next == (BeamContinuation(0, 9), BeamContinuation(0, 1))


@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_extreme_penalties_give_finite_scores(length_penalty: float) -> None:
    beams = make(width=1, max_tokens=3000, length_penalty=length_penalty)
    for _ in range(2999):
        beams.advance([scripted((4, -0.5), (5, -2.0))])
    beams.advance([scripted((0, -0.5))])
    assert np.isfinite([hypothesis.score for hypothesis in beams.results()]).all()
