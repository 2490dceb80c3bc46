"""Folders that change hands: an opening that is cancelled lets go, and one that fails leaves what could be read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.storage.disk.tier import DiskOptions, DiskTier
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.testing.contract import Fault, FaultyTier
from octavo.tests.storage.disk_samples import SAMPLES as DISK_SAMPLES
from octavo.tests.storage.disk_samples import SHELF, Bench, QuickFilesystem, names
from octavo.tests.storage.manager_rig import SAMPLES, Rig, memory, until

CHAIN = DISK_SAMPLES.chain(SHELF, 2)


@pytest.mark.asyncio
async def test_a_tier_whose_opening_was_cancelled_is_closed() -> None:
    tier = FaultyTier(memory())
    tier.inject(Fault("open", "hang"))
    rig = Rig(tier)
    opening = asyncio.ensure_future(rig.manager.open())
    await until(lambda: tier.running["open"] == 1)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert tier.calls["close"] == 1
    await rig.manager.close(10.0)


class HeldOpening(QuickFilesystem):
    """Stops with the folder locked until ``gate`` opens."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.gate = threading.Event()

    def fsync_folder(self, path: Path) -> None:
        if (path / "lock").exists():
            self.reached.set()
            self.gate.wait(20)


@pytest.mark.asyncio
async def test_a_folder_whose_opening_was_cancelled_is_free_for_the_next_engine(tmp_path: Path) -> None:
    fs = HeldOpening()
    options = DiskOptions(path=str(tmp_path), bytes=64 << 20, free_floor=0)
    rig = Rig(DiskTier(options, SAMPLES.geometry, fs=fs))
    opening = asyncio.ensure_future(rig.manager.open())
    await until(fs.reached.is_set)
    opening.cancel()
    fs.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await rig.manager.close(10.0)
    after = DiskTier(options, SAMPLES.geometry, fs=Filesystem())
    await after.open()
    problem = after.stats().problem
    await after.close()
    assert not problem


class AskedWhileLocking(QuickFilesystem):
    """Calls ``meanwhile`` each time that a lock is asked for."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    def lock(self, path: Path) -> File:
        self.meanwhile()
        return super().lock(path)


@pytest.mark.parametrize("is_free", [True, False])
def test_blocks_can_be_read_while_their_folder_is_taken_over(tmp_path: Path, is_free: bool) -> None:
    holder = Bench(tmp_path / "disk").store()
    holder.open()
    holder.put(SHELF, CHAIN)
    fs = AskedWhileLocking()
    bench = Bench(tmp_path / "disk", fs=fs)
    store = bench.store()
    store.open()
    if is_free:
        holder.close()
    seen: list[tuple[int | None, list[bool]]] = []
    fs.meanwhile = lambda: seen.append(
        (store.peek(SHELF, names(CHAIN)), [each is not None for each in store.get(SHELF, names(CHAIN))])
    )
    bench.clock.now += 1e6
    assert store.put(SHELF, DISK_SAMPLES.chain(SHELF, 1, seed=1)) == [is_free]
    assert seen
    assert all(each == (2, [True, True]) for each in seen)
    assert store.peek(SHELF, names(CHAIN)) == 2
    store.close()
    holder.close()
