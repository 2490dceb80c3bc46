"""Prefix sharing through the whole engine: hits change nothing but the work, and only what was computed is hit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.runner import StepInput
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeRunner

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
PreemptWhen = Callable[[AsyncEngine, Callable[[Sample], bool]], None]
B = 4
PROMPT = [7, 3, 9, 9, 1, 4, 4, 2, 60, 5, 11, 8, 30, 31]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.asyncio
@pytest.mark.parametrize("chunk", [1, 3, B, None])
@pytest.mark.parametrize("length", range(1, 3 * B + 1))
async def test_a_warm_run_and_its_extensions_equal_cold_ones(
    length: int, chunk: int | None, engine_of: EngineOf, alone: Alone
) -> None:
    """PREFIX-01, PREFIX-02, PREFIX-13, NUM-04: every length with every chunk size; at least one token is computed."""
    steps: list[StepInput] = []
    runner = FakeRunner(before_step=steps.append)
    prompt = PROMPT[:length]
    cold = ids(await alone(prompt, GREEDY))
    async with engine_of(runner=runner, prefill_chunk=chunk) as engine:
        assert ids(await engine.complete(prompt, GREEDY)) == cold
        steps.clear()
        (warm,) = await engine.complete(prompt, GREEDY)
        assert [warm.token_ids] == cold
        assert warm.cached_tokens == length - 1  # generated tokens are published too, so whole blocks cover the prompt
        assert steps[0].positions.tolist() == [length - 1]
        assert steps[0].rows[0].context == length
        for tail in ([1, 2, 3, 4, 5], [6, 6, 6, 6, 6]):
            (extended,) = await engine.complete([*prompt, *tail], GREEDY)
            assert [extended.token_ids] == ids(await alone([*prompt, *tail], GREEDY))
            assert extended.cached_tokens >= length // B * B
        assert all(row.length >= 1 for step in steps for row in step.rows)


@pytest.mark.asyncio
async def test_whole_blocks_hit_while_others_decode_and_resume(
    engine_of: EngineOf, alone: Alone, preempt_when: PreemptWhen
) -> None:
    """PREFIX-13: prompts of B, 2B and 3B tokens twice, mixed with decodes and a resumed request that has outputs."""
    long = SamplingParams(max_tokens=20, temperature=0.0)
    async with engine_of() as engine:
        preempt_when(engine, lambda sample: sample.group.request_id == "long" and len(sample.token_ids) in (5, 8))
        background = asyncio.create_task(engine.complete([1, 2, 3], long, request_id="long"))
        for _ in range(2):
            for blocks in (1, 2, 3):
                prompt = PROMPT[: blocks * B]
                assert ids(await engine.complete(prompt, GREEDY)) == ids(await alone(prompt, GREEDY))
        (output,) = await background
        assert output.metrics.preemptions >= 1
        assert [output.token_ids] == ids(await alone([1, 2, 3], long))


@pytest.mark.asyncio
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1])
async def test_prompt_logprobs_are_whole_cold_and_warm(
    length: int, max_tokens: int, engine_of: EngineOf, alone: Alone
) -> None:
    """PREFIX-06: a request for prompt log-probabilities computes its prompt; neighbours use their hits all the same."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=2)
    prompt = PROMPT[:length]
    (expected,) = await alone(prompt, params)
    async with engine_of(prefill_chunk=3) as engine:
        for _ in range(2):
            (output,), (neighbour,) = await asyncio.gather(
                engine.complete(prompt, params), engine.complete(PROMPT, GREEDY)
            )
            assert output.prompt_logprobs == expected.prompt_logprobs
            assert output.token_ids == expected.token_ids
            assert output.cached_tokens == 0
            assert [neighbour.token_ids] == ids(await alone(PROMPT, GREEDY))
        assert neighbour.cached_tokens == len(PROMPT) - 1
    scores = expected.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [score.token_id for score in scores[1:] if score is not None] == prompt[1:]
    assert expected.finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_prompt_logprobs_survive_a_preemption_in_mid_prompt(
    engine_of: EngineOf, alone: Alone, preempt_when: PreemptWhen
) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)
    (expected,) = await alone(PROMPT, params)
    async with engine_of(prefill_chunk=4) as engine:
        left = [4, 8]
        preempt_when(engine, lambda sample: bool(left) and sample.sequence.computed == left[0] and bool(left.pop(0)))
        (output,) = await engine.complete(PROMPT, params)
        assert output.metrics.preemptions == 2
    assert (output.prompt_logprobs, output.token_ids) == (expected.prompt_logprobs, expected.token_ids)


@pytest.mark.asyncio
@pytest.mark.parametrize("cancelled_at", [None, 2, 3])
async def test_followers_wait_for_the_producer_and_outlive_it(
    cancelled_at: int | None, engine_of: EngineOf, alone: Alone
) -> None:
    """PREFIX-09: equal prompts in one tick and in mid-prefill; the producer is cancelled after each chunk in turn."""
    prompt = PROMPT[:12]
    later: list[asyncio.Task[list[RequestOutput]]] = []
    seen: list[StepInput] = []

    async def on_step(step: int) -> None:
        if step == 2:
            generation = await engine.generate(prompt, GREEDY, request_id="third").start()
            later.append(asyncio.create_task(read_all(generation)))
        if step == cancelled_at:
            assert engine.abort("first")

    async with engine_of(
        runner=FakeRunner(before_step=seen.append), on_step=on_step, prefill_chunk=5, num_blocks=32
    ) as engine:
        generations = [await engine.generate(prompt, GREEDY, request_id=name).start() for name in ("first", "second")]
        answers = await asyncio.gather(*map(read_all, generations))
        answers += await asyncio.gather(*later)
        expected = ids(await alone(prompt, GREEDY))
        ended = answers[1:] if cancelled_at else answers
        assert [ids(answer) for answer in ended] == [expected] * len(ended)
        prefilled = sum(row.length for step in seen for row in step.rows if row.length > 1)
        assert prefilled <= len(prompt) + B  # nobody computed what another one was computing
        assert all(len(step.rows) == 1 for step in seen[:3])


async def read_all(generation: Generation) -> list[RequestOutput]:
    last = {output.index: output async for output in generation}
    return list(last.values())


@pytest.mark.asyncio
async def test_a_follower_waits_no_longer_than_prefix_wait(engine_of: EngineOf, alone: Alone) -> None:
    """The producer computes one token per step; after ``prefix_wait`` seconds the follower computes for itself."""
    clock = Seconds()
    admitted: dict[str, int] = {}

    async def on_step(step: int) -> None:
        clock.now += 1.0
        for group in engine._loop.groups.values():
            if group.metrics.scheduled is not None:
                admitted.setdefault(group.request_id, step)

    async with engine_of(clock=clock, on_step=on_step, prefill_chunk=1, prefix_wait=3.5) as engine:
        answers = await asyncio.gather(*(engine.complete(PROMPT, GREEDY, request_id=name) for name in ("a", "b")))
        assert admitted["a"] == 1
        assert admitted["b"] in (5, 6)
        assert list(map(ids, answers)) == [ids(await alone(PROMPT, GREEDY))] * 2
    assert answers[1][0].cached_tokens == 4  # the one block that was published by then


class Seconds:
    """A clock that stands still until moved."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.asyncio
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("tokens", [1, B - 1, B, B + 1])
async def test_a_preempted_request_streams_each_token_once(
    tokens: int, sharing: bool, engine_of: EngineOf, alone: Alone, read: Read, preempt_when: PreemptWhen
) -> None:
    """PREFIX-10, METRICS-10: resumed by recomputation and by hits on its own blocks; usage counts nothing twice."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, frequency_penalty=0.5, logprobs=1)
    (expected,) = await alone(PROMPT, params)
    async with engine_of(enable_prefix_caching=sharing) as engine:
        left = [tokens, tokens + 1, tokens + 3]
        preempt_when(engine, lambda sample: bool(left) and len(sample.token_ids) == left[0] and bool(left.pop(0)))
        (output,) = await read(engine.generate(PROMPT, params))
        stats = engine.stats()
        assert output.metrics.preemptions == 3
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
        assert (output.cached_tokens, output.prompt_tokens) == (0, len(PROMPT))
        assert stats.cache.prefix_hits == stats.cache.prefix_hit_tokens == 0
        assert stats.cache.prefix_query_tokens == len(PROMPT)
        assert (stats.cache.resume_hit_tokens > 0) is sharing
        assert stats.generated_tokens == 12
        (again,) = await engine.complete(PROMPT, params)  # what was written after the resumption has the right keys
        assert again.token_ids == expected.token_ids


@pytest.mark.asyncio
async def test_a_salt_separates_tenants_from_the_first_block_on(engine_of: EngineOf) -> None:
    """TENANT-01: neither the usage nor the work tells a tenant what another one has sent."""
    secret = [(7 * i) % 61 for i in range(64)]
    none = SamplingParams(max_tokens=1, temperature=0.0)
    async with engine_of(num_blocks=600) as engine:
        runner = engine._life.parts.runner
        assert isinstance(runner, FakeRunner)
        await engine.complete(secret, none, tenant="a")
        for length in range(8, 65, 7):
            for tenant in ("b", None, ""):
                before = runner.tokens_computed
                (probe,) = await engine.complete([*secret[: length - 1], length % 3], none, tenant=f"{tenant}{length}")
                assert (probe.cached_tokens, runner.tokens_computed - before) == (0, length)
        for tenant in ("b", None, ""):
            (other,) = await engine.complete(secret, none, tenant=tenant)
            assert other.cached_tokens == 0
        (control,) = await engine.complete(secret[:40], none, tenant="a")
        assert control.cached_tokens == 39


@pytest.mark.asyncio
@pytest.mark.parametrize("seeds", [(1, 2, 3), (4, 4, 5)])
async def test_a_block_with_free_rows_has_one_writer(seeds: tuple[int, ...], engine_of: EngineOf, alone: Alone) -> None:
    """COW-10: three requests of one prompt that ends inside a block, started 0, 1 and 5 steps apart."""
    prompt = PROMPT[:11]
    tasks: list[asyncio.Task[list[RequestOutput]]] = []
    written: list[list[int]] = []

    def record(step: StepInput) -> None:
        written.append(step.slots.tolist())

    async def on_step(step: int) -> None:
        if step in (1, 2, 6) and len(tasks) < 3:
            generation = await engine.generate(prompt, params(seeds[len(tasks)])).start()
            tasks.append(asyncio.create_task(read_all(generation)))

    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=10, temperature=1.0, seed=seed)

    async with engine_of(runner=FakeRunner(before_step=record), on_step=on_step, block_size=8) as engine:
        await engine.complete([63], SamplingParams(max_tokens=12, temperature=0.0))
        answers = await asyncio.gather(*tasks)
        assert [ids(answer) for answer in answers] == [ids(await alone(prompt, params(seed))) for seed in seeds]
    assert all(len(set(slots)) == len(slots) for slots in written)


@pytest.mark.asyncio
@pytest.mark.parametrize("max_tokens", [1, 2, B - 1, B, B + 1])
@pytest.mark.parametrize("stopped", [False, True])
async def test_what_stays_cached_is_what_was_computed(
    max_tokens: int, stopped: bool, engine_of: EngineOf, alone: Alone
) -> None:
    """REFCOUNT-04: after one request the tree holds prompt + output - 1 tokens in whole blocks, never more."""
    prompt = PROMPT[:5]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    if stopped:  # the stop token comes out where the limit would have been
        (free,) = await alone(prompt, params)
        params = SamplingParams(max_tokens=99, temperature=0.0, stop_token_ids=[free.token_ids[-1]])
    async with engine_of() as engine:
        (output,) = await engine.complete(prompt, params)
        census = engine.census()
        assert census.idle == (len(prompt) + len(output.token_ids) - 1) // B
        assert census.free == census.total - census.idle


@pytest.mark.asyncio
async def test_a_tiny_pool_never_hands_out_stale_blocks(engine_of: EngineOf, alone: Alone) -> None:
    """PREFIX-11, REFCOUNT-05: prompts take each other's blocks away, then come back."""
    texts = [[i, i, i, i, 2, 2, i, 1] for i in range(5)]
    texts += [[*text[:4], 9, 9] for text in texts]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    expected = [ids(await alone(text, params)) for text in texts]
    async with engine_of(num_blocks=4) as engine:
        for turn in range(60):
            index = turn * 7 % len(texts)
            assert ids(await engine.complete(texts[index], params)) == expected[index]
