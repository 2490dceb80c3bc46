"""Everything at once on a real event loop with a real model thread and sixteen foreign threads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest

CLIENTS = 200
LEAST = 2
"""Requests of each client, and of each thread, however short the time."""


class Truth:
    """Greedy outputs by prompt: whoever asks the same gets the same, or a part of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def check(self, prompt: list[int], tokens: tuple[int, ...]) -> None:
        known = self._known.get(tuple(prompt), ())
        shared = min(len(known), len(tokens))
        assert known[:shared] == tokens[:shared]
        if len(tokens) > len(known):
            self._known[tuple(prompt)] = tokens


class Client:
    """One of many concurrent users of an engine, each with its own chance."""

    def __init__(self, engine: AsyncEngine, truth: Truth, seed: int) -> None:
        self._engine = engine
        self._truth = truth
        self._rng = random.Random(seed)  # noqa: S311  # a test's
        self._seed = seed
        self.answered = 0

    def prompt(self) -> list[int]:
        return [self._rng.randrange(2) for _ in range(self._rng.randint(1, 40))]

    def params(self) -> SamplingParams:
        kind = self._rng.randrange(5)
        length = self._rng.randint(1, 20)
        if kind == 0:
            return SamplingParams(max_tokens=length, n=self._rng.randint(2, 4), seed=self._rng.randrange(9))
        if kind == 1:
            return SamplingParams(max_tokens=length, beam_width=self._rng.randint(2, 3))
        return SamplingParams(max_tokens=length, temperature=0.0)

    async def live(self, deadline: float) -> None:
        while self.answered < LEAST or monotonic() < deadline:
            await self.one(f"{self._seed}-{self.answered}")
            self.answered += 1

    async def one(self, request_id: str) -> None:
        prompt, params = self.prompt(), self.params()
        tenant = self._rng.choice([None, "a"])
        generation = self._engine.generate(
            prompt, params, request_id=request_id, tenant=tenant, priority=self._rng.randrange(3)
        )
        fate = self._rng.choice(["read", "read", "leave", "abort", "cancel", "fork"])
        if fate == "cancel":
            task = asyncio.create_task(self._engine.complete(prompt, params))
            for _ in range(self._rng.randrange(30)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            return
        last: dict[int, RequestOutput] = {}
        async for output in generation:
            last[output.index] = output
            if fate == "leave" and self._rng.random() < 0.3:
                break
            if fate == "abort" and self._rng.random() < 0.3:
                self._engine.abort(request_id)
            if fate == "fork" and output.finish_reason is None:
                fate = "read"
                await self._fork(request_id, prompt, params, output)
        generation.close()
        if params.samples == 1:
            for output in last.values():
                self._truth.check(prompt, output.token_ids)

    async def _fork(self, request_id: str, prompt: list[int], params: SamplingParams, seen: RequestOutput) -> None:
        try:
            child = await self._engine.fork(request_id, SamplingParams(max_tokens=25, temperature=0.0))
        except InvalidRequest:  # it was a beam search, or over already
            return
        outputs = [output async for output in child]
        assert outputs == [] or outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        if outputs and params.samples == 1:
            self._truth.check(prompt, outputs[-1].token_ids)


def foreign(engine: AsyncEngine, truth: Truth, seed: int, deadline: float) -> int:
    rng = random.Random(seed)  # noqa: S311  # a test's
    with engine.blocking() as blocking:
        for number in itertools.count():
            if number >= LEAST and monotonic() >= deadline:
                return number
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
            params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.0)
            fate = rng.randrange(3)
            if fate == 0:
                truth.check(prompt, blocking.complete(prompt, params)[0].token_ids)
            elif fate == 1:
                for output in blocking.generate(prompt, params):
                    truth.check(prompt, output.token_ids)
                    if rng.random() < 0.3:
                        break
            else:
                request_id = f"thread-{seed}-{number}"
                for output in blocking.generate(prompt, params, request_id=request_id):
                    truth.check(prompt, output.token_ids)
                    blocking.abort(request_id)
    raise AssertionError  # the count has no end


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_everybody_is_answered_and_nothing_is_held(seconds: float, policy: str) -> None:
    config = EngineConfig(
        num_blocks=60,
        block_size=4,
        max_running=24,
        max_batch_tokens=48,
        scheduling_policy=policy,
        check_every_step=True,
        prefix_wait=0.05,
        policy_timeout=float("inf"),  # a busy machine's pauses are no fault of the policy
    )
    runner, truth = FakeRunner(), Truth()
    async with AsyncEngine(runner=runner, codec=FakeCodec(), config=config) as engine:
        loop = asyncio.get_running_loop()
        people = [Client(engine, truth, seed) for seed in range(CLIENTS)]
        deadline = monotonic() + seconds
        with ThreadPoolExecutor(16) as pool:
            threads = [loop.run_in_executor(pool, foreign, engine, truth, 10_000 + k, deadline) for k in range(16)]
            await asyncio.gather(*(person.live(deadline) for person in people))
            assert min(await asyncio.gather(*threads)) >= LEAST
        await engine._loop.wait_idle()
        assert min(person.answered for person in people) >= LEAST
        census, stats = engine.census(), engine.stats()
        assert (census.held, census.in_transfer, stats.running, stats.waiting) == (0, 0, 0, 0)
        assert stats.submitted == sum(stats.finished.values())
        assert "error" not in stats.finished
        assert stats.preemptions > 0
        assert stats.cache.cow_forks > 0
