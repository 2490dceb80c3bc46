"""A tier that hangs, fails, fills up or lies never stalls, kills or corrupts a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from octavo.engine import assembly
from octavo.engine.model.runner import Int32Array, UInt8Array
from octavo.engine.testing import FakeRunner
from octavo.errors import DeviceOutOfMemory, StorageError
from octavo.storage.base import TierGeometry, TierStats
from octavo.storage.manager.settings import ManagerSettings
from octavo.storage.naming import BlockName, Shelf
from octavo.storage.testing.contract import Fault, MemoryStore, MemoryTier, SharedMemoryTier
from octavo.tests.engine.conftest import DEFAULTS, FakeClock
from octavo.tests.engine.tier_rig import (
    GREEDY,
    ONE,
    EngineOf,
    Faulty,
    ask,
    cool,
    lasting,
    memory,
    prompt,
    settled,
    threaded,
    tiering,
    tokens,
    until,
)

Answers: TypeAlias = list[list[tuple[int, ...]]]
PROMPTS = [prompt(number) for number in range(6)]
LONG_ENOUGH = SamplingParams(max_tokens=80, temperature=0.0)
FAULTS = [
    *[(call, kind) for call in ("get", "put", "touch", "delete", "spill", "flush") for kind in ("fail", "hang")],
    *[("get", kind) for kind in ("flip", "other", "short", "long", "reorder", "fewer", "more", "nonsense")],
    *[("put", kind) for kind in ("full", "invert", "fewer", "more")],
    *[("spill", kind) for kind in ("reorder", "more")],
    ("*", "fail"),
    ("*", "hang"),
]


class Odd(Exception):  # as foreign as can be
    """Whoever asks what it says gets another error."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.fixture(scope="module")
def alone() -> Answers:
    """What each of ``PROMPTS`` says without any tier."""

    async def answers() -> Answers:
        settings = EngineConfig(**DEFAULTS | {"enable_prefix_caching": False})  # type: ignore[arg-type]  # names are known
        async with AsyncEngine(runner=FakeRunner(), config=settings) as engine:
            return [tokens(await engine.complete(ids, GREEDY)) for ids in PROMPTS]

    return asyncio.run(answers())


async def busy(engine: AsyncEngine, expected: Answers, rounds: int = 3) -> None:
    """Requests that go through the tiers all the time; each has to say what it says alone."""
    for _ in range(rounds):
        outputs = await asyncio.gather(*(engine.complete(ids, GREEDY) for ids in PROMPTS))
        assert [tokens(output) for output in outputs] == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("call", "kind"), FAULTS)
async def test_a_tier_that_misbehaves_costs_time_only(
    call: str, kind: str, after: int, engine_of: EngineOf, alone: Answers
) -> None:
    """The upper or the lower one of two, from the first call on or a later one; and then it is well again."""
    clock = FakeClock()
    bad, good = Faulty(memory(9)), memory(40)
    async with engine_of(
        mounts={"bad": bad, "good": good}, num_blocks=14, clock=clock, tier_deadline=0.02, promotion_timeout=0.05
    ) as engine:
        await busy(engine, alone, 1)
        bad.tier.inject(Fault(call, kind, after=after))  # type: ignore[arg-type]  # one of the kinds
        await busy(engine, alone)
        bad.tier.heal()
        clock.now += 1000  # past any pause
        await busy(engine, alone, 2)
        await settled(engine)
        assert engine.stats().finished == {"length": 36}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["fail", "hang", "invert", "fewer", "nonsense"])
async def test_a_tier_that_must_be_asked_and_does_not_tell(kind: str, engine_of: EngineOf, alone: Answers) -> None:
    bad = Faulty(lambda geometry: SharedMemoryTier(geometry, store=MemoryStore()))
    async with engine_of(mounts={"bad": bad}, num_blocks=14, tier_deadline=0.02, promotion_timeout=0.05) as engine:
        await busy(engine, alone, 1)
        bad.tier.inject(Fault("contains", kind))  # type: ignore[arg-type]  # one of the kinds
        await busy(engine, alone)
        await settled(engine)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error",
    [OSError(28, "no space"), MemoryError(), RecursionError(), SystemExit(1), Odd(), StopIteration()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("call", ["get", "put", "flush", "close"])
async def test_whatever_a_tier_raises(call: str, error: BaseException, engine_of: EngineOf, alone: Answers) -> None:
    bad = Faulty(lasting(MemoryStore()))
    bad.prepare(Fault(call, "fail", after=2 if call == "put" else 0, error=lambda: error))
    async with engine_of(mounts={"bad": bad}, num_blocks=14) as engine:
        await busy(engine, alone)
        await settled(engine)


class Rude(MemoryTier):
    """Raises where nothing may be raised."""

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        raise OSError("peek")

    def stats(self) -> TierStats:
        raise OSError("stats")


class Liar(MemoryTier):
    """Says that it has what it has not."""

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        return 10**6

    def stats(self) -> TierStats:
        return TierStats(-5, -1, -1)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Rude, Liar])
async def test_what_is_answered_from_memory_is_not_believed_either(
    kind: type[MemoryTier], engine_of: EngineOf, alone: Answers
) -> None:
    async with engine_of(mounts={"bad": kind, "good": memory()}, num_blocks=14) as engine:
        await busy(engine, alone)
        await settled(engine)
        engine.stats()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["fail", "hang"])
@pytest.mark.parametrize("strict", [False, True])
async def test_a_tier_that_does_not_open(
    kind: str,
    strict: bool,
    engine_of: EngineOf,
    alone: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DISK-16: left out and said so, or no start at all, as configured."""
    monkeypatch.setattr(assembly, "ManagerSettings", partial(ManagerSettings, open_deadline=0.05))
    bad, closed = Faulty(), Faulty()
    bad.prepare(Fault("open", kind))  # type: ignore[arg-type]  # one of the kinds
    mounts = {"bad": bad, "good": closed}
    if strict:
        with pytest.raises(StorageError, match="bad"):
            async with engine_of(mounts=mounts, strict_tiers=True):
                pass
        assert closed.tier.calls["close"] == 1, "what was open is closed again"
        return
    async with engine_of(mounts=mounts, num_blocks=14) as engine:
        await busy(engine, alone)
        report = engine.stats().tiers[0]
        assert (report.opened, report.tier.healthy) == (False, False)
        assert engine.stats().tiers[1].loaded_blocks > 0


@pytest.mark.asyncio
async def test_a_broken_tier_is_left_alone_and_tried_again(engine_of: EngineOf, alone: Answers) -> None:
    clock, bad = FakeClock(), Faulty()
    async with engine_of(mounts={"bad": bad}, num_blocks=14, clock=clock) as engine:
        await busy(engine, alone, 1)
        await settled(engine)
        bad.tier.inject(Fault("*", "fail"))
        await busy(engine, alone, 10)
        await settled(engine)
        calls = bad.tier.calls.copy()
        assert calls["get"] + calls["put"] < 20, "it is asked again and again"
        await busy(engine, alone, 2)
        assert bad.tier.calls == calls
        bad.tier.heal()
        clock.now += 1000
        await busy(engine, alone, 3)
        assert engine.stats().tiers[0].breaker == "closed"
        assert engine.stats().transfers.loaded_tokens["bad"] > 0


class Fragile(FakeRunner):
    """Every third export and import fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error
        self._calls = 0

    def _maybe_fail(self) -> None:
        self._calls += 1
        if self._calls % 3 == 0:
            raise self._error

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        self._maybe_fail()
        super().export_blocks(blocks, out)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        self._maybe_fail()
        super().import_blocks(blocks, payloads)


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [RuntimeError("x"), DeviceOutOfMemory("x"), MemoryError(), Odd()], ids=type)
@pytest.mark.parametrize("demotion", ["write_back", "write_through"])
async def test_a_device_that_cannot_copy_now_and_then(
    demotion: str, error: Exception, engine_of: EngineOf, alone: Answers
) -> None:
    async with engine_of(
        mounts={"m": lasting(MemoryStore())}, runner=Fragile(error), num_blocks=14, demotion=demotion
    ) as engine:
        await busy(engine, alone, 6)
        await settled(engine)
        assert engine.stats().transfers.failed_exports > 0


@pytest.mark.asyncio
async def test_a_tier_that_is_dropped_while_loads_run(engine_of: EngineOf, alone: Answers) -> None:
    """LEAK-01: it fails for everybody at once; nobody holds anything, and the next ones compute."""
    bad, gate = Faulty(), anyio.Event()
    async with engine_of(mounts={"bad": bad}, num_blocks=64, tier_deadline=60.0, promotion="wait") as engine:
        await busy(engine, alone, 1)
        await cool(engine)
        bad.tier.inject(Fault("get", "slow", gate=gate))
        tasks = [asyncio.create_task(engine.complete(ids, GREEDY)) for ids in PROMPTS]
        await until(lambda: engine.stats().loading == len(PROMPTS))
        await bad.tier.inner.close()
        gate.set()
        assert [tokens(await task) for task in tasks] == alone
        await settled(engine)
        loads = engine.stats().transfers.loads
        assert set(loads) <= {"failed", "missing"}, (
            "missing: the manager has seen the empty tier before the read failed"
        )
        assert sum(loads.values()) == len(PROMPTS)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["put", "get", "flush", "close", "touch", "*"])
async def test_closing_keeps_its_budget_whatever_hangs(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """STOP-06, DISK-19: with requests that load and blocks that wait to be written."""
    bad = Faulty(lasting(MemoryStore()))
    how = {"tier_deadline": 60.0, "promotion": "wait", "close_budget": 0.2, "num_blocks": 32}
    async with threaded(monkeypatch, {"bad": bad}, **how) as engine:
        for number in range(12):
            await ask(engine, prompt(number), ONE)
        await until(lambda: engine.stats().tiers[0].put_blocks > 8)
        bad.tier.inject(Fault(call, "hang"))
        tasks = [asyncio.create_task(engine.complete(prompt(number), LONG_ENOUGH)) for number in range(6)]
        await until(lambda: engine.stats().loading > 0 or engine.stats().running > 0)
        with anyio.fail_after(8):
            await engine.close()
        for task in tasks:
            assert {output.finish_reason for output in await task} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not bad.tier.running.total()


@pytest.mark.asyncio
async def test_a_slow_tier_slows_nobody_down(engine_of: EngineOf) -> None:
    """FLOW-07: as many steps between two tokens of a stream as without any tier, while everything below waits."""
    bad, gate = Faulty(), anyio.Event()
    steps: list[int] = []

    async with engine_of(
        mounts={"bad": bad}, num_blocks=256, tier_deadline=60.0, promotion="wait", demotion="write_through"
    ) as engine:
        for number in range(6):
            await ask(engine, prompt(number))
        await cool(engine)
        bad.tier.inject(Fault("*", "slow", gate=gate))
        loading = [asyncio.create_task(ask(engine, prompt(number))) for number in range(6)]
        await until(lambda: engine.stats().loading == 6)
        async for _ in engine.generate(prompt(50), SamplingParams(max_tokens=100, temperature=0.0)):
            steps.append(engine.stats().steps)  # noqa: PERF401  # a line each
        assert [after - before for before, after in pairwise(steps)] == [1] * 99
        assert engine.stats().loading == 6
        gate.set()
        for task in loading:
            await task
        await settled(engine)


@pytest.mark.asyncio
async def test_bytes_in_queues_are_bounded_while_nothing_is_written(engine_of: EngineOf) -> None:
    bad, gate = Faulty(), anyio.Event()
    async with engine_of(
        mounts={"bad": bad, "good": memory()}, num_blocks=14, tier_deadline=60.0, tier_queue_bytes=4_000
    ) as engine:
        bad.tier.inject(Fault("put", "slow", gate=gate))
        for number in range(60):
            await ask(engine, prompt(number), ONE)
            assert all(report.queued_bytes <= 4_000 for report in engine.stats().tiers)
        assert tiering(engine).exports.outstanding(tiering(engine)._evicted) == 0, "what is evicted does not pile up"
        gate.set()
        await settled(engine)


def geometry_of(engine: AsyncEngine) -> TierGeometry:
    return engine._life.parts.control._geometry


@pytest.mark.asyncio
async def test_pickled_records_are_not_even_looked_into(engine_of: EngineOf, alone: Answers, tmp_path: Path) -> None:
    """DESER-01: a payload that makes a file when it is unpickled, in the place of every block."""
    store = MemoryStore()
    marker = tmp_path / "marker"
    async with engine_of(mounts={"m": memory(store=store)}, num_blocks=14) as engine:
        await busy(engine, alone, 1)
        await cool(engine)
        payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
        for size in (len(payload), geometry_of(engine).record_bytes):
            for key, kept in list(store.blocks.items()):
                store.blocks[key] = kept._replace(data=payload.ljust(size, b"\0"))
            await busy(engine, alone, 1)
            await settled(engine)
        assert engine.stats().tiers[0].corrupt > 0
    assert not marker.exists()
