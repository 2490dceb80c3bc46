"""Streams and times: what a reader sees, however slow it is, and when things happened."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import octavo
from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.request import Metrics
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ModelError

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("pause", [0, 1, 3, 50])
async def test_a_slow_reader_gets_fewer_outputs_and_the_same_whole(pause: int, engine_of: EngineOf) -> None:
    """FLOW-01: what is not fetched is merged; there is no queue that grows."""
    async with engine_of(codec=FakeCodec()) as engine:
        (expected,) = await engine.complete([1, 2], greedy(20))
        tokens: list[int] = []
        text, outputs = "", 0
        async for output in engine.generate([1, 2], greedy(20)):
            tokens.extend(output.new_token_ids)
            text += output.text_delta
            outputs += 1
            for _ in range(pause):
                await asyncio.sleep(0)
        assert (tuple(tokens), text) == (expected.token_ids, expected.text)
        assert outputs == 20 if pause == 0 else outputs <= 20
        if pause == 50:
            assert outputs == 2


@pytest.mark.asyncio
async def test_outputs_grow_and_end_once(engine_of: EngineOf, read: Read) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        generation = engine.generate([1, 2], SamplingParams(max_tokens=9, n=3, seed=1), request_id="r")
        names = [generation.request_id]
        outputs = await read(generation)
        assert [*names, generation.request_id] == [None, "r"]
        assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 3
        with pytest.raises(StopAsyncIteration):
            await anext(generation)


@pytest.mark.asyncio
async def test_an_error_comes_after_what_was_generated(engine_of: EngineOf) -> None:
    """FLOW-09: and then nothing more."""
    steps = {"broken": False}

    def before_step(step: object) -> None:
        if steps["broken"]:
            raise RuntimeError("broken")

    async def on_step(step: int) -> None:
        steps["broken"] = step == 4

    async with engine_of(runner=FakeRunner(before_step=before_step), on_step=on_step) as engine:
        generation = engine.generate([1], greedy(9))
        seen = [await anext(generation)]
        with pytest.raises(ModelError, match="broken"):  # noqa: PT012  # any of the next steps may be the one
            while True:
                seen.append(await anext(generation))
        assert (len(seen[-1].token_ids), seen[-1].finish_reason) == (3, FinishReason.ERROR)
        with pytest.raises(StopAsyncIteration):
            await anext(generation)


@pytest.mark.asyncio
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("tokens", [1, 2, 10])
async def test_times_are_in_order(tokens: int, n: int, engine_of: EngineOf) -> None:
    """TIME-04: arrival <= scheduled <= first <= last <= finished; the last one is that of the last step."""
    clock = Ticking()
    async with engine_of(clock=clock, prefill_chunk=4) as engine:
        outputs = [
            output async for output in engine.generate(list(range(10)), SamplingParams(max_tokens=tokens, n=n, seed=1))
        ]
    final = outputs[-1].metrics
    assert_in_order(final)
    first, last = final.first_token, final.last_token
    assert first is not None
    assert last is not None
    assert (last > first) is (tokens > 1)
    assert {output.metrics.first_token for output in outputs} == {first}
    assert [output.metrics.finished for output in outputs[:-n]] == [None] * (len(outputs) - n)


class Ticking:
    """A monotonic clock that moves on by a second with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def assert_in_order(metrics: Metrics) -> None:
    times = [metrics.arrival, metrics.scheduled, metrics.first_token, metrics.last_token, metrics.finished]
    known = [time for time in times if time is not None]
    assert known == sorted(known)
    assert metrics.finished is not None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("at", "missing"), [(1, {"scheduled", "first_token", "last_token"}), (2, {"first_token", "last_token"})]
)
async def test_what_did_not_happen_has_no_time(at: int, missing: set[str], engine_of: EngineOf, read: Read) -> None:
    """TIME-04: cancelled in the queue and in mid-prefill."""

    async def on_step(step: int) -> None:
        if step == at:
            engine.abort("x")

    busy = 1 if at == 1 else 2
    async with engine_of(clock=Ticking(), on_step=on_step, max_running=busy, prefill_chunk=4) as engine:
        first = asyncio.create_task(engine.complete([1], greedy(6)))
        await asyncio.sleep(0)
        (output,) = await read(engine.generate(list(range(2, 20)), greedy(2), request_id="x"))
        assert output.finish_reason is FinishReason.ABORT
        assert {name for name, value in output.metrics._asdict().items() if value is None} == missing
        assert_in_order(output.metrics)
        await first


def test_no_duration_comes_from_the_wall_clock() -> None:
    """TIME-06: ``time.time`` and ``datetime.now`` are for what outlives the process: passed in as ``wall``, once."""
    root = Path(octavo.__file__).parent
    found = []
    for path in sorted([*root.glob("engine/**/*.py"), *root.glob("policies/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                found += [f"{path}:{node.lineno}"] if name in {"time.time", "datetime.now", "time.time_ns"} else []
    assert [place.partition(":")[0].rpartition("/")[2] for place in found] == ["async_engine.py", "service.py"]


@pytest.mark.asyncio
async def test_a_slow_reader_sees_all_samples_grow(engine_of: EngineOf) -> None:
    """The first sample has something new whenever the reader comes; the others must not wait until it ends."""
    async with engine_of(codec=FakeCodec()) as engine:
        grown = dict.fromkeys(range(3), 0)
        async for output in engine.generate([1, 2], SamplingParams(max_tokens=30, n=3, seed=1)):
            grown[output.index] += len(output.new_token_ids)
            for _ in range(2):  # slower than the steps
                await asyncio.sleep(0)
            assert max(grown.values()) - min(grown.values()) <= 12
