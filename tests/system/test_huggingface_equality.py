"""The demo model in the whole engine against ``generate`` of Transformers with the same weights, token for token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.request import Chat
from octavo.tests.system.demo_reference import (
    BLOCK,
    LONGEST,
    Beam,
    Breadth,
    Demo,
    Ids,
    alone,
    assert_equal,
    config,
    count_ties,
    crowd,
    greedy,
    together,
)

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(1800),
]

EarlyStopping: TypeAlias = bool | Literal["never"]
breadths = pytest.mark.parametrize("breadth", ["few", pytest.param("all", marks=pytest.mark.slow)])


AtRest: TypeAlias = Callable[[AsyncEngine], None]


@breadths
@pytest.mark.asyncio
async def test_cold_hit_longer_and_diverging(demo: Demo, assert_at_rest: AtRest, breadth: Breadth) -> None:
    prompts = demo.prompts(breadth)
    expected = demo.greedy(prompts, 16)
    some = [(p, e) for p, e in zip(prompts, expected, strict=True) if BLOCK < len(p) < 320][
        :: 1 if breadth == "all" else 3
    ]
    longer = [(*prompt, *reference.tokens, 11, 22, 33, 44, 55) for prompt, reference in some]
    parting = [(*prompt[: len(prompt) - BLOCK // 2 - 1], 66, 77, 88) for prompt, _ in some]
    async with AsyncEngine.open("smollm2", config(num_blocks=1024)) as engine:
        assert_equal(await together(engine, prompts, greedy(16)), expected)
        computed = engine.stats().prefill_tokens
        again = await together(engine, prompts, greedy(16))
        assert_equal(again, expected)
        assert engine.stats().prefill_tokens - computed <= sum(p - c for p, c in _prompt_and_cached(again))
        for prompt, output in zip(prompts, again, strict=True):
            kept = (len(prompt) + len(output.token_ids) - 1) // BLOCK * BLOCK
            assert output.cached_tokens == min(len(prompt) - 1, kept), f"a prompt of {len(prompt)} tokens"
        extended = await together(engine, longer, greedy(8))
        assert_equal(extended, demo.greedy(longer, 8, most=8))
        assert all(cached >= prompt - 5 - BLOCK for prompt, cached in _prompt_and_cached(extended))
        diverged = await together(engine, parting, greedy(8))
        assert_equal(diverged, demo.greedy(parting, 8, most=8))
        assert all(cached == prompt - 3 for prompt, cached in _prompt_and_cached(diverged))
        assert_at_rest(engine)


@breadths
@pytest.mark.parametrize(
    "chunk", [16, pytest.param(64, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
@pytest.mark.asyncio
async def test_alone_without_sharing_in_chunks(
    demo: Demo, assert_at_rest: AtRest, breadth: Breadth, chunk: int | None
) -> None:
    prompts = demo.prompts(breadth)[:: 1 if breadth == "all" else 2]
    async with demo.engine(prefill_chunk=chunk, enable_prefix_caching=False) as engine:
        outputs = await alone(engine, prompts, greedy(16))
        assert_equal(outputs, demo.greedy(prompts, 16))
        assert engine.stats().cache.prefix_hits == 0
        assert_at_rest(engine)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"prefill_chunk": 64}, {"max_batch_tokens": 40}, {"max_running": 3}])
@pytest.mark.asyncio
async def test_in_batches_of_other_shapes(demo: Demo, assert_at_rest: AtRest, settings: dict[str, object]) -> None:
    prompts = demo.prompts("all")
    async with demo.engine(num_blocks=1024, **settings) as engine:
        assert_equal(await together(engine, prompts, greedy(16)), demo.greedy(prompts, 16))
        assert_at_rest(engine)


@breadths
@pytest.mark.parametrize("sharing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.asyncio
async def test_preempted_in_a_small_pool(demo: Demo, assert_at_rest: AtRest, breadth: Breadth, sharing: bool) -> None:
    prompts, tight = crowd(demo, breadth)
    async with demo.engine(**tight, enable_prefix_caching=sharing) as engine:
        assert_equal(await together(engine, prompts, greedy(LONGEST)), demo.greedy(prompts, LONGEST))
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


@breadths
@pytest.mark.asyncio
async def test_forks_and_parallel_samples(demo: Demo, assert_at_rest: AtRest, breadth: Breadth) -> None:
    prompts = [prompt for prompt in demo.prompts(breadth) if len(prompt) < 120][:: 1 if breadth == "all" else 3]
    parted = 0
    async with demo.engine() as engine:
        for prompt, reference in zip(prompts, demo.greedy(prompts, 16), strict=True):
            forked = await _forked(engine, prompt, greedy(16))
            samples = await engine.complete(prompt, greedy(16, n=3))
            assert [sample.index for sample in samples] == [0, 1, 2]
            lines = [output.token_ids for output in (*forked, *samples)]
            parted += count_ties(lines, [reference] * 7) > 0
        assert parted <= max(1, len(prompts) // 20)
        assert_at_rest(engine)


@pytest.mark.asyncio
async def test_a_chat_as_text(demo: Demo, assert_at_rest: AtRest) -> None:
    codec = demo.checkpoint.codec
    assert codec is not None
    messages = [{"role": "user", "content": "Name three fruits."}]
    prompt = tuple(codec.encode_chat(Chat(messages)))
    expected = demo.huggingface.greedy(prompt, LONGEST)
    async with demo.engine() as engine:
        outputs = [output async for output in engine.generate(messages, greedy(LONGEST))]
        assert_at_rest(engine)
    last = outputs[-1]
    assert count_ties([last.token_ids], [expected]) == 0
    assert last.prompt_tokens == len(prompt)
    assert "".join(output.text_delta for output in outputs) == last.text == codec.decode(expected.tokens)
    ended = expected.tokens[-1] in demo.checkpoint.eos_token_ids
    assert last.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


BEAMS = [
    pytest.param("few", 2, False, 1.0, marks=pytest.mark.slow),
    ("few", 4, True, 0.5),
    *(
        pytest.param("all", *values, marks=pytest.mark.slow)
        for values in itertools.product((2, 4), (False, True), (1.0, 0.5))
    ),
]


@pytest.mark.parametrize(("breadth", "width", "early", "penalty"), BEAMS)
@pytest.mark.asyncio
async def test_beams(
    demo: Demo, assert_at_rest: AtRest, breadth: Breadth, width: int, early: EarlyStopping, penalty: float
) -> None:
    """Commas and full stops end a beam, too: else none would end within so few tokens. The second round hits the cache,
    and the third has to be preempted."""
    codec = demo.checkpoint.codec
    assert codec is not None
    ends = sorted({codec.encode(text)[-1] for text in (",", ".")})
    chosen = (0, 1, 7, 13, 18, 20, 28, 36) if breadth == "all" else (0, 13)
    prompts = [demo.prompts("all")[i] for i in chosen]
    params = SamplingParams(
        max_tokens=8,
        beam_width=width,
        n=width,
        early_stopping=early,
        length_penalty=penalty,
        stop_token_ids=ends,
    )
    expected = [demo.huggingface.beams(prompt, params) for prompt in prompts]
    async with demo.engine() as engine:
        for _ in range(2):
            found = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts))
            for outputs, beams in zip(found, expected, strict=True):
                _assert_beams(outputs, beams, penalty)
        assert_at_rest(engine)
    needed = max(len(prompt) // BLOCK + width * 2 for prompt in prompts)
    spare = 2 if breadth == "all" else 1  # so that another one is admitted and both grow
    async with demo.engine(num_blocks=needed + spare, admission_reserve=0.0) as engine:
        found = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts * 2))
        for outputs, beams in zip(found, expected * 2, strict=True):
            _assert_beams(outputs, beams, penalty)
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


@breadths
@pytest.mark.asyncio
async def test_seeded_draws_do_not_depend_on_company(demo: Demo, assert_at_rest: AtRest, breadth: Breadth) -> None:
    prompts, tight = crowd(demo, breadth)
    params = [_drawn(seed) for seed in range(len(prompts))]
    every = 1 if breadth == "all" else 2
    async with demo.engine(enable_prefix_caching=False) as engine:
        lonely = await alone(engine, prompts[::every], params[::every])
    async with demo.engine() as engine:
        for _ in range(1 if breadth == "few" else 2):
            social = await together(engine, prompts, params)
            assert_same_draws(social[::every], lonely)
        assert_at_rest(engine)
    async with demo.engine(**tight) as engine:
        assert_same_draws(await together(engine, prompts, params), social)
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


def assert_same_draws(outputs: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> None:
    """Some hundred draws may hold one that fell between the sums of two almost equal distributions."""
    different = sum(a.token_ids != b.token_ids for a, b in zip(outputs, others, strict=True))
    assert different <= len(outputs) // 20


def _drawn(seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=LONGEST,
        ignore_eos=True,
        temperature=0.7 + 0.1 * (seed % 4),
        top_p=0.95,
        top_k=50 * (seed % 3),
        seed=seed,
    )


async def _forked(engine: AsyncEngine, prompt: Ids, params: SamplingParams) -> list[RequestOutput]:
    """A request, a fork of it before anything was computed, and two from the middle of its output."""
    source = await engine.generate(prompt, params).start()
    assert source.request_id is not None
    forks = [asyncio.ensure_future(_last(await engine.fork(source.request_id)))]
    last: RequestOutput | None = None
    async for output in source:
        last = output
        if len(forks) == 1 and len(output.token_ids) >= 5:
            forks += [asyncio.ensure_future(_last(await engine.fork(source.request_id))) for _ in range(2)]
    assert last is not None
    assert len(forks) == 3
    return [last, *await asyncio.gather(*forks)]


async def _last(outputs: Generation) -> RequestOutput:
    return [output async for output in outputs][-1]


def _assert_beams(outputs: Sequence[RequestOutput], expected: Sequence[Beam], penalty: float) -> None:
    scores = [output.cumulative_logprob / len(output.token_ids) ** penalty for output in outputs]
    assert [output.token_ids for output in outputs] == [beam.tokens for beam in expected]
    assert scores == pytest.approx([beam.score for beam in expected], abs=2e-4)


def _prompt_and_cached(outputs: Sequence[RequestOutput]) -> list[tuple[int, int]]:
    return [(output.prompt_tokens, output.cached_tokens) for output in outputs]
