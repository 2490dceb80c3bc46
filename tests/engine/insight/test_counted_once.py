"""What spans, books and metrics could easily tell differently: each of these once did, or nearly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan

from octavo import AsyncEngine, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.runner import Int32Array, StepInput, UInt8Array
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeRunner
from octavo.engine.warming import Readiness
from octavo.errors import InvalidRequest, ModelError
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.telemetry import names, record
from octavo.telemetry.tracing import Tracing
from octavo.tests.engine.insight.agreement_rig import Numbers, attributes, check_agreement, check_end, number
from octavo.tests.engine.insight.trace_rig import Recorder, Watch, at_peace, recording, traced
from octavo.tests.engine.tier_rig import ONE, Faulty, MakeTier, ask, lasting, memory, prompt, until

Preempt = Callable[[AsyncEngine, Callable[[Sample], bool]], None]
OnStep = Callable[[int], Awaitable[None]]
FIVE = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=5, temperature=0.0, beam_width=3, ignore_eos=True)


class Seen(NamedTuple):
    """An engine and its spans."""

    engine: AsyncEngine
    recorder: Recorder

    async def agreed(self) -> Numbers:
        """What spans, books and metrics say alike, once the engine is at rest."""
        await at_peace(self.engine)
        return check_agreement(self.engine, self.recorder.ended)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.recorder.ended if span.name == name]


@asynccontextmanager
async def seen(
    patch: pytest.MonkeyPatch,
    *,
    runner: FakeRunner | None = None,
    mounts: Mapping[str, MakeTier] | None = None,
    on_step: OnStep | None = None,
    **settings: object,
) -> AsyncIterator[Seen]:
    """An engine with a span for every request and every step."""
    provider, recorder = recording()
    wanted = {"trace_decode_steps": 1, **settings}
    async with traced(patch, provider, runner=runner, mounts=mounts, on_step=on_step, settings=wanted) as engine:
        yield Seen(engine, recorder)


async def cool(engine: AsyncEngine) -> None:
    """Everything leaves the device."""
    await engine._loop.at_edge(lambda: engine._loop.cache.evict(engine._loop.cache.pool.num_blocks))
    await at_peace(engine)


# copies and loads

STORED = [1, 2, 3, 4, 5, 6, 7, 8, 9]
BESIDE = [1, 2, 3, 4, 5, 6, 0, 0, 9]
"""Begins like ``STORED``, and with half of its second block."""


@pytest.mark.asyncio
async def test_a_part_of_a_block_that_is_loaded_as_a_whole_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with seen(monkeypatch, mounts={"near": memory()}) as (engine, recorder):
        await ask(engine, STORED, ONE)
        await cool(engine)
        await ask(engine, BESIDE, ONE)
        again = await ask(engine, STORED, ONE)
        agreed = await Seen(engine, recorder).agreed()
        assert again.cached_tokens == 8
        assert "copies of a partial" not in agreed
        assert agreed["hit tokens from near"] == 8


@pytest.mark.asyncio
async def test_a_part_of_a_block_that_is_copied_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with seen(monkeypatch) as (engine, recorder):
        await ask(engine, STORED, ONE)
        again = await ask(engine, BESIDE, ONE)
        agreed = await Seen(engine, recorder).agreed()
        assert again.cached_tokens == 6
        assert agreed["copies of a partial"] == 1


@pytest.mark.asyncio
async def test_a_request_that_is_aborted_while_it_loads_has_hit_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty, gate = Faulty(), anyio.Event()
    async with seen(monkeypatch, mounts={"near": faulty}) as (engine, recorder):
        await ask(engine, STORED, ONE)
        await cool(engine)
        await ask(engine, BESIDE, ONE)
        faulty.tier.inject(Fault("get", "slow", gate=gate))
        waiting = await engine.generate(STORED, ONE, request_id="gone").start()
        await until(lambda: engine.stats().loading == 1)
        engine.abort("gone")
        async for _ in waiting:
            pass
        gate.set()
        agreed = await Seen(engine, recorder).agreed()
        assert agreed["hit tokens"] == 4 + 4, "the first block, by each of the two"


@pytest.mark.asyncio
async def test_a_load_from_two_tiers_is_told_of_by_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {"near": memory(2), "far": memory()}
    async with seen(monkeypatch, mounts=mounts, demotion="write_through") as (engine, recorder):
        await ask(engine, prompt(1), ONE)
        await cool(engine)
        await ask(engine, prompt(1), ONE)
        agreed = await Seen(engine, recorder).agreed()
        assert (
            engine.stats().cache.hit_tokens_by_tier == engine.stats().transfers.loaded_tokens == {"near": 8, "far": 8}
        )
        assert agreed["hit tokens from near"] == agreed["hit tokens from far"] == 8


@pytest.mark.asyncio
async def test_warming_finds_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stored prompts have a beginning in common: the second one to be warmed finds it on the device."""
    store = MemoryStore()
    async with seen(monkeypatch, mounts={"below": lasting(store)}) as (engine, _):
        await ask(engine, [*STORED[:8], 1, 1, 1, 1, 1], ONE)
        await ask(engine, [*STORED[:8], 2, 2, 2, 2, 2], ONE)
    async with seen(monkeypatch, mounts={"below": lasting(store)}, warm_bytes=2**20) as (engine, recorder):
        await until(lambda: engine.stats().restore.readiness == Readiness.READY)
        agreed = await Seen(engine, recorder).agreed()
        assert agreed == {"warmed": 4, "loaded from below": 16}


@pytest.mark.asyncio
async def test_what_is_copied_for_a_snapshot_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with seen(monkeypatch) as (engine, recorder):
        await ask(engine, prompt(1), ONE)
        await engine.snapshot(tmp_path / "snapshot")
        agreed = await Seen(engine, recorder).agreed()
        assert agreed["exports"] == 4


class Broken(FakeRunner):
    """Copies nothing, neither way, while it is broken."""

    is_broken = False

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        self._check()
        super().export_blocks(blocks, out)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        self._check()
        super().import_blocks(blocks, payloads)

    def _check(self) -> None:
        if self.is_broken:
            raise ModelError("injected")


@pytest.mark.asyncio
async def test_copies_that_fail_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Broken()
    async with seen(monkeypatch, runner=runner, mounts={"near": memory()}) as (engine, recorder):
        await ask(engine, STORED, ONE)
        await cool(engine)
        runner.is_broken = True
        await ask(engine, STORED, ONE)
        await cool(engine)
        agreed = await Seen(engine, recorder).agreed()
        assert agreed["exports"] == 2
        assert "loaded from near" not in agreed
        await ask(engine, prompt(1), ONE)
        await cool(engine)
        agreed = await Seen(engine, recorder).agreed()
        assert (agreed["exports"], agreed["failed exports"]) == (2, 4)


@pytest.mark.asyncio
async def test_what_closing_saves_is_in_the_metrics_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with seen(monkeypatch, mounts={"below": lasting(MemoryStore())}) as (engine, recorder):
        await ask(engine, prompt(1), ONE)
        assert "exports" not in await Seen(engine, recorder).agreed()
    agreed = check_end(engine, recorder.ended)
    assert (agreed["checkpoints"], agreed["exports"], agreed["blocks put into below"]) == (1, 4, 4)


# requests


@pytest.mark.asyncio
@pytest.mark.parametrize("width", [2, 3])
async def test_beams_are_preempted_once_and_what_they_compute_again_is_told_of(
    width: int, monkeypatch: pytest.MonkeyPatch, preempt_when: Preempt
) -> None:
    times: list[int] = []

    def once(sample: Sample) -> bool:
        if times or len(sample.token_ids) < 2:
            return False
        times.append(1)
        return True

    async with seen(monkeypatch) as (engine, recorder):
        preempt_when(engine, once)
        await engine.complete(prompt(1), replace(BEAMS, beam_width=width))
        agreed = await Seen(engine, recorder).agreed()
        assert agreed["preemptions by recompute"] == agreed["preemptions of requests"] == 1


@pytest.mark.asyncio
async def test_a_fork_that_is_refused_is_counted_like_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fork(step: int) -> None:
        if step != 2:
            return
        for source, new_id, params in (("nobody", None, FIVE), ("first", "first", FIVE), ("first", None, BEAMS)):
            with pytest.raises(InvalidRequest):
                await engine.fork(source, params, new_id=new_id)

    async with seen(monkeypatch, on_step=fork) as (engine, recorder):
        await ask(engine, prompt(1), FIVE, request_id="first")
        agreed = await Seen(engine, recorder).agreed()
        assert (agreed["taken"], agreed["refused"]) == (1, 3)


@pytest.mark.asyncio
async def test_a_step_counts_although_everybody_in_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def abort(step: int) -> None:
        engine.abort("gone")

    async with seen(monkeypatch, on_step=abort) as (engine, recorder):
        await ask(engine, prompt(1), FIVE, request_id="gone")
        agreed = await Seen(engine, recorder).agreed()
        assert agreed["finished by abort"] == 1
        (step,) = Seen(engine, recorder).named(names.STEP)
        assert number(step, names.TOKENS) == len(prompt(1)) == engine.stats().batch_tokens
        assert len(step.links) == 1


@pytest.mark.asyncio
async def test_rows_that_fail_have_computed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: StepInput) -> None:
        raise ModelError("injected")

    async with seen(monkeypatch, runner=FakeRunner(before_step=fail)) as (engine, recorder):
        with suppress(ModelError):
            await ask(engine, prompt(1), FIVE)
        agreed = await Seen(engine, recorder).agreed()
        assert agreed["finished by error"] == 1
        (step,) = Seen(engine, recorder).named(names.STEP)
        assert number(step, names.TOKENS) == engine.stats().batch_tokens == 0


@pytest.mark.asyncio
async def test_a_request_ends_for_the_reason_of_what_it_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several draws the best is handed out, and the first may have ended otherwise."""
    handed_out: list[str] = []
    runner = FakeRunner(vocab_size=6, eos_token_ids=frozenset({5}))
    async with seen(monkeypatch, runner=runner) as (engine, recorder):
        for seed in range(12):
            drawn = await engine.complete([1, 2], SamplingParams(max_tokens=4, seed=seed, best_of=3))
            handed_out += [str(output.finish_reason) for output in drawn]
        await Seen(engine, recorder).agreed()
        reasons = {reason: handed_out.count(reason) for reason in ("stop", "length")}
        assert engine.stats().finished == reasons
        assert min(reasons.values()) > 0


@pytest.mark.asyncio
async def test_a_fork_generates_what_comes_after_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fork(step: int) -> None:
        if step == 3:
            forks.append(await engine.fork("first", new_id="second"))

    forks: list[Generation] = []
    async with seen(monkeypatch, on_step=fork) as (engine, recorder):
        await ask(engine, prompt(1), FIVE, request_id="first")
        async for _ in forks[0]:
            pass
        await Seen(engine, recorder).agreed()
        by_id = {
            attributes(span)[names.REQUEST_ID]: span
            for span in recorder.ended
            if names.REQUEST_ID in attributes(span) and names.OPERATION_NAME in attributes(span)
        }
        assert number(by_id["second"], names.USAGE_OUTPUT_TOKENS) == 5
        assert number(by_id["second"], names.TOKENS) == engine.stats().generated_tokens - 5 < 5


@pytest.mark.asyncio
async def test_acts_beyond_the_bound_are_counted_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_ACTS", 2)
    async with seen(monkeypatch, num_blocks=8) as (engine, recorder):
        for number_of in range(3):
            await ask(engine, prompt(number_of, 6), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        await at_peace(engine)
        missing = [attributes(span).get(names.SPANS_DROPPED, 0) for span in recorder.ended]
        dropped = engine.registry.get_sample_value("octavo_spans_dropped_total", {"reason": "bound"})
        assert dropped == sum(count for count in missing if isinstance(count, int)) > 0


def test_what_one_beam_computes_again_while_another_decodes_is_told_of() -> None:
    provider, recorder = recording()
    watch = Watch()
    tracing = Tracing(provider, clock=watch, wall=watch.wall)
    request = tracing.begin(Context(), names.OPERATION_COMPLETION, "fake")
    track = request.track(0)
    track.enter(names.DECODE)
    track.prefilled(tracing.step(watch(), watch(), {}, [request]), 3)
    request.finish()
    tracing.flush()
    (chunk,) = [span for span in recorder.ended if span.name == names.PREFILL_CHUNK]
    assert number(chunk, names.TOKENS) == 3
