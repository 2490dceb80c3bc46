"""A live engine and a replica that plays its recording back choose the same victims, whatever the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import ClassVar

import msgspec
import pytest

from octavo import RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.kv import Retention
from octavo.engine.pins import Pin
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, NeverFits, OutOfBlocks, TraceError
from octavo.policies.eviction.base import Entry, EvictionPolicy, Returned
from octavo.policies.eviction.lru import Lru
from octavo.policies.eviction.priority_ttl import PriorityTtl
from octavo.policies.history import Admitted, Dropped, Evicted, Gap, Left, Published
from octavo.policies.simulator.exact import play, replay_exactly
from octavo.policies.simulator.recording import events, read_header
from octavo.tests.engine.conftest import EngineOf, FakeClock
from octavo.tests.engine.test_random_workloads import EOS, VOCAB, Crowd, Sent
from octavo.tests.engine.tier_rig import memory

Read = Callable[[Generation], Coroutine[object, object, list[RequestOutput]]]
POLICIES = {point.name: point for point in entry_points(group="octavo.eviction_policies")}


class Operators(Crowd):
    """A crowd among which are some who pin, keep and forget prefixes."""

    def __init__(self, random: Random, read: Read) -> None:
        super().__init__(random, read)
        self.pins: list[Pin] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def act(self) -> None:
        await super().act()
        if self._random.random() < 0.15:
            self._spawn(self._pin())
        if self._random.random() < 0.1:
            self._spawn(self._forget())

    async def send(self) -> None:
        if len(self.sent) >= 40 or self.engine is None:
            return
        prompt = self._random.choice(self._texts)[: self._random.randint(1, 24)]
        prompt = [*prompt, *(self._random.randrange(VOCAB) for _ in range(self._random.choice((0, 0, 1, 5))))]
        priority = self._random.choice((-1, 1, 2))
        retention = (Retention(0, 8, priority, self._random.choice((None, 0.5))),)
        options = {"tenant": self._random.choice((None, None, "t")), "priority": self._random.randint(-1, 1)}
        params, name = self.params(), f"r{len(self.sent)}"
        kept = retention if self._random.random() < 0.3 else ()
        try:
            generation = self.engine.generate(prompt, params, request_id=name, retention=kept, **options)  # type: ignore[arg-type]  # of the right types
            await generation.start()
        except NeverFits:
            return
        self._keep(name, Sent(prompt, params, None, asyncio.create_task(self._read(generation))))

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)
        for pin in self.pins:
            if self.engine is not None:
                await self.engine.unpin(pin)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _pin(self) -> None:
        if self.engine is None:
            return
        prompt = self._random.choice(self._texts)[: self._random.randint(8, 16)]
        try:
            self.pins.append(await self.engine.pin(prompt, ttl=1.0, priority=self._random.choice((None, 3))))
        except (OutOfBlocks, InvalidRequest):
            return

    async def _forget(self) -> None:
        if self.engine is not None:
            await self.engine.evict(self._random.choice(self._texts)[: self._random.randint(4, 24)])


class Witness(Lru):
    """Notes all that it hears, with what it is shown of the entries."""

    wants_requests = True
    log: ClassVar[list[tuple[object, ...]]] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        self._note("insert", entry, now)
        super().on_insert(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._note("extend", entry, blocks, now)
        super().on_extend(entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._note("split", lower, shown(upper), now)
        super().on_split(upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        self._note("hit", entry, now)
        super().on_hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._note("candidate", entry, now)
        super().on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        self._note("held", entry)
        super().on_held(entry)

    def on_forget(self, entry: Entry) -> None:
        self._note("forget", entry)
        super().on_forget(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        self._note("evict", entry, blocks, now)
        super().on_evict(entry, blocks, now)
        return len(self.log)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self._note("ghost", entry, returned, now)
        super().on_ghost_hit(entry, returned, now)

    def on_request(self, number: int, names: bytes, now: float) -> None:
        self.log.append(("request", number, names, now))

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        self.log.append(("complete", number, names, now))

    def _note(self, what: str, entry: Entry, *more: object) -> None:
        self.log.append((what, *shown(entry), *more))


def shown(entry: Entry) -> tuple[object, ...]:
    """An entry as a policy sees it, but for the name of the tenant, which recordings do not have."""
    seen = (entry.blocks, entry.depth, entry.insert_time, entry.last_use, entry.hits, entry.candidate)
    worth = (entry.recompute_seconds, entry.reload_seconds, entry.reload_tier, entry.priority, entry.expires)
    return (*seen, *worth, bool(entry.tenant))


async def recorded(path: Path, seed: int, policy: str, engine_of: EngineOf, read: Read, **more: object) -> None:
    """A random run of a small engine, written to ``path``."""
    random = Random(seed)  # noqa: S311  # nothing is secret here
    crowd = Operators(random, read)
    block_size = random.choice((1, 2, 4))
    least = -(-42 // block_size) + 1
    async with engine_of(
        runner=FakeRunner(vocab_size=VOCAB, eos_token_ids=EOS),
        codec=FakeCodec(VOCAB),
        on_step=crowd.on_step,
        clock=FakeClock(step=0.01),
        record=path,
        block_size=block_size,
        num_blocks=random.choice((least, least + 2, 2 * least)),
        max_batch_tokens=random.choice((5, 12, 64)),
        max_running=random.choice((3, 4, 16)),
        scheduling_policy="octavo.policies.scheduling.priority:Priority",
        eviction_policy=policy,
        evict_below=random.choice((0.02, 0.2)),
        evict_until=0.3,
        policy_timeout=float("inf"),
        **more,
    ) as engine:
        crowd.engine = engine
        while len(crowd.sent) < 12:
            await crowd.send()
        answered = 0
        while answered < len(crowd.sent):
            answered = len(crowd.sent)
            ended = await asyncio.gather(*(sent.answer for sent in crowd.sent.values()), return_exceptions=True)
            assert all(isinstance(end, list | OutOfBlocks) for end in ended)  # pins may leave too little room
        await crowd.finish()


def fresh(path: Path, cls: type[EvictionPolicy]) -> EvictionPolicy:
    return PriorityTtl(read_header(path).num_blocks, cls)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_same_victims(name: str, seed: int, tmp_path: Path, engine_of: EngineOf, read: Read) -> None:
    path = tmp_path / "run"
    await recorded(path, seed, POLICIES[name].value, engine_of, read)
    played = play(path, fresh(path, POLICIES[name].load()))
    assert played.divergence is None
    assert played.victims > 20


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(10, 14))
async def test_all_that_a_policy_hears_is_the_same(seed: int, tmp_path: Path, engine_of: EngineOf, read: Read) -> None:
    """Also with tiers, whose blocks come with a past of their own, and with pins, retention, forks and tenants."""
    path = tmp_path / "run"
    mounts = {"near": memory(30)} if seed % 2 else None
    Witness.log = []
    await recorded(path, seed, f"{__name__}:Witness", engine_of, read, mounts=mounts)
    live, Witness.log = Witness.log, []
    assert play(path, fresh(path, Witness)).divergence is None
    assert len(live) > 60
    assert Witness.log == live


@pytest.mark.asyncio
async def test_the_runs_above_have_everything_in_them(tmp_path: Path, engine_of: EngineOf, read: Read) -> None:
    """What a recording can hold comes up in a handful of seeds, or the tests above prove less than they seem to."""
    seen: set[str] = set()
    for seed in range(10, 14):
        path = tmp_path / str(seed)
        await recorded(path, seed, f"{Lru.__module__}:Lru", engine_of, read, mounts={"near": memory(30)})
        for _, event in events(path):
            seen.add(type(event).__name__)
            match event:
                case Left() | Evicted() | Dropped():
                    seen.add(event.kind if isinstance(event, Left) else event.reason)
                case Admitted():
                    seen |= {"resumed"} if event.resumed else set()
                    seen |= {"found"} if event.found else set()
                    seen |= {"ghost"} if event.ghosts else set()
                    seen |= {"tenant"} if event.tenant else set()
                case Published():
                    seen |= {"known"} if event.known else set()
                    seen |= {"kept"} if any(part.priority for part in event.parts) else set()
                    seen |= {"loaded"} if any(part.reload_tier for part in event.parts) else set()
    assert seen >= {"Locked", "Unlocked", "Evicted", "Admitted", "Kept", "Published", "Extended", "Forked", "Left"}
    assert seen >= {"Dropped", "Done", "End", "finished", "preempted", "abandoned", "allocate", "watermark", "forget"}
    assert seen >= {"resumed", "found", "ghost", "tenant", "kept", "loaded"}


class Backwards(Lru):
    """The most recently used goes first: not what the recording was made with."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield max(super().victims(count, now), key=lambda entry: entry.last_use)


@pytest.mark.asyncio
async def test_another_policy_is_told_apart(tmp_path: Path, engine_of: EngineOf, read: Read) -> None:
    path = tmp_path / "run"
    await recorded(path, 0, f"{Lru.__module__}:Lru", engine_of, read)
    divergence = replay_exactly(path, fresh(path, Backwards))
    assert divergence is not None
    assert divergence.recorded != divergence.chosen
    event = dict(events(path))[divergence.line]
    assert isinstance(event, Evicted)
    at = divergence.victim
    assert divergence.recorded == (event.names[8 * at : 8 * at + 8], event.blocks[at])


@pytest.mark.asyncio
async def test_what_cannot_be_played_back_is_said(tmp_path: Path, engine_of: EngineOf, read: Read) -> None:
    path = tmp_path / "run"
    async with engine_of(num_blocks=16, record=path) as engine:
        await engine.complete([1] * 9, SamplingParams(max_tokens=2))
        await engine.set_eviction_policy("octavo.policies.eviction.lfu:Lfu")
        await engine.complete([2] * 9, SamplingParams(max_tokens=2))
    with pytest.raises(TraceError, match=r"line \d+: .*Lfu took over"):
        replay_exactly(path, fresh(path, Lru))


@pytest.mark.asyncio
async def test_a_recording_with_a_gap_is_not_played_back(tmp_path: Path, engine_of: EngineOf, read: Read) -> None:
    path = tmp_path / "run"
    async with engine_of(num_blocks=16, record=path) as engine:
        await engine.complete([1] * 9, SamplingParams(max_tokens=2))
    *whole, end = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*whole, msgspec.json.encode(Gap(0.0, 3)) + b"\n", end]))
    with pytest.raises(TraceError, match=rf"line {len(whole) + 1}: .*3 events are missing"):
        replay_exactly(path, fresh(path, Lru))


class Faulty(Lru):
    """Names nothing now and then."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(()) if count % 2 else super().victims(count, now)


@pytest.mark.asyncio
async def test_victims_of_the_stand_in_are_taken_as_they_were(tmp_path: Path, engine_of: EngineOf, read: Read) -> None:
    path = tmp_path / "run"
    await recorded(path, 1, f"{__name__}:Faulty", engine_of, read)
    assert any(isinstance(event, Evicted) and event.faulty for _, event in events(path))
    assert replay_exactly(path, fresh(path, Lru)) is None
