"""Erasing a tenant reaches every place, also what is being written, and goes on where one place fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from octavo.errors import StorageError
from octavo.storage.snapshot.backend import FolderSink
from octavo.storage.testing.contract import Fault
from octavo.tests.engine.tier_rig import EngineOf, Faulty, ask, prompt, settled, stored, until

Holds = Callable[[Path], Awaitable[bool]]


@pytest.fixture
def holds_tenant(engine_of: EngineOf) -> Holds:
    """Whether a snapshot has something of prompt 1 of tenant "t"."""

    async def look(snapshot: Path) -> bool:
        async with engine_of(restore=snapshot, strict_tiers=True) as engine:
            return bool((await engine.explain(prompt(1), tenant="t")).tier_tokens)

    return look


@pytest.mark.asyncio
async def test_snapshots_are_erased_though_a_tier_fails(
    engine_of: EngineOf, holds_tenant: Holds, tmp_path: Path
) -> None:
    faulty = Faulty()
    async with engine_of(mounts={"m": faulty}) as engine:
        await ask(engine, prompt(1), tenant="t")
        await engine.snapshot(tmp_path / "s")
        faulty.tier.inject(Fault("erase", "fail", times=1))
        with pytest.raises(StorageError, match="injected"):
            await engine.erase("t", snapshots=[tmp_path / "s"])
    assert not await holds_tenant(tmp_path / "s")


@pytest.mark.asyncio
async def test_snapshots_are_erased_though_one_before_them_fails(
    engine_of: EngineOf, holds_tenant: Holds, tmp_path: Path
) -> None:
    async with engine_of() as engine:
        await ask(engine, prompt(1), tenant="t")
        await engine.snapshot(tmp_path / "s")
        with pytest.raises(StorageError) as raised:
            await engine.erase("t", snapshots=[tmp_path / "none", tmp_path / "s", tmp_path / "nor this"])
        for missing in ("none", "nor this"):
            assert str(tmp_path / missing) in str(raised.value)
    assert not await holds_tenant(tmp_path / "s")


@pytest.mark.asyncio
async def test_a_snapshot_that_is_being_written_is_erased_too(
    engine_of: EngineOf, holds_tenant: Holds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, gate = anyio.Event(), anyio.Event()
    commit = FolderSink.commit

    async def slow(self: FolderSink) -> int:
        written.set()
        await gate.wait()
        return await commit(self)

    monkeypatch.setattr(FolderSink, "commit", slow)
    async with engine_of() as engine:
        await ask(engine, prompt(1), tenant="t")
        await ask(engine, prompt(2))
        saving = asyncio.create_task(engine.snapshot(tmp_path / "s"))
        await written.wait()
        assert await engine.erase("t") == 5
        gate.set()
        assert (await saving).blocks == 5
    assert not await holds_tenant(tmp_path / "s")
    async with engine_of(restore=tmp_path / "s") as engine:
        assert (await ask(engine, prompt(2))).cached_tokens == 16, "it was not the tenant's"


@pytest.mark.asyncio
@pytest.mark.parametrize(("erased", "other"), [("t", "u"), ("u", "t")])
async def test_what_is_being_imported_is_erased_too(
    erased: str, other: str, engine_of: EngineOf, tmp_path: Path
) -> None:
    """The queue is shorter than the snapshot: of one tenant some is offered by then, and the rest waits for room."""
    async with engine_of(num_blocks=128) as engine:
        for number in range(10):
            await ask(engine, prompt(number), tenant="t")
        for number in range(10):
            await ask(engine, prompt(number), tenant="u")
        await engine.snapshot(tmp_path / "s")
    faulty, gate = Faulty(), anyio.Event()
    faulty.prepare(Fault("put", "slow", gate=gate, times=1))
    async with engine_of(mounts={"m": faulty}, tier_queue_bytes=3000, tier_deadline=60.0) as engine:
        importing = asyncio.create_task(engine.import_snapshot(tmp_path / "s"))
        await until(lambda: faulty.tier.running["put"] == 1)
        erasing = asyncio.create_task(engine.erase(erased))
        await asyncio.sleep(0)
        await engine._loop.at_edge(lambda: None)
        gate.set()
        await erasing
        await importing
        await settled(engine)
        assert len(await stored(faulty.tier)) == 50
        assert (await engine.explain(prompt(1), tenant=erased)).tier_tokens == ()
        assert (await engine.explain(prompt(1), tenant=other)).tier_tokens != ()
