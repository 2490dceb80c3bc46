"""Explanations: what a prompt would find and why not more, for every reason that there is."""

from __future__ import annotations

import pytest

from octavo.engine.explanation import TierHit, explained
from octavo.engine.kv import DeviceExplanation
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import ONE, B, EngineOf, Faulty, ask, cool, memory, prompt, settled, tiering


@pytest.mark.asyncio
async def test_never_seen(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}) as engine:
        found = await engine.explain(prompt(1))
        assert found[:4] == (18, 0, 0, ())
        assert "never seen" in found.reason


@pytest.mark.asyncio
async def test_all_of_it_is_there(engine_of: EngineOf) -> None:
    runner = FakeRunner()
    async with engine_of(runner=runner) as engine:
        await ask(engine, prompt(1))
        computed = runner.tokens_computed
        found = await engine.explain(prompt(1))
        assert found[:5] == (18, 17, 17, (), "")
        assert runner.tokens_computed == computed
        output = await ask(engine, prompt(1))
        assert output.cached_tokens == found.cached_tokens


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 1, 3, 4, 7, 9, 15])
async def test_the_first_token_that_differs(at: int, engine_of: EngineOf) -> None:
    """And from which stored text; what it says is what the request then finds."""
    stored = prompt(1)
    asked = [*stored[:at], (stored[at] + 1) % 64, *stored[at + 1 :], 1, 2, 3, 4]
    async with engine_of() as engine:
        await ask(engine, stored, ONE)
        found = await engine.explain(asked)
        relative = found.device.relative
        assert relative is not None
        assert relative.position == at
        assert relative.stored[at - relative.start] == stored[at]
        assert f"differs at token {at}" in found.reason
        assert (await ask(engine, asked, ONE)).cached_tokens == found.cached_tokens


@pytest.mark.asyncio
async def test_evicted_when_and_by_whom(engine_of: EngineOf, clock: FakeClock) -> None:
    async with engine_of(num_blocks=16, clock=clock) as engine:
        await ask(engine, prompt(1), ONE)
        for number in range(2, 6):
            await ask(engine, prompt(number), ONE)
        clock.now += 7
        found = await engine.explain(prompt(1))
        assert found.cached_tokens == 0
        assert "evicted 7.0 s ago by Lru" in found.reason
        assert "no tier has it" in found.reason


@pytest.mark.asyncio
async def test_in_which_tier(engine_of: EngineOf) -> None:
    """Two blocks on the device, one in the first tier, the last in the second."""
    upper, lower = MemoryStore(), MemoryStore()
    mounts = {"fast": memory(store=upper), "slow": memory(store=lower)}
    async with engine_of(mounts=mounts, demotion="write_through") as engine:
        await ask(engine, prompt(1), ONE)
        await cool(engine)
        await ask(engine, [*prompt(1)[:8], 1, 2], ONE)
        fourth = next(key for key, kept in upper.blocks.items() if kept.head.start == 12)
        del upper.blocks[fourth]
        found = await engine.explain(prompt(1))
        assert found.device_tokens == 8
        assert found.tier_tokens == (TierHit("fast", 4), TierHit("slow", 4))
        assert (found.cached_tokens, found.reason) == (16, "")
        third = next(key for key, kept in lower.blocks.items() if kept.head.start == 8)
        del upper.blocks[third], lower.blocks[third]
        found = await engine.explain(prompt(1))
        assert (found.cached_tokens, found.tier_tokens) == (8, ())
        longer = await engine.explain([*prompt(1)[:8], 1, 2])
        assert longer.reason == ""


@pytest.mark.asyncio
async def test_a_tier_that_has_only_a_part_of_it(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}) as engine:
        await ask(engine, prompt(1), ONE)
        await cool(engine)
        found = await engine.explain([*prompt(1)[:16], 1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert found.tier_tokens == (TierHit("m", 16),)
        assert found.reason == "no tier has the block after token 16"


@pytest.mark.asyncio
async def test_another_salt_is_told_only_when_asked(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        await ask(engine, prompt(1), tenant="a")
        assert "namespace" not in (await engine.explain(prompt(1), tenant="b")).reason
        found = await engine.explain(prompt(1), tenant="b", others=True)
        assert "another namespace" in found.reason
        assert "'a'" not in repr(found), "never whose"
        assert found.cached_tokens == 0
        assert (await engine.explain(prompt(2), tenant="b", others=True)).device.other_salt is False


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["fail", "hang", "nonsense"])
async def test_a_tier_that_does_not_answer_has_nothing(kind: str, engine_of: EngineOf) -> None:
    faulty = Faulty()
    async with engine_of(mounts={"m": faulty}, tier_deadline=0.05) as engine:
        await ask(engine, prompt(1), ONE)
        await cool(engine)
        mount = tiering(engine).manager._mounts[0]
        faulty.tier.inner.peek = lambda *_: None  # type: ignore[method-assign]  # so that it must be asked
        mount.asks = True
        faulty.tier.inject(Fault("contains", kind))  # type: ignore[arg-type]  # one of the kinds
        found = await engine.explain(prompt(1))
        assert found.tier_tokens in ((), (TierHit("m", 16),))
        assert (found.tier_tokens == ()) is (kind != "nonsense")


@pytest.mark.asyncio
async def test_asking_changes_nothing(engine_of: EngineOf) -> None:
    async with engine_of(mounts={"m": memory()}, num_blocks=16) as engine:
        for number in range(4):
            await ask(engine, prompt(number), ONE)
        await settled(engine)
        before = engine.stats()
        order = engine._loop.cache.tree.candidates.copy()
        for number in range(6):
            await engine.explain(prompt(number))
        after = engine.stats()
        assert (after.cache, after.tiers, after.transfers) == (before.cache, before.tiers, before.transfers)
        assert engine._loop.cache.tree.candidates == order


@pytest.mark.asyncio
async def test_an_empty_prompt_is_refused(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest):
            await engine.explain([])


@pytest.mark.parametrize("length", range(1, 4 * B))
def test_never_more_than_a_prompt_has(length: int) -> None:
    for on_device in range(length // B + 1):
        for below in range((length - 1) // B - on_device + 1):
            missing = on_device * B if (on_device + 1) * B <= length else None
            device = DeviceExplanation(min(on_device * B, length - 1), missing, None, None, None)
            found = explained(length, device, ["t"] * below, B)
            assert 0 <= found.device_tokens <= found.cached_tokens + B
            assert found.cached_tokens == min((on_device + below) * B, length - 1)
