"""What an eviction policy has learned outlives the process, in snapshots and on disk, and does no harm there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import msgspec
import pytest

from octavo import AsyncEngine
from octavo.engine.learned import VERSION
from octavo.policies.eviction import Entry, EvictionPolicy, Lru
from octavo.policies.eviction.base import Json
from octavo.storage.base import MOST_NOTES
from octavo.storage.disk import DiskTier
from octavo.storage.snapshot.backend import FolderBackend
from octavo.storage.testing.contract import MemoryTier
from octavo.tests.engine.conftest import EngineOf
from octavo.tests.engine.tier_rig import MakeTier, ask, prompt, settled, tiering, until

pytestmark = pytest.mark.asyncio

LEARNING = "octavo_learning:Learning"
WARM = 1 << 20


class Learning(Lru):
    """Counts the uses of every entry, and what it was ever told; keeps both over a restart."""

    made: ClassVar[list[Learning]] = []

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[Entry, int] = {}
        self.events = 0
        self.made.append(self)

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self.uses[entry] = 0

    def on_hit(self, entry: Entry, now: float) -> None:
        super().on_hit(entry, now)
        self.events += 1
        self.uses[entry] = self.uses.get(entry, 0) + 1

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self.uses[upper] = self.uses.get(lower, 0)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            self.uses.pop(entry, None)
        return super().on_evict(entry, blocks, now)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"events": self.events, "uses": [[key(entry), uses] for entry, uses in self.uses.items() if uses]}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        events, uses = state["events"], state["uses"]
        if not isinstance(events, int) or not isinstance(uses, list):
            raise TypeError("no state of this policy")
        self.events += events
        for key, count in uses:
            if (found := entry(key)) is not None:
                self.uses[found] = self.uses.get(found, 0) + count


class Other(Learning):
    """Another class, which would understand the state."""


class Huge(Learning):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"events": "x" * MOST_NOTES}


class Twice(Learning):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {**super().dump(key), "again": super().dump(key)["uses"]}


class Unsayable(Learning):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"events": object()}  # type: ignore[dict-item]  # that it is none is the point


class AsksForStrangers(Learning):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"events": key(Entry(1, 4, 0.0, 0.0))}


class Forgetful(Learning):
    """Cannot read what it has written."""

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        self.events = 10**6
        raise ValueError("what is this")


CLASSES = (Learning, Other, Huge, Twice, Unsayable, AsksForStrangers, Forgetful)


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("octavo_learning")
    module.__dict__.update({cls.__name__: cls for cls in CLASSES})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for cls in CLASSES:
        monkeypatch.setattr(cls, "made", [])


def newest(cls: type[Learning] = Learning) -> Learning:
    return cls.made[-1]


def disk(path: Path) -> MakeTier:
    return lambda geometry: DiskTier.create({"path": str(path), "bytes": 8 << 20, "free_floor": 0}, geometry)


async def learn(engine: AsyncEngine) -> None:
    """Five uses of one prompt, one of another."""
    for number in (1, 1, 1, 2, 1, 1, 2, 1):
        await ask(engine, prompt(number))
    await settled(engine)


async def back(engine: AsyncEngine) -> None:
    """Until the policy had its chance to take over."""
    await until(lambda: engine.stats().restore.readiness == "ready")
    await until(lambda: engine.stats().restore.learned)


def hot(policy: Learning) -> list[int]:
    return sorted(uses for uses in policy.uses.values() if uses)


async def test_it_survives_in_a_snapshot(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(eviction_policy=LEARNING) as engine:
        await learn(engine)
        await engine.snapshot(tmp_path / "s")
        before = newest()
        assert not engine.stats().restore.learned
    async with engine_of(eviction_policy=LEARNING, restore=tmp_path / "s", warm_bytes=WARM) as engine:
        await back(engine)
        after = newest()
        assert after is not before
        assert (after.events, hot(after)) == (before.events, hot(before))
        assert engine.stats().cache.policy_faults == 0


async def test_it_survives_on_disk(engine_of: EngineOf, tmp_path: Path) -> None:
    """A checkpoint brings it down, the one on closing too."""
    async with engine_of(eviction_policy=LEARNING, mounts={"store": disk(tmp_path)}) as engine:
        await learn(engine)
        before = newest()
    async with engine_of(eviction_policy=LEARNING, mounts={"store": disk(tmp_path)}, warm_bytes=WARM) as engine:
        await back(engine)
        after = newest()
        assert (after.events, hot(after)) == (before.events, hot(before))


async def test_of_two_the_newer_one_counts(engine_of: EngineOf, tmp_path: Path) -> None:
    """The snapshot is older than what lies on the disk."""
    now = [1000.0]
    settings = {"eviction_policy": LEARNING, "mounts": {"store": disk(tmp_path / "d")}, "wall": lambda: now[0]}
    async with engine_of(**settings) as engine:
        await learn(engine)
        await engine.snapshot(tmp_path / "s")
        now[0] += 10
        await learn(engine)
        before = newest().events
    async with engine_of(**settings, restore=tmp_path / "s") as engine:
        await back(engine)
        assert newest().events == before


async def test_without_warming_what_is_known_of_entries_is_lost_and_the_rest_is_there(
    engine_of: EngineOf, tmp_path: Path
) -> None:
    async with engine_of(eviction_policy=LEARNING) as engine:
        await learn(engine)
        await engine.snapshot(tmp_path / "s")
        before = newest().events
    async with engine_of(eviction_policy=LEARNING, restore=tmp_path / "s") as engine:
        await back(engine)
        assert (newest().events, hot(newest())) == (before, [])


@pytest.mark.parametrize("policy", ["octavo_learning:Other", "octavo.policies.eviction.lru:Lru"])
async def test_another_class_does_not_get_it(policy: str, engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(eviction_policy=LEARNING) as engine:
        await learn(engine)
        await engine.snapshot(tmp_path / "s")
    async with engine_of(eviction_policy=policy, restore=tmp_path / "s", warm_bytes=WARM) as engine:
        await until(lambda: engine.stats().restore.readiness == "ready")
        await ask(engine, prompt(1))
        await settled(engine)
        assert not engine.stats().restore.learned
        assert all(made.events <= 2 for made in Other.made)


async def test_one_for_another_contract_does_not_get_it(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(eviction_policy=LEARNING) as engine:
        await learn(engine)
        learned = tiering(engine).learned
        data = learned.dump()
        assert data is not None
        saved = msgspec.json.decode(data)
        assert (saved["version"], saved["api"]) == (VERSION, 1)
        assert saved["policy"].endswith(":Learning")
        for change in ({"api": 2}, {"version": VERSION + 1}, {"policy": "x:y"}, {"state": 5}, {"written": "now"}):
            learned.load([msgspec.json.encode({**saved, **change})])
        unreadable = [data.replace(b'"events":', b'"x":%s,"events":' % value) for value in (b"1e999", b'"\xff"')]
        for nonsense in (b"", b"\0", b"[]", b"{}", b"[" * 100_000, data[:-1], *unreadable):
            learned.load([nonsense])
        assert not learned.is_back
        assert engine.stats().cache.policy_faults == 0
        learned.load([b"", *unreadable, data])
        assert learned.is_back


async def test_a_run_is_named_once_however_often_it_is_told_of(engine_of: EngineOf) -> None:
    async with engine_of(eviction_policy="octavo_learning:Twice") as engine:
        await learn(engine)
        data = tiering(engine).learned.dump()
        assert data is not None
        saved = msgspec.json.decode(data)
        first, second = saved["state"]["0"]["uses"], saved["state"]["0"]["again"]
        assert first == second
        assert {key for key, _ in first} == set(range(len(saved["ends"])))


@pytest.mark.parametrize("policy", [Huge, Unsayable, AsksForStrangers])
async def test_what_cannot_be_saved_is_not_and_the_snapshot_is(
    policy: type[EvictionPolicy], engine_of: EngineOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_of(eviction_policy=f"octavo_learning:{policy.__name__}") as engine:
        await learn(engine)
        report = await engine.snapshot(tmp_path / "s")
        assert report.blocks == engine.census().idle
        assert engine.stats().cache.policy_faults == (policy is not Huge)
    assert await notes_in(tmp_path / "s", engine) is None
    told = [record.getMessage() for record in caplog.get_records("call")]
    assert any("not saved" in line or "broke its contract" in line for line in told)


async def notes_in(location: Path, engine: AsyncEngine) -> bytes | None:
    tier = await FolderBackend.create({}).open(str(location), engine._life.parts.control._geometry)
    try:
        return await tier.notes()
    finally:
        await tier.close()


async def test_one_that_cannot_read_its_state_starts_afresh(engine_of: EngineOf, tmp_path: Path) -> None:
    settings = {"eviction_policy": "octavo_learning:Forgetful", "warm_bytes": WARM}
    async with engine_of(**settings) as engine:
        await learn(engine)
        await engine.snapshot(tmp_path / "s")
    async with engine_of(**settings, restore=tmp_path / "s") as engine:
        await until(lambda: engine.stats().cache.policy_faults == 1)
        assert newest(Forgetful).events < 10**6, "another object, without what was half loaded"
        assert not engine.stats().restore.learned
        assert sum(entry.blocks for entry in newest(Forgetful).uses) == engine._loop.cache.tree.blocks > 0
        assert (await ask(engine, prompt(1))).cached_tokens > 0


async def test_a_snapshot_of_one_prefix_does_not_tell_of_the_others(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(eviction_policy=LEARNING) as engine:
        await learn(engine)
        await engine.snapshot(tmp_path / "part", prefix=prompt(1))
        await engine.snapshot(tmp_path / "whole")
        assert await notes_in(tmp_path / "part", engine) is None
        assert await notes_in(tmp_path / "whole", engine) is not None


async def test_erasing_a_tenant_forgets_what_was_learned(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(eviction_policy=LEARNING, mounts={"store": disk(tmp_path / "d")}) as engine:
        await learn(engine)
        await ask(engine, prompt(3), tenant="t")
        await engine.snapshot(tmp_path / "s")
        await tiering(engine).checkpoint.make(engine._loop, 5.0)
        assert len(await tiering(engine).manager.notes()) == 1
        await engine.erase("t", snapshots=[tmp_path / "s"])
        assert await tiering(engine).manager.notes() == []
        assert await notes_in(tmp_path / "s", engine) is None


async def test_a_policy_without_a_state_leaves_no_trace(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of() as engine:
        await learn(engine)
        await engine.snapshot(tmp_path / "s")
        assert await notes_in(tmp_path / "s", engine) is None
    assert b'"version":1' in (tmp_path / "s" / "manifest.json").read_bytes()


async def test_a_start_from_scratch_forgets_it(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(eviction_policy=LEARNING, mounts={"store": disk(tmp_path)}) as engine:
        await learn(engine)
    async with engine_of(eviction_policy=LEARNING, mounts={"store": disk(tmp_path)}, restore_from_disk=False) as engine:
        await ask(engine, prompt(1))
        assert await tiering(engine).manager.notes() == []
        assert newest().events == 0


async def test_tiers_that_keep_no_notes_lose_nothing_else(engine_of: EngineOf) -> None:
    async with engine_of(
        eviction_policy=LEARNING, mounts={"memory": lambda geometry: MemoryTier(geometry, blocks=None, store=None)}
    ) as engine:
        await learn(engine)
        await tiering(engine).manager.note(b"notes")
        assert await tiering(engine).manager.notes() == []
