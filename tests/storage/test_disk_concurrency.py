"""The disk tier under many callers, slow disks and callers that give up."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from octavo.errors import StorageError
from octavo.storage.base import Stored
from octavo.storage.disk.tier import DiskOptions, DiskTier
from octavo.storage.files.filesystem import File, Filesystem
from octavo.tests.storage.disk_samples import BYTES, SAMPLES, SHELF, Bench, QuickFilesystem, kept, names

CHAINS = [SAMPLES.chain(SHELF, 4, seed=seed) for seed in range(64)]


class SlowDisk(QuickFilesystem):
    """While it is slow, ``fsync`` waits until it is not."""

    def __init__(self) -> None:
        self.quick = threading.Event()
        self.quick.set()
        self.waiting = threading.Event()

    def fsync(self, file: File) -> None:
        self.waiting.set()
        assert self.quick.wait(30)


@asynccontextmanager
async def opened(path: Path, fs: Filesystem, size: int = BYTES) -> AsyncIterator[DiskTier]:
    tier = DiskTier(DiskOptions(path=str(path / "disk"), bytes=size, free_floor=0), SAMPLES.geometry, fs=fs)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def right(chain: int, found: list[Stored | None]) -> list[bool]:
    for record, stored in zip(CHAINS[chain], found, strict=True):
        assert stored is None or stored.data == record.data, "a wrong byte"
    return [stored is not None for stored in found]


async def waits(disk: SlowDisk) -> None:
    await anyio.to_thread.run_sync(disk.waiting.wait)


@pytest.mark.asyncio
async def test_a_slow_disk_stops_neither_the_loop_nor_readers(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with opened(tmp_path, disk) as tier:
        await tier.put(SHELF, CHAINS[0])
        disk.waiting.clear()
        disk.quick.clear()
        writing = asyncio.ensure_future(tier.put(SHELF, CHAINS[1]))
        await waits(disk)
        with anyio.fail_after(20):
            for _ in range(10):
                assert right(0, await tier.get(SHELF, names(CHAINS[0]))) == [True] * 4
                assert tier.peek(SHELF, names(CHAINS[1])) == 0, "not there before it is durable"
                assert await tier.contains(SHELF, names(CHAINS[0])) == [True] * 4
                await tier.touch(SHELF, {})
                assert len([each async for each in tier.listing()]) == 4
                assert tier.stats().blocks == 4
        assert not writing.done()
        disk.quick.set()
        assert await writing == [True] * 4


@pytest.mark.asyncio
async def test_a_put_that_is_given_up_is_whole_or_nothing_and_stops_nobody(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with opened(tmp_path, disk) as tier:
        disk.quick.clear()
        with anyio.move_on_after(0.01):
            await tier.put(SHELF, CHAINS[0])
        others = [asyncio.ensure_future(tier.put(SHELF, CHAINS[each])) for each in (1, 2)]
        await asyncio.sleep(0)
        others[0].cancel()
        disk.quick.set()
        assert await others[1] == [True] * 4
        there = right(0, await tier.get(SHELF, names(CHAINS[0])))
        assert there in ([True] * 4, [False] * 4)
        assert right(1, await tier.get(SHELF, names(CHAINS[1]))) == [False] * 4
        assert (await tier.verify()).problems == ()


@pytest.mark.asyncio
async def test_close_can_be_given_up_and_the_lock_goes_when_the_disk_answers(tmp_path: Path) -> None:
    disk = SlowDisk()
    tier = DiskTier(DiskOptions(path=str(tmp_path / "disk"), bytes=BYTES, free_floor=0), SAMPLES.geometry, fs=disk)
    await tier.open()
    disk.waiting.clear()
    disk.quick.clear()
    writing = asyncio.ensure_future(tier.put(SHELF, CHAINS[0]))
    await waits(disk)
    with anyio.move_on_after(0.01) as scope:
        await tier.close()
    assert scope.cancelled_caught
    with pytest.raises(StorageError):
        await tier.get(SHELF, [])
    disk.quick.set()
    assert await writing == [True] * 4
    async with opened(tmp_path, QuickFilesystem()) as again:
        assert again.stats().healthy, "the lock is free"
        assert right(0, await again.get(SHELF, names(CHAINS[0]))) == [True] * 4


@pytest.mark.asyncio
async def test_every_call_can_be_cancelled_anywhere(tmp_path: Path) -> None:
    async with opened(tmp_path, QuickFilesystem()) as tier:
        await tier.put(SHELF, CHAINS[0])
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: tier.put(SHELF, CHAINS[1]),
            lambda: tier.get(SHELF, names(CHAINS[0])),
            lambda: tier.delete(SHELF, names(CHAINS[2])),
            tier.flush,
            tier.compact,
        ]
        for call in calls:
            for steps in range(6):
                task = asyncio.ensure_future(call())
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
        assert right(0, await tier.get(SHELF, names(CHAINS[0]))) == [True] * 4
        assert all(await tier.put(SHELF, CHAINS[3]))
        assert (await tier.verify()).problems == ()


@pytest.mark.asyncio
async def test_sessions_come_back_as_they_were_while_others_are_written(tmp_path: Path) -> None:
    rng = random.Random(5)  # noqa: S311  # no secret
    hits = 0

    async def resume(tier: DiskTier, chain: int) -> None:
        nonlocal hits
        found = await tier.get(SHELF, names(CHAINS[chain]))
        hits += all(right(chain, found))
        await tier.put(SHELF, CHAINS[chain])
        await tier.put(SHELF, SAMPLES.chain(SHELF, 4, seed=1000 + rng.randrange(20)))

    async with opened(tmp_path, QuickFilesystem(), 2 << 20) as tier:
        for chain in CHAINS:
            await tier.put(SHELF, chain)
        for _ in range(6):
            order = rng.sample(range(64), 64)
            for at in range(0, 64, 8):
                async with anyio.create_task_group() as group:
                    for number in order[at : at + 8]:
                        group.start_soon(resume, tier, number)
        assert tier.stats().corrupt == 0
        assert tier.stats().bytes <= 2 << 20
    assert hits > 100


def test_many_threads_at_once_see_whole_blocks_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "disk")

    def work(seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311  # no secret
        for _ in range(40):
            chain = CHAINS[rng.randrange(48)]
            match rng.randrange(8):
                case 0:
                    store.delete(SHELF, names(chain[3:]))
                case 1:
                    store.touch(SHELF, {chain[0].head.name: chain[0].meta})
                case 2 if seed == 0:
                    store.compact()
                case 3 | 4:
                    store.put(SHELF, chain)
                case _:
                    kept(store, chain)

    with bench.opened(segment_bytes=10 * 4096) as store:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert store.stats().corrupt == 0
        assert store.stats().bytes <= BYTES
        assert store.verify().problems == ()
    with bench.opened(strict=True) as store:
        assert store.verify().problems == ()


READER = """
import sys, pathlib
from octavo.tests.storage.disk_samples import *
bench = Bench(pathlib.Path(sys.argv[1]))
chains = [SAMPLES.chain(SHELF, 4, seed=seed) for seed in range(48)]
hits = 0
for _ in range(10):
    with bench.opened(read_only=True) as store:
        hits += sum(sum(kept(store, chain)) for chain in chains)
        assert store.put(SHELF, chains[0][:1]) in ([False], [True])
print(hits)
"""


def test_another_process_reads_along_while_one_writes(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "disk")
    with bench.opened(segment_bytes=10 * 4096) as store:
        for chain in CHAINS[:40]:
            store.put(SHELF, chain)
        command = [sys.executable, "-W", "error", "-c", READER, str(bench.path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:  # noqa: S603  # our own
            rounds = 0
            while reader.poll() is None:
                store.put(SHELF, CHAINS[rounds % 64])
                store.delete(SHELF, names(CHAINS[(rounds + 7) % 64][2:]))
                rounds += 1
                if rounds % 16 == 0:
                    store.compact()
            assert reader.stdout is not None
            assert int(reader.stdout.read()) > 0
        assert reader.returncode == 0
        assert store.stats().corrupt == 0
        assert store.verify().problems == ()
