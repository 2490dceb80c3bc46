"""What a replica says of itself, against the engine that it speaks of."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.engine.fleet import status
from octavo.engine.fleet.status import StatusBoard
from octavo.engine.insight import backlog
from octavo.errors import EngineClosed
from octavo.policies.routing.digest import Digest
from octavo.policies.routing.status import ReplicaStatus
from octavo.storage.testing.contract import MemoryStore, SharedMemoryTier
from octavo.tests.engine.tier_rig import GREEDY, ONE, B, EngineOf, ask, cool, lasting, memory, prompt, settled, stored

pytestmark = pytest.mark.asyncio


def device_names(engine: AsyncEngine) -> set[bytes]:
    return {name for run in engine._loop.cache.runs() for name in run.names}


def digest(told: ReplicaStatus) -> Digest:
    assert told.digest is not None
    return Digest.from_bytes(told.digest)


def holds_all(told: ReplicaStatus, names: set[bytes]) -> bool:
    return bool(digest(told).holds(sorted(names)).all()) and digest(told).blocks == len(names)


async def test_the_digest_is_of_what_is_on_the_device_whatever_comes_and_goes(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=24) as engine:
        board = StatusBoard(engine, every=0.0)
        for number in range(8):
            await ask(engine, prompt(number, 3 * B + 2), tenant="a" if number % 2 else None)
            told = await board.status()
            assert holds_all(told, device_names(engine))
            assert (told.total_blocks, told.free_blocks, told.block_tokens) == (24, 24, B)
        gone = device_names(engine)
        await cool(engine)
        told = await board.status()
        assert digest(told).blocks == 0
        assert not digest(told).holds(sorted(gone)).any()
        assert ReplicaStatus.from_dict(told.to_dict()) == told
        board.close()


async def test_near_tiers_count_and_shared_ones_do_not(engine_of: EngineOf) -> None:
    store = MemoryStore()
    mounts = {"near": memory(), "far": lambda geometry: SharedMemoryTier(geometry, store=store)}
    async with engine_of(mounts=mounts, num_blocks=16, demotion="write_through") as engine:
        for number in range(3):
            await ask(engine, prompt(number, 2 * B + 1))
            await settled(engine)
        board = StatusBoard(engine, every=0.0)
        await cool(engine)
        far = {name for _, name in store.blocks}
        near = {name for _, name in await stored(engine._life.parts.tiering.manager._mounts[0].tier)}
        assert near
        assert near <= far, "write_through reaches both"
        assert holds_all(await board.status(), near)
        await engine.erase(None)
        assert store.blocks == {}
        assert holds_all(await board.status(), set())
        board.close()


async def test_what_lies_in_a_tier_from_an_earlier_run_counts(engine_of: EngineOf) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"lower": lasting(store)}) as engine:
        await ask(engine, prompt(1, 4 * B + 1))
        await settled(engine)
    async with engine_of(mounts={"lower": lasting(store)}) as engine:
        board = StatusBoard(engine)
        assert holds_all(await board.status(), {name for _, name in store.blocks})
        assert store.blocks
        board.close()


async def test_a_device_that_fills_the_digest_leaves_tiers_out(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MOST_NAMES", 8)
    async with engine_of(mounts={"near": memory()}, num_blocks=8) as engine:
        board = StatusBoard(engine, every=0.0)
        for number in range(4):
            await ask(engine, prompt(number, 3 * B + 1), ONE)
            await settled(engine)
            assert holds_all(await board.status(), device_names(engine))
        board.close()


async def test_nothing_is_watched_before_somebody_asks_and_after_nobody_does(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        log = engine._life.parts.kv_events.log
        board = StatusBoard(engine, rest=0.02)
        await ask(engine, prompt(1))
        assert (log.is_on, board.is_watching) == (False, False)
        await board.status()
        assert (log.is_on, board.is_watching) == (True, True)
        while board.is_watching:  # noqa: ASYNC110  # a timer ends it
            await anyio.sleep(0.005)
        assert not log.is_on
        assert holds_all(await board.status(), device_names(engine))
        board.close()
        board.close()
        assert not log.is_on


async def test_a_digest_is_good_for_a_while(engine_of: EngineOf) -> None:
    now = 0.0
    async with engine_of(clock=lambda: now) as engine:
        board = StatusBoard(engine, every=5.0)
        first = await board.status()
        await ask(engine, prompt(1))
        now = 4.0
        second = await board.status()
        assert second.digest == first.digest
        now = 5.0
        assert holds_all(await board.status(), device_names(engine))
        board.close()


async def test_many_may_ask_at_once(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"near": memory()}) as engine:
        board = StatusBoard(engine)
        await ask(engine, prompt(1))
        answers = await asyncio.gather(*[board.status() for _ in range(5)])
        assert len(set(answers)) == 1
        board.close()


async def test_replicas_of_one_model_share_a_namespace_and_say_when_they_drain(engine_of: EngineOf) -> None:
    async with engine_of() as engine, engine_of() as twin, engine_of(block_size=8) as other:
        told = [await StatusBoard(each).status() for each in (engine, twin, other)]
        assert told[0].namespace == told[1].namespace != told[2].namespace
        assert [each.is_draining for each in told] == [False] * 3
        await engine.drain()
        assert (await StatusBoard(engine).status()).is_draining
    with pytest.raises(EngineClosed):
        await StatusBoard(engine).status()


async def test_waiting_tokens_are_those_of_prompts_that_are_not_computed(engine_of: EngineOf) -> None:
    """Counted apart from the engine's own books: a prompt's length without what it found and what steps computed."""
    seen: list[int] = []

    async def on_step(_: int) -> None:
        seen.append(engine.stats().waiting_tokens)

    async with engine_of(on_step=on_step, max_running=1, max_batch_tokens=2 * B, num_blocks=64) as engine:
        await ask(engine, prompt(1, 4 * B + 1), ONE)  # steps of 8, 8 and 1 tokens; the last one leaves 1
        assert seen == [17, 9, 1]
        assert engine.stats().waiting_tokens == 0
        seen.clear()
        again, fresh = [*prompt(1, 4 * B + 1), *prompt(9, 31)], prompt(2, 3 * B)
        async with anyio.create_task_group() as tasks:
            for ids in (again, fresh, fresh):
                tasks.start_soon(ask, engine, ids, ONE)
        assert seen[0] == 32 + 12 + 12, "of the first one 16 tokens were there"
        assert seen == sorted(seen, reverse=True)
        assert seen[-1] <= 4, "the last one finds what the one before it has computed"
        assert engine.stats().waiting_tokens == 0


async def test_a_prompt_counts_once_for_all_its_samples(engine_of: EngineOf) -> None:
    seen: list[int] = []

    async def on_step(_: int) -> None:
        seen.append(engine.stats().waiting_tokens)

    async with engine_of(on_step=on_step, max_batch_tokens=2 * B) as engine:
        await engine.complete(prompt(1, 4 * B + 1), SamplingParams(max_tokens=2, temperature=1.0, n=3))
        assert seen[:2] == [17, 9]


async def test_those_far_behind_count_whole(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "LOOKS", 1)
    seen: list[int] = []
    shared = prompt(1, 4 * B)

    async def on_step(_: int) -> None:
        if engine.stats().waiting == 2:
            seen.append(engine.stats().waiting_tokens)

    async with engine_of(on_step=on_step, max_running=1) as engine:
        await ask(engine, shared, ONE)
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(ask, engine, [*shared, number], GREEDY)
        assert set(seen) <= {0 + 1 + 17, 1 + 1 + 17}, "the second finds 16 tokens, the third was not looked up"
        assert seen
