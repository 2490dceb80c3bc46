"""What was erased or deleted stays away, and an erase that could not be done says so."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import anyio
import pytest

from octavo.errors import StorageError
from octavo.storage.base import Record, Stored
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.manager import writer as tier_writer
from octavo.storage.manager.tier_manager import ManagerSettings
from octavo.storage.naming import Shelf
from octavo.storage.snapshot.backend import FolderBackend
from octavo.storage.testing.contract import Fault, FaultyTier, MemoryStore, MemoryTier
from octavo.tests.storage import disk_samples, manager_rig, snapshot_samples
from octavo.tests.storage.disk_samples import Bench
from octavo.tests.storage.manager_rig import HANG, Rig, batch_of, remote, running, until

CHAIN = disk_samples.SAMPLES.chain(disk_samples.SHELF, 8)
SMALL = manager_rig.SAMPLES.chain(manager_rig.SHELF, 2)
TENANT = manager_rig.SHELF.tenant


def files_with_tokens(folder: Path) -> list[str]:
    """Files in which the tokens of a block can be read."""
    return [
        path.name
        for path in sorted(folder.iterdir())
        if any(record.head.tokens in path.read_bytes() for record in CHAIN)
    ]


def test_an_erase_fails_while_somebody_reads_the_index_whose_log_keeps_the_tokens(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "disk")
    with bench.opened() as store:
        store.put(disk_samples.SHELF, CHAIN)
        assert store._parts is not None
        assert store._parts.state.index is not None
        store._parts.state.index._connection.execute("PRAGMA busy_timeout = 0")
        with closing(sqlite3.connect(bench.home / "index.sqlite", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM blocks").fetchall() == [(8,)]
            with pytest.raises(StorageError, match="another process reads"):
                store.erase(disk_samples.SHELF.tenant)
        assert not any(store.contains(disk_samples.SHELF, disk_samples.names(CHAIN)))
        store.erase(disk_samples.SHELF.tenant)
        assert files_with_tokens(bench.home) == []


def test_what_was_deleted_while_the_folder_was_in_use_is_gone_when_it_is_free(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "disk")
    first, last = CHAIN[:7], CHAIN[7:]
    holder, store = bench.store(), bench.store()
    holder.open()
    holder.put(disk_samples.SHELF, CHAIN)
    store.open()
    assert store.delete(disk_samples.SHELF, disk_samples.names(last)) == 1
    holder.close()
    bench.clock.now += 1e6
    assert all(store.put(disk_samples.SHELF, disk_samples.SAMPLES.chain(disk_samples.SHELF, 1, seed=1)))
    assert disk_samples.kept(store, CHAIN) == [True] * len(first) + [False]
    store.close()
    with bench.opened() as again:
        assert disk_samples.kept(again, CHAIN) == [True] * len(first) + [False]


@pytest.mark.asyncio
async def test_a_tier_that_was_left_out_makes_an_erase_fail() -> None:
    store = MemoryStore()
    async with running(Rig(remote(store))) as rig:
        await rig.stored(SMALL, 0)
    down = FaultyTier(remote(store))
    down.inject(Fault("open", "fail"))
    async with running(Rig(down)) as rig:
        with pytest.raises(StorageError, match="tier0 is not open"):
            await rig.manager.erase(TENANT)
        assert len(store.blocks) == 2


@pytest.mark.asyncio
async def test_the_other_tiers_are_erased_all_the_same() -> None:
    down, well = FaultyTier(remote()), remote()
    down.inject(Fault("open", "fail"))
    async with running(Rig(down, well)) as rig:
        await rig.stored(SMALL, 1)
        with pytest.raises(StorageError, match="tier0 is not open"):
            await rig.manager.erase(TENANT)
        assert not well.store.blocks


@pytest.mark.asyncio
async def test_an_erase_after_the_end_fails() -> None:
    rig = Rig(remote())
    await rig.manager.open()
    await rig.manager.close(10.0)
    with pytest.raises(StorageError, match="tier0 is not open"):
        await rig.manager.erase(TENANT)


class Late(MemoryTier):
    """Puts when ``gate`` opens, whether anybody still waits for it or not; forgets only when it is well."""

    def __init__(self) -> None:
        super().__init__(manager_rig.SAMPLES.geometry)
        self.gate = asyncio.Event()
        self.failures = 0
        self.failed = 0
        self.has_put = False

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        while not self.gate.is_set():
            with suppress(asyncio.CancelledError):
                await self.gate.wait()
        self.has_put = True
        return await super().put(shelf, records)

    async def erase(self, tenant: bytes) -> int:
        self._fail_perhaps()
        return await super().erase(tenant)

    async def delete(self, shelf: Shelf, names: Sequence[bytes]) -> int:
        self._fail_perhaps()
        return await super().delete(shelf, names)

    def _fail_perhaps(self) -> None:
        if self.failures:
            self.failures -= 1
            self.failed += 1
            raise StorageError("injected")


async def _forget(rig: Rig, what: str) -> None:
    if what == "erase":
        await rig.manager.erase(TENANT)
    else:
        await rig.manager.forget(manager_rig.SHELF, manager_rig.names_of(SMALL))


async def _left_behind(rig: Rig, tier: Late, what: str) -> None:
    """A put was given up, its blocks were forgotten, it wrote them all the same, and deleting them failed once."""
    rig.manager.offer(batch_of(SMALL), to="all")
    await until(lambda: rig.manager.stats()[0].abandoned == 1)
    await until(lambda: rig.manager.stats()[0].queued_blocks == 0)
    await _forget(rig, what)
    tier.failures = 1
    tier.gate.set()
    await until(lambda: tier.failed == 1)
    assert tier.has_put


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["erase", "forget"])
async def test_a_late_put_is_revoked_until_that_works(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writer, "_REVOKE_AGAIN", 0.0)
    tier = Late()
    async with running(Rig(tier, settings=ManagerSettings(deadline=HANG))) as rig:
        await _left_behind(rig, tier, what)
        await until(lambda: not tier.store.blocks and not rig.manager._mounts[0].revoked)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["erase", "forget"])
async def test_a_flush_revokes_what_could_not_be_revoked_before(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writer, "_REVOKE_AGAIN", 1e6)
    tier = Late()
    async with running(Rig(tier, settings=ManagerSettings(deadline=HANG))) as rig:
        await _left_behind(rig, tier, what)
        assert len(tier.store.blocks) == 2
        await rig.manager.flush(10.0)
        assert not tier.store.blocks


class HeldRead(Filesystem):
    """Keeps the next read of a segment to itself until ``gate`` opens."""

    def __init__(self) -> None:
        self.armed = False
        self.reached = threading.Event()
        self.gate = threading.Event()

    def read_into(self, file: File, offset: int, buffer: memoryview) -> int:
        count = super().read_into(file, offset, buffer)
        if self.armed and file.path.suffix == ".seg":
            self.armed = False
            self.reached.set()
            self.gate.wait(20)
        return count


@pytest.mark.asyncio
async def test_a_read_of_a_snapshot_that_began_before_an_erase_brings_nothing_after_it(tmp_path: Path) -> None:
    fs = HeldRead()
    how = snapshot_samples.settings(fs)
    of = snapshot_samples.content(1)
    snapshot_samples.write(tmp_path / "snap", of, how)
    shelf = snapshot_samples.SAMPLES.shelf("a")
    tier = await FolderBackend(how).open(str(tmp_path / "snap"), snapshot_samples.SAMPLES.geometry)
    found: list[Stored | None] = []

    async def get() -> None:
        found.extend(await tier.get(shelf, [record.head.name for record in of[shelf]]))

    fs.armed = True
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(get)
            await until(fs.reached.is_set)
            assert await tier.erase(shelf.tenant) == 3
            fs.gate.set()
    finally:
        fs.gate.set()
        await tier.close()
    assert found == [None] * 3
