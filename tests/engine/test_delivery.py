"""What readers and operators see between a commit and its delivery, while the next step has just begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from octavo import Acceleration, AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.runner import Int32Array, StepInput, UInt8Array
from octavo.engine.sequence import Sample, SequenceGroup
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ModelError

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
Meanwhile = Callable[[], object] | None
CONFIG = EngineConfig(num_blocks=64, block_size=4)


class Mute(FakeCodec):
    """A tokenizer that has no text for any output that holds ``bad``."""

    bad: int | None = None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self.bad in ids:
            raise ValueError("no such token")
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)  # type: ignore[arg-type]  # names come from the tests


def in_the_gap(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, look: Callable[[], None], *, delivers: bool = True
) -> None:
    """Let others run, then ``look``, then others again, before what the last step brought is delivered; without
    ``delivers`` the steps are too short for that.
    """
    thread = engine._loop._executor._thread

    async def late(meanwhile: Meanwhile, function: Callable[..., object], *args: object) -> object:
        await _turns()
        look()
        await _turns()
        if meanwhile is not None and delivers:
            meanwhile()
        return await thread.call(function, *args)

    monkeypatch.setattr(thread, "call_beside", late)


async def _turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_who_is_over_is_not_under_way(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to operators, and an abort says that it comes too late rather than promise an end that does not come."""
    seen: list[tuple[list[str], bool, int]] = []

    def look() -> None:
        names = [view.request_id for view in engine.requests()]
        group = engine._loop.groups.get("short")
        if group is not None and group.metrics.finished is not None:
            seen.append((names, engine.abort("short"), engine._loop.queued))

    async with engine_of(codec=FakeCodec()) as engine:
        in_the_gap(engine, monkeypatch, look)
        longer = asyncio.create_task(engine.complete([5, 6], greedy(9), request_id="long"))
        (short,) = await engine.complete([1, 2], greedy(2), request_id="short")
        assert short.finish_reason is FinishReason.LENGTH
        await longer
    assert seen == [(["long"], False, 0)]


@pytest.mark.asyncio
async def test_one_that_was_ended_in_the_queue_takes_no_place_in_it(
    engine_of: EngineOf, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []

    def look() -> None:
        group = engine._loop.groups.get("gone")
        if group is not None and group.metrics.finished is not None:
            waiting.append(engine._loop.queued)

    async with engine_of(max_running=1) as engine:
        in_the_gap(engine, monkeypatch, look)
        longer = engine.generate([5, 6], greedy(9))
        await longer.start()
        gone = engine.generate([1, 2], greedy(2), request_id="gone")
        await gone.start()
        await _turns()
        engine.abort("gone")
        assert [output.finish_reason async for output in gone] == [FinishReason.ABORT]
        await read(longer)
    assert waiting == [0]


@pytest.mark.asyncio
async def test_a_reader_that_comes_early_is_not_told_of_an_end_without_a_text(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token has no text: whoever looks before the delivery must not take it for a good end."""
    codec = Mute()
    async with engine_of(codec=codec) as engine:
        (whole,) = await engine.complete([1, 2], greedy(30))
        (other,) = await engine.complete([3, 4], greedy(40))
        codec.bad = next(t for t in whole.token_ids[2:] if t not in whole.token_ids[:2] + other.token_ids)
        length = whole.token_ids.index(codec.bad) + 1
        pause = asyncio.Event()

        in_the_gap(engine, monkeypatch, pause.set)
        neighbour = engine.generate([3, 4], greedy(40))  # so that there is a next step; nobody reads it
        await neighbour.start()
        reasons = []
        with pytest.raises(ModelError, match="no such token"):  # noqa: PT012  # any of the outputs may be the last
            async for output in engine.generate([1, 2], greedy(length)):
                reasons.append(output.finish_reason)
                pause.clear()
                await pause.wait()
        assert [reason for reason in reasons if reason is not None] == [FinishReason.ERROR]
        neighbour.close()


@pytest.mark.asyncio
async def test_a_sample_whose_end_has_no_text_ends_as_the_others_do(engine_of: EngineOf) -> None:
    """It came to its end while another one goes on: all of them are told that they failed."""
    codec = Mute()
    both = SamplingParams(max_tokens=12, n=2, seed=3)
    async with engine_of(codec=codec) as engine:
        first, second = await engine.complete([1, 2], both)
        codec.bad = next(t for t in first.token_ids[2:] if t not in second.token_ids)
        params = SamplingParams(max_tokens=12, n=2, seed=3, stop_token_ids=[codec.bad], include_stop=True)
        last: dict[int, RequestOutput] = {}
        with pytest.raises(ModelError, match="no such token"):  # noqa: PT012  # any of the outputs may be the last
            async for output in engine.generate([1, 2], params):
                last[output.index] = output
        assert [last[index].finish_reason for index in sorted(last)] == [FinishReason.ERROR] * 2
        assert codec.bad in last[0].token_ids


@pytest.mark.asyncio
async def test_a_meter_that_always_fails_costs_nobody_a_good_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three that are over in the same step: each is counted once, and told what it was and nothing else."""
    async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("always")

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop._measures, "request_done", broken)
            ended = await asyncio.gather(*(engine.complete([1, number], greedy(3)) for number in (2, 3, 4)))
        assert [output.finish_reason for (output,) in ended] == [FinishReason.LENGTH] * 3
        await engine.complete([1, 2], greedy(3))
        assert engine.stats().finished == {"length": 4}
        engine.census()


@pytest.mark.asyncio
async def test_one_that_cannot_be_seen_off_is_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    results = SequenceGroup.results

    def broken(group: SequenceGroup) -> list[Sample] | None:
        if group.request_id == "x":
            raise ZeroDivisionError("always")
        return results(group)

    monkeypatch.setattr(SequenceGroup, "results", broken)
    async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine, asyncio.timeout(15):
        two = engine.complete([1, 2], greedy(3), request_id="x"), engine.complete([1, 3], greedy(3))
        found, good = await asyncio.gather(*two, return_exceptions=True)
        assert isinstance(found, ModelError)
        assert isinstance(good, list)
        await engine.drain()
        assert engine.stats().finished == {"error": 1, "length": 1}
        engine.census()


@pytest.mark.asyncio
async def test_readers_do_not_wait_until_the_rows_at_fault_are_found() -> None:
    """A step of two rows fails at once, and then the model takes its time over the halves."""
    gate = threading.Semaphore(0)
    steps: list[int] = []

    def slow(step: StepInput) -> None:
        steps.append(len(step.rows))
        if len(step.rows) > 1:
            raise ValueError("not together")
        gate.acquire()

    async with AsyncEngine(runner=FakeRunner(before_step=slow), codec=FakeCodec(), config=CONFIG) as engine:
        first, second = engine.generate([1, 2], greedy(2)), engine.generate([3, 4], greedy(2))
        try:
            reading = asyncio.create_task(_one(first))
            while not steps:  # noqa: ASYNC110  # the model runs in a thread
                await asyncio.sleep(0.001)
            await second.start()
            gate.release()
            assert len((await asyncio.wait_for(reading, 15)).token_ids) == 1
            async with asyncio.timeout(15):
                while len(steps) < 3:  # noqa: ASYNC110  # the next step begins in its own time
                    await asyncio.sleep(0.001)
            assert steps == [1, 2, 1]
        finally:
            gate.release(1000)
        assert [len(output.token_ids) async for output in second][-1] == 2
        first.close()


@pytest.mark.asyncio
async def test_nobody_waits_for_a_copy_into_a_tier() -> None:
    """What a request leaves behind is written through, and that hangs: its answer is out before."""
    gate = threading.Event()

    class Hanging(FakeRunner):
        def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
            gate.wait(30)
            super().export_blocks(blocks, out)

    config = replace(CONFIG, tiers=("host",), host_bytes=2**20, demotion="write_through")
    runner = Hanging()
    async with AsyncEngine(runner=runner, config=config) as engine:
        longer = engine.generate([6, 7], greedy(30))  # there is a next step, which waits for the copy
        await longer.start()
        try:
            (output,) = await asyncio.wait_for(engine.complete([1, 2, 3, 4, 5], greedy(6)), 15)
            assert output.finish_reason is FinishReason.LENGTH
            assert runner.blocks_exported == 0
        finally:
            gate.set()
        while runner.blocks_exported == 0:  # noqa: ASYNC110  # it happens in a thread
            await asyncio.sleep(0.001)
        longer.close()


async def _one(generation: Generation) -> RequestOutput:
    return await anext(generation)


@pytest.mark.asyncio
@pytest.mark.parametrize("delivers", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        greedy(12),
        greedy(12, stop=["5", "ab"]),
        greedy(12, logprobs=2, stop_token_ids=[7, 9]),
        SamplingParams(max_tokens=12, n=3, seed=5),
        SamplingParams(max_tokens=12, n=1, best_of=3, seed=5),
        greedy(12, beam_width=3, n=2),
    ],
)
async def test_early_readers_see_the_same(
    delivers: bool, params: SamplingParams, engine_of: EngineOf, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(codec=FakeCodec(), acceleration=Acceleration(overlap=False), max_batch_tokens=8) as engine:
        expected = [await read(engine.generate([number, 2, 3, 4, 5], params)) for number in range(1, 7)]
    async with engine_of(codec=FakeCodec(), max_batch_tokens=8) as engine:
        pauses = [asyncio.Event() for _ in expected]

        def look() -> None:
            for pause in pauses[engine.stats().steps % 2 :: 2]:
                pause.set()

        async def slowly(number: int) -> list[RequestOutput]:
            pause, seen = pauses[number], list[RequestOutput]()
            async for output in engine.generate([number + 1, 2, 3, 4, 5], params):
                seen.append(output)
                pause.clear()
                if output.finish_reason is None:
                    await pause.wait()
            for index in {output.index for output in seen}:
                mine = [output for output in seen if output.index == index]
                assert "".join(output.text_delta for output in mine) == mine[-1].text
                assert sum((output.new_token_ids for output in mine), ()) == mine[-1].token_ids
                assert [output.finish_reason is None for output in mine] == [True] * (len(mine) - 1) + [False]
            return list({output.index: output for output in seen}.values())

        in_the_gap(engine, monkeypatch, look, delivers=delivers)
        async with engine.generate([63], greedy(200)) as another:  # so that there is a next step
            await another.start()
            found = await asyncio.gather(*map(slowly, range(len(expected))))
    for one, other in zip(found, expected, strict=True):
        assert _shown(one) == _shown(other)


def _shown(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    by_index = sorted(outputs, key=lambda output: output.index)
    return [(o.index, o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for o in by_index]
