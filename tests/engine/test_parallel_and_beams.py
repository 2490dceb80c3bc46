"""Parallel samples, beams and forks: shared blocks, private futures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.beam import BeamHypothesis, BeamSearch
from octavo.engine.generation import Generation
from octavo.engine.model.runner import Row, RowSampling, StepInput, TokenScore
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, NeverFits

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
PreemptWhen = Callable[[AsyncEngine, Callable[[Sample], bool]], None]
PROMPT = [7, 3, 8, 8, 1, 4]


def beams(width: int, max_tokens: int = 12, length_penalty: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, beam_width=width, n=width, length_penalty=length_penalty)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def essence(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [(o.index, o.token_ids, o.finish_reason, o.cumulative_logprob) for o in outputs]


def search_from_scratch(
    prompt: list[int], params: SamplingParams, *, vocab_size: int, eos: frozenset[int]
) -> tuple[BeamHypothesis, ...]:
    """Beam search without a cache: every beam is computed as a whole, in a memory of its own, in every step."""
    search = BeamSearch(
        width=params.beam_width,
        max_tokens=params.max_tokens or 0,
        eos_token_ids=eos,
        length_penalty=params.length_penalty,
        n=params.n,
    )
    while True:
        offered = [
            candidates([*prompt, *beam], params, search.candidates_per_beam, vocab_size=vocab_size)
            for beam in search.live
        ]
        if search.advance(offered).finished:
            return search.results()


def candidates(tokens: list[int], params: SamplingParams, count: int, *, vocab_size: int) -> tuple[TokenScore, ...]:
    runner = FakeRunner(vocab_size=vocab_size)
    runner.allocate(1, len(tokens))
    history = np.array(tokens, dtype=np.int32)
    sampling = RowSampling(params, (), history, prompt_length=len(PROMPT), beam_candidates=count)
    row = Row(0, len(tokens), len(tokens), np.zeros(1, dtype=np.int32), sampling)
    positions = np.arange(len(tokens), dtype=np.int32)
    step = StepInput(history, positions, positions.astype(np.int64), (row,), np.zeros((0, 2), dtype=np.int32))
    return runner.execute(step).rows[0].beam


@pytest.mark.asyncio
@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("width", [2, 3, 4])
async def test_beams_equal_a_search_without_any_cache(width: int, length_penalty: float, engine_of: EngineOf) -> None:
    """COW-01, COW-07: the partial block of the prompt is shared at first; unwritten slots would raise. The length that
    the penalty sees is the generated one."""
    params = beams(width, length_penalty=length_penalty)
    eos = frozenset({2, 5})
    expected = search_from_scratch(PROMPT, params, vocab_size=9, eos=eos)
    async with engine_of(runner=FakeRunner(vocab_size=9, eos_token_ids=eos)) as engine:
        outputs = await engine.complete(PROMPT, params)
        assert [(o.token_ids, o.finish_reason) for o in outputs] == [(h.token_ids, h.finish_reason) for h in expected]
        scores = [output.cumulative_logprob for output in outputs]
        assert scores == pytest.approx([hypothesis.sum_logprob for hypothesis in expected], abs=1e-5)
        assert engine.stats().cache.cow_forks > 0


@pytest.mark.asyncio
async def test_beams_of_a_long_prompt_end_clean(engine_of: EngineOf, alone: Alone) -> None:
    """REFCOUNT-01: prompt 30, width 4, 20 tokens in a pool of 32 blocks, twice."""
    prompt = [(i * i) % 53 for i in range(30)]
    params = beams(4, max_tokens=20)
    expected = essence(await alone(prompt, params))
    async with engine_of(num_blocks=32) as engine:
        for _ in range(2):
            assert essence(await engine.complete(prompt, params)) == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("budget", [3, 6, 64])
@pytest.mark.parametrize("num_blocks", [14, 26, 100])
async def test_beam_searches_side_by_side_equal_their_solo_runs(
    num_blocks: int, budget: int, engine_of: EngineOf, alone: Alone
) -> None:
    """COW-09: widths 2, 3 and 4 with two plain requests at once, down to pools in which they displace each other."""
    requests = [(PROMPT[: 3 + i], beams(2 + i, 7 + i)) for i in range(3)]
    requests = [(p, q) for p, q in requests if q.beam_width <= budget] + [([1], greedy(15)), (PROMPT, greedy(9))]
    async with engine_of(num_blocks=num_blocks, max_batch_tokens=budget) as engine:
        answers = await asyncio.gather(*(engine.complete(prompt, params) for prompt, params in requests))
        assert (engine.stats().preemptions > 0) is (num_blocks == 14 and budget == 64)
    for (prompt, params), outputs in zip(requests, answers, strict=True):
        assert essence(outputs) == essence(await alone(prompt, params))


@pytest.mark.asyncio
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("tokens", range(1, 8))
async def test_preempted_beams_come_back(
    tokens: int, block_size: int, engine_of: EngineOf, alone: Alone, preempt_when: PreemptWhen
) -> None:
    """At every length, so also where the cache gives back everything but the last tokens and only these are missing."""
    params = beams(3, max_tokens=9)
    async with engine_of(block_size=block_size) as engine:
        left = [tokens]
        preempt_when(engine, lambda sample: bool(left) and len(sample.token_ids) == left[0] and bool(left.pop()))
        outputs = await engine.complete(PROMPT, params)
        assert not left
    assert essence(outputs) == essence(await alone(PROMPT, params))


@pytest.mark.asyncio
async def test_beams_without_a_prefix_cache_need_room_apart(engine_of: EngineOf) -> None:
    """Once preempted they share nothing, so what does not fit side by side is refused rather than left waiting."""
    async with engine_of(num_blocks=10) as engine:
        assert len(await engine.complete([3] * 16, beams(2, max_tokens=9))) == 2
    async with engine_of(num_blocks=10, enable_prefix_caching=False) as engine:
        with pytest.raises(NeverFits):
            await engine.complete([3] * 16, beams(2, max_tokens=9))
        assert len(await engine.complete([3] * 16, SamplingParams(max_tokens=9, n=2))) == 2


@pytest.mark.asyncio
async def test_more_beams_than_a_small_vocabulary_offers(engine_of: EngineOf, alone: Alone) -> None:
    params = beams(4, max_tokens=3)
    async with engine_of(runner=FakeRunner(vocab_size=2)) as engine:
        outputs = await engine.complete([0, 1], params)
        assert len({output.token_ids for output in outputs}) == 4
        assert essence(outputs) == essence(await alone([0, 1], params, vocab_size=2))


@pytest.mark.asyncio
@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_finished_beam_says_how_it_ended(include_stop: bool, engine_of: EngineOf) -> None:
    params = SamplingParams(
        max_tokens=9, beam_width=3, n=3, stop_token_ids=[2, 5], include_stop=include_stop, early_stopping=True
    )
    async with engine_of(runner=FakeRunner(vocab_size=9), codec=FakeCodec(9)) as engine:
        outputs = await engine.complete(PROMPT, params)
    assert any(output.finish_reason is FinishReason.STOP for output in outputs)
    for output in outputs:
        stopped = output.finish_reason is FinishReason.STOP
        shown = output.token_ids[:-1] if stopped and not include_stop else output.token_ids
        assert output.text == FakeCodec(9).decode(shown)
        assert output.stop_reason == (output.token_ids[-1] if stopped else None)


@pytest.mark.asyncio
async def test_aborted_beams_show_what_they_have(engine_of: EngineOf, read: Read) -> None:
    async def on_step(step: int) -> None:
        if step == 5:
            engine.abort("b")

    async with engine_of(runner=FakeRunner(vocab_size=9), codec=FakeCodec(9), on_step=on_step) as engine:
        outputs = await read(engine.generate(PROMPT, beams(3), request_id="b"))
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT] * 3
        for output in outputs:
            assert len(output.token_ids) == 4
            assert output.text == FakeCodec(9).decode(output.token_ids)


# parallel samples


@pytest.mark.asyncio
@pytest.mark.parametrize("cold", [True, False])
async def test_parallel_samples_share_the_prompt_and_differ(
    cold: bool, engine_of: EngineOf, alone: Alone, preempt_when: PreemptWhen
) -> None:
    """METRICS-06, NUM-07: prompt tokens count once, first token of the earliest, preemptions of all; penalties and
    seeds do not depend on what was cached or preempted."""
    params = SamplingParams(max_tokens=9, n=4, seed=11, repetition_penalty=1.4, presence_penalty=0.3, logprobs=1)
    expected = await alone(PROMPT * 2, params)
    async with engine_of() as engine:
        if not cold:
            await engine.complete(PROMPT * 2, greedy(1))
        before = engine.stats().generated_tokens
        left = [2, 5]
        preempt_when(
            engine, lambda s: bool(left) and s.index == 2 and len(s.token_ids) == left[0] and bool(left.pop(0))
        )
        outputs = await engine.complete(PROMPT * 2, params)
        stats = engine.stats()
    assert essence(outputs) == essence(expected)
    assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]
    assert len({output.token_ids for output in outputs}) == 4
    assert {output.prompt_tokens for output in outputs} == {12}
    assert {output.metrics.preemptions for output in outputs} == {2}
    assert stats.generated_tokens - before == 4 * 9
    assert stats.submitted == (1 if cold else 2)
    assert stats.cache.prefix_hits == (0 if cold else 1)


@pytest.mark.asyncio
async def test_the_first_of_n_samples_is_what_one_sample_would_be(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        four = await engine.complete(PROMPT, SamplingParams(max_tokens=6, n=4, seed=5))
        (one,) = await engine.complete(PROMPT, SamplingParams(max_tokens=6, seed=5))
        assert one.token_ids == four[0].token_ids


@pytest.mark.asyncio
async def test_best_of_returns_the_likeliest_and_streams_no_loser(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        drawn = await engine.complete(PROMPT, SamplingParams(max_tokens=6, n=5, seed=5))
        ranked = sorted(drawn, key=lambda output: -output.cumulative_logprob / len(output.token_ids))
        seen = [
            output async for output in engine.generate(PROMPT, SamplingParams(max_tokens=6, n=2, best_of=5, seed=5))
        ]
        assert [output.token_ids for output in seen] == [output.token_ids for output in ranked[:2]]
        assert [output.index for output in seen] == [0, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_every_sample_is_returned_however_short(max_tokens: int, engine_of: EngineOf) -> None:
    """INPUT-11: also when nothing is to be generated."""
    async with engine_of() as engine:
        for params in (
            SamplingParams(max_tokens=max_tokens, n=3, seed=1),
            SamplingParams(max_tokens=max_tokens, n=3, seed=1, prompt_logprobs=0),
            SamplingParams(max_tokens=max_tokens, n=2, best_of=3, seed=1),
            SamplingParams(max_tokens=max_tokens, n=2, beam_width=3),
        ):
            outputs = await engine.complete(PROMPT, params)
            assert [output.index for output in outputs] == list(range(params.n))
            assert {len(output.token_ids) for output in outputs} == {max_tokens}
            assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
async def test_aborting_parallel_samples_leaves_nothing(at: int, engine_of: EngineOf, read: Read) -> None:
    """COW-04: before, in and after prefill, and when some have finished; one end for each sample that began."""

    async def on_step(step: int) -> None:
        if step == at:
            engine.abort("n")

    async with engine_of(on_step=on_step, prefill_chunk=4, runner=FakeRunner(vocab_size=9)) as engine:
        params = SamplingParams(max_tokens=9, n=4, seed=1, stop_token_ids=[1, 2])
        outputs = await read(engine.generate([8] * 7, params, request_id="n"))
        assert len(outputs) == (1 if at <= 2 else 4)
        assert any(output.finish_reason is FinishReason.ABORT for output in outputs)
        assert engine.stats().finished == {"abort": 1} or at > 2


@pytest.mark.asyncio
@pytest.mark.parametrize("neighbours", [0, 1, 3, 7])
async def test_a_seed_decides_whoever_is_around(neighbours: int, engine_of: EngineOf, alone: Alone) -> None:
    """NUM-01: unseeded and greedy neighbours, that join and leave midway."""
    params = SamplingParams(max_tokens=12, seed=42)
    others: list[asyncio.Task[list[RequestOutput]]] = []

    async def on_step(step: int) -> None:
        for i in range(neighbours):
            if step == 1 + 2 * i:
                unseeded = SamplingParams(max_tokens=3 + i, temperature=i % 2)
                generation = await engine.generate([i, 1], unseeded).start()
                others.append(asyncio.create_task(read_all(generation)))

    async with engine_of(on_step=on_step) as engine:
        outputs = await engine.complete(PROMPT, params)
        await asyncio.gather(*others)
    assert essence(outputs) == essence(await alone(PROMPT, params))


# forks


async def read_all(generation: Generation) -> list[RequestOutput]:
    last = {output.index: output async for output in generation}
    return [last[index] for index in sorted(last)]


class Forker:
    """Forks a request when a given step is under way."""

    def __init__(self, at: int, params: SamplingParams | None) -> None:
        self.engine: AsyncEngine | None = None
        self.tasks: list[asyncio.Task[list[RequestOutput]]] = []
        self.past = -1
        self._at = at
        self._params = params

    async def on_step(self, step: int) -> None:
        if step == self._at and self.engine is not None:
            self.past = len(self.engine._loop.groups["source"].samples[0].token_ids)
            generation = await self.engine.fork("source", self._params, new_id="fork")
            self.tasks.append(asyncio.create_task(read_all(generation)))


@pytest.mark.asyncio
@pytest.mark.parametrize("max_running", [1, 8])
@pytest.mark.parametrize("at", range(1, 10))
async def test_a_greedy_fork_says_what_its_source_says(
    at: int, max_running: int, engine_of: EngineOf, alone: Alone
) -> None:
    """Forked while it waits, in prefill, in decode and in its last step; with a free slot and without."""
    forker = Forker(at, None)
    async with engine_of(on_step=forker.on_step, max_running=max_running, prefill_chunk=4) as engine:
        forker.engine = engine
        source = await engine.complete(PROMPT * 2, greedy(6), request_id="source")
        (forked,) = await asyncio.gather(*forker.tasks) if forker.tasks else ([],)
        if at <= 8:
            assert [output.token_ids for output in forked] == [output.token_ids for output in source]
            assert [output.finish_reason for output in forked] == [FinishReason.LENGTH]
    assert essence(source) == essence(await alone(PROMPT * 2, greedy(6)))


@pytest.mark.asyncio
async def test_a_waiting_request_can_be_forked(engine_of: EngineOf, alone: Alone) -> None:
    forker = Forker(2, None)
    async with engine_of(on_step=forker.on_step, max_running=1) as engine:
        forker.engine = engine
        first, source = await asyncio.gather(
            engine.complete([1, 2], greedy(5)), engine.complete(PROMPT, greedy(5), request_id="source")
        )
        (forked,) = await asyncio.gather(*forker.tasks)
        assert forker.past == 0
    assert essence(first) == essence(await alone([1, 2], greedy(5)))
    assert essence(source) == essence(forked) == essence(await alone(PROMPT, greedy(5)))


@pytest.mark.asyncio
async def test_sampled_forks_share_the_past_and_differ_after(engine_of: EngineOf, alone: Alone) -> None:
    """COW-10: the tail block is copied for the second writer, so the source is not disturbed."""
    forker = Forker(6, SamplingParams(max_tokens=12, seed=99))
    params = SamplingParams(max_tokens=12, seed=1)
    async with engine_of(on_step=forker.on_step) as engine:
        forker.engine = engine
        source = await engine.complete(PROMPT, params, request_id="source")
        ((forked,),) = await asyncio.gather(*forker.tasks)
        assert engine.stats().cache.cow_forks >= 1
        assert forked.cached_tokens == 0
    assert essence(source) == essence(await alone(PROMPT, params))
    assert forked.token_ids[: forker.past] == source[0].token_ids[: forker.past]
    assert forked.token_ids[forker.past + 2 :] != source[0].token_ids[forker.past + 2 :]
    assert len(forked.token_ids) == 12


@pytest.mark.asyncio
async def test_a_fork_obeys_its_own_parameters(engine_of: EngineOf) -> None:
    """Its stop strings, not those of its source, and also for text that the source held back."""
    codec = FakeCodec()
    async with engine_of(codec=codec) as engine:
        (plain,) = await engine.complete(PROMPT, greedy(12))
    text = plain.text
    source_params = SamplingParams(max_tokens=12, temperature=0.0, stop=[text[5:7] + "\x00", text[9:11]])
    fork_params = SamplingParams(max_tokens=12, temperature=0.0, stop=[text[7:9]])
    forker = Forker(7, fork_params)  # six tokens are known: the sixth is held back as the start of a stop string
    async with engine_of(codec=codec, on_step=forker.on_step) as engine:
        forker.engine = engine
        (source,) = await engine.complete(PROMPT, source_params, request_id="source")
        ((forked,),) = await asyncio.gather(*forker.tasks)
    assert (source.text, source.stop_reason) == (text[:9], text[9:11])
    assert (forked.text, forked.stop_reason) == (text[:7], text[7:9])


@pytest.mark.asyncio
async def test_a_fork_of_a_source_that_comes_to_a_stop_ends_like_it(engine_of: EngineOf, alone: Alone) -> None:
    (free,) = await alone(PROMPT, greedy(6))
    params = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=[free.token_ids[3]])
    forker = Forker(4, params)

    async def on_step(step: int) -> None:
        if step == 4 and forker.engine is not None:
            forker.engine._loop.post(lambda: None)
        await forker.on_step(step)

    async with engine_of(on_step=on_step) as engine:
        forker.engine = engine
        (source,) = await engine.complete(PROMPT, params, request_id="source")
        ((forked,),) = await asyncio.gather(*forker.tasks)
        assert (forked.token_ids, forked.finish_reason) == (source.token_ids, FinishReason.STOP)
        assert forked.stop_reason == source.stop_reason == free.token_ids[3]


@pytest.mark.asyncio
async def test_what_cannot_be_forked_is_refused(engine_of: EngineOf) -> None:
    caught: list[str] = []

    async def on_step(step: int) -> None:
        if step != 2:
            return
        for source, params, name in (
            ("gone", None, None),
            ("beams", None, None),
            ("beams", greedy(2), None),
            ("plain", SamplingParams(n=2), None),
            ("plain", SamplingParams(beam_width=2), None),
            ("plain", SamplingParams(prompt_logprobs=1), None),
            ("plain", SamplingParams(logprobs=1), None),
            ("plain", None, "beams"),
        ):
            with pytest.raises(InvalidRequest) as error:
                await engine.fork(source, params, new_id=name)
            caught.append(str(error.value))

    async with engine_of(on_step=on_step) as engine:
        await asyncio.gather(
            engine.complete(PROMPT, greedy(4), request_id="plain"),
            engine.complete(PROMPT, beams(2, 4), request_id="beams"),
        )
        assert len(caught) == 8
        with pytest.raises(InvalidRequest, match="under way"):
            await engine.fork("plain")
        assert engine.stats().submitted == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("tokens", range(1, 9))
async def test_a_fork_of_a_row_that_fails_reads_no_block_that_was_not_copied(
    tokens: int, engine_of: EngineOf, alone: Alone
) -> None:
    """The source's step fails before its copy on write is made; a fork asked for in that step must not rely on it."""
    failing = {"now": False, "step": -1}

    def before_step(step: StepInput) -> None:
        if failing["now"] and len(step.copies):
            raise RuntimeError("broken")

    forks: list[asyncio.Task[list[RequestOutput]]] = []

    async def on_step(step: int) -> None:
        failing["now"] = engine.stats().steps == failing["step"]
        group = engine._loop.groups.get("source")
        if group is None or len(forks) >= 2:
            return
        if len(group.samples[0].token_ids) == tokens + len(forks):
            generation = await engine.fork("source", greedy(14), new_id=f"fork{len(forks)}")
            forks.append(asyncio.create_task(read_all(generation)))
            if len(forks) == 2:
                failing.update(now=True, step=engine.stats().steps)

    async with engine_of(runner=FakeRunner(before_step=before_step), on_step=on_step) as engine:
        generation = await engine.generate(PROMPT, greedy(14), request_id="source").start()
        source = asyncio.create_task(read_all(generation))
        await asyncio.gather(source, return_exceptions=True)
        results = await asyncio.gather(*forks, return_exceptions=True)
        assert engine.stats().failed_rows == 1
    (expected,) = await alone(PROMPT, greedy(14))
    assert len(results) == 2
    failed = [result for result in results if isinstance(result, BaseException)]
    assert len(failed) == (0 if source.exception() else 1)  # the one row at fault, and nobody else
    answers = [result for result in results if isinstance(result, list)]
    assert [answer[0].token_ids for answer in answers] == [expected.token_ids] * len(answers)
