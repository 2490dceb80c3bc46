"""The disk tier when the disk is full, fails, is not ours, or holds rubbish."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from octavo.errors import StorageError
from octavo.storage.files.filesystem import File
from octavo.tests.storage.disk_samples import BYTES, SAMPLES, SHELF, Bench, QuickFilesystem, kept, names
from octavo.tests.storage.shim import RecordingFilesystem

CHAINS = [SAMPLES.chain(SHELF, 4, seed=seed) for seed in range(6)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "disk")


def error(number: int, kind: str) -> Exception:
    """What the operation would raise."""
    if kind == "commit":
        return sqlite3.OperationalError("database or disk is full" if number == errno.ENOSPC else "disk I/O error")
    return OSError(number, os.strerror(number))


class Faults:
    """Fails the operations from ``first`` to ``last``, counted from 1; notes how many there were."""

    def __init__(self, first: int, last: int, number: int) -> None:
        self.first, self.last, self.number = first, last, number
        self.count = 0

    def __call__(self, kind: str, path: Path) -> None:
        self.count += 1
        if self.first <= self.count <= self.last:
            raise error(self.number, kind)


def scenario(bench: Bench) -> None:
    """Must not raise, whatever fails."""
    with bench.opened(segment_bytes=12 * 4096) as store:
        for chain in CHAINS[:4]:
            store.put(SHELF, chain)
            kept(store, chain)
        _quietly(lambda: store.delete(SHELF, names(CHAINS[1][2:])))
        _quietly(store.compact)
        store.put(SHELF, CHAINS[4])
        for chain in CHAINS:
            kept(store, chain)
        assert store.stats().bytes <= BYTES


def _quietly(call: Callable[[], object]) -> None:
    """These may say that they failed."""
    with contextlib.suppress(StorageError):
        call()


def operations(tmp_path: Path) -> int:
    faults = Faults(0, -1, 0)
    scenario(Bench(tmp_path / "count", RecordingFilesystem(tmp_path / "count", faults)))
    return faults.count


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("length", [1, 2, 10**6])
def test_no_failing_call_gets_out_or_leaves_half_a_block(tmp_path: Path, number: int, length: int) -> None:
    for first in range(1, operations(tmp_path) + 1):
        root = tmp_path / str(first)
        faults = Faults(first, first + length - 1, number)
        bench = Bench(root / "disk", RecordingFilesystem(root, faults))
        scenario(bench)
        bench.fs = QuickFilesystem()
        with bench.opened(strict=True) as store:
            for chain in CHAINS:
                kept(store, chain)
            assert store.stats().corrupt == 0
            assert store.verify().problems == ()
            assert store.put(SHELF, CHAINS[5]) == [True] * 4
        shutil.rmtree(root, ignore_errors=True)


class SmallDisk(QuickFilesystem):
    """A disk of ``room`` bytes."""

    def __init__(self, root: Path, room: int) -> None:
        self.root = root
        self.room = room
        self.is_honest = True
        """Whether it says beforehand how much is free."""

    def _left(self) -> int:
        return self.room - sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def free_bytes(self, folder: Path) -> int:
        return max(self._left(), 0) if self.is_honest else 1 << 40

    def write(self, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        if sum(map(len, buffers)) > self._left():
            super().write(file, offset, [bytes(buffers[0])[:100]])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, offset, buffers)


@pytest.mark.parametrize("is_honest", [True, False])
def test_a_disk_that_fills_up_before_the_bound_makes_old_blocks_go(bench: Bench, is_honest: bool) -> None:
    bench.path.mkdir()
    disk = SmallDisk(bench.path, 1 << 20)
    disk.is_honest = is_honest
    bench.fs = disk
    with bench.opened(bytes=1 << 30, segment_bytes=64 << 10) as store:
        kept_last = 0
        for seed in range(60):
            records = SAMPLES.chain(SHELF, 8, seed=seed)
            store.put(SHELF, records)
            kept_last += all(kept(store, records))
        assert kept_last > 50
        assert store.stats().evicted > 0
        assert store.verify().problems == ()


def test_the_floor_is_left_to_others(bench: Bench) -> None:
    bench.path.mkdir()
    bench.fs = disk = SmallDisk(bench.path, 4 << 20)
    with bench.opened(bytes=1 << 30, segment_bytes=64 << 10, free_floor=2 << 20) as store:
        for seed in range(80):
            store.put(SHELF, SAMPLES.chain(SHELF, 8, seed=seed))
        assert disk.free_bytes(bench.path) >= (2 << 20) - (600 << 10), "index aside"
        blocks = store.stats().blocks
        assert blocks > 100
        disk.room -= 3 << 20  # somebody else fills the disk: the tier does not grow, and is not emptied either
        disk.room += 1 << 20
        for seed in range(80, 90):
            store.put(SHELF, SAMPLES.chain(SHELF, 8, seed=seed))
        assert blocks * 0.7 < store.stats().blocks <= blocks


def test_writes_pause_after_a_failure_and_go_on_when_it_is_over(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(10**9, 10**9, errno.EROFS)
    bench.fs = RecordingFilesystem(bench.path, faults)
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
        faults.first, faults.last = 0, 10**9
        for _ in range(5):
            assert store.put(SHELF, CHAINS[1]) == [False] * 4
        failed_at = faults.count
        assert store.put(SHELF, CHAINS[1]) == [False] * 4
        assert faults.count == failed_at, "while writes pause, nothing is tried"
        assert kept(store, CHAINS[0]) == [True] * 4
        assert not store.stats().healthy
        assert "Read-only file system" in store.stats().problem
        assert store.stats().declined == 24
        assert len([each for each in caplog.records if "takes_no_writes" in each.message]) == 1
        faults.last = 0
        assert store.put(SHELF, CHAINS[1]) == [False] * 4
        bench.clock.now += 30.0
        assert store.put(SHELF, CHAINS[1]) == [True] * 4
        assert store.stats().healthy


def test_a_folder_that_could_not_be_had_at_first_is_tried_again(bench: Bench) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
    faults = Faults(0, 10**9, errno.ENOSPC)
    bench.fs = RecordingFilesystem(bench.path, faults)
    with bench.opened() as store:
        assert store.put(SHELF, CHAINS[1]) == [False] * 4
        assert kept(store, CHAINS[0]) == [True] * 4
        assert not store.stats().healthy
        faults.last = 0
        assert store.put(SHELF, CHAINS[1]) == [False] * 4
        bench.clock.now += 30.0
        assert store.put(SHELF, CHAINS[1]) == [True] * 4
        assert kept(store, CHAINS[0] + CHAINS[1]) == [True] * 8
        assert store.stats().healthy


def _not_a_folder(path: Path) -> None:
    path.write_text("a file")


def _parent_is_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("a file")


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("spoil", [_not_a_folder, _parent_is_a_file, _loop])
def test_a_folder_that_cannot_be_had_is_an_empty_tier_or_an_error(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path / "parent" / "disk")
    bench.path.parent.mkdir()
    spoil(bench.path)
    with bench.opened() as store:
        assert store.put(SHELF, CHAINS[0]) == [False] * 4
        assert kept(store, CHAINS[0]) == [False] * 4
        assert not store.stats().healthy
        assert str(bench.path) in store.stats().problem
        store.flush()
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    with pytest.raises(StorageError, match="cannot write"):
        bench.store(strict=True).open()


def test_a_path_that_is_too_long_is_no_crash(tmp_path: Path) -> None:
    bench = Bench(tmp_path / ("x" * 300))
    with bench.opened() as store:
        assert "too long" in store.stats().problem


def test_a_folder_that_can_only_be_read_is_read(bench: Bench) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
    bench.fs = RecordingFilesystem(bench.path, Faults(0, 10**9, errno.EROFS))
    with bench.opened() as store:
        assert kept(store, CHAINS[0]) == [True] * 4
        assert store.put(SHELF, CHAINS[1]) == [False] * 4
        assert store.delete(SHELF, names(CHAINS[0][3:])) == 1
        assert not store.stats().healthy
        with pytest.raises(StorageError, match="reading only"):
            store.erase(SHELF.tenant)


def _middle(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    at = len(raw) // 2
    raw[at : at + 100] = random.Random(1).randbytes(100)  # noqa: S311  # no secret
    path.write_bytes(raw)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").touch()


def _link(path: Path) -> None:
    moved = path.rename(path.parent.parent / "moved")
    path.symlink_to(moved)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE Cache (key, value)")
    database.close()


def _header(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[:16] = b"no database here"
    path.write_bytes(raw)


def _gone(path: Path) -> None:
    path.unlink()


SPOILERS = [_middle, _half, _empty, _folder, _link, _pipe, _foreign, _header, _gone]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_broken_index_is_set_aside_and_made_anew(
    bench: Bench, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with bench.opened() as store:
        for chain in CHAINS:
            store.put(SHELF, chain)
    spoil(bench.home / "index.sqlite")
    with bench.opened(strict=True) as store:
        there = [kept(store, chain) for chain in CHAINS]
        assert store.stats().healthy
        assert store.put(SHELF, CHAINS[0]) == [True] * 4
        assert store.verify().problems == ()
    if spoil is not _middle:  # a hole in the middle may cost some rows only
        assert all(all(chain) for chain in there), "the segments know everything"
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    caplog.clear()
    with bench.opened(strict=True) as store:
        assert kept(store, CHAINS[0]) == [True] * 4
    assert [each for each in caplog.records if each.levelname == "WARNING"] == [], "it must not fail each time"


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("name", ["identity.json", "used", "lock", "blocks-00000001.seg", "used.tmp"])
def test_any_other_broken_file_costs_its_blocks_at_most(bench: Bench, name: str, spoil: Callable[[Path], None]) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
    with bench.opened() as store:
        store.put(SHELF, CHAINS[1])
    (bench.home / "used.tmp").write_text("left over")
    spoil(bench.home / name)
    for _ in range(2):
        with bench.opened(strict=True) as store:
            assert kept(store, CHAINS[1]) == [True] * 4
            kept(store, CHAINS[0])
            assert store.put(SHELF, CHAINS[0]) == [True] * 4
            assert kept(store, CHAINS[0]) == [True] * 4


def _flips(bench: Bench, step: int, first: int) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0][:2])
    files = {path: path.read_bytes() for path in bench.home.iterdir()}
    for path, raw in files.items():
        for at in range(first % step, len(raw), step):
            bad = bytearray(raw)
            bad[at] ^= 1 << (at % 8)
            path.write_bytes(bad)
            with bench.opened() as store:
                there = kept(store, CHAINS[0][:2])
                if path.suffix == ".seg" and at >= 4096:
                    assert not all(there), f"byte {at} of {path.name}"
                assert store.put(SHELF, CHAINS[0][:2]) == [True] * 2
            for stale in bench.path.rglob("*"):
                if stale.is_file():
                    stale.unlink()
            for each, content in files.items():
                each.write_bytes(content)


def test_a_flipped_bit_in_any_file_never_gives_a_wrong_byte(bench: Bench) -> None:
    _flips(bench, 257, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_flipped_byte_never_gives_a_wrong_byte(bench: Bench) -> None:
    _flips(bench, 1, 0)


def test_every_bit_of_a_row_counts(bench: Bench) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
    database = sqlite3.connect(bench.home / "index.sqlite")
    changes = [
        "namespace = zeroblob(32)", "tenant = zeroblob(32)", "name = zeroblob(32)", "parent = zeroblob(32)",
        "start = start + 1", "tokens = zeroblob(16)", "segment = segment + 1", "offset = offset + 4096",
        "length = length + 4096", "meta = zeroblob(20)", "sum = sum + 1", "name = 'text'", "start = NULL",
        "meta = CAST(x'ff80' AS TEXT)", "tokens = 17", "offset = -4096", "length = 1152921504606846976",
    ]  # fmt: skip
    database.close()
    pristine = (bench.home / "index.sqlite").read_bytes()
    for change in changes:
        with sqlite3.connect(bench.home / "index.sqlite") as database:
            database.execute(f"UPDATE blocks SET {change} WHERE id = 2")  # noqa: S608  # ours
        database.close()
        with bench.opened() as store:
            assert kept(store, CHAINS[0]) == [True, False, True, True], change
        (bench.home / "index.sqlite").write_bytes(pristine)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_nothing_that_is_planted_is_ever_executed(bench: Bench, tmp_path: Path) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
    payload = pickle.dumps(Bomb(tmp_path / "marker"))
    for path in sorted(bench.home.iterdir()):
        for content in (payload, payload * 200, path.read_bytes()[:4096] + payload * 200):
            path.write_bytes(content)
            with bench.opened() as store:
                kept(store, CHAINS[0])
                assert store.put(SHELF, CHAINS[0]) == [True] * 4
    with sqlite3.connect(bench.home / "index.sqlite") as database:
        database.execute("UPDATE blocks SET meta = ?, tokens = ?", (payload, payload))
        database.execute("CREATE TRIGGER t AFTER INSERT ON blocks BEGIN DELETE FROM blocks; END")
    database.close()
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
        assert kept(store, CHAINS[0]) == [True] * 4, "a stranger's trigger is not run"
    assert not (tmp_path / "marker").exists()


def test_a_bad_block_is_a_miss_once_and_then_written_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
        path = next(bench.home.glob("*.seg"))
        raw = bytearray(path.read_bytes())
        raw[2 * 4096 + 1000] ^= 1
        path.write_bytes(raw)
        assert kept(store, CHAINS[0]) == [True, False, True, True]
        assert store.peek(SHELF, names(CHAINS[0])) == 1
        assert store.stats().corrupt == 1
        assert len([each for each in caplog.records if "block_dropped" in each.message]) == 1
        assert store.put(SHELF, CHAINS[0]) == [True] * 4
        assert kept(store, CHAINS[0]) == [True] * 4
    with bench.opened() as store:
        assert kept(store, CHAINS[0]) == [True] * 4


def test_a_bad_spot_on_the_disk_costs_one_block_only(bench: Bench) -> None:
    class BadSpot(QuickFilesystem):
        def read_into(self, file: File, offset: int, buffer: memoryview) -> int:
            if file.path.name == "blocks-00000001.seg" and offset <= 2 * 4096 + 500 < offset + len(buffer):
                raise OSError(errno.EIO, "Input/output error")
            return super().read_into(file, offset, buffer)

    bench.fs = BadSpot()
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
        assert kept(store, CHAINS[0]) == [True, False, True, True]
        assert store.compact() > 0
        assert kept(store, CHAINS[0]) == [True, False, True, True]


def test_verify_names_every_bad_block(bench: Bench) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAINS[0])
        path = next(bench.home.glob("*.seg"))
        raw = bytearray(path.read_bytes())
        raw[2 * 4096 + 1000] ^= 1
        raw[3 * 4096 + 4000] ^= 1
        raw[5] ^= 1
        path.write_bytes(raw)
        report = store.verify()
        assert (report.segments, report.blocks, len(report.problems)) == (1, 4, 3)
        assert CHAINS[0][1].head.name.hex()[:16] in report.problems[1]
