"""Loads: what goes wrong on the way from a tier to the device costs time and nothing else."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

import anyio
import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine import loading
from octavo.engine.model.runner import Int32Array, StepInput
from octavo.engine.testing import FakeRunner
from octavo.errors import DeviceOutOfMemory, ModelError, StorageError
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.tests.engine.tier_rig import (
    GREEDY,
    LONG,
    ONE,
    B,
    EngineOf,
    Faulty,
    ask,
    cool,
    lasting,
    memory,
    prompt,
    settled,
    tiering,
    tokens,
    until,
)

Alone = Callable[..., Awaitable[list[RequestOutput]]]
LOT = prompt(1, 4 * 40 + 2)
"""A prompt of forty whole blocks, more than a batch of a tier."""
SPOILS = ("flip", "other", "short", "long", "nonsense", "reorder", "fewer", "more", "fail")


class Brittle(FakeRunner):
    """Imports fail, the first ``good`` of them excepted."""

    def __init__(self, good: int, error: Exception | None = None, *, partly: bool = False) -> None:
        super().__init__()
        self._left = good
        self._error = error or RuntimeError("no import")
        self._partly = partly
        self.is_healed = False

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        if self._left < 1 and not self.is_healed:
            if self._partly:
                super().import_blocks(blocks[:1], payloads[:1])
                self._bytes()[blocks[1:]] = 0xEE
            raise self._error
        self._left -= 1
        super().import_blocks(blocks, payloads)


@pytest.mark.asyncio
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("kind", SPOILS)
async def test_whatever_a_tier_gives_back_is_right_or_computed(
    kind: str, after: int, engine_of: EngineOf, alone: Alone
) -> None:
    """SWAP-09, DISK-05: the k-th batch of a load is wrong in every way; what came before it is used."""
    faulty = Faulty()
    runner = FakeRunner()
    async with engine_of(mounts={"m": faulty}, runner=runner, num_blocks=128) as engine:
        await ask(engine, LOT)
        await cool(engine)
        faulty.tier.inject(Fault("get", kind, times=1, after=after))  # type: ignore[arg-type]  # one of the kinds
        before = runner.tokens_computed
        output = await ask(engine, LOT)
        assert [output.token_ids] == tokens(await alone(LOT, GREEDY))
        assert output.cached_tokens == 128 * after
        assert runner.tokens_computed - before == len(LOT) - 128 * after + 3, "what did not come is not computed"
        stats = engine.stats()
        loads = stats.transfers.loads
        assert loads["corrupt" if kind in ("flip", "other", "short", "long", "nonsense", "reorder") else "failed"] == 1
        assert stats.transfers.loaded_tokens.get("m", 0) == 128 * after
        assert stats.tiers[0].corrupt + stats.tiers[0].failures > 0


@pytest.mark.asyncio
async def test_any_bit_of_a_record_that_is_wrong_is_found(engine_of: EngineOf, alone: Alone) -> None:
    """In the header, the padding and the numbers themselves: sampled over a record, with its first and last byte."""
    store = MemoryStore()
    expected = tokens(await alone(prompt(1), GREEDY))
    async with engine_of(mounts={"m": memory(store=store)}) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        first = next(key for key, kept in store.blocks.items() if not kept.head.start)
        good = store.blocks[first]
        for at in (*range(0, len(good.data), 13), len(good.data) - 1):
            wrong = bytearray(good.data)
            wrong[at] ^= 1 << at % 8
            store.blocks[first] = good._replace(data=bytes(wrong))
            output = await ask(engine, prompt(1))
            assert [output.token_ids] == expected, at
            assert output.cached_tokens == 0, at
            assert first not in store.blocks, at
            await cool(engine)
            assert store.blocks[first].data[at:] != bytes(wrong[at:]), "the right one is written again"


@pytest.mark.asyncio
@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("broken"), DeviceOutOfMemory("full"), ModelError("bad")], ids=repr)
async def test_what_the_device_does_not_take_is_computed(
    error: Exception, good: int, partly: bool, engine_of: EngineOf, alone: Alone
) -> None:
    """SWAP-09: the k-th import fails, before or after a part of it was copied. Nothing of it counts as loaded."""
    runner = Brittle(good, error, partly=partly)
    async with engine_of(mounts={"m": memory()}, runner=runner, num_blocks=128) as engine:
        await ask(engine, LOT)
        await cool(engine)
        output = await ask(engine, LOT)
        assert [output.token_ids] == tokens(await alone(LOT, GREEDY))
        assert output.cached_tokens == engine.stats().transfers.loaded_tokens.get("m", 0) == 128 * good
        assert engine.stats().transfers.loads == {"failed": 1}
        await settled(engine)
        runner.is_healed = True
        await cool(engine)
        assert (await ask(engine, LOT)).cached_tokens == 160


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["flip", "fail"])
async def test_by_configuration_a_failed_load_fails_the_request(kind: str, engine_of: EngineOf) -> None:
    faulty = Faulty()
    async with engine_of(mounts={"m": faulty}, load_failure="fail") as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault("get", kind))  # type: ignore[arg-type]  # one of the kinds
        with pytest.raises(StorageError, match="could not be loaded"):
            await ask(engine, prompt(1))
        assert (await ask(engine, prompt(2))).finish_reason is FinishReason.LENGTH
        assert engine.stats().finished["error"] == 1


@pytest.mark.asyncio
async def test_blocks_that_vanish_after_they_were_promised(engine_of: EngineOf, alone: Alone) -> None:
    store = MemoryStore()
    faulty, gate = Faulty(memory(store=store)), anyio.Event()
    async with engine_of(mounts={"m": faulty}, tier_deadline=60.0) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault("get", "slow", gate=gate))
        task = asyncio.create_task(ask(engine, prompt(1)))
        await until(lambda: faulty.tier.running["get"] == 1)
        store.blocks.clear()
        gate.set()
        output = await task
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        assert output.cached_tokens == 0
        assert engine.stats().transfers.loads == {"missing": 1}


@pytest.mark.asyncio
async def test_a_request_that_loads_is_in_nobodys_way(engine_of: EngineOf, alone: Alone) -> None:
    """SWAP-09: fifty others finish while a load hangs; it ends as it should when it comes at last."""
    faulty, gate = Faulty(), anyio.Event()
    async with engine_of(
        mounts={"m": faulty}, tier_deadline=60.0, promotion="wait", num_blocks=32, max_running=3
    ) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault("get", "slow", gate=gate, times=1))
        loading = asyncio.create_task(ask(engine, prompt(1)))
        await until(lambda: engine.stats().loading == 1)
        for number in range(2, 52):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))
        stats = engine.stats()
        assert (stats.loading, stats.running, loading.done()) == (1, 0, False)
        gate.set()
        output = await loading
        assert output.cached_tokens == 16
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["get", "contains"])
async def test_a_load_that_never_comes_ends_with_the_deadline(call: str, engine_of: EngineOf, alone: Alone) -> None:
    faulty = Faulty()
    patience = 0.1 if call == "get" else 10.0  # the other one succeeds once what was read is checked, in a thread
    async with engine_of(mounts={"m": faulty}, tier_deadline=0.05, promotion_timeout=patience) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault(call, "hang"))
        output = await ask(engine, prompt(1))
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        assert (output.cached_tokens == 0) is (call == "get")
        assert set(engine.stats().transfers.loads) <= {"failed", "deadline", "complete"}


@pytest.mark.asyncio
async def test_the_time_of_a_request_is_bounded_whatever_the_tier_may_take(engine_of: EngineOf, alone: Alone) -> None:
    """``promotion_timeout`` ends a load long before the tier's own deadline does."""
    faulty = Faulty()
    async with engine_of(mounts={"m": faulty}, tier_deadline=60.0, promotion_timeout=0.05) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault("get", "hang"))
        output = await ask(engine, prompt(1))
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        assert engine.stats().transfers.loads == {"deadline": 1}


@pytest.mark.asyncio
@pytest.mark.parametrize(("promotion", "loaded"), [("best_effort", 0), ("timeout", 16), ("wait", 16)])
async def test_best_effort_waits_for_the_first_tier_only(promotion: str, loaded: int, engine_of: EngineOf) -> None:
    upper, lower = MemoryStore(), MemoryStore()
    async with engine_of(
        mounts={"a": memory(store=upper), "b": memory(store=lower)}, demotion="write_through", promotion=promotion
    ) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        assert (await ask(engine, prompt(1))).cached_tokens == 16, "it lies in the first tier"
        await cool(engine)
        upper.blocks.clear()
        tiering(engine).manager._mounts[0].tier.peek = lambda *_: 0  # type: ignore[method-assign]
        output = await ask(engine, prompt(1))
        assert output.cached_tokens == loaded


@pytest.mark.asyncio
async def test_nobody_waits_longer_than_needed_when_told_to_wait(engine_of: EngineOf) -> None:
    """``wait`` knows no deadline of its own."""
    faulty, gate = Faulty(), anyio.Event()
    async with engine_of(mounts={"m": faulty}, promotion="wait", promotion_timeout=0.0, tier_deadline=60.0) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault("get", "slow", gate=gate))
        task = asyncio.create_task(ask(engine, prompt(1)))
        await until(lambda: faulty.tier.running["get"] == 1)
        await ask(engine, prompt(2), replace(LONG, max_tokens=50))
        gate.set()
        assert (await task).cached_tokens == 16


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=5, n=3, seed=2),
        SamplingParams(max_tokens=5, n=2, best_of=4, seed=2),
        SamplingParams(max_tokens=5, beam_width=3, n=2),
        SamplingParams(max_tokens=5, prompt_logprobs=1, logprobs=1, seed=2),
        SamplingParams(max_tokens=0),
    ],
    ids=["n", "best_of", "beams", "prompt scores", "nothing"],
)
async def test_every_kind_of_request_on_a_loaded_prefix(
    params: SamplingParams, engine_of: EngineOf, alone: Alone
) -> None:
    expected = await alone(prompt(1), params)
    async with engine_of(mounts={"m": memory()}) as engine:
        for _ in range(3):
            outputs = await engine.complete(prompt(1), params)
            assert tokens(outputs) == tokens(expected)
            assert [output.cumulative_logprob for output in outputs] == [each.cumulative_logprob for each in expected]
            assert [output.prompt_logprobs for output in outputs] == [each.prompt_logprobs for each in expected]
            await cool(engine)
        loaded = engine.stats().transfers.loaded_tokens.get("m", 0)
        assert (loaded > 0) is (params.max_tokens != 0 and params.prompt_logprobs is None)


@pytest.mark.asyncio
@pytest.mark.parametrize("length", range(1, 3 * B + 2))
async def test_at_least_one_token_is_computed(length: int, engine_of: EngineOf, alone: Alone) -> None:
    """Every length around block borders: all whole blocks are loaded, but never the last token."""
    steps: list[StepInput] = []
    expected = tokens(await alone(prompt(1, 20), replace(GREEDY, max_tokens=2)))
    async with engine_of(mounts={"m": memory()}, runner=FakeRunner(before_step=steps.append)) as engine:
        assert tokens([await ask(engine, prompt(1, 20), replace(GREEDY, max_tokens=2))]) == expected
        await cool(engine)
        steps.clear()
        output = await ask(engine, prompt(1, 20)[:length], ONE)
        assert output.cached_tokens == (length - 1) // B * B
        assert sum(len(step.tokens) for step in steps) == length - output.cached_tokens
        assert tokens([output]) == tokens(await alone(prompt(1, 20)[:length], ONE))


@pytest.mark.asyncio
async def test_a_fork_of_a_request_that_loads(engine_of: EngineOf, alone: Alone) -> None:
    faulty, gate = Faulty(), anyio.Event()
    expected = tokens(await alone(prompt(1), GREEDY))
    async with engine_of(mounts={"m": faulty}, tier_deadline=60.0) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault("get", "slow", gate=gate))
        source = asyncio.create_task(ask(engine, prompt(1), request_id="source"))
        await until(lambda: engine.stats().loading == 1)
        fork = await engine.fork("source", GREEDY)
        gate.set()
        assert tokens([await source]) == expected
        last = [output async for output in fork][-1]
        assert tokens([last]) == expected


@pytest.mark.asyncio
async def test_two_requests_load_the_same_prefix_at_once(engine_of: EngineOf, alone: Alone) -> None:
    faulty, gate = Faulty(), anyio.Event()
    longer = [*prompt(1), 5, 6, 7]
    async with engine_of(mounts={"m": faulty}, tier_deadline=60.0, prefix_wait=0.0) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        faulty.tier.inject(Fault("get", "slow", gate=gate))
        tasks = [asyncio.create_task(ask(engine, ids)) for ids in (prompt(1), longer, prompt(1))]
        await until(lambda: engine.stats().loading == 3)
        gate.set()
        for ids, task in zip((prompt(1), longer, prompt(1)), tasks, strict=True):
            assert tokens([await task]) == tokens(await alone(ids, GREEDY))


@pytest.mark.asyncio
async def test_loads_are_imported_a_few_blocks_at_a_time_between_steps(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLOW-07: a stream that runs gets a step in between."""
    monkeypatch.setattr(loading, "IMPORT_BLOCKS", 8)
    imports: list[tuple[int, int]] = []

    class Watched(FakeRunner):
        def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
            imports.append((self.steps, len(blocks)))
            super().import_blocks(blocks, payloads)

    async def on_step(_: int) -> None:
        if engine.stats().loading:  # batches are checked in threads, and the stream must outlast them
            await until(lambda: bool(engine._loop._inbox))

    async with engine_of(
        mounts={"m": memory()}, runner=Watched(), num_blocks=256, block_size=1, on_step=on_step
    ) as engine:
        await ask(engine, LOT, ONE)
        await cool(engine)
        stream = asyncio.create_task(ask(engine, prompt(2, 5), replace(LONG, max_tokens=60)))
        await until(lambda: engine.stats().running == 1)
        output = await ask(engine, LOT, ONE)
        assert output.cached_tokens == len(LOT) - 1
        await stream
    assert len(imports) == len(range(0, 161, 32))
    assert len({step for step, _ in imports}) == len(imports), "two batches without a step between them"


@pytest.mark.asyncio
async def test_blocks_are_found_by_others_only_when_their_bytes_are_there(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks while an import is under way does not see the blocks; afterwards they are whole."""

    class Checked(FakeRunner):
        def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
            found = engine._loop.cache.explain(engine._life.parts.intake.namespace(None), array("i", prompt(1)))
            seen.append(found.cached_tokens)
            super().import_blocks(blocks, payloads)

    seen: list[int] = []
    async with engine_of(mounts={"m": memory()}, runner=Checked()) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        assert (await ask(engine, prompt(1))).cached_tokens == 16
    assert seen == [0]


@pytest.mark.asyncio
async def test_a_load_resumed_is_no_hit(engine_of: EngineOf) -> None:
    """Tokens that a preempted request gets back were never saved by the cache."""
    async with engine_of(mounts={"m": memory()}, num_blocks=10, max_running=4) as engine:
        outputs = await asyncio.gather(
            *(ask(engine, prompt(number, 10), replace(LONG, max_tokens=16)) for number in range(3))
        )
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.cache.prefix_hit_tokens == 0
        assert [output.cached_tokens for output in outputs] == [0, 0, 0]


@pytest.mark.asyncio
async def test_what_an_earlier_run_computed_is_told_apart(engine_of: EngineOf) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"m": lasting(store)}) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        await ask(engine, prompt(1))
        assert engine.stats().restore.saved_tokens == 0, "it was this run"
    async with engine_of(mounts={"m": lasting(store)}) as engine:
        await ask(engine, prompt(1))
        assert engine.stats().restore.saved_tokens == 16
        await ask(engine, prompt(1))
        assert engine.stats().restore.saved_tokens == 16, "the second time it was on the device"


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_cancelled_requests_whose_loads_never_come_hold_nothing(
    how: Literal["abort", "cancel"], engine_of: EngineOf, alone: Alone
) -> None:
    """LEAK-01: eight of them; then one that needs the whole pool. What comes late is ignored."""
    faulty, gate = Faulty(), anyio.Event()
    whole = prompt(99, 60)
    async with engine_of(mounts={"m": faulty}, num_blocks=16, tier_deadline=60.0, promotion="wait") as engine:
        for number in range(8):
            await ask(engine, prompt(number, 13), ONE)
        await cool(engine)
        faulty.tier.inject(Fault("get", "slow", gate=gate))
        for number in range(8):
            task = asyncio.create_task(ask(engine, prompt(number, 13), ONE, request_id=f"r{number}"))
            await until(lambda: engine.stats().loading == 1 or task.done())  # noqa: B023  # awaited here
            assert not task.done()
            await stop(engine, task, f"r{number}", how)
        assert engine.stats().transfers.loads == {"given up": 8}
        assert engine.census().held == 0
        assert tokens([await ask(engine, whole, ONE)]) == tokens(await alone(whole, ONE))
        gate.set()
        for _ in range(20):
            await asyncio.sleep(0)
        await settled(engine)
        assert engine.stats().transfers.loaded_tokens == {}


async def stop(engine: AsyncEngine, task: asyncio.Task[RequestOutput], name: str, how: str) -> None:
    if how == "abort":
        engine.abort(name)
        assert (await task).finish_reason is FinishReason.ABORT
    else:
        task.cancel()
        await asyncio.wait((task,))
        await engine._loop.wait_idle()
