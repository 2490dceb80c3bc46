"""Admission leaves room for what is expected to grow: no more than that, and nothing that would be lost again."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from random import Random
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import AsyncEngine, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.growth import HORIZON, MEMORY, Growth
from octavo.engine.kv import CacheManager, Namespace, Sequence
from octavo.engine.model.runner import StepInput
from octavo.engine.sequence import EndTokens, Phase, Sample, SequenceGroup
from octavo.engine.testing import FakeRunner
from octavo.policies.eviction.lru import Lru
from octavo.policies.scheduling.base import Job

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
B = 4
PLACE = Namespace("test")
PREFIX_FIRST = "octavo.policies.scheduling.prefix_first:PrefixFirst"
PRIORITY = "octavo.policies.scheduling.priority:Priority"


def _unexpected(where: str, error: BaseException | str) -> None:
    raise AssertionError(where, error)


class Rig:
    """A cache and requests on it, without an engine."""

    def __init__(self) -> None:
        self.cache = CacheManager(4096, B, Lru(4096), clock=lambda: 0.0, on_fault=_unexpected)
        self.growth = Growth(self.cache)
        self._count = 0

    def sample(
        self, prompt: int, max_tokens: int, *, used: int = 0, admitted: bool = True, n: int = 1, same: bool = False
    ) -> Sample:
        """``used``: tokens that it has got. ``same``: its prompt is that of all others with it."""
        self._count += 1
        tokens = [0 if same else self._count] * prompt
        job = Job(self._count, 0.0, 0, None, prompt, max_tokens)
        group = SequenceGroup(
            str(self._count),
            SamplingParams(max_tokens=max_tokens, n=n, seed=1),
            job=job,
            namespace=PLACE,
            prompt_ids=tuple(tokens),
            ends=EndTokens(frozenset(), {}),
            seed=1,
            codec=None,
        )
        if used:
            group.metrics = group.metrics._replace(first_token=0.0)
        sequence = Sequence(self._count, array("i", [*tokens, *range(used)]), PLACE, block_size=B)
        sample = Sample(group, 0, sequence, 1, None)
        sample.token_ids = list(range(used))
        group.samples.append(sample)
        if admitted:
            self.cache.admit(sequence)
            self.cache.commit(sequence, sequence.uncomputed)
            sample.phase = Phase.RUNNING
        return sample


LINES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(0, 20)), max_size=8)


@given(LINES, st.integers(1, 40), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_the_peak_is_enough_when_lengths_are_as_expected(
    lines: list[tuple[int, int, int]], prompt: int, max_tokens: int
) -> None:
    """Against a simulation that lets all of them grow token by token."""
    rig = Rig()
    admitted = [rig.sample(prompt, used + rest, used=used) for prompt, rest, used in lines]
    newcomer = rig.sample(prompt, max_tokens, admitted=False)
    peak = rig.growth.peak(newcomer, admitted)
    begins = [len(sample.sequence.tokens) for sample in (*admitted, newcomer)]
    rests = [sample.group.max_tokens - len(sample.token_ids) for sample in (*admitted, newcomer)]
    held, worst = sum(-(-tokens // B) for tokens in begins), 0
    for time in range(1, max(rests) + 1):
        needed = sum(
            -(-(tokens + time) // B) if time <= rest else (-(-tokens // B) if index == len(admitted) else 0)
            for index, (tokens, rest) in enumerate(zip(begins, rests, strict=True))
        )
        worst = max(worst, needed - held)
    assert worst <= peak <= worst + len(begins)  # each line may just have begun a block, or not


def test_what_ends_first_makes_room_unless_it_is_shared() -> None:
    rig = Rig()
    newcomer, short = rig.sample(4, 40, admitted=False), rig.sample(40, 2)
    assert rig.growth.peak(newcomer, [short]) == 2  # one block each until the short one ends; then 10 are free
    shared = [rig.sample(40, 2, same=True) for _ in range(2)]
    assert rig.growth.peak(newcomer, shared) == 10  # what it needs alone: nothing comes free for it


def test_all_continuations_of_a_prompt_grow() -> None:
    rig = Rig()
    alone = rig.growth.peak(rig.sample(8, 20, admitted=False), [])
    assert alone == 5
    assert rig.growth.peak(rig.sample(8, 20, admitted=False, n=3), []) == 3 * alone
    assert rig.growth.peak(rig.sample(8, 20, used=4, admitted=False, n=3), []) == 4  # they are there, this is one
    # each but the last to go on copies what the prompt has begun of a block
    assert rig.growth.peak(rig.sample(7, 20, admitted=False, n=3), []) == 3 * alone + 2
    assert rig.growth.peak(rig.sample(7, 0, admitted=False, n=3), []) == 0


def test_what_others_give_back_is_looked_up_anew_when_somebody_came(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    exclusive = Mock(wraps=rig.cache.exclusive_blocks)
    monkeypatch.setattr(rig.cache, "exclusive_blocks", exclusive)
    newcomer, first = rig.sample(4, 40, admitted=False), rig.sample(40, 2, same=True)
    assert [rig.growth.peak(newcomer, [first]) for _ in range(3)] == [2] * 3
    assert exclusive.call_count == 1
    follower = rig.sample(40, 2, same=True)
    rig.growth.changed()
    assert rig.growth.peak(newcomer, [first, follower]) == 10


def test_answers_that_stop_early_leave_room_for_more() -> None:
    """And those that do not take it back, however many there were before."""
    rig = Rig()
    boundless = rig.sample(4, 100_000, admitted=False)
    assert rig.growth.expected(boundless) == HORIZON
    for _ in range(100):
        rig.growth.ended(rig.sample(4, 100_000, used=HORIZON // 4, admitted=False))
    assert rig.growth.expected(boundless) == HORIZON // 4
    assert rig.growth.expected(rig.sample(4, 40, used=20, admitted=False)) == 5
    for _ in range(4 * MEMORY):
        rig.growth.ended(rig.sample(4, 10, used=10, admitted=False))
    assert rig.growth.expected(boundless) > HORIZON * 9 // 10
    rig.growth.ended(rig.sample(4, 0, admitted=False))  # it had nothing to use


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [PREFIX_FIRST, "octavo.policies.scheduling.fcfs:Fcfs"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("seed", range(3))
async def test_nobody_is_preempted_when_lengths_are_as_expected(
    engine_of: EngineOf, policy: str, n: int, seed: int
) -> None:
    """Whatever the order is; and several run side by side all the same."""
    random = Random(seed)  # noqa: S311  # not for secrets
    together: list[int] = []

    def note(step: StepInput) -> None:
        together.append(len(step.rows))

    config = {"num_blocks": 40 * n, "admission_reserve": 0.0, "scheduling_policy": policy}
    async with engine_of(runner=FakeRunner(before_step=note), **config) as engine:
        asked = [
            ([random.randrange(60) for _ in range(random.randint(2, 30))], random.randint(2, 40)) for _ in range(24)
        ]
        params = [SamplingParams(max_tokens=most, n=n, temperature=1.0, seed=seed) for _, most in asked]
        await asyncio.gather(*(engine.complete(ids, p) for (ids, _), p in zip(asked, params, strict=True)))
        assert engine.stats().preemptions == 0
    assert sum(together) > 3 * len(together)


@pytest.mark.asyncio
@pytest.mark.parametrize("max_tokens", [150, 100_000])
async def test_whoever_is_alone_is_let_in_whatever_it_may_grow_to(engine_of: EngineOf, max_tokens: int) -> None:
    """Its growth is more than the whole pool has left; it is its own affair."""
    async with engine_of(num_blocks=40, admission_reserve=0.9, runner=FakeRunner(max_context=160)) as engine:
        (output,) = await engine.complete([1] * 10, SamplingParams(max_tokens=min(max_tokens, 150), temperature=0.0))
        assert len(output.token_ids) == 150


@pytest.mark.asyncio
async def test_no_room_is_left_for_the_growth_of_those_who_are_given_up(engine_of: EngineOf) -> None:
    """A request of high priority gets the blocks that are free while one of low priority would grow into them."""
    sent: list[asyncio.Task[object]] = []
    together: list[set[str]] = []

    async def on_step(step: int) -> None:
        if step == 3:
            params = SamplingParams(max_tokens=2, temperature=0.0)
            generation = await engine.generate([2] * 8, params, request_id="high", priority=1).start()
            sent.append(asyncio.create_task(anext(aiter(generation))))
        together.append({sample.group.request_id for sample in engine._loop._scheduler.running})

    async with engine_of(num_blocks=16, admission_reserve=0.0, scheduling_policy=PRIORITY, on_step=on_step) as engine:
        low = SamplingParams(max_tokens=50, temperature=0.0)
        await engine.complete([1] * 12, low, request_id="low")
        await asyncio.gather(*sent)
        assert {"low", "high"} in together
        assert engine.stats().preemptions == 0


@pytest.mark.asyncio
async def test_nobody_is_given_up_for_one_that_finds_no_room_then(engine_of: EngineOf, read: Read) -> None:
    """There is none beside the growth of one that stays: who would be displaced runs on until that one ends."""
    sent: list[asyncio.Future[list[RequestOutput]]] = []

    async def send(name: str, tokens: int, most: int, priority: int) -> None:
        params = SamplingParams(max_tokens=most, temperature=0.0)
        generation = await engine.generate([len(sent)] * tokens, params, request_id=name, priority=priority).start()
        sent.append(asyncio.ensure_future(read(generation)))

    async def on_step(step: int) -> None:
        if step == 2:
            await send("low", 4, 8, 0)
        if step == 4:
            await send("late", 24, 8, 1)

    async with engine_of(num_blocks=20, admission_reserve=0.0, scheduling_policy=PRIORITY, on_step=on_step) as engine:
        high = SamplingParams(max_tokens=60, temperature=0.0)
        await engine.complete([9] * 4, high, request_id="high", priority=1)
        await asyncio.gather(*sent)
        assert engine.stats().preemptions == 0


@pytest.mark.asyncio
async def test_the_engine_learns_from_answers_that_stop(engine_of: EngineOf) -> None:
    async with engine_of(runner=FakeRunner(eos_token_ids=frozenset(range(64)))) as engine:
        await engine.complete([1] * 4, SamplingParams(max_tokens=100, temperature=0.0))
        assert engine._loop._scheduler._growth.expected(Rig().sample(4, 100, admitted=False)) <= 2
