"""Shares of the work between tenants, and that nobody is starved, under each scheduling policy."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import NamedTuple

import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.quotas import LOOK_AHEAD
from octavo.engine.sequence import Phase
from octavo.policies.scheduling.base import Job, SchedulingPolicy
from octavo.policies.scheduling.fair import Fair

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Answer = asyncio.Task[RequestOutput]
FCFS, PRIORITY, PREFIX_FIRST, FAIR = (
    f"octavo.policies.scheduling.{name}"
    for name in ("fcfs:Fcfs", "priority:Priority", "prefix_first:PrefixFirst", "fair:Fair")
)


class Clock:
    """The shape of the ``clock`` fixture."""

    now: float


class Load(NamedTuple):
    """A tenant's: so many requests always wait, of ``prompt`` tokens, for ``answer`` tokens."""

    backlog: int
    prompt: int
    answer: int


FLOOD = Load(backlog=40, prompt=600, answer=8)
STEADY = Load(backlog=4, prompt=60, answer=8)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


async def collect(generation: Generation) -> RequestOutput:
    last = None
    async for output in generation:
        last = output
    assert last is not None
    return last


async def send(
    engine: AsyncEngine, name: str, prompt: list[int], params: SamplingParams, tenant: str | None = None
) -> Answer:
    generation = await engine.generate(prompt, params, request_id=name, tenant=tenant).start()
    return asyncio.create_task(collect(generation))


class Clients:
    """Tenants with their loads, and the tokens of each in the steps before which all of them had something waiting."""

    def __init__(self, loads: Mapping[str, Load], *, steps: int, warm_up: int) -> None:
        self.served: Counter[str] = Counter()
        self.answers: list[Answer] = []
        self._loads, self._steps, self._warm_up = loads, steps, warm_up
        self._random = Random(7)  # noqa: S311  # a test's

    async def on_step(self, engine: AsyncEngine, step: int) -> None:
        scheduler = engine._loop._scheduler
        waiting = Counter(sample.group.job.tenant or "" for sample in scheduler.waiting)
        if step > self._steps:
            for name in list(engine._loop.groups):
                engine.abort(name)
            return
        if step > self._warm_up and all(waiting[tenant] for tenant in self._loads):
            for row in scheduler._plan.rows:
                self.served[row.sample.group.job.tenant or ""] += row.count
        for tenant, load in self._loads.items():
            for _ in range(load.backlog - waiting[tenant]):
                await self.send(engine, tenant, load)

    async def send(self, engine: AsyncEngine, tenant: str, load: Load) -> None:
        prompt = [self._random.randrange(60) for _ in range(load.prompt)]
        self.answers.append(await send(engine, f"r{len(self.answers)}", prompt, greedy(load.answer), tenant))


async def share_of_steady(
    engine_of: EngineOf, loads: Mapping[str, Load], *, least: int = 10_000, **config: object
) -> float:
    clients = Clients(loads, steps=350, warm_up=50)

    async def on_step(step: int) -> None:
        await clients.on_step(engine, step)

    size = {"num_blocks": 600, "block_size": 16, "max_batch_tokens": 128, "max_running": 12, "check_every_step": False}
    async with engine_of(on_step=on_step, **size | config) as engine:
        for tenant, load in loads.items():
            await clients.send(engine, tenant, load)
        await engine._loop.wait_idle()
        await asyncio.gather(*clients.answers, return_exceptions=True)
        assert engine.stats().policy_faults == 0
    assert clients.served.total() > least
    return clients.served["steady"] / clients.served.total()


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{}, {"output_weight": 1.0}], ids=str)
async def test_a_flood_of_long_prompts_leaves_another_tenant_half_of_the_tokens(
    options: Mapping[str, object], engine_of: EngineOf
) -> None:
    loads = {"flood": FLOOD, "steady": STEADY}
    share = await share_of_steady(engine_of, loads, scheduling_policy=FAIR, scheduling_options=options)
    assert 0.45 <= share <= 0.55
    if options:  # all tokens weigh the same
        assert 0.48 <= share <= 0.52


@pytest.mark.asyncio
async def test_without_shares_the_flood_has_nearly_all(engine_of: EngineOf) -> None:
    """What the test above would look like if the policy did nothing."""
    loads = {"flood": FLOOD, "steady": STEADY}
    assert await share_of_steady(engine_of, loads, scheduling_policy=FCFS) < 0.2


@pytest.mark.asyncio
async def test_a_short_pool_does_not_spoil_the_shares(engine_of: EngineOf) -> None:
    """Two long prompts fill the pool, so blocks are what is short, not tokens."""
    loads = {"flood": FLOOD, "steady": STEADY}
    options = {"output_weight": 1.0}
    share = await share_of_steady(engine_of, loads, scheduling_policy=FAIR, scheduling_options=options, num_blocks=80)
    assert 0.45 <= share <= 0.55


@pytest.mark.asyncio
async def test_shares_follow_the_weights(engine_of: EngineOf) -> None:
    loads = {"flood": FLOOD, "steady": STEADY._replace(backlog=12)}
    options = {"weights": {"steady": 3.0}, "output_weight": 1.0}
    share = await share_of_steady(engine_of, loads, scheduling_policy=FAIR, scheduling_options=options)
    assert 0.7 <= share <= 0.8


@pytest.mark.asyncio
async def test_who_decodes_for_long_is_charged_for_it(engine_of: EngineOf) -> None:
    """Answers are as dear as prompts, though each step gives a running request one token whatever its rank, and who
    has a slot keeps it until the end."""
    loads = {"flood": Load(backlog=20, prompt=8, answer=40), "steady": STEADY}
    options = {"output_weight": 1.0}
    share = await share_of_steady(
        engine_of, loads, least=2_500, scheduling_policy=FAIR, scheduling_options=options, max_running=8
    )
    assert 0.45 <= share <= 0.55


@pytest.mark.asyncio
async def test_what_is_cached_costs_nothing(engine_of: EngineOf) -> None:
    """A tenant whose prompts are cached gets many more answers for the same computed tokens."""
    done: Counter[str] = Counter()

    async def on_step(step: int) -> None:
        for tenant in ("known", "fresh"):
            waiting = [s for s in engine._loop._scheduler.waiting if s.group.job.tenant == tenant]
            if len(waiting) < 3 and step < 250:
                prompt = [5] * 64 if tenant == "known" else [random.randrange(60) for _ in range(64)]
                answers.append(await send(engine, f"{tenant}{step}", prompt, greedy(4), tenant))

    random, answers = Random(3), list[Answer]()  # noqa: S311  # a test's
    config = {"num_blocks": 400, "max_batch_tokens": 32, "max_running": 4, "check_every_step": False}
    async with engine_of(scheduling_policy=FAIR, on_step=on_step, **config) as engine:
        answers.append(await send(engine, "known0", [5] * 64, greedy(4), "known"))
        await engine._loop.wait_idle()
        for output in await asyncio.gather(*answers):
            done[output.request_id.rstrip("0123456789")] += 1
    assert done["known"] > 2 * done["fresh"] > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [PREFIX_FIRST, FAIR])
async def test_a_pool_far_below_demand_lets_everyone_finish(policy: str, engine_of: EngineOf, alone: Alone) -> None:
    """SCHED-01: 20 requests that need 10 of 12 blocks each, of two tenants."""
    prompts = [[(i * 13 + j * j) % 61 for j in range(20)] for i in range(20)]

    async def on_step(step: int) -> None:
        assert step < 20_000

    async with engine_of(num_blocks=12, on_step=on_step, scheduling_policy=policy) as engine:
        answers = await asyncio.gather(
            *[await send(engine, f"r{i}", prompt, greedy(20), "ab"[i % 2]) for i, prompt in enumerate(prompts)]
        )
        assert engine.stats().policy_faults == 0
    for prompt, output in zip(prompts, answers, strict=True):
        assert [output.token_ids] == [reference.token_ids for reference in await alone(prompt, greedy(20))]
        assert output.metrics.preemptions < 10


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [PRIORITY, PREFIX_FIRST, FAIR])
async def test_prefill_does_not_starve_decodes_nor_the_other_way_round(policy: str, engine_of: EngineOf) -> None:
    """SCHED-05: 4 decodes, then a prompt of 1000 tokens and 10 newcomers of 30 tokens with each of 15 steps."""
    answers: list[Answer] = []
    got: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, int] = {}

    async def on_step(step: int) -> None:
        if step == 10:
            answers.append(await send(engine, "long", [i % 61 for i in range(1000)], greedy(2), "long"))
        if 10 <= step < 25:
            answers.extend(
                [await send(engine, f"new{step}-{i}", [step % 61, i, *range(28)], greedy(2)) for i in range(10)]
            )
        for i in range(4):
            group = engine._loop.groups.get(f"d{i}")
            got[f"d{i}"].append(len(group.samples[0].token_ids) if group is not None else 0)
        for name in [name for name in ("long", "new10-0") if name not in engine._loop.groups and step > 10]:
            ended.setdefault(name, step)

    size = {"num_blocks": 1500, "max_batch_tokens": 32, "check_every_step": False}
    async with engine_of(on_step=on_step, scheduling_policy=policy, **size) as engine:
        answers.extend([await send(engine, f"d{i}", [i], greedy(150)) for i in range(4)])
        outputs = await asyncio.gather(*answers)
        assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    for tokens in got.values():
        busy = tokens[12:140]
        assert all(later > earlier for earlier, later in zip(busy, busy[2:], strict=False))
    assert ended["new10-0"] < 60  # not behind the long prompt
    assert ended["long"] < 10 + 2 * 1000 // 14


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [PREFIX_FIRST, FAIR])
async def test_nobody_is_starved_by_prompts_with_more_luck(policy: str, engine_of: EngineOf, clock: Clock) -> None:
    """SCHED-08 for ranks by prefix: a stream of requests whose prompt is cached, and one that has nothing."""
    answers: list[Answer] = []
    done_at: dict[str, int] = {}

    async def on_step(step: int) -> None:
        clock.now += 1.0
        if step < 120:
            answers.append(await send(engine, f"lucky{step}", [7] * 20, greedy(2)))
        if step == 10:
            answers.append(await send(engine, "unlucky", [1, 2, 3], greedy(2)))
        if step > 10 and "unlucky" not in engine._loop.groups:
            done_at.setdefault("unlucky", step)

    async with engine_of(on_step=on_step, scheduling_policy=policy, clock=clock, max_running=1) as engine:
        answers.append(await send(engine, "first", [7] * 20, greedy(2)))
        await asyncio.gather(*answers)
        await asyncio.gather(*answers)
    assert done_at["unlucky"] < 60


@pytest.mark.asyncio
async def test_the_longest_cached_prefix_goes_first_and_copies_of_a_new_one_last(engine_of: EngineOf) -> None:
    """Whatever the order of arrival: none, a block and three blocks are cached, and twins lack the same block."""
    order: list[str] = []

    async def on_step(step: int) -> None:
        names = [row.sample.group.request_id for row in engine._loop._scheduler._plan.rows]
        order.extend(name for name in names if name not in order)

    async with engine_of(scheduling_policy=PREFIX_FIRST, on_step=on_step, max_running=1) as engine:
        await engine.complete([9] * 16, greedy(1), request_id="seed")
        prompts = {
            "twin1": [1] * 12,
            "twin2": [1] * 12,
            "none": [2] * 6,
            "one": [9] * 4 + [3] * 8,
            "three": [9] * 13,
        }
        await asyncio.gather(*[await send(engine, name, prompt, greedy(1)) for name, prompt in prompts.items()])
    assert order == ["seed", "three", "one", "twin1", "twin2", "none"]


@pytest.mark.asyncio
async def test_a_copy_that_waits_does_not_hold_up_others(engine_of: EngineOf) -> None:
    """Of five that lack the same block one runs; the next slots go to who came later and lacks another one."""
    order: list[str] = []

    async def on_step(step: int) -> None:
        names = [row.sample.group.request_id for row in engine._loop._scheduler._plan.rows]
        order.extend(name for name in names if name not in order)

    async with engine_of(scheduling_policy=PREFIX_FIRST, on_step=on_step, max_running=1) as engine:
        first = [await send(engine, f"twin{i}", [1] * 12, greedy(1)) for i in range(5)]
        later = [await send(engine, f"own{i}", [10 + i] * 12, greedy(1)) for i in range(3)]
        await asyncio.gather(*first, *later)
        scheduler = engine._loop._scheduler
    assert order[0] == "twin0"
    assert order[1:5] == [f"twin{i}" for i in range(1, 5)]  # by then their prefix was there, and they came first
    assert scheduler.waiting == []


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [PREFIX_FIRST, FAIR])
async def test_more_copies_than_a_plan_looks_at_do_not_hide_others(policy: str, engine_of: EngineOf) -> None:
    """One of them runs, so they cannot go on yet: the second slot is for the one that can, though it came last."""
    order: list[str] = []

    async def on_step(step: int) -> None:
        names = [row.sample.group.request_id for row in engine._loop._scheduler._plan.rows]
        order.extend(name for name in names if name not in order)

    async with engine_of(scheduling_policy=policy, on_step=on_step, max_running=2) as engine:
        twins = [await send(engine, f"twin{i}", [1] * 12, greedy(1)) for i in range(LOOK_AHEAD + 6)]
        await asyncio.gather(*twins, await send(engine, "own", [2] * 12, greedy(1)))
    assert order[:2] == ["twin0", "own"]


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [PREFIX_FIRST, FAIR])
async def test_what_another_tenant_has_cached_gives_no_rank(policy: str, engine_of: EngineOf) -> None:
    """TENANT-01: the order of b's requests is the same whether or not a has run the longer one of them."""
    orders = []
    for secret in ([1] * 24, [2] * 24):
        order: list[str] = []

        async def on_step(step: int, order: list[str] = order) -> None:
            names = [row.sample.group.request_id for row in engine._loop._scheduler._plan.rows]
            order.extend(name for name in names if name not in order)

        async with engine_of(scheduling_policy=policy, on_step=on_step, max_running=1) as engine:
            await engine.complete(secret, greedy(1), request_id="a", tenant="a")
            probes = {"other": [3] * 24, "probe": [1] * 24}
            await asyncio.gather(*[await send(engine, name, ids, greedy(1), "b") for name, ids in probes.items()])
            known = [job.cached_tokens for job in engine._loop._scheduler._ranks._places]
            assert not any(known)
        orders.append(order)
    assert orders[0] == orders[1] == ["a", "other", "probe"]


class Books(SchedulingPolicy):
    """Notes what it is told, and breaks at one of the events if asked to."""

    def __init__(self, fails: str = "") -> None:
        self.events: list[tuple[str, int]] = []
        self.tokens: Counter[int] = Counter()
        self.live: set[Job] = set()
        self._fails = fails

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (job.order,)

    def on_arrival(self, job: Job, now: float) -> None:
        self._note("on_arrival", job)
        assert job not in self.live
        self.live.add(job)

    def on_served(self, job: Job, prefill_tokens: int, decode_tokens: int, now: float) -> None:
        self._note("on_served", job)
        assert job in self.live
        assert min(prefill_tokens, decode_tokens) == 0 < max(prefill_tokens, decode_tokens)
        self.tokens[job.order] += prefill_tokens + decode_tokens

    def on_leave(self, job: Job, now: float) -> None:
        self._note("on_leave", job)
        self.live.remove(job)

    def _note(self, event: str, job: Job) -> None:
        self.events.append((event, job.order))
        if event == self._fails:
            raise RuntimeError(event)


@pytest.mark.asyncio
async def test_a_policy_hears_of_each_request_from_arrival_to_leave(engine_of: EngineOf) -> None:
    """However it ends: finished, aborted while it waits or runs, with several samples, as beams, or forked."""
    books = Books()

    async def on_step(step: int) -> None:
        if step == 4:
            engine.abort("runs")
            engine.abort("waits")
        if step == 5:
            forks.append(await engine.fork("long", greedy(12), new_id="fork"))

    forks: list[Generation] = []
    async with engine_of(on_step=on_step, num_blocks=24, max_running=6, enable_prefix_caching=False) as engine:
        scheduler = engine._loop._scheduler
        scheduler._ranks._policy, scheduler._ranks._listens = books, True
        long = await send(engine, "long", [1] * 6, greedy(12))
        sent = [await send(engine, "runs", [2] * 6, greedy(20))]
        sent.append(await send(engine, "n", [3] * 6, SamplingParams(max_tokens=4, n=2, seed=1)))
        sent.append(await send(engine, "beams", [4] * 6, SamplingParams(max_tokens=4, beam_width=2)))
        sent.append(await send(engine, "waits", [5] * 40, greedy(20)))
        outputs = await asyncio.gather(long, *sent, *(collect(fork) for fork in forks), return_exceptions=True)
        assert isinstance(outputs[0], RequestOutput)
        await asyncio.gather(*(collect(fork) for fork in forks))
        await engine._loop.wait_idle()
        await engine._loop.at_edge(lambda: None)
        assert engine.stats().policy_faults == 0
        arrived = [order for event, order in books.events if event == "on_arrival"]
        assert arrived == sorted(set(arrived))
        assert len(arrived) == 6
        assert sorted(order for event, order in books.events if event == "on_leave") == arrived
        assert books.live == set()
        assert books.tokens[arrived[0]] == 6 + 11
        assert engine.stats().batch_tokens >= books.tokens.total()


@pytest.mark.asyncio
@pytest.mark.parametrize("event", ["on_arrival", "on_served", "on_leave"])
async def test_a_policy_that_breaks_at_an_event_is_contained(event: str, engine_of: EngineOf, alone: Alone) -> None:
    async with engine_of(num_blocks=12) as engine:
        ranks = engine._loop._scheduler._ranks
        ranks._policy, ranks._listens = Books(event), True
        outputs = await asyncio.gather(*(engine.complete([i] * 6, greedy(8)) for i in range(5)))
        assert engine.stats().policy_faults > 0
    for i, (output,) in enumerate(outputs):
        assert [output.token_ids] == [reference.token_ids for reference in await alone([i] * 6, greedy(8))]


@pytest.mark.asyncio
async def test_tenants_that_are_gone_leave_nothing_behind(engine_of: EngineOf) -> None:
    """Whether their requests were answered or aborted."""

    async def on_step(step: int) -> None:
        for name in [name for name in engine._loop.groups if name.startswith("gone")]:
            engine.abort(name)

    async with engine_of(on_step=on_step, scheduling_policy=FAIR) as engine:
        policy = engine._loop._scheduler._ranks._policy
        assert isinstance(policy, Fair)
        for i in range(40):
            sent = [await send(engine, f"gone{i}", [1] * 9, greedy(9), f"gone{i}")]
            sent.append(await send(engine, f"r{i}", [2] * 5, greedy(3), f"t{i}"))
            await asyncio.gather(*sent, return_exceptions=True)
            await engine._loop.wait_idle()
            await engine._loop.at_edge(lambda: None)
        await asyncio.sleep(0)
        assert policy._present == {}
        assert policy.known_tenants < 10
        assert engine.stats().policy_faults == 0


@pytest.mark.asyncio
async def test_jobs_say_who_waits(engine_of: EngineOf) -> None:
    """Also one that came back to the queue, and not one that was adopted as a fork."""
    seen: Counter[tuple[str, bool]] = Counter()

    async def on_step(step: int) -> None:
        scheduler = engine._loop._scheduler
        for sample in (*scheduler.running, *scheduler.waiting):
            # who was let in or preempted by this very plan is told with the next
            if sample.group.job.is_waiting == (sample.phase is Phase.WAITING):
                seen[sample.phase.value, True] += 1
            else:
                seen[sample.phase.value, False] += 1

    async with engine_of(on_step=on_step, num_blocks=12, scheduling_policy=FAIR) as engine:
        await asyncio.gather(*[await send(engine, f"r{i}", [i] * 20, greedy(20)) for i in range(4)])
    assert seen["waiting", True] > 3 * seen["waiting", False]
    assert seen["running", True] > 3 * seen["running", False]
