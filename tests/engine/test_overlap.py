"""Outputs are delivered while the next step runs: what readers see is the same, and nobody waits for the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager

import pytest

from octavo import Acceleration, AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine import loop
from octavo.engine.delivery import Delivery
from octavo.engine.generation import Generation
from octavo.engine.model.runner import StepInput
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ModelError

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
CONFIG = EngineConfig(num_blocks=64, block_size=4)
OFF = Acceleration(overlap=False)


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)  # type: ignore[arg-type]  # names come from the tests


class Gate:
    """Lets a model make its first steps, and then only as many as a test says."""

    def __init__(self, steps: int) -> None:
        self._free = threading.Semaphore(steps)

    def __call__(self, step: StepInput) -> None:
        self._free.acquire()

    @contextmanager
    def opened_at_last(self) -> Iterator[None]:
        """Whatever happens, the model does not hang for ever."""
        try:
            yield
        finally:
            self.open(1000)

    def open(self, steps: int) -> None:
        self._free.release(steps)


@pytest.mark.asyncio
@pytest.mark.parametrize("overlap", [True, False])
async def test_what_a_step_brought_is_read_while_the_next_one_hangs(overlap: bool) -> None:
    gate = Gate(3)
    config = EngineConfig(num_blocks=64, block_size=4, acceleration=Acceleration(overlap=overlap))
    async with AsyncEngine(runner=FakeRunner(before_step=gate), codec=FakeCodec(), config=config) as engine:
        with gate.opened_at_last():
            generation = engine.generate([1, 2], greedy(9))
            seen = 0
            while seen < 3:
                output = await asyncio.wait_for(anext(generation), 15)
                seen = len(output.token_ids)
                assert len(output.text) == seen
            gate.open(100)
            *_, last = [output async for output in generation]
            assert (len(last.token_ids), last.finish_reason) == (9, FinishReason.LENGTH)


@pytest.mark.asyncio
async def test_a_request_that_is_over_is_told_so_while_the_step_of_others_hangs() -> None:
    gate = Gate(3)
    async with AsyncEngine(runner=FakeRunner(before_step=gate), codec=FakeCodec(), config=CONFIG) as engine:
        with gate.opened_at_last():
            longer = asyncio.create_task(engine.complete([5, 6], greedy(9)))
            (short,) = await asyncio.wait_for(engine.complete([1, 2], greedy(2), request_id="short"), 15)
            assert short.finish_reason is FinishReason.LENGTH
            assert not longer.done()
            assert engine.stats().finished == {"length": 1}
            again = engine.generate([1, 2], greedy(1), request_id="short")  # its id is free again
            await again.start()
            gate.open(100)
            assert [len(output.token_ids) async for output in again] == [1]
            assert len((await longer)[0].token_ids) == 9


@pytest.mark.asyncio
async def test_an_abort_from_within_the_delivery_comes_at_the_next_edge(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that hears of a token ends its own request, another one and one that is over, all in the same moment."""
    run = Delivery.run
    at: list[int] = []

    def run_and_abort(delivery: Delivery, most: int | None = None) -> None:
        over = [group.request_id for group in delivery._news if group.metrics.finished is not None]
        run(delivery, most)
        if engine.stats().generated_tokens >= 7 and not at:
            at.append(engine.stats().generated_tokens)
            for name in ("a", "b", *over):
                engine.abort(name)

    monkeypatch.setattr(Delivery, "run", run_and_abort)
    async with engine_of(codec=FakeCodec()) as engine:
        streams = [
            engine.generate([1, number], greedy(3 if number == 5 else 50), request_id="abc"[number - 3])
            for number in (3, 4, 5)
        ]
        outputs = await asyncio.gather(*(_last(stream) for stream in streams))
        assert [output.finish_reason for output in outputs] == [
            FinishReason.ABORT,
            FinishReason.ABORT,
            FinishReason.LENGTH,
        ]
        assert at


async def _last(generation: Generation) -> RequestOutput:
    *_, last = [output async for output in generation]
    return last


@pytest.mark.asyncio
async def test_who_aborts_between_commit_and_delivery_finds_the_request_over(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token is there, and nobody has been told: an abort at that edge must not end it a second time."""
    async with engine_of(codec=FakeCodec()) as engine:
        apply = engine._loop._committer.apply

        def apply_and_abort(*args: object) -> None:
            apply(*args)  # type: ignore[arg-type]  # as the loop calls it
            engine.abort("x")
            engine._loop._run_inbox()

        monkeypatch.setattr(engine._loop._committer, "apply", apply_and_abort)
        (one,) = await engine.complete([1, 2], greedy(1), request_id="x")
        assert (one.finish_reason, one.text) == (FinishReason.LENGTH, chr(48 + one.token_ids[0]))
        (cut,) = await engine.complete([1, 2], greedy(5), request_id="x")
        assert (cut.finish_reason, len(cut.token_ids)) == (FinishReason.ABORT, 1)
        assert engine.stats().finished == {"length": 1, "abort": 1}


@pytest.mark.asyncio
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
async def test_readers_see_the_same_with_and_without(params: SamplingParams, engine_of: EngineOf, read: Read) -> None:
    found = []
    for acceleration in (Acceleration(), OFF):
        async with engine_of(codec=FakeCodec(), acceleration=acceleration, max_batch_tokens=8) as engine:
            streams = (engine.generate([number, 2, 3, 4, 5], params) for number in range(1, 7))
            outputs = await asyncio.gather(*map(read, streams))
        found.append(
            [[(o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for o in some] for some in outputs]
        )
    assert found[0] == found[1]
    assert all(tokens for some in found[0] for _, tokens, *_ in some)


@pytest.mark.asyncio
@pytest.mark.parametrize("overlap", [True, False])
async def test_a_stop_string_ends_the_request_in_the_step_that_completes_it(overlap: bool, engine_of: EngineOf) -> None:
    """It decides what the next step computes, so it cannot wait for the delivery."""
    async with engine_of(codec=FakeCodec(), acceleration=Acceleration(overlap=overlap)) as engine:
        (whole,) = await engine.complete([1, 2], greedy(9))
        steps = engine.stats().steps
        stop = whole.text[4]
        (cut,) = await engine.complete([1, 2], greedy(9, stop=[stop]))
        first = whole.text.index(stop)
        assert (cut.text, cut.stop_reason) == (whole.text[:first], stop)
        assert engine.stats().steps - steps == first + 1


class Mute(FakeCodec):
    """A tokenizer that has no text for any output that holds ``bad``."""

    bad: int | None = None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self.bad in ids:
            raise ValueError("no such token")
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.asyncio
@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("place", [0, 3, 7])
async def test_a_token_without_a_text_ends_its_own_request(
    place: int, stop: tuple[str, ...], engine_of: EngineOf
) -> None:
    """In the middle and at the very end; what came before it is delivered, with the reason ``error``."""
    codec = Mute()
    async with engine_of(codec=codec) as engine:
        (whole,) = await engine.complete([1, 2], greedy(8))
        (other,) = await engine.complete([3, 4], greedy(8))
        codec.bad = next(token for token in whole.token_ids[place:] if token not in other.token_ids)
        first = whole.token_ids.index(codec.bad)
        neighbour = asyncio.create_task(engine.complete([3, 4], greedy(8)))
        seen = []
        with pytest.raises(ModelError, match="no such token"):  # noqa: PT012  # any of the outputs may be the last
            async for output in engine.generate([1, 2], greedy(8, stop=stop)):
                seen.append(output)  # noqa: PERF401  # it ends with an error
        assert seen[-1].finish_reason is FinishReason.ERROR
        assert whole.text.startswith(seen[-1].text)
        assert len(seen[-1].text) <= first
        assert (await neighbour)[0].text == other.text
        assert engine.stats().finished == {"length": 3, "error": 1}


@pytest.mark.asyncio
async def test_complete_makes_no_text_before_the_end(engine_of: EngineOf) -> None:
    """Nobody looks at what grows, so nobody is woken and nothing is decoded for it."""

    class Counting(FakeCodec):
        calls = 0

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.calls += 1
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    codec = Counting()
    async with engine_of(codec=codec) as engine:
        (output,) = await engine.complete([1, 2], greedy(40))
        assert len(output.text) == 40
        assert codec.calls < 40


@pytest.mark.asyncio
async def test_a_fault_while_telling_ends_everything_and_the_engine_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's histogram that raises where nobody catches it: the loop's own rule for faults inside holds."""
    async with AsyncEngine(runner=FakeRunner(), config=CONFIG) as engine:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("always")

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop._measures, "request_done", broken)
            running = asyncio.create_task(engine.complete([3, 4], greedy(200)))
            (output,) = await engine.complete([1, 2], greedy(3))  # it was told before
            assert output.finish_reason is FinishReason.LENGTH
        with pytest.raises(ModelError, match="always"):
            await running
        assert len((await engine.complete([1, 2], greedy(3)))[0].token_ids) == 3
        engine.census()


@pytest.mark.asyncio
async def test_many_readers_are_woken_in_slices_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever else waits for the event loop is never behind all of them; in order, and none is left out."""
    gate = Gate(0)
    told: list[int] = []
    run = Delivery.run

    def run_and_count(delivery: Delivery, most: int | None = None) -> None:
        before = len(delivery._news)
        run(delivery, most)
        if before:
            told.append(before - len(delivery._news))

    monkeypatch.setattr(Delivery, "run", run_and_count)
    config = EngineConfig(num_blocks=256, block_size=4, max_running=80)
    async with AsyncEngine(runner=FakeRunner(before_step=gate), codec=FakeCodec(), config=config) as engine:
        with gate.opened_at_last():
            streams = [engine.generate([number % 60, number // 60 + 3], greedy(9)) for number in range(70)]
            for stream in streams:
                await stream.start()
            gate.open(2)  # the second step is one of all, and the third one hangs
            for stream in streams:
                await asyncio.wait_for(anext(stream), 15)
            slices = -(-70 // loop.TOLD_AT_ONCE)
            assert sum(told[-slices:]) == 70
            assert max(told[-slices:]) == loop.TOLD_AT_ONCE
            gate.open(1000)
            for stream in streams:
                *_, last = [output async for output in stream]
                assert (len(last.token_ids), last.finish_reason) == (9, FinishReason.LENGTH)
        engine.census()
