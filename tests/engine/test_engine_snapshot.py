"""Snapshots through the engine: one moment, whole, under the same model only, and worth something afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from octavo import AsyncEngine, RequestOutput, Retention
from octavo.engine import enlisting, snapshotting
from octavo.engine.model.runner import Int32Array, UInt8Array
from octavo.engine.testing import FakeRunner
from octavo.errors import FingerprintMismatch, InvalidRequest, StorageError
from octavo.storage.base import Record, TierGeometry
from octavo.storage.naming import Shelf
from octavo.storage.snapshot.backend import FolderBackend, FolderSink
from octavo.storage.testing.contract import MemoryStore
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.tier_rig import (
    GREEDY,
    ONE,
    EngineOf,
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


def listed(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def on_device(engine: AsyncEngine, ids: list[int]) -> int:
    return (await engine.explain(ids)).device_tokens


@pytest.mark.asyncio
async def test_a_restart_saves_what_the_snapshot_had(engine_of: EngineOf, alone: Alone, tmp_path: Path) -> None:
    """DISK-15: counted in tokens that the model computes, not in what the log says."""
    async with engine_of() as engine:
        for number in range(3):
            await ask(engine, prompt(number))
        report = await engine.snapshot(tmp_path / "s")
        assert report == (str(tmp_path / "s"), 15, 15, 0)
    runner = FakeRunner()
    async with engine_of(runner=runner, restore=tmp_path / "s") as engine:
        assert engine.stats().restore.stored_blocks == 15
        for number in range(3):
            longer = [*prompt(number), 1, 2, 3]
            before = runner.tokens_computed
            output = await ask(engine, longer, ONE)
            assert [output.token_ids] == tokens(await alone(longer, ONE))
            assert (output.cached_tokens, runner.tokens_computed - before) == (16, 5)
        restore = engine.stats().restore
        assert (restore.saved_tokens, restore.refused) == (48, None)


@pytest.mark.asyncio
@pytest.mark.parametrize("slice_blocks", [1, 3, 1024])
async def test_it_is_of_one_moment_while_everything_changes(
    slice_blocks: int, engine_of: EngineOf, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was cached then is in it, also what was evicted and overwritten while it was written; nothing else is."""
    monkeypatch.setattr(enlisting, "SLICE_BLOCKS", slice_blocks)
    gate = anyio.Event()
    add = FolderSink.add

    async def slow(self: FolderSink, shelf: Shelf, records: list[Record]) -> None:
        await gate.wait()
        await add(self, shelf, records)

    monkeypatch.setattr(FolderSink, "add", slow)
    async with engine_of(num_blocks=16) as engine:
        for number in (1, 2):
            await ask(engine, prompt(number))
        saving = asyncio.create_task(engine.snapshot(tmp_path / "s"))
        await until(lambda: engine.stats().transfers.exported_blocks > 0)
        for number in range(3, 12):
            await ask(engine, prompt(number))
        assert await on_device(engine, prompt(1)) == 0
        gate.set()
        assert (await saving)[1:] == (10, 10, 0)
        await settled(engine)
    async with engine_of(restore=tmp_path / "s") as engine:
        for number in range(12):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))
            assert (output.cached_tokens == 16) is (number in (1, 2)), number
        assert engine.stats().transfers.loads == {"complete": 2}


@pytest.mark.asyncio
async def test_streams_go_on_while_it_is_written(
    engine_of: EngineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = anyio.Event()
    commit = FolderSink.commit

    async def slow(self: FolderSink) -> int:
        await gate.wait()
        return await commit(self)

    monkeypatch.setattr(FolderSink, "commit", slow)
    async with engine_of(num_blocks=256) as engine:
        await ask(engine, prompt(1))
        saving = asyncio.create_task(engine.snapshot(tmp_path / "s"))
        for number in range(2, 30):
            await ask(engine, prompt(number))
        assert not saving.done()
        gate.set()
        assert (await saving).blocks >= 5


@pytest.mark.asyncio
async def test_one_prefix_is_exported_and_imported_elsewhere(engine_of: EngineOf, alone: Alone, tmp_path: Path) -> None:
    """Of one tenant, its whole blocks and nothing else, from the device and from a tier."""
    longer = [*prompt(1), 1, 2, 3, 4, 5, 6, 7]
    async with engine_of(mounts={"m": memory()}) as engine:
        await ask(engine, longer, tenant="t")
        await ask(engine, prompt(1))
        await ask(engine, prompt(2), tenant="t")
        device = await engine.snapshot(tmp_path / "device", prefix=prompt(1), tenant="t")
        await cool(engine)
        below = await engine.snapshot(tmp_path / "tier", prefix=prompt(1), tenant="t")
        nothing = await engine.snapshot(tmp_path / "none", prefix=prompt(1), tenant="t", tiers=False)
    assert (device[1:], below[1:], nothing[1:]) == ((4, 4, 0), (4, 0, 0), (0, 0, 0))
    for name in ("device", "tier"):
        async with engine_of(mounts={"m": memory()}) as engine:
            assert await engine.import_snapshot(tmp_path / name) == 4
            await settled(engine)
            output = await ask(engine, longer, tenant="t")
            assert output.cached_tokens == 16
            assert [output.token_ids] == tokens(await alone(longer, GREEDY))
            assert (await ask(engine, prompt(1))).cached_tokens == 0, "it was the tenant's"
            assert (await ask(engine, prompt(2), tenant="t")).cached_tokens == 0


@pytest.mark.asyncio
async def test_taking_in_waits_for_a_queue_that_is_too_small_for_it(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(num_blocks=256) as engine:
        for number in range(12):
            await ask(engine, prompt(number))
        await engine.snapshot(tmp_path / "s")
    async with engine_of(mounts={"m": memory()}, tier_queue_bytes=900) as engine:
        assert await engine.import_snapshot(tmp_path / "s") == 60
        await settled(engine)
        assert engine.stats().tiers[0].tier.blocks == 60


@pytest.mark.asyncio
async def test_what_lies_in_local_tiers_alone_goes_in_too(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(mounts={"m": memory()}, num_blocks=16) as engine:
        for number in range(5):
            await ask(engine, prompt(number))
        await settled(engine)
        whole = await engine.snapshot(tmp_path / "whole")
        device = await engine.snapshot(tmp_path / "device", tiers=False)
    assert whole.blocks == 25
    assert device.blocks == device.device_blocks == whole.device_blocks < 16


@pytest.mark.asyncio
async def test_the_state_of_policies_comes_back(engine_of: EngineOf, tmp_path: Path) -> None:
    """Recency, hits, priority and what is left of its time: the next eviction is the one that was due."""
    clock, wall = FakeClock(), FakeClock()
    async with engine_of(clock=clock, wall=wall) as engine:
        await ask(engine, prompt(1), retention=[Retention(0, None, 5, ttl=100.0)])
        for number in (2, 3, 4):
            clock.now += 10
            wall.now += 10
            await ask(engine, prompt(number))
        clock.now += 10
        wall.now += 10
        await ask(engine, prompt(2))
        await engine.snapshot(tmp_path / "s")
    wall.now += 30
    for wait, order in ((0.0, [3, 4, 2, 1]), (40.0, [1, 3, 4, 2])):
        clock = FakeClock()
        async with engine_of(clock=clock, wall=wall, restore=tmp_path / "s", warm_bytes=10**6) as engine:
            await until(lambda: engine.stats().restore.warmed_blocks == 20)  # awaited here
            await settled(engine)
            clock.now += wait
            await engine._loop.at_edge(lambda: None)
            gone: list[int] = []
            for _ in range(20):
                await engine._loop.at_edge(lambda: engine._loop.cache.evict(1))  # awaited here
                gone += [n for n in (1, 2, 3, 4) if n not in gone and await on_device(engine, prompt(n)) < 16]
            assert gone == order


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [10 * 365 * 86400.0, -86400.0])
async def test_a_clock_that_was_wrong_makes_nothing_live_for_ever(
    error: float, engine_of: EngineOf, tmp_path: Path
) -> None:
    """TIME-01: ten years ahead when it was saved, right again after the restart; or a day behind."""
    clock, wall = FakeClock(), FakeClock()
    right = 2_000_000_000.0
    wall.now = right + error
    async with engine_of(clock=clock, wall=wall) as engine:
        await ask(engine, prompt(1), retention=[Retention(0, None, 5, ttl=10.0)])
        await ask(engine, prompt(2))
        await engine.snapshot(tmp_path / "s")
    wall.now, clock = right, FakeClock()
    async with engine_of(clock=clock, wall=wall, restore=tmp_path / "s", num_blocks=16) as engine:
        await ask(engine, prompt(1))
        clock.now += 11
        for number in range(3, 9):
            await ask(engine, prompt(number))
        assert await on_device(engine, prompt(1)) == 0, "its ten seconds are over"


@pytest.mark.asyncio
@pytest.mark.parametrize("part", ["weights", "dtype", "geometry", "position encoding", "tokenizer", "configuration"])
async def test_another_model_starts_cold_and_says_why(part: str, engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of() as engine:
        await ask(engine, prompt(1))
        await engine.snapshot(tmp_path / "s")
    runner = FakeRunner(identity={part: "another"})
    async with engine_of(runner=runner, restore=tmp_path / "s") as engine:
        assert part in (engine.stats().restore.refused or "")
        assert (await ask(engine, prompt(1))).cached_tokens == 0
    async with engine_of(runner=FakeRunner(identity={part: "another"}), mounts={"m": memory()}) as engine:
        with pytest.raises(FingerprintMismatch, match=part):
            await engine.import_snapshot(tmp_path / "s")
    with pytest.raises(FingerprintMismatch, match=part):
        async with engine_of(runner=FakeRunner(identity={part: "x"}), restore=tmp_path / "s", strict_tiers=True):
            pass


@pytest.mark.asyncio
async def test_another_block_size_starts_cold(engine_of: EngineOf, alone: Alone, tmp_path: Path) -> None:
    async with engine_of() as engine:
        await ask(engine, prompt(1))
        await engine.snapshot(tmp_path / "s")
    async with engine_of(restore=tmp_path / "s", block_size=2) as engine:
        assert engine.stats().restore.refused
        assert [(await ask(engine, prompt(1))).token_ids] == tokens(await alone(prompt(1), GREEDY))


@pytest.mark.asyncio
@pytest.mark.parametrize("damage", ["missing", "empty", "file", "pickle", "cut"])
async def test_a_snapshot_that_cannot_be_read_is_a_cold_start(
    damage: str, engine_of: EngineOf, alone: Alone, tmp_path: Path
) -> None:
    """DISK-12, DESER-01: nothing is executed, nothing is fatal, unless asked for."""
    place, marker = tmp_path / "s", tmp_path / "marker"
    if damage == "empty":
        place.mkdir()
    elif damage == "file":
        place.write_bytes(b"not a folder")
    elif damage != "missing":
        async with engine_of() as engine:
            await ask(engine, prompt(1))
            await engine.snapshot(place)
        for file in (each for each in place.rglob("*") if each.is_file()):
            payload = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
            file.write_bytes(payload if damage == "pickle" else file.read_bytes()[: file.stat().st_size // 2])
    async with engine_of(restore=place) as engine:
        output = await ask(engine, prompt(1))
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))
        assert output.cached_tokens == 0
        assert engine.stats().restore.refused
    with pytest.raises(StorageError):
        async with engine_of(restore=place, strict_tiers=True):
            pass
    assert not marker.exists()


@pytest.mark.asyncio
async def test_a_damaged_block_is_a_miss(engine_of: EngineOf, alone: Alone, tmp_path: Path) -> None:
    async with engine_of() as engine:
        await ask(engine, prompt(1))
        await engine.snapshot(tmp_path / "s")
    records = max(
        (file for file in (tmp_path / "s").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    data = bytearray(records.read_bytes())
    data[len(data) // 2] ^= 0x10
    records.write_bytes(bytes(data))
    async with engine_of(restore=tmp_path / "s") as engine:
        output = await ask(engine, prompt(1))
        assert [output.token_ids] == tokens(await alone(prompt(1), GREEDY))


class CannotExport(FakeRunner):
    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        raise RuntimeError("no export")


@pytest.mark.asyncio
async def test_blocks_that_could_not_be_copied_are_counted_as_lost(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(runner=CannotExport()) as engine:
        await ask(engine, prompt(1))
        assert (await engine.snapshot(tmp_path / "s"))[1:] == (0, 0, 5)
        await settled(engine)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["begin", "add", "commit"])
async def test_a_snapshot_that_fails_leaves_the_old_one_and_no_promises(
    call: str, engine_of: EngineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> int:
        raise StorageError("injected")

    async with engine_of() as engine:
        await ask(engine, prompt(1))
        await engine.snapshot(tmp_path / "s")
        await ask(engine, prompt(2))
        with monkeypatch.context() as patch:
            patch.setattr(FolderBackend if call == "begin" else FolderSink, call, broken)
            with pytest.raises(StorageError, match="injected"):
                await engine.snapshot(tmp_path / "s")
        await settled(engine)
        assert tiering(engine).exports._watchers == []
    async with engine_of(restore=tmp_path / "s") as engine:
        assert engine.stats().restore.stored_blocks == 5


@pytest.mark.asyncio
async def test_a_snapshot_that_fails_early_copies_nothing_more(
    engine_of: EngineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise StorageError("injected")

    monkeypatch.setattr(snapshotting, "WAITING_BATCHES", 1)
    monkeypatch.setattr(FolderSink, "add", broken)
    async with engine_of(num_blocks=512) as engine:
        await ask(engine, prompt(1, 1600), ONE)
        with pytest.raises(StorageError, match="injected"):
            await engine.snapshot(tmp_path / "s")
        await settled(engine)
        assert engine.stats().transfers.exported_blocks < 400


@pytest.mark.asyncio
async def test_whoever_cancels_a_snapshot_leaves_nothing_behind(engine_of: EngineOf, tmp_path: Path) -> None:
    """At the k-th turn of the event loop, for every k until it is through before."""
    async with engine_of(num_blocks=64, mounts={"m": memory()}) as engine:
        for number in range(5):
            await ask(engine, prompt(number))
        turns = 0
        while True:
            saving = asyncio.create_task(engine.snapshot(tmp_path / "s"))
            for _ in range(turns):
                await asyncio.sleep(0.0003)
            was_running = saving.cancel()
            await asyncio.wait((saving,))
            await settled(engine)
            assert tiering(engine).exports._watchers == []
            if not was_running or turns > 60:
                break
            turns += 3
        assert (await engine.snapshot(tmp_path / "s")).blocks == 25
        assert listed(tmp_path) == ["s"]


@pytest.mark.asyncio
async def test_taking_in_needs_a_tier(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of() as engine:
        await engine.snapshot(tmp_path / "s")
        with pytest.raises(InvalidRequest, match="tier"):
            await engine.import_snapshot(tmp_path / "s")
    async with engine_of(mounts={"m": memory()}) as engine:
        with pytest.raises(StorageError):
            await engine.import_snapshot(tmp_path / "nothing here")


@pytest.mark.asyncio
async def test_tiers_that_fail_make_the_snapshot_smaller_not_wrong(
    engine_of: EngineOf, alone: Alone, tmp_path: Path
) -> None:
    store = MemoryStore()
    async with engine_of(mounts={"m": lasting(store)}, num_blocks=16) as engine:
        for number in range(5):
            await ask(engine, prompt(number))
        await cool(engine)
        bad = next(key for key, kept in store.blocks.items() if kept.head.start == 4)
        store.blocks[bad] = store.blocks[bad]._replace(data=bytes(288))
        assert 21 <= (await engine.snapshot(tmp_path / "s")).blocks < 25, "one is bad, other prompts are not"
    async with engine_of(restore=tmp_path / "s") as engine:
        for number in range(5):
            output = await ask(engine, prompt(number))
            assert [output.token_ids] == tokens(await alone(prompt(number), GREEDY))
        assert engine.stats().tiers[0].corrupt == 0


class ElsewhereBackend(FolderBackend):
    """Keeps everything in a folder of its own below the location."""

    async def begin(self, location: str, geometry: TierGeometry) -> FolderSink:
        await anyio.Path(location).mkdir()
        return await super().begin(f"{location}/elsewhere", geometry)


@pytest.mark.asyncio
async def test_a_backend_of_ones_own_is_used(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of(persistence_backend="octavo.tests.engine.test_engine_snapshot:ElsewhereBackend") as engine:
        await engine.snapshot(tmp_path / "s")
    assert listed(tmp_path / "s") == ["elsewhere"]
