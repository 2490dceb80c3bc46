"""Who runs when: progress, fairness, priorities and limits, seen from outside."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise

import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.runner import StepInput
from octavo.engine.sequence import Phase, Sample
from octavo.engine.testing import FakeRunner
from octavo.errors import NeverFits, QueueFull
from octavo.policies.scheduling.base import Job, SchedulingPolicy

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
PreemptWhen = Callable[[AsyncEngine, Callable[[Sample], bool]], None]
B = 4
PRIORITY = "octavo.policies.scheduling.priority:Priority"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def tokens_of(engine: AsyncEngine, name: str) -> int:
    """Tokens that a request has now; 0 before its first."""
    group = engine._loop.groups.get(name)
    return sum(len(sample.token_ids) for sample in group.samples) if group is not None else 0


async def send(engine: AsyncEngine, name: str, prompt: list[int], params: SamplingParams, priority: int = 0) -> Answer:
    generation = await engine.generate(prompt, params, request_id=name, priority=priority).start()
    return asyncio.create_task(collect(generation))


async def collect(generation: Generation) -> RequestOutput:
    last = None
    async for output in generation:
        last = output
    assert last is not None
    return last


Answer = asyncio.Task[RequestOutput]


@pytest.mark.asyncio
async def test_a_pool_far_below_demand_lets_everyone_finish(engine_of: EngineOf, alone: Alone) -> None:
    """SCHED-01: the oldest always gets on, and preemptions are bounded."""
    prompts = [[(i * 13 + j * j) % 61 for j in range(20)] for i in range(20)]
    oldest: list[tuple[str, int]] = []

    async def on_step(step: int) -> None:
        assert step < 20_000
        running = {sample.group.request_id for sample in engine._loop._scheduler.running}
        first = next(name for name in engine._loop.groups if name in running)
        computed = engine._loop.groups[first].samples[0].sequence.computed
        oldest.append((first, computed))

    async with engine_of(num_blocks=12, on_step=on_step) as engine:
        answers = await asyncio.gather(
            *[await send(engine, f"r{i}", prompt, greedy(20)) for i, prompt in enumerate(prompts)]
        )
    for prompt, output in zip(prompts, answers, strict=True):
        assert [output.token_ids] == [reference.token_ids for reference in await alone(prompt, greedy(20))]
        assert output.metrics.preemptions < 10
    assert answers[0].metrics.preemptions == 0
    for (name, computed), (later_name, later) in pairwise(oldest):
        assert name != later_name or later > computed


@pytest.mark.asyncio
async def test_a_prompt_is_let_in_only_with_room_for_what_runs(engine_of: EngineOf) -> None:
    """It would fit to the last block, and lose its place with the next token of the older one."""
    async with engine_of(num_blocks=6, admission_reserve=0.0) as engine:
        old = await send(engine, "old", [1] * 8, greedy(9))
        young = await send(engine, "young", [2] * 16, greedy(2))
        outputs = await asyncio.gather(old, young)
        assert engine.stats().preemptions == 0
        assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 2


@pytest.mark.asyncio
async def test_a_group_at_the_limit_runs_and_one_above_it_is_refused(engine_of: EngineOf, alone: Alone) -> None:
    """SCHED-04: nothing waits in silence for slots that do not exist."""
    async with engine_of(max_running=8) as engine:
        for n in (9, 64):
            with pytest.raises(NeverFits, match="8 side by side"):
                await engine.complete([1, 2, 3, 4], SamplingParams(max_tokens=3, n=n, seed=1))
        params = SamplingParams(max_tokens=5, n=8, seed=1)
        wide, canary = await asyncio.gather(engine.complete([1, 2, 3, 4], params), engine.complete([5, 6], greedy(3)))
        assert [output.index for output in wide] == list(range(8))
        assert [o.token_ids for o in wide] == [o.token_ids for o in await alone([1, 2, 3, 4], params)]
        assert [o.token_ids for o in canary] == [o.token_ids for o in await alone([5, 6], greedy(3))]
        assert engine.stats().rejected == 2


@pytest.mark.asyncio
async def test_prefill_does_not_starve_decodes_nor_the_other_way_round(engine_of: EngineOf) -> None:
    """SCHED-05: 4 decodes, then a prompt of 2000 tokens and 10 newcomers of 30 tokens with each of 30 steps."""
    answers: list[Answer] = []
    got: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, int] = {}

    async def on_step(step: int) -> None:
        if step == 10:
            answers.append(await send(engine, "long", [i % 61 for i in range(2000)], greedy(2)))
        if 10 <= step < 40:
            answers.extend(
                [await send(engine, f"new{step}-{i}", [step % 61, i, *range(28)], greedy(2)) for i in range(10)]
            )
        for i in range(4):
            got[f"d{i}"].append(tokens_of(engine, f"d{i}"))
        for name in [name for name in ("long", "new10-0") if name not in engine._loop.groups and step > 10]:
            ended.setdefault(name, step)

    async with engine_of(num_blocks=2000, max_batch_tokens=32, on_step=on_step, check_every_step=False) as engine:
        answers.extend([await send(engine, f"d{i}", [i], greedy(300)) for i in range(4)])
        outputs = await asyncio.gather(*answers)
        assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    for tokens in got.values():
        busy = tokens[12:290]
        assert all(later > earlier for earlier, later in zip(busy, busy[2:], strict=False))
    assert ended["new10-0"] < 30  # not behind the long prompt ...
    assert ended["long"] < 10 + 2 * 2000 // 14  # ... which gets half of what decodes leave


@pytest.mark.asyncio
async def test_a_long_prompt_leaves_room_for_short_ones_where_the_budget_is_two_blocks(engine_of: EngineOf) -> None:
    """SCHED-05 with blocks of 16 in a budget of 32: a long prompt and four decodes leave no room for a block."""
    answers: list[Answer] = []
    ended: dict[str, int] = {}

    async def on_step(step: int) -> None:
        if step == 10:
            answers.append(await send(engine, "long", [i % 61 for i in range(2000)], greedy(2)))
        if step == 12:
            answers.extend([await send(engine, f"new{i}", [i, *range(29)], greedy(2)) for i in range(3)])
        for name in [name for name in ("long", "new0", "new2") if name not in engine._loop.groups and step > 12]:
            ended.setdefault(name, step)

    async with engine_of(
        num_blocks=400, block_size=16, max_batch_tokens=32, on_step=on_step, check_every_step=False
    ) as engine:
        answers.extend([await send(engine, f"d{i}", [i], greedy(300)) for i in range(4)])
        outputs = await asyncio.gather(*answers)
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    assert ended["new0"] < 25
    assert ended["new2"] < 35
    assert ended["long"] < 12 + 2 * 2000 // 16


@pytest.mark.asyncio
@pytest.mark.parametrize("budget", [B, B + 1, B + 2, 2 * B - 1, 2 * B])
async def test_a_small_budget_lets_prompts_in_while_others_decode(budget: int, engine_of: EngineOf) -> None:
    """Decodes may not leave a rest of the budget that is too small for any prompt for as long as they run."""
    first: dict[str, int] = {}

    async def on_step(step: int) -> None:
        if step == 10:
            answers.append(await send(engine, "late", list(range(12)), greedy(1)))
        if step > 10 and "late" not in engine._loop.groups:
            first.setdefault("late", step)

    answers: list[Answer] = []
    async with engine_of(max_batch_tokens=budget, on_step=on_step, num_blocks=400) as engine:
        answers.extend([await send(engine, f"d{i}", [i], greedy(80)) for i in range(2 * B)])
        await asyncio.gather(*answers)
        await asyncio.gather(*answers)
    assert first["late"] < 10 + 4 * 12


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["slots", "blocks"])
async def test_a_higher_priority_displaces_a_strictly_lower_one(limit: str, engine_of: EngineOf, alone: Alone) -> None:
    """SCHED-08: by slots as by blocks; the displaced one ends with the same tokens; equals displace nobody."""
    order: list[str] = []
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        if step == 6:
            answers.append(await send(engine, "equal", [50, 51], greedy(3), 0))
            answers.append(await send(engine, "high", [60, 61], greedy(3), 1))
        order.extend(name for name in ("high", "equal") if tokens_of(engine, name) and name not in order)

    size = {"max_running": 4} if limit == "slots" else {"num_blocks": 13}
    async with engine_of(scheduling_policy=PRIORITY, on_step=on_step, **size) as engine:
        for i in range(4):
            prompt = [i] * (2 if limit == "slots" else 6)
            answers.append(await send(engine, f"low{i}", prompt, greedy(12), 0))
        await asyncio.gather(*answers[:4])
        outputs = await asyncio.gather(*answers)
        lows = [output for output in outputs if output.request_id.startswith("low")]
        assert order[0] == "high"
        high = next(output for output in outputs if output.request_id == "high")
        assert high.metrics.preemptions == 0
        for output in lows:
            prompt = [int(output.request_id[3:])] * (2 if limit == "slots" else 6)
            assert [output.token_ids] == [o.token_ids for o in await alone(prompt, greedy(12))]
        if limit == "slots":
            assert [output.metrics.preemptions for output in lows] == [0, 0, 0, 1]  # the youngest of the lowest


@pytest.mark.asyncio
async def test_displacing_in_vain_does_not_go_round_in_circles(engine_of: EngineOf) -> None:
    """A request that does not fit even without those below it may displace them once, not step after step."""
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        if step == 3:
            answers.append(await send(engine, "middle", [2] * 24, greedy(2), priority=1))

    async with engine_of(scheduling_policy=PRIORITY, on_step=on_step, num_blocks=12) as engine:
        answers.append(await send(engine, "top", [1] * 20, greedy(20), priority=2))
        answers.append(await send(engine, "low", [3] * 2, greedy(16), priority=0))
        await asyncio.gather(*answers)
        outputs = {output.request_id: output for output in await asyncio.gather(*answers)}
    assert outputs["low"].metrics.preemptions <= 1


@pytest.mark.asyncio
async def test_lows_are_not_starved_by_a_stream_of_highs(engine_of: EngineOf, clock: Clock) -> None:
    """SCHED-08: ageing lifts a waiting request by one level for every 30 seconds."""
    answers: list[Answer] = []
    done_at: list[int] = []

    async def on_step(step: int) -> None:
        clock.now += 1.0
        if step < 300:
            answers.append(await send(engine, f"high{step}", [step % 60], greedy(2), priority=1))
        if low not in engine._loop.groups and not done_at:
            done_at.append(step)

    low = "low"
    async with engine_of(scheduling_policy=PRIORITY, on_step=on_step, clock=clock, max_running=1) as engine:
        answers.append(await send(engine, "first", [9], greedy(3), priority=1))
        answers.append(await send(engine, low, [1], greedy(2), priority=0))
        await asyncio.gather(*answers)
        await asyncio.gather(*answers)
    assert done_at
    assert done_at[0] < 100


class Clock:
    """The shape of the ``clock`` fixture."""

    now: float


class NewestFirst(SchedulingPolicy):
    """Ranks against the order of arrival and displaces nobody."""

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (-job.order,)


@pytest.mark.asyncio
async def test_beams_that_are_half_back_give_way_to_a_better_rank(
    engine_of: EngineOf, alone: Alone, monkeypatch: pytest.MonkeyPatch, preempt_when: PreemptWhen
) -> None:
    """Beams are let in one by one. A newcomer of better rank that needs the blocks of those which are in, while the
    last one waits behind it, may not end in a stand-off."""
    params = SamplingParams(max_tokens=8, beam_width=3, n=3)
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        group = engine._loop.groups.get("beams")
        phases = [sample.phase for sample in group.samples] if group is not None else []
        if not answers and phases == [Phase.RUNNING, Phase.RUNNING, Phase.WAITING]:
            answers.append(await send(engine, "new", [1] * 28, greedy(2)))

    config = {"max_batch_tokens": 8, "num_blocks": 12, "enable_prefix_caching": False}
    async with engine_of(on_step=on_step, **config) as engine:
        monkeypatch.setattr(engine._loop._scheduler._ranks, "_policy", NewestFirst())
        left = [3]
        preempt_when(engine, lambda sample: bool(left) and len(sample.token_ids) == left[0] and bool(left.pop()))
        outputs = await engine.complete([5] * 9, params, request_id="beams")
        (new,) = await asyncio.gather(*answers)
        assert outputs[0].metrics.preemptions == 2
        assert new.metrics.preemptions == 0
        assert [o.token_ids for o in outputs] == [o.token_ids for o in await alone([5] * 9, params)]


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", ["raises", "not comparable", "nan"])
async def test_a_policy_that_breaks_its_contract_is_contained(
    bad: str, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bad(SchedulingPolicy):
        def rank(self, job: Job, now: float) -> tuple[float, ...]:
            if bad == "raises":
                raise RuntimeError(bad)
            return (float("nan"),) if bad == "nan" else ("x" if job.order % 2 else 1.0,)  # type: ignore[return-value]  # the breach

        def displaces(self, waiting: Job, running: Job, now: float) -> bool:
            raise RuntimeError(bad)

    async with engine_of(num_blocks=8, max_running=2) as engine:
        monkeypatch.setattr(engine._loop._scheduler._ranks, "_policy", Bad())
        outputs = await asyncio.gather(*(engine.complete([i] * 6, greedy(8)) for i in range(5)))
        assert [output.finish_reason for (output,) in outputs] == [FinishReason.LENGTH] * 5
        assert engine.stats().policy_faults > 0 or bad == "nan"  # which can be sorted, in whatever order


@pytest.mark.asyncio
async def test_the_queue_is_bounded_and_what_it_refuses_leaves_no_trace(engine_of: EngineOf) -> None:
    async with engine_of(max_running=1, max_waiting=2) as engine:
        answers = [await send(engine, f"r{i}", [i], greedy(2)) for i in range(2)]
        with pytest.raises(QueueFull, match="max_waiting"):
            await engine.complete([3], greedy(2))
        assert engine.stats().rejected == 1
        await asyncio.gather(*answers)
        assert (await engine.complete([3], greedy(2)))[0].finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_what_can_never_fit_is_refused_at_once(engine_of: EngineOf) -> None:
    """And what fits exactly runs, alone and after others."""
    async with engine_of(num_blocks=4) as engine:
        with pytest.raises(NeverFits, match="5 blocks of 4 tokens and the pool has 4"):
            await engine.complete([1] * 9, greedy(9))
        for _ in range(3):
            (output,) = await engine.complete([1] * 9, greedy(8))
            assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_a_step_never_exceeds_its_budget_and_chunks_end_at_block_borders(engine_of: EngineOf) -> None:
    steps: list[StepInput] = []
    async with engine_of(runner=FakeRunner(before_step=steps.append), max_batch_tokens=11, num_blocks=99) as engine:
        answers = [await send(engine, f"r{i}", [(i + j) % 60 for j in range(5 + 7 * i)], greedy(9)) for i in range(5)]
        await asyncio.gather(*answers)
    for step in steps:
        assert len(step.tokens) == sum(row.length for row in step.rows) <= 11
        unfinished = [row for row in step.rows if row.sampling is None]
        assert all(row.context % B == 0 for row in unfinished)


@pytest.mark.asyncio
async def test_an_old_reader_cannot_touch_a_new_request_of_the_same_id(engine_of: EngineOf) -> None:
    """TENANT-04: an id is free again when its request is done, even while somebody still holds the old stream."""
    async with engine_of() as engine:
        old = await engine.generate([1], greedy(2), request_id="x").start()
        await engine._loop.wait_idle()
        new = await send(engine, "x", [2], greedy(9))
        old.close()
        output = await new
        assert output.finish_reason is FinishReason.LENGTH
        assert engine.stats().finished == {"length": 2}


@pytest.mark.asyncio
async def test_nothing_is_displaced_in_vain(engine_of: EngineOf) -> None:
    """One that could not start even without all that it may displace leaves them alone."""
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        if step == 2:
            answers.append(await send(engine, "high", [5] * 36, greedy(4), priority=3))

    async with engine_of(
        num_blocks=16, block_size=4, max_running=8, scheduling_policy="priority", on_step=on_step
    ) as engine:
        answers.append(await send(engine, "top", [1] * 40, greedy(20), priority=5))
        answers.append(await send(engine, "low", [2] * 4, greedy(4), priority=0))
        await asyncio.gather(*answers)
        outputs = await asyncio.gather(*answers)
        assert len(outputs) == 3
        assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
        assert [output.metrics.preemptions for output in outputs] == [0, 0, 0]


@pytest.mark.asyncio
async def test_beams_as_wide_as_the_budget_let_prompts_in(engine_of: EngineOf) -> None:
    answers: list[Answer] = []
    ended: dict[str, int] = {}

    async def on_step(step: int) -> None:
        if step == 3:
            answers.append(await send(engine, "short", [3, 4, 5], greedy(2)))
        if step > 3 and "short" not in engine._loop.groups:
            ended.setdefault("short", step)

    async with engine_of(num_blocks=400, max_batch_tokens=8, on_step=on_step) as engine:
        answers.append(await send(engine, "beams", [1, 2], SamplingParams(max_tokens=60, beam_width=8)))
        await asyncio.gather(*answers)
    assert ended["short"] < 20
