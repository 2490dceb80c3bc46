"""Spans, books and metrics tell the same story: what an engine did, added up over its spans, is what it has counted and
what a scrape shows, whatever it was asked to do.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo import AsyncEngine, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.runner import Int32Array, StepInput, UInt8Array
from octavo.engine.pins import Pin
from octavo.engine.testing import FakeRunner
from octavo.engine.warming import Readiness
from octavo.errors import ModelError, OctavoError
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.tests.engine.insight.agreement_rig import check_agreement, check_end
from octavo.tests.engine.insight.trace_rig import Watch, at_peace, recording, traced
from octavo.tests.engine.tier_rig import Faulty, MakeTier, lasting, memory, until

VOCABULARY = 8
LONGEST = 24
TEXTS = tuple(tuple((at * at + 3 * which) % 3 for at in range(LONGEST)) for which in range(3))
"""Prompts are the beginnings of these, so that they share what they can."""
SHAPES = ("plain", "plain", "plain", "several", "best", "beams", "scores")
TENANTS = (None, None, "t")
KINDS = (
    *("send",) * 12,
    *("abort", "fork", "fork", "pin", "unpin", "evict", "cool", "erase", "snapshot", "refused"),
    *("break model", "break export", "break import", "break tier", "wait"),
)
LIES = ("flip", "other", "short", "fewer", "nonsense", "fail", "reorder")
EVICTION = ("lru:Lru", "lfu:Lfu", "cost_aware:CostAware")
SCHEDULING = ("fcfs:Fcfs", "priority:Priority")


class Act(NamedTuple):
    """Something that is asked of the engine, or done to it."""

    kind: str
    which: int
    """Chooses among what there is."""
    length: int
    shape: str
    max_tokens: int


class Plan(NamedTuple):
    """A workload."""

    rounds: list[list[Act]]
    """After each, the engine comes to rest and is asked what it did."""
    settings: dict[str, object]
    mounts: tuple[tuple[str, int | None, bool], ...]
    """Tiers: kind, bound, and whether it misbehaves when told to."""
    restarts: bool
    waits: bool
    """Whether the crowd comes when what was stored has been warmed; otherwise at once."""


ACTS = st.builds(
    Act,
    kind=st.sampled_from(KINDS),
    which=st.integers(0, 11),
    length=st.sampled_from((LONGEST, 1, 3, 4, 9, 13, 18, 21, 22, 23)),
    shape=st.sampled_from(SHAPES),
    max_tokens=st.sampled_from((13, 0, 1, 5, 8)),
)
BLOCK_SIZE = 4
LEAST = -(-37 // BLOCK_SIZE) + 1
"""Blocks that the longest request needs."""
SETTINGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from((LEAST, LEAST + 2, 2 * LEAST)),
        "max_batch_tokens": st.sampled_from((64, 16, 8)),
        "max_running": st.sampled_from((16, 4, 3)),
        "scheduling_policy": st.sampled_from([f"octavo.policies.scheduling.{each}" for each in SCHEDULING]),
        "eviction_policy": st.sampled_from([f"octavo.policies.eviction.{each}" for each in EVICTION]),
        "evict_below": st.sampled_from((0.0, 0.3)),
        "evict_until": st.just(0.5),
        "demotion": st.sampled_from(("write_through", "write_back", "selective")),
        "promotion": st.sampled_from(("wait", "best_effort")),
        "load_failure": st.sampled_from(("recompute", "fail")),
        "tier_queue_bytes": st.sampled_from((300, 2**20)),
        "trace_decode_steps": st.sampled_from((1, 1, 16)),
        "warm_bytes": st.sampled_from((2**20, 0)),
    }
)
MOUNT = st.tuples(st.sampled_from(("lasting", "passing")), st.sampled_from((None, 8, 3)), st.booleans())
MOUNTS = st.sampled_from((2, 1, 2, 0)).flatmap(lambda count: st.lists(MOUNT, min_size=count, max_size=count))
PLANS = st.builds(
    Plan,
    rounds=st.lists(st.lists(ACTS, min_size=12, max_size=20), min_size=1, max_size=3),
    settings=SETTINGS,
    mounts=MOUNTS.map(tuple),
    restarts=st.sampled_from((True, False)),
    waits=st.booleans(),
)


class Brittle(FakeRunner):
    """A model that fails when told to, so many times."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY, before_step=self._step, eos_token_ids=frozenset({7}))
        self.broken = Counter[str]()

    def _step(self, step: StepInput) -> None:
        self._use("model")

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        self._use("export")
        super().export_blocks(blocks, out)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        self._use("import")
        super().import_blocks(blocks, payloads)

    def _use(self, part: str) -> None:
        if self.broken[part] > 0:
            self.broken[part] -= 1
            raise ModelError(f"the {part} is broken")


class Crowd:
    """Carries out a plan, and asks after each round what happened."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.snapshots = 0
        self.seen = Counter[str]()
        """What the accounts told of."""
        self._folder = folder
        self._store = MemoryStore()

    @property
    def newest(self) -> str | None:
        """A snapshot to start from."""
        return str(self._folder / str(self.snapshots - 1)) if self.snapshots else None

    async def live(self) -> None:
        """All of it, with the restart."""
        restore = None
        for rounds in (self.plan.rounds, self.plan.rounds[:1]):
            with pytest.MonkeyPatch.context() as patch:
                await self._life(patch, rounds, restore)
            if not self.plan.restarts:
                return
            restore = self.newest

    async def _life(self, patch: pytest.MonkeyPatch, rounds: list[list[Act]], restore: str | None) -> None:
        provider, recorder = recording()
        mounts, faulty = self._mounts()
        runner, watch = Brittle(), Watch()
        acts = deque[Act]()
        async with traced(
            patch,
            provider,
            runner=runner,
            watch=watch,
            on_step=lambda _: visit.during_a_step(),
            mounts=mounts,
            restore=restore,
            settings={**self.plan.settings, "block_size": BLOCK_SIZE},
        ) as engine:
            visit = Visit(engine, runner, watch, faulty, acts, self._next_snapshot)
            if self.plan.waits:
                await visit.rest()
            for each in rounds:
                acts.extend(each)
                await visit.carry_out()
                self.seen.update(check_agreement(engine, recorder.ended).keys())
            await visit.leave()
            self.seen.update(check_agreement(engine, recorder.ended).keys())
        self.seen.update(check_end(engine, recorder.ended).keys())

    def _next_snapshot(self) -> Path:
        self.snapshots += 1
        return self._folder / str(self.snapshots - 1)

    def _mounts(self) -> tuple[dict[str, MakeTier], list[Faulty]]:
        mounts: dict[str, MakeTier] = {}
        for at, (kind, blocks, _) in enumerate(self.plan.mounts):
            mounts[f"tier{at}"] = memory(blocks) if kind == "passing" else lasting(self._store, blocks)
        faulty = {f"tier{at}": Faulty(mounts[f"tier{at}"]) for at, each in enumerate(self.plan.mounts) if each[2]}
        return {**mounts, **faulty}, list(faulty.values())


class Visit:
    """One life of an engine with those who use it."""

    def __init__(
        self,
        engine: AsyncEngine,
        runner: Brittle,
        watch: Watch,
        faulty: list[Faulty],
        acts: deque[Act],
        next_snapshot: Callable[[], Path],
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._watch = watch
        self._faulty = faulty
        self._acts = acts
        self._next_snapshot = next_snapshot
        self._tasks: list[asyncio.Task[None]] = []
        self._sent: list[str] = []
        self._pins: list[Pin] = []

    async def during_a_step(self) -> None:
        """What comes while the model computes."""
        if self._acts:
            await self._do(self._acts.popleft())

    async def carry_out(self) -> None:
        """All that is to be done, until the engine has come to rest."""
        while self._acts or self._tasks:
            if self._acts:
                await self._do(self._acts.popleft())
            tasks, self._tasks = self._tasks, []
            await asyncio.gather(*tasks)
        await self.rest()

    async def rest(self) -> None:
        """Until nothing is under way, with all that was broken mended."""
        self._runner.broken.clear()
        for each in self._faulty:
            each.tier.heal()
        await until(lambda: self._engine.stats().restore.readiness == Readiness.READY)
        await at_peace(self._engine)

    async def leave(self) -> None:
        """Nothing is held any more."""
        for pin in self._pins:
            await self._engine.unpin(pin)
        await at_peace(self._engine)

    async def _do(self, act: Act) -> None:
        prompt, tenant = list(TEXTS[act.which % 3][: act.length]), TENANTS[act.which % len(TENANTS)]
        match act.kind.split():
            case ["send"]:
                await self._send(act, prompt, tenant)
            case ["fork"] if self._sent:
                await self._fork(act)
            case ["abort"] if self._sent:
                self._engine.abort(self._sent[act.which % len(self._sent)])
            case ["refused"]:
                await self._send(act, [VOCABULARY], tenant)
            case ["break", "tier"] if self._faulty:
                faults = Fault("get", LIES[act.which % len(LIES)], times=2), Fault("put", "fail", times=1)  # type: ignore[arg-type]  # one of the kinds
                self._faulty[act.which % len(self._faulty)].tier.inject(*faults)
            case ["break", part]:
                self._runner.broken[part] += 1 + act.which % 3
            case ["wait"]:
                self._watch.now += act.which
            case ["cool"]:
                self._start(self._cool(act.which))
            case _:
                self._start(self._operate(act, prompt, tenant))

    async def _send(self, act: Act, prompt: list[int], tenant: str | None) -> None:
        name = f"r{len(self._sent)}"
        generation = self._engine.generate(
            prompt, params(act), request_id=name, priority=act.which % 3 - 1, tenant=tenant
        )
        await self._begin(name, generation.start())

    async def _fork(self, act: Act) -> None:
        name = f"r{len(self._sent)}"
        source = self._sent[act.which % len(self._sent)]
        plain = params(act._replace(shape="plain"))
        await self._begin(name, self._engine.fork(source, plain, new_id=name))

    async def _begin(self, name: str, begin: Coroutine[object, object, Generation]) -> None:
        with suppress(OctavoError):
            generation = await begin
            self._sent.append(name)
            self._start(_read(generation))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.append(asyncio.create_task(_tolerant(work)))

    async def _cool(self, blocks: int) -> None:
        loop = self._engine._loop
        await loop.at_edge(lambda: loop.cache.evict(blocks))

    async def _operate(self, act: Act, prompt: list[int], tenant: str | None) -> None:
        engine = self._engine
        if act.kind == "pin" and engine.config.num_blocks >= 2 * LEAST:  # it may hold half: others must fit beside
            self._pins.append(await engine.pin(prompt, ttl=3.0 if act.which % 2 else None, tenant=tenant))
        elif act.kind == "unpin" and self._pins:
            await engine.unpin(self._pins[act.which % len(self._pins)])
        elif act.kind == "evict":
            await engine.evict(prompt, tenant=tenant, tiers=act.which % 2 == 0)
        elif act.kind == "erase":
            await engine.erase(tenant)
        elif act.kind == "snapshot":
            await engine.snapshot(self._next_snapshot())


def params(act: Act) -> SamplingParams:
    """What a request asks for."""
    return SamplingParams(
        max_tokens=act.max_tokens,
        temperature=float(act.which % 2),
        seed=act.which,
        ignore_eos=act.which % 3 == 0,
        n=2 if act.shape == "several" else 1,
        best_of=3 if act.shape == "best" else None,
        beam_width=3 if act.shape == "beams" else 1,
        prompt_logprobs=1 if act.shape == "scores" else None,
    )


async def _read(generation: Generation) -> None:
    async for _ in generation:
        pass


async def _tolerant(work: Coroutine[object, object, None]) -> None:
    """Whether it works out is not what is asked here."""
    with suppress(OctavoError):
        await work


def agree(plan: Plan) -> set[str]:
    """Carry ``plan`` out; returns what the accounts told of."""
    with tempfile.TemporaryDirectory(prefix="octavo-agreement-") as folder:
        crowd = Crowd(plan, Path(folder))
        asyncio.run(crowd.live())
    return set(crowd.seen)


USUAL: dict[str, object] = {
    "num_blocks": LEAST,
    "max_batch_tokens": 16,
    "max_running": 16,
    "scheduling_policy": "octavo.policies.scheduling.fcfs:Fcfs",
    "eviction_policy": "octavo.policies.eviction.lru:Lru",
    "evict_below": 0.0,
    "evict_until": 0.5,
    "demotion": "write_through",
    "promotion": "wait",
    "load_failure": "recompute",
    "tier_queue_bytes": 2**20,
    "trace_decode_steps": 1,
    "warm_bytes": 2**20,
}
SENDS = [Act("send", which, 9, "plain", 13) for which in range(0, 27, 3)]
PRESSED = Plan([SENDS], USUAL, (), restarts=False, waits=False)
"""Too many requests for a tiny pool."""
RESTARTED = Plan([SENDS], USUAL, (("lasting", None, False), ("lasting", 8, True)), restarts=True, waits=True)
"""The same with tiers; what was stored is warmed when the engine comes back."""

REACHED = {
    *(f"evictions by {reason}" for reason in ("allocate", "watermark", "call", "forget", "distrust")),
    *("copies of a fork", "copies of a partial", "exports", "failed exports", "warmed", "checkpoints"),
    *("loaded from tier0", "hit tokens from tier0", "tokens found again", "blocks put into tier1"),
    *(f"finished by {reason}" for reason in ("stop", "length", "abort", "error")),
    *("preemptions by swap", "preemptions by recompute", "refused", "hits"),
}
"""What the workloads must bring about, so that the comparison is about something."""


def test_spans_books_and_metrics_agree_after_any_workload() -> None:
    reached = set[str]()

    @settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
    @given(PLANS)
    @example(PRESSED)
    @example(RESTARTED)
    def agrees(plan: Plan) -> None:
        reached.update(agree(plan))

    agrees()
    assert reached >= REACHED


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS)
def test_they_agree_after_many_more(plan: Plan) -> None:
    agree(plan)
