"""Quotas on the pool, seen from outside: who keeps what, who borrows, who gives back, and that everybody is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from random import Random

import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeRunner
from octavo.errors import ContractBroken, InvalidRequest

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Answer = asyncio.Task[RequestOutput]
FCFS, PRIORITY, PREFIX_FIRST, FAIR = (
    f"octavo.policies.scheduling.{name}"
    for name in ("fcfs:Fcfs", "priority:Priority", "prefix_first:PrefixFirst", "fair:Fair")
)
EVICTIONS = ("octavo.policies.eviction.lru:Lru", "octavo.policies.eviction.lfu:Lfu")


class Clock:
    """The shape of the ``clock`` fixture."""

    now: float


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


async def collect(generation: Generation) -> RequestOutput:
    last = None
    async for output in generation:
        last = output
    assert last is not None
    return last


async def send(
    engine: AsyncEngine,
    name: str,
    prompt: list[int],
    params: SamplingParams,
    tenant: str | None = None,
    priority: int = 0,
) -> Answer:
    generation = await engine.generate(prompt, params, request_id=name, tenant=tenant, priority=priority).start()
    return asyncio.create_task(collect(generation))


def running(engine: AsyncEngine) -> set[str]:
    return {sample.group.request_id for sample in engine._loop._scheduler.running}


class Watch:
    """Looks at every choice of who has to give way: for another tenant, only who holds more than his quota."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.for_others = 0
        self._cache = engine._loop.cache
        giving = engine._loop._scheduler._giving
        growth, blocks, slots = giving.for_growth, giving.for_blocks, giving.for_slots

        def for_growth(sample: Sample, admitted: Sequence[Sample]) -> Sample | None:
            victim = growth(sample, admitted)
            self._check(sample, [victim] if victim is not None else [])
            if victim is None:  # it steps back itself
                assert self._left(sample) <= 0 or self._cache.pool.in_transfer
            return victim

        def for_blocks(sample: Sample, headroom: int, running: Sequence[Sample]) -> list[Sample]:
            return self._check(sample, blocks(sample, headroom, running))

        def for_slots(sample: Sample, running: Sequence[Sample], loading: Sequence[Sample]) -> list[Sample]:
            return self._check(sample, slots(sample, running, loading))

        monkeypatch.setattr(giving, "for_growth", for_growth)
        monkeypatch.setattr(giving, "for_blocks", for_blocks)
        monkeypatch.setattr(giving, "for_slots", for_slots)

    def _check(self, taker: Sample, victims: list[Sample]) -> list[Sample]:
        gone: set[Sample] = set()
        for victim in victims:
            if self._group(victim) != self._group(taker) and victim not in gone:
                assert self._left(victim, gone) < 0, "it took from a tenant within its quota"
                self.for_others += 1
            gone |= set(victim.group.samples) if victim.group.beam is not None else {victim}
        return victims

    def _group(self, sample: Sample) -> str:
        assert self._cache.quotas is not None
        return self._cache.quotas.group(sample.group.job.tenant)

    def _left(self, sample: Sample, gone: set[Sample] | None = None) -> int:
        """Of the quota of its tenant, beside what is held: counted block by block."""
        assert self._cache.quotas is not None
        group, blocks = self._group(sample), set[int]()
        out = {each.sequence for each in gone or ()}
        for sequence in self._cache._sequences.values():
            if self._cache.quotas.group(sequence.namespace.salt) == group and sequence not in out:
                blocks |= set(sequence.table.blocks)
        return self._cache.quotas.blocks[group] - len(blocks)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
async def test_under_random_load_everybody_gets_his_answer_and_nobody_within_his_quota_gives(
    seed: int, engine_of: EngineOf, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``check_every_step`` proves the books of the quotas, too."""
    random = Random(seed)  # noqa: S311  # a test's
    texts = [[random.randrange(6) for _ in range(24)] for _ in range(3)]
    requests: list[tuple[list[int], SamplingParams, str | None, int]] = []
    for i in range(22):
        width = random.choice((1, 1, 1, 2, 3))
        shape = {"beam_width": width} if i % 5 == 0 else {"n": width}
        params = SamplingParams(max_tokens=random.randint(1, 14), seed=i, **shape)  # type: ignore[arg-type]  # both are counts
        prompt = [*random.choice(texts)[: random.randint(1, 24)], random.randrange(6)]
        requests.append((prompt, params, random.choice(("a", "a", "b", "c", "d", None)), random.randint(0, 2)))
    quotas = random.choice(({"a": 0.5, "b": 0.25}, {"a": 0.2, "b": 0.7, "*": 0.1}, {"b": 1.0}, {"": 0.4, "a": 0.4}))

    async def on_step(step: int) -> None:
        assert step < 5_000, "the engine works without getting anywhere"
        for _ in range(random.choice((0, 1, 2)) if len(sent) < len(requests) else 0):
            await next_one()

    async def next_one() -> None:
        if len(sent) < len(requests):
            prompt, params, tenant, priority = requests[len(sent)]
            sent.append(asyncio.create_task(engine.complete(prompt, params, tenant=tenant, priority=priority)))
            await asyncio.sleep(0)

    sent: list[asyncio.Task[list[RequestOutput]]] = []
    async with engine_of(
        num_blocks=28,
        max_running=6,
        max_batch_tokens=random.choice((8, 32)),
        scheduling_policy=random.choice((FCFS, PRIORITY, PREFIX_FIRST, FAIR)),
        eviction_policy=random.choice(EVICTIONS),
        enable_prefix_caching=random.random() < 0.8,
        tenant_quotas=quotas,
        on_step=on_step,
    ) as engine:
        Watch(engine, monkeypatch)
        await next_one()
        while len(sent) < len(requests) or not all(task.done() for task in sent):
            await asyncio.sleep(0)
            if not engine._loop.groups:
                await next_one()
        outputs = await asyncio.gather(*sent)
        assert engine.stats().policy_faults == engine.stats().cache.policy_faults == 0
    for (prompt, params, _, _), found in zip(requests, outputs, strict=True):
        expected = await alone(prompt, params)
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@pytest.mark.asyncio
@pytest.mark.parametrize(("quotas", "kept"), [({"a": 0.25}, 16), ({}, 0)], ids=["quota", "none"])
async def test_what_a_tenant_has_cached_within_its_share_outlives_a_flood(
    quotas: dict[str, float], kept: int, engine_of: EngineOf
) -> None:
    """Of the others the flood's own blocks go, though all of them are younger."""
    async with engine_of(num_blocks=24, tenant_quotas=quotas) as engine:
        await engine.complete([1] * 17, greedy(1), tenant="a")
        for i in range(20):
            await engine.complete([i % 60, *range(30)], greedy(2), tenant="flood")
        (output,) = await engine.complete([1] * 17, greedy(1), tenant="a")
        assert output.cached_tokens == kept


@pytest.mark.asyncio
async def test_cached_blocks_beyond_the_share_go_first_and_no_more_than_those(engine_of: EngineOf) -> None:
    """``a`` borrowed for its cache; when others want room, it is left with what it may have, not with nothing."""
    async with engine_of(num_blocks=20, tenant_quotas={"a": 0.5, "b": 0.5}, evict_below=0.0, evict_until=0.0) as engine:
        await engine.complete([2] * 64, greedy(1), tenant="a")
        assert engine.stats().tenant_blocks == {"a": 16, "b": 0, "*": 0}
        await engine.complete([3] * 36, greedy(1), tenant="b")
        assert engine.stats().tenant_blocks["a"] == 11
        await engine.complete([4] * 36, greedy(1), tenant="b")
        used = engine.stats().tenant_blocks
        assert used["a"] == 10
        assert used["b"] <= 10


@pytest.mark.asyncio
async def test_a_tenant_alone_may_use_the_whole_pool(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=20, tenant_quotas={"a": 0.1, "b": 0.9}) as engine:
        outputs = await asyncio.gather(*[engine.complete([i] * 12, greedy(8), tenant="a") for i in range(4)])
        assert engine.stats().preemptions == 0
        (large,) = await engine.complete([9] * 70, greedy(8), tenant="a")
        (stranger,) = await engine.complete([9] * 70, greedy(8), tenant="who")  # has no share at all
    assert {output.finish_reason for (output,) in outputs} == {FinishReason.LENGTH}
    assert large.finish_reason is stranger.finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [FCFS, PREFIX_FIRST, FAIR, PRIORITY])
async def test_what_was_borrowed_comes_back_at_once(
    policy: str, engine_of: EngineOf, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of ``a`` fill the pool and more wait; ``b``, which comes behind them, is let in by the next plan."""
    seen: list[set[str]] = []
    answers: dict[str, Answer] = {}

    async def on_step(step: int) -> None:
        if step == 12:
            answers["b"] = await send(engine, "b", [50] * 20, greedy(12), "b")
        if step == 13:
            seen.append(running(engine))

    async with engine_of(
        num_blocks=24, on_step=on_step, scheduling_policy=policy, tenant_quotas={"a": 0.5, "b": 0.5}
    ) as engine:
        watch = Watch(engine, monkeypatch)
        for i in range(10):
            answers[f"a{i}"] = await send(engine, f"a{i}", [i] * 12, greedy(12), "a")
        await asyncio.gather(*answers.values())
        await answers["b"]
        assert watch.for_others > 0
    assert "b" in seen[0]
    assert len(seen[0]) > 1  # down to the quota, not to nothing
    assert answers["b"].result().metrics.preemptions == 0
    for name, answer in answers.items():
        prompt = [50] * 20 if name == "b" else [int(name[1:])] * 12
        assert [answer.result().token_ids] == [each.token_ids for each in await alone(prompt, greedy(12))]


@pytest.mark.asyncio
async def test_who_is_beyond_its_quota_is_overtaken_but_not_for_ever(engine_of: EngineOf, clock: Clock) -> None:
    """``a`` may have 4 blocks and asks for 16 of 24, while ``b`` keeps its 20 busy."""
    done_at: list[int] = []
    overtook: Counter[str] = Counter()
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        clock.now += 1.0
        if step < 150:
            answers.append(await send(engine, f"b{step}", [step % 60] * 12, greedy(12), "b"))
        if step == 5:
            answers.append(await send(engine, "large", [61] * 40, greedy(24), "a"))
        if step > 5 and "large" not in engine._loop.groups and not done_at:
            done_at.append(step)
        if step > 5 and not done_at and "large" not in running(engine):
            overtook.update(name for name in running(engine) if int(name[1:]) > 5)

    config = {"num_blocks": 24, "max_running": 20, "tenant_quotas": {"a": 4 / 24, "b": 20 / 24}, "quota_wait": 25.0}
    async with engine_of(on_step=on_step, clock=clock, **config) as engine:
        answers.append(await send(engine, "b0", [0] * 12, greedy(12), "b"))
        await engine._loop.wait_idle()
        outputs = {output.request_id: output for output in await asyncio.gather(*answers)}
    assert overtook
    assert outputs["large"].finish_reason is FinishReason.LENGTH
    assert done_at[0] < 5 + 25 + 60
    assert max(output.metrics.preemptions for output in outputs.values()) < 10


@pytest.mark.asyncio
async def test_a_flood_far_longer_than_what_a_plan_looks_at_hides_nobody(engine_of: EngineOf) -> None:
    started: list[int] = []
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        if step == 6:
            answers.append(await send(engine, "b", [50] * 8, greedy(2), "b"))
        if "b" in running(engine) and not started:
            started.append(step)
        if step == 60:
            for name in [name for name in engine._loop.groups if name != "b"]:
                engine.abort(name)

    async with engine_of(
        num_blocks=16, on_step=on_step, max_running=64, tenant_quotas={"a": 0.5, "b": 0.5}, check_every_step=False
    ) as engine:
        answers.extend([await send(engine, f"a{i}", [i % 60, i // 60] * 6, greedy(20), "a") for i in range(200)])
        await asyncio.gather(*answers, return_exceptions=True)
        await engine._loop.wait_idle()
    assert started[0] <= 8


@pytest.mark.asyncio
async def test_priority_displaces_nobody_within_its_quota(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        if step == 4:
            answers.append(await send(engine, "high", [5] * 24, greedy(12), "a", priority=9))

    config = {"num_blocks": 20, "scheduling_policy": PRIORITY, "tenant_quotas": {"a": 0.2, "b": 0.8}}
    async with engine_of(on_step=on_step, **config) as engine:
        Watch(engine, monkeypatch)
        answers.extend([await send(engine, f"b{i}", [i] * 12, greedy(12), "b") for i in range(2)])
        await asyncio.gather(*answers[:2])
        outputs = await asyncio.gather(*answers)
    assert [output.metrics.preemptions for output in outputs if output.request_id != "high"] == [0, 0]


@pytest.mark.asyncio
async def test_without_quotas_nothing_is_told(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await engine.complete([1] * 9, greedy(2), tenant="a")
        assert engine.stats().tenant_blocks == {}


@pytest.mark.parametrize(
    "quotas",
    [{"a": 0.0}, {"a": 1.1}, {"a": -0.5}, {"a": float("nan")}, {"a": True}, {"a": "x"}, {5: 0.5}, None, [("a", 0.5)]],
    ids=str,
)
def test_bad_quotas_are_refused(quotas: object) -> None:
    with pytest.raises(InvalidRequest, match="tenant_quotas"):
        EngineConfig(tenant_quotas=quotas)  # type: ignore[arg-type]  # what is tested


def test_quotas_may_not_exceed_the_pool_together() -> None:
    with pytest.raises(InvalidRequest, match=r"at most 1 together, not 1\.1"):
        EngineConfig(tenant_quotas={"a": 0.6, "*": 0.5})
    assert EngineConfig(tenant_quotas=dict.fromkeys("abcdefghij", 0.1)).tenant_quotas["a"] == 0.1


@pytest.mark.parametrize("value", [-1.0, float("nan"), "5", None])
def test_a_bad_quota_wait_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="quota_wait"):
        EngineConfig(quota_wait=value)  # type: ignore[arg-type]  # what is tested


# options of scheduling policies


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (FAIR, {"wieghts": {}}, "knows no wieghts; its settings: weights, input_weight, output_weight, max_delay"),
        (FCFS, {"margin": 2}, "knows no margin; its settings: none"),
        (PRIORITY, {"margin": 0}, "must be positive"),
        (FAIR, {"weights": {"a": "heavy"}}, "refuses them"),
        (FAIR, {"weights": 5}, "refuses them"),
    ],
)
async def test_options_that_a_scheduling_policy_cannot_take_are_told(
    policy: str, options: dict[str, object], message: str
) -> None:
    config = EngineConfig(scheduling_policy=policy, scheduling_options=options)
    engine = AsyncEngine(runner=FakeRunner(), config=config)
    with pytest.raises(InvalidRequest, match=message):
        await engine.__aenter__()


@pytest.mark.parametrize("options", [None, 5, {3: 4}, [("margin", 2)]], ids=str)
def test_options_must_be_named(options: object) -> None:
    with pytest.raises(InvalidRequest, match="scheduling_options"):
        EngineConfig(scheduling_options=options)  # type: ignore[arg-type]  # what is tested


@pytest.mark.asyncio
async def test_options_reach_the_policy(engine_of: EngineOf) -> None:
    """With a margin of 2 one level more displaces nobody."""
    answers: list[Answer] = []

    async def on_step(step: int) -> None:
        if step == 3:
            answers.append(await send(engine, "high", [5] * 8, greedy(3), priority=1))

    config = {"scheduling_policy": PRIORITY, "max_running": 1}
    for margin, preemptions in ((1, 1), (2, 0)):
        answers.clear()
        async with engine_of(on_step=on_step, scheduling_options={"margin": margin}, **config) as engine:
            low = await send(engine, "low", [1] * 8, greedy(12))
            await engine._loop.wait_idle()
            await asyncio.gather(*answers)
            assert (await low).metrics.preemptions == preemptions


def test_a_constructor_that_fails_on_its_own_is_a_broken_contract() -> None:
    from octavo.engine.choosing import made_with  # noqa: PLC0415  # beside the engine's own errors

    class Broken:
        def __init__(self) -> None:
            raise ValueError("always")

    with pytest.raises(ContractBroken, match="always"):
        made_with(Broken, "broken", {})
