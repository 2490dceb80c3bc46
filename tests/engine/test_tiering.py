"""Tiers under the engine: what goes down, when, and that it is the right thing that comes up again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from octavo import AsyncEngine, RequestOutput, SamplingParams
from octavo.engine.kv import Sequence
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest
from octavo.storage.base import TierGeometry
from octavo.storage.record import RecordCodec
from octavo.storage.testing.contract import Fault, MemoryStore, SharedMemoryTier
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
PreemptWhen = Callable[[AsyncEngine, Callable[[Sample], bool]], None]
LONG_ENOUGH = SamplingParams(max_tokens=20, temperature=0.0)
"""To show what was computed from."""
DEMOTION = ("write_back", "write_through", "selective")
PROMOTION = ("timeout", "wait", "best_effort")


def evict_all(engine: AsyncEngine) -> None:
    engine._loop.cache.evict(64)


def put_blocks(engine: AsyncEngine, tier: int = 0) -> int:
    return engine.stats().tiers[tier].put_blocks


@pytest.mark.asyncio
@pytest.mark.parametrize("demotion", DEMOTION)
@pytest.mark.parametrize("promotion", PROMOTION)
async def test_what_comes_back_from_a_tier_is_what_went_down(
    demotion: str, promotion: str, engine_of: EngineOf, alone: Alone
) -> None:
    """SWAP-04: prompts of 1 to 30 tokens on a device that holds two of them at a time."""
    prompts = [prompt(number, length) for number, length in enumerate(range(1, 31, 3))]
    expected = [tokens(await alone(ids, GREEDY)) for ids in prompts]
    async with engine_of(mounts={"m": memory()}, num_blocks=20, demotion=demotion, promotion=promotion) as engine:
        for turn in range(3):
            for ids, wanted in zip(prompts, expected, strict=True):
                output = await ask(engine, ids)
                assert [output.token_ids] == wanted
                if demotion == "selective":
                    await ask(engine, ids)  # a second use
                if turn == 2:
                    assert output.cached_tokens >= (len(ids) - 1) // B * B
                await settled(engine)
        stats = engine.stats()
        assert stats.transfers.loaded_tokens["m"] == stats.tiers[0].loaded_blocks * B > 0
        assert stats.transfers.loads.keys() == {"complete"}


@pytest.mark.asyncio
async def test_host_and_disk_together(engine_of: EngineOf, alone: Alone, tmp_path: Path) -> None:
    """DISK-05: more texts than host memory holds, resumed eight at a time while others are written."""
    prompts = [prompt(number) for number in range(24)]
    expected = {number: tokens(await alone(prompts[number], GREEDY)) for number in range(24)}
    async with engine_of(
        tiers=("octavo.storage.host.tier:HostTier", "octavo.storage.disk.tier:DiskTier"),
        tier_options={
            "octavo.storage.host.tier:HostTier": {"bytes": 6_000},
            "octavo.storage.disk.tier:DiskTier": {"path": str(tmp_path / "disk"), "bytes": 8 << 20, "free_floor": 0},
        },
        num_blocks=64,
    ) as engine:
        for start in (0, 8, 16, 4, 20, 12, 0, 8, 16):
            numbers = [number % 24 for number in range(start, start + 8)]
            outputs = await asyncio.gather(*(ask(engine, prompts[number]) for number in numbers))
            for number, output in zip(numbers, outputs, strict=True):
                assert [output.token_ids] == expected[number], number
            await cool(engine)
        host, disk = engine.stats().tiers
        assert host.tier.bytes <= 6_000
        assert disk.loaded_blocks > 0
        assert (host.corrupt, disk.corrupt) == (0, 0)


@pytest.mark.asyncio
async def test_written_back_only_once_evicted(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}, demotion="write_back") as engine:
        await ask(engine, prompt(1))
        await ask(engine, prompt(1))
        await settled(engine)
        assert put_blocks(engine) == 0
        await cool(engine)
        assert put_blocks(engine) == (18 + 3) // B


@pytest.mark.asyncio
async def test_written_through_when_done_to_all_tiers_and_once(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"a": memory(), "b": memory()}, demotion="write_through") as engine:
        await ask(engine, prompt(1))
        await settled(engine)
        assert (put_blocks(engine, 0), put_blocks(engine, 1)) == (5, 5)
        exported = engine.stats().transfers.exported_blocks
        await ask(engine, prompt(1))
        await cool(engine)
        assert (put_blocks(engine, 0), put_blocks(engine, 1)) == (5, 5)
        assert engine.stats().transfers.exported_blocks == exported


@pytest.mark.asyncio
async def test_what_is_evicted_on_its_way_through_is_copied_once(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"a": memory(), "b": memory()}, demotion="write_through") as engine:
        completed = tiering(engine).completed

        def evicted_at_once(sequence: Sequence) -> None:
            completed(sequence)
            engine._loop.post(lambda: evict_all(engine))

        tiering(engine).completed = evicted_at_once  # type: ignore[method-assign]  # nothing else comes between
        await ask(engine, prompt(1))
        await settled(engine)
        assert engine.stats().transfers.exported_blocks == 5
        assert (put_blocks(engine, 0), put_blocks(engine, 1)) == (5, 5)


@pytest.mark.asyncio
async def test_selective_writes_what_is_used_twice(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}, demotion="selective") as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        assert put_blocks(engine) == 0, "what was used once is not worth it"
        await ask(engine, prompt(2))
        await ask(engine, prompt(2))
        await settled(engine)
        assert put_blocks(engine) >= 18 // B


@pytest.mark.asyncio
@pytest.mark.parametrize("demotion", ["write_through", "selective"])
async def test_what_a_preempted_request_computed_goes_down(
    demotion: str, engine_of: EngineOf, preempt_when: PreemptWhen
) -> None:
    done: list[int] = []
    held: list[bool] = []

    async def on_step(_: int) -> None:
        if done and not held:  # blocks are sealed in a thread, and the request must not end before
            held.append(True)
            with anyio.move_on_after(10):
                await until(lambda: put_blocks(engine) > 0)

    async with engine_of(mounts={"m": memory()}, demotion=demotion, on_step=on_step) as engine:

        def once(sample: Sample) -> bool:
            if len(sample.token_ids) != 6 or done:
                return False
            done.append(put_blocks(engine))
            return True

        preempt_when(engine, once)
        task = asyncio.create_task(ask(engine, prompt(1), replace(GREEDY, max_tokens=60)))
        await until(lambda: put_blocks(engine) > 0 or task.done())
        assert done == [0]
        assert not task.done(), "it was written after the end, not when it was preempted"
        await task


@pytest.mark.asyncio
async def test_a_swapped_request_goes_on_as_if_nothing_had_been(
    engine_of: EngineOf, alone: Alone, preempt_when: PreemptWhen
) -> None:
    """SWAP-01, EVICT-02: preempted, evicted below, loaded again, several times over."""
    params = replace(GREEDY, max_tokens=40)
    expected = tokens(await alone(prompt(1), params))
    async with engine_of(mounts={"m": memory()}) as engine:
        seen: set[int] = set()

        def often(sample: Sample) -> bool:
            due = len(sample.token_ids) % 9 == 8 and len(sample.token_ids) not in seen
            if due:
                seen.add(len(sample.token_ids))
                engine._loop.post(lambda: evict_all(engine))
            return due

        preempt_when(engine, often)
        output = await ask(engine, prompt(1), params)
        assert [output.token_ids] == expected
        assert output.metrics.preemptions == 4
        assert engine.stats().cache.resume_hit_tokens > 0


@pytest.mark.asyncio
async def test_a_wide_request_and_small_ones_share_a_pool_that_is_too_small_for_all(
    engine_of: EngineOf, alone: Alone
) -> None:
    """SWAP-01: six samples with long outputs on 16 blocks, five small requests after it."""
    wide = SamplingParams(max_tokens=6, n=6, seed=1)
    async with engine_of(mounts={"m": memory(64)}, num_blocks=16) as engine:
        big = asyncio.create_task(engine.complete(prompt(1, 7), wide))
        small = [asyncio.create_task(engine.complete(prompt(number), GREEDY)) for number in range(2, 7)]
        assert tokens(await big) == tokens(await alone(prompt(1, 7), wide))
        for number, task in enumerate(small, 2):
            assert tokens(await task) == tokens(await alone(prompt(number), GREEDY))
        await settled(engine)


@pytest.mark.asyncio
async def test_a_newcomer_gets_freed_blocks_filled_from_a_tier(engine_of: EngineOf, alone: Alone) -> None:
    """SWAP-06: its loads land in blocks that a request which ended a step ago has written."""
    prompts = [prompt(number) for number in range(6)]
    expected = [tokens(await alone(ids, GREEDY)) for ids in prompts]
    async with engine_of(mounts={"m": memory()}, num_blocks=12, max_running=2) as engine:
        for _ in range(8):
            outputs = await asyncio.gather(*(engine.complete(ids, GREEDY) for ids in prompts))
            assert [tokens(output) for output in outputs] == expected
        assert engine.stats().transfers.loaded_tokens["m"] > 100


@pytest.mark.asyncio
async def test_a_tier_far_too_small_is_never_above_its_bound(engine_of: EngineOf, alone: Alone) -> None:
    """SWAP-07: four blocks, offered forty in one go."""
    faulty = Faulty(memory(4))
    async with engine_of(mounts={"m": faulty}, num_blocks=64) as engine:
        await ask(engine, prompt(1, 161), ONE)
        await cool(engine)
        (report,) = engine.stats().tiers
        assert report.tier.blocks <= 4
        assert report.dropped + report.tier.evicted == 36
        assert tokens([await ask(engine, prompt(1, 161), ONE)]) == tokens(await alone(prompt(1, 161), ONE))


@pytest.mark.asyncio
async def test_a_queue_that_is_full_drops_what_is_evicted_and_counts_it(engine_of: EngineOf, alone: Alone) -> None:
    faulty = Faulty()
    gate = anyio.Event()
    async with engine_of(mounts={"m": faulty}, tier_queue_bytes=3_000, tier_deadline=60.0) as engine:
        faulty.tier.inject(Fault("put", "slow", gate=gate))
        for number in range(12):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))
            await engine._loop.at_edge(lambda: engine._loop.cache.evict(64))
        (report,) = engine.stats().tiers
        assert 0 < report.queued_bytes <= 3_000
        assert report.dropped > 0
        gate.set()
        await settled(engine)


@pytest.mark.asyncio
async def test_streams_go_on_while_a_tier_does_not_take_anything(engine_of: EngineOf) -> None:
    """FLOW-07: two hundred steps of a stream while each write hangs; nobody waits for it."""
    faulty, gate = Faulty(), anyio.Event()
    async with engine_of(mounts={"m": faulty}, num_blocks=128, tier_deadline=60.0, demotion="write_through") as engine:
        faulty.tier.inject(Fault("put", "slow", gate=gate))
        stream = asyncio.create_task(ask(engine, prompt(1), replace(LONG, max_tokens=200)))
        for number in range(2, 12):
            await ask(engine, prompt(number))
            await engine._loop.at_edge(lambda: engine._loop.cache.evict(64))
        await stream
        await until(lambda: faulty.tier.running["put"] == 1)  # what is put is sealed in a thread before
        gate.set()
        await settled(engine)


@pytest.mark.asyncio
async def test_tenants_share_nothing_in_any_tier(engine_of: EngineOf, alone: Alone) -> None:
    """TENANT-01, HASH-05: zero hits for anybody else, not even a difference; all of it for the same tenant."""
    secret = prompt(1, 64)
    async with engine_of(mounts={"a": memory(), "b": memory()}, demotion="write_through") as engine:
        await ask(engine, secret, tenant="a")
        await cool(engine)
        for length in (8, 16, 33, 64):
            for other in ("b", "", "a ", None):
                assert (await ask(engine, secret[:length], ONE, tenant=other)).cached_tokens == 0
                await engine.erase(other)
        assert engine.stats().transfers.loaded_tokens == {}
        output = await ask(engine, secret, tenant="a")
        assert output.cached_tokens == 60
        assert [output.token_ids] == tokens(await alone(secret, GREEDY))
        await ask(engine, secret)
        await cool(engine)
        assert (await ask(engine, secret, ONE, tenant="")).cached_tokens == 0, "an empty salt is one"
        for malformed in (5, b"a", ["a"]):
            with pytest.raises(InvalidRequest):
                await ask(engine, secret, tenant=malformed)


def shared(store: MemoryStore) -> Callable[[TierGeometry], SharedMemoryTier]:
    return lambda geometry: SharedMemoryTier(geometry, store=store)


@pytest.mark.asyncio
async def test_engines_share_a_store(engine_of: EngineOf, alone: Alone) -> None:
    """HASH-04, CONC-08: names do not depend on the engine; both work at the same time on one store."""
    store = MemoryStore()
    prompts = [prompt(number) for number in range(6)]
    expected = [tokens(await alone(ids, GREEDY)) for ids in prompts]
    async with (
        engine_of(mounts={"s": shared(store)}, num_blocks=16) as one,
        engine_of(mounts={"s": shared(store)}, num_blocks=16) as two,
    ):
        for _ in range(3):
            outputs = await asyncio.gather(*(engine.complete(ids, GREEDY) for ids in prompts for engine in (one, two)))
            assert [tokens(output) for output in outputs] == [each for each in expected for _ in (one, two)]
            await cool(one)
            await cool(two)
        found = [engine.stats().restore.saved_tokens for engine in (one, two)]
        assert sum(found) > 0, "what one engine stored was never used by the other"


@pytest.mark.asyncio
async def test_engines_with_other_keys_neither_use_nor_disturb_each_other(engine_of: EngineOf, alone: Alone) -> None:
    """TENANT-07: one engine with a key, one with another, one without, on one store."""
    store = MemoryStore()
    expected = tokens(await alone(prompt(1), GREEDY))
    for turn in range(2):
        for key in (None, b"k" * 16, b"other key, other trust"):
            async with engine_of(mounts={"s": shared(store)}, storage_key=key, num_blocks=16) as engine:
                output = await ask(engine, prompt(1))
                assert [output.token_ids] == expected
                assert output.cached_tokens == 16 * turn
                assert engine.stats().tiers[0].corrupt == 0
                await cool(engine)


@pytest.mark.asyncio
@pytest.mark.parametrize(("key", "forged_with"), [(None, None), (b"k" * 16, None), (b"k" * 16, b"another one, 16+")])
async def test_what_others_put_into_a_shared_store_is_believed_only_without_a_key(
    key: bytes | None, forged_with: bytes | None, engine_of: EngineOf, alone: Alone
) -> None:
    """TENANT-07: other content, under the right name and with a checksum that is right. The key is what tells."""
    store = MemoryStore()
    async with engine_of(mounts={"s": shared(store)}, storage_key=key) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        assert len(store.blocks) == 5
        for (shelf, name), kept in list(store.blocks.items()):
            forger = RecordCodec(block_size=B, payload_bytes=B * 8, run=b"forger00", key=forged_with)
            rows = forger.buffer(1)
            forger.payloads(rows)[0][:] = 7
            data = bytes(forger.seal(rows[0], shelf, kept.head, 0.0))
            store.blocks[shelf, name] = kept._replace(data=data)
        output = await ask(engine, prompt(1), LONG_ENOUGH)
        is_right = tokens([output]) == tokens(await alone(prompt(1), LONG_ENOUGH))
        assert is_right is (key is not None), "the test forges nothing, or a forged block was used"
        assert (engine.stats().tiers[0].corrupt > 0) is is_right


@pytest.mark.asyncio
async def test_another_model_finds_nothing_of_this_one(engine_of: EngineOf, alone: Alone) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"s": lasting(store)}) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
    for part in ("weights", "dtype", "geometry", "position encoding", "tokenizer", "configuration"):
        runner = FakeRunner(identity={part: "another"})
        async with engine_of(mounts={"s": lasting(store)}, runner=runner) as engine:
            assert (await ask(engine, prompt(1))).cached_tokens == 0, part
    async with engine_of(mounts={"s": lasting(store)}, block_size=2) as engine:
        assert (await ask(engine, prompt(1))).cached_tokens == 0
    async with engine_of(mounts={"s": lasting(store)}) as engine:
        output = await ask(engine, prompt(1))
        assert output.cached_tokens == 16
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))


@pytest.mark.asyncio
async def test_a_cold_start_forgets_what_was_stored(engine_of: EngineOf) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"s": lasting(store)}) as engine:
        await ask(engine, prompt(1))
        await ask(engine, prompt(2), tenant="t")
    assert len(store.blocks) == 10
    async with engine_of(mounts={"s": lasting(store)}, restore_from_disk=False) as engine:
        assert len(store.blocks) == 0
        assert (await ask(engine, prompt(1))).cached_tokens == 0
        assert engine.stats().restore.stored_blocks == 0


@pytest.mark.asyncio
async def test_blocks_of_a_failed_request_are_taken_out_of_the_tiers(engine_of: EngineOf) -> None:
    """What a request published whose step failed may be bad: nobody shall find it, also not below."""
    faulty = Faulty()
    async with engine_of(mounts={"m": faulty}, demotion="write_through") as engine:
        await ask(engine, prompt(1))
        await settled(engine)
        shelf = engine._life.parts.intake.namespace(None).shelf()
        names = [key[1] for key in faulty.tier.inner.store.blocks]  # type: ignore[attr-defined]  # a MemoryTier
        assert len(names) == 5
        tiering(engine).distrusted(engine._life.parts.intake.namespace(None), names[:2])
        await until(lambda: faulty.tier.peek(shelf, names[:1]) == 0)
        assert faulty.tier.peek(shelf, names[2:]) == 3


@pytest.mark.asyncio
async def test_waiting_requests_use_the_time_to_bring_blocks_up(engine_of: EngineOf) -> None:
    """What lies in the lower tier is in the first one when the request is admitted at last."""

    async def on_step(_: int) -> None:
        if engine._loop._scheduler.waiting:  # what is read is checked in a thread
            await until(lambda: upper.queue.blocks > 0 or upper.counters.put_blocks > 5)

    async with engine_of(
        mounts={"a": memory(), "b": memory()}, demotion="write_through", max_running=1, num_blocks=64, on_step=on_step
    ) as engine:
        await ask(engine, prompt(1))
        await cool(engine)
        upper, lower = tiering(engine).manager._mounts
        upper.tier.store.blocks.clear()  # type: ignore[attr-defined]  # a MemoryTier
        busy = asyncio.create_task(ask(engine, prompt(2), replace(LONG, max_tokens=150)))
        await until(lambda: engine.stats().running == 1)
        later = asyncio.create_task(ask(engine, prompt(1)))
        await until(lambda: upper.queue.blocks > 0 or upper.counters.put_blocks > 5)
        assert not busy.done()
        await busy
        assert (await later).cached_tokens == 16
        assert engine.stats().transfers.loaded_tokens["a"] == 16
        assert lower.counters.loaded_blocks > 0


@pytest.mark.asyncio
async def test_an_idle_engine_goes_on_writing_through(engine_of: EngineOf) -> None:
    """A queue of one block at a time: what waits for room gets it without anybody asking for anything."""
    async with engine_of(mounts={"m": memory()}, demotion="write_through", tier_queue_bytes=300) as engine:
        await ask(engine, prompt(1))
        await settled(engine)
        assert put_blocks(engine) == 5


@pytest.mark.asyncio
async def test_a_look_that_ends_between_plan_and_wait_is_no_reason_to_give_up(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan could not judge the request yet; by the time the loop wants to wait, it could."""
    async with engine_of(mounts={"s": shared(MemoryStore())}) as engine:
        parts = tiering(engine)
        save = parts.save

        async def slow(*, is_idle: bool) -> None:
            await save(is_idle=is_idle)
            await until(lambda: not parts._looking)

        monkeypatch.setattr(parts, "save", slow)
        assert len((await ask(engine, prompt(1))).token_ids) == 4
