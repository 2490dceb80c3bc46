"""The whole engine with tiers under random use: wherever a prefix comes from, a request ends as it would have ended
alone, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from random import Random

import pytest

from octavo import RequestOutput
from octavo.engine.generation import Generation
from octavo.engine.kv import Retention
from octavo.engine.pins import Pin
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, NeverFits, OutOfBlocks
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.tests.engine.test_random_workloads import (
    EOS,
    EVICTION,
    REQUESTS,
    SCHEDULING,
    VOCAB,
    Crowd,
    Sent,
    fault_of,
)
from octavo.tests.engine.tier_rig import EngineOf, Faulty, MakeTier, lasting, memory, settled

Alone = Callable[..., Awaitable[list[RequestOutput]]]
Read = Callable[[Generation], Coroutine[object, object, list[RequestOutput]]]
LIES = ("flip", "other", "short", "fewer", "nonsense", "fail", "reorder")
WEIGHTS = {"send": 10, "abort": 1, "fork": 2, "pin": 1, "unpin": 1, "evict": 1, "erase": 1, "explain": 1, "snapshot": 1}


class Operators(Crowd):
    """A crowd with operators in it, who pin, evict, erase, explain and save at any time."""

    def __init__(self, random: Random, read: Read, folder: Path) -> None:
        super().__init__(random, read)
        self.errands: list[asyncio.Task[None]] = []
        self.pins: list[Pin] = []
        self._folder = folder
        self.widest = 0
        """Blocks of the largest request."""

    async def act(self) -> None:
        kind = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "send":
            await self.send()
        elif self.sent and kind == "abort":
            self.abort()
        elif self.sent and kind == "fork":
            await self.fork()
        elif self.sent and len(self.errands) < REQUESTS:
            text = self._random.choice(self._texts)[: self._random.randint(1, 24)]
            errand = self._errand(len(self.errands), kind, text, self._random.choice((None, "t")))
            self.errands.append(asyncio.create_task(errand))

    async def send(self) -> None:
        if len(self.sent) >= REQUESTS or self.engine is None:
            return
        random = self._random
        text = random.choice(self._texts)[: random.randint(1, 24)]
        params, tenant, name = self.params(), random.choice((None, None, "t")), f"r{len(self.sent)}"
        kept = [Retention(0, random.randint(1, 20), random.randint(-1, 3), random.choice((None, 5.0)))]
        try:
            generation = await self.engine.generate(
                text,
                params,
                request_id=name,
                priority=random.randint(-1, 1),
                tenant=tenant,
                retention=kept if random.random() < 0.3 else (),
            ).start()
        except NeverFits:
            return
        self._keep(name, Sent(text, params, tenant, asyncio.create_task(self._read(generation))))

    async def _errand(self, number: int, kind: str, text: list[int], tenant: str | None) -> None:
        engine = self.engine
        assert engine is not None
        if kind == "pin":
            if engine.config.num_blocks < 2 * self.widest:  # it may hold half: requests must fit into the rest
                return
            try:
                self.pins.append(await engine.pin(text, ttl=self._random.choice((None, 3.0)), tenant=tenant))
            except (OutOfBlocks, InvalidRequest, NeverFits):
                return
        elif kind == "unpin" and self.pins:
            await engine.unpin(self._random.choice(self.pins))
        elif kind == "evict":
            await engine.evict(text, tenant=tenant, tiers=self._random.random() < 0.5)
        elif kind == "erase":
            for sent in self.sent.values():
                sent.aborted |= sent.tenant == tenant and not sent.answer.done()
            await engine.erase(tenant)
        elif kind == "explain":
            assert (await engine.explain(text, tenant=tenant)).cached_tokens < len(text)
        else:
            await engine.snapshot(self._folder / str(number))


def tiers(random: Random, store: MemoryStore) -> dict[str, MakeTier]:
    """One to three tiers, tiny or not, some of which misbehave now and then."""
    chosen: dict[str, MakeTier] = {}
    for name in ("first", "second", "third")[: random.randint(1, 3)]:
        blocks = random.choice((2, 5, 20, None))
        make = random.choice((memory(blocks), lasting(store, blocks)))
        chosen[name] = Troubled(random, make) if random.random() < 0.4 else make
    return chosen


class Troubled(Faulty):
    """A tier that lies and fails in some of its calls."""

    def __init__(self, random: Random, make: MakeTier) -> None:
        super().__init__(make)
        self._random = random

    def trouble(self) -> None:
        random = self._random
        for _ in range(random.randint(1, 4)):
            call = random.choice(("get", "get", "put", "contains", "delete", "touch", "spill", "flush"))
            kind = random.choice(LIES) if call == "get" else "fail"
            self.tier.inject(Fault(call, kind, times=random.randint(1, 3), after=random.randint(0, 5)))  # type: ignore[arg-type]  # one of the kinds


async def run_workload(seed: int, engine_of: EngineOf, alone: Alone, read: Read, folder: Path) -> list[str]:
    random = Random(seed)  # noqa: S311  # nothing is secret here
    crowd = Operators(random, read, folder)
    codec = FakeCodec(VOCAB)
    block_size = random.choice((1, 2, 4, 4, 5))
    least = -(-37 // block_size) + 1
    mounts = tiers(random, MemoryStore())
    async with engine_of(
        runner=FakeRunner(vocab_size=VOCAB, eos_token_ids=EOS),
        codec=codec,
        on_step=crowd.on_step,
        mounts=mounts,
        block_size=block_size,
        num_blocks=random.choice((least, least + 2, 2 * least)),
        max_batch_tokens=random.choice((3, 5, 8, 16, 64)),
        max_running=random.choice((3, 4, 16)),
        scheduling_policy=random.choice(SCHEDULING),
        eviction_policy=random.choice(EVICTION),
        demotion=random.choice(("write_back", "write_through", "selective")),
        promotion=random.choice(("timeout", "wait", "best_effort")),
        tier_queue_bytes=random.choice((300, 5_000, 2**20)),
        checkpoint_interval=0,
    ) as engine:
        crowd.engine, crowd.widest = engine, least
        for make in mounts.values():
            if isinstance(make, Troubled):
                make.trouble()
        while len(crowd.sent) < 4:
            await crowd.send()
        while not all(sent.answer.done() for sent in crowd.sent.values()):
            await asyncio.gather(*(sent.answer for sent in crowd.sent.values()))
        for ended in await asyncio.gather(*crowd.errands, return_exceptions=True):
            assert ended is None or "injected" in str(ended) or "left alone" in str(ended), repr(ended)
        for pin in crowd.pins:
            await engine.unpin(pin)
        await settled(engine)
        assert engine.stats().pins == 0
        assert engine.stats().transfers.failed_exports == 0
    return [f"{name}: {fault}" for name, sent in crowd.sent.items() if (fault := await fault_of(sent, alone, codec))]


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(30))
async def test_every_request_ends_as_it_would_alone(
    seed: int, engine_of: EngineOf, alone: Alone, read: Read, tmp_path: Path
) -> None:
    assert await run_workload(seed, engine_of, alone, read, tmp_path) == []


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(1000, 1300))
async def test_many_more_workloads(seed: int, engine_of: EngineOf, alone: Alone, read: Read, tmp_path: Path) -> None:
    assert await run_workload(seed, engine_of, alone, read, tmp_path) == []
