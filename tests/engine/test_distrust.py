"""A request that fails because a tier could not read takes no good blocks with it."""

from __future__ import annotations

import pytest

from octavo.errors import StorageError
from octavo.storage.testing.contract import Fault
from octavo.tests.engine.tier_rig import B, EngineOf, Faulty, ask, cool, prompt, settled, stored

PROMPT = prompt(1, 40 * B + 2)


@pytest.mark.asyncio
async def test_a_load_that_fails_forgets_no_good_blocks(engine_of: EngineOf) -> None:
    """Neither those that it could not have, nor those that it had been given before: they were checked."""
    faulty = Faulty()
    async with engine_of(mounts={"m": faulty}, load_failure="fail") as engine:
        await ask(engine, PROMPT)
        await cool(engine)
        before = await stored(faulty.tier)
        assert len(before) == 41
        faulty.tier.inject(Fault("get", "fail", after=1, times=1))
        with pytest.raises(StorageError):
            await ask(engine, PROMPT)
        await settled(engine)
        assert engine.stats().transfers.loads == {"failed": 1}
        assert "distrust" not in engine.stats().cache.evictions
        assert faulty.tier.calls["delete"] == 0
        assert await stored(faulty.tier) == before
        assert (await ask(engine, PROMPT)).cached_tokens == 40 * B, "the next one finds them"
