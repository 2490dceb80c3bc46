"""The disk tier as its engine sees it: bound, order of eviction, other identities, locks, modes, times."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from octavo.errors import InvalidRequest, StorageError
from octavo.storage.base import Meta, Record, TierGeometry
from octavo.storage.disk.entries import Entry
from octavo.storage.disk.folder import Identified
from octavo.storage.disk.store import DiskStore
from octavo.storage.disk.tier import DiskOptions, DiskTier, store_settings
from octavo.storage.identity import Identity
from octavo.tests.storage.disk_samples import BYTES, SAMPLES, SHELF, Bench, kept, names

CHAIN = SAMPLES.chain(SHELF, 8)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "disk")


def used(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def other_geometry(**parts: str) -> TierGeometry:
    identity = Identity.of({"weights": "sample", **parts}, block_size=4, payload_bytes=512)
    return TierGeometry(identity, SAMPLES.geometry.record_bytes)


def test_everything_is_there_after_a_restart_and_nothing_is_written_twice(bench: Bench) -> None:
    with bench.opened() as store:
        assert store.put(SHELF, CHAIN) == [True] * 8
    before = sorted(path.name for path in bench.home.iterdir()), used(bench.path)
    with bench.opened() as store:
        assert kept(store, CHAIN) == [True] * 8
        assert store.put(SHELF, CHAIN) == [True] * 8
        assert store.peek(SHELF, names(CHAIN)) == 8
        assert store.stats().bytes >= used(bench.home) - 4096
    assert sorted(path.name for path in bench.home.iterdir()) == before[0]
    assert used(bench.path) == before[1]


def test_what_is_there_does_not_depend_on_a_clean_end(bench: Bench) -> None:
    left = bench.store()
    left.open()
    left.put(SHELF, CHAIN)
    view = bench.store(read_only=True)
    view.open()
    assert kept(view, CHAIN) == [True] * 8
    view.close()
    left.close()


def test_the_bound_holds_whatever_is_put(bench: Bench) -> None:
    with bench.opened() as store:
        for seed in range(30):
            records = SAMPLES.chain(SHELF, 16, seed=seed)
            assert any(store.put(SHELF, records))
            assert used(bench.path) <= BYTES
            assert store.stats().bytes <= BYTES
            kept(store, records)
        assert store.stats().evicted > 0
        assert store.stats().blocks > 40


def test_a_smaller_bound_holds_from_the_start(bench: Bench) -> None:
    with bench.opened(bytes=3 << 20) as store:
        for seed in range(20):
            store.put(SHELF, SAMPLES.chain(SHELF, 16, seed=seed))
        assert store.stats().blocks == 320
    with bench.opened() as store:
        assert used(bench.path) <= BYTES
        assert 0 < store.stats().blocks < 320


def test_a_chain_longer_than_the_tier_keeps_its_beginning(bench: Bench) -> None:
    long = SAMPLES.chain(SHELF, 400)
    with bench.opened() as store:
        for at in range(0, 400, 16):
            store.put(SHELF, long[at : at + 16])
        there = kept(store, long)
    assert there[:40] == [True] * 40
    assert not any(there[there.index(False) :]), "blocks whose parents are gone take up room"


def test_the_least_used_goes_first_and_priority_protects(bench: Bench) -> None:
    with bench.opened() as store:
        cold, warm, held, expired = (SAMPLES.chain(SHELF, 8, seed=seed) for seed in range(100, 104))
        store.put(SHELF, _with(held, Meta(priority=1)))
        store.put(SHELF, _with(expired, Meta(bench.wall(), priority=1, ttl=10.0)))
        store.put(SHELF, warm)
        store.put(SHELF, cold)
        bench.clock.now += 100.0
        bench.wall.now += 100.0
        kept(store, warm)
        for seed in range(10):
            store.put(SHELF, SAMPLES.chain(SHELF, 8, seed=seed))
            if not all(kept_quietly(store, cold)):
                break
        assert all(kept_quietly(store, warm))
        assert all(kept_quietly(store, held))
        for seed in range(10, 40):
            store.put(SHELF, SAMPLES.chain(SHELF, 8, seed=seed))
        assert kept_quietly(store, held) == [True] * 8
        assert not any(kept_quietly(store, expired)), "a priority whose time is over protects no more"


def _with(records: list[Record], meta: Meta) -> list[Record]:
    return [record._replace(meta=meta) for record in records]


def kept_quietly(store: DiskStore, records: list[Record]) -> list[bool]:
    """Without counting as a use."""
    return store.contains(SHELF, names(records))


def test_what_is_known_about_a_block_outlives_the_process(bench: Bench) -> None:
    with bench.opened() as store:
        store.put(SHELF, _with(CHAIN, Meta(bench.wall(), 5.0, 3, 2, 100.0, 0.25)))
        store.touch(SHELF, {CHAIN[0].head.name: Meta(bench.wall(), 0.0, 9, 4, 50.0, 0.5)})
    bench.wall.now += 20.0
    bench.clock.now = 3.0
    with bench.opened() as store:
        metas = {listed.head.name: listed.meta for listed in store.listing(None)}
    assert metas[CHAIN[0].head.name] == Meta(bench.wall(), 20.0, 9, 4, 30.0, 0.5)
    assert metas[CHAIN[1].head.name] == Meta(bench.wall(), 25.0, 3, 2, 80.0, 0.25)


@pytest.mark.parametrize("jump", [10 * 365 * 86400.0, -86400.0])
def test_a_wrong_clock_lets_nothing_live_for_ever(bench: Bench, jump: float) -> None:
    right = bench.wall.now
    bench.wall.now += jump
    with bench.opened() as store:
        store.put(SHELF, _with(CHAIN[:1], Meta(bench.wall(), 0.0, 1, 5, 10.0)))
        bench.clock.now += 1.0
        bench.wall.now = right
        store.put(SHELF, CHAIN[1:2])
        order = [entry.head.name for entry in sorted(_entries(store), key=lambda each: each.meta.written)]
        assert order == names(CHAIN[:2]), "within the process the order is that of use"
    with bench.opened() as store:
        ttl = next(listed.meta.ttl for listed in store.listing(None) if listed.head == CHAIN[0].head)
        assert ttl is not None
        assert ttl <= 10.0
    bench.wall.now += 11.0
    with bench.opened() as store:
        assert store.listing(None)[0].meta.ttl == 0.0


def _entries(store: DiskStore) -> list[Entry]:
    assert store._parts is not None
    return store._parts.state.entries.all()


@pytest.mark.parametrize(
    "change", [{"weights": "2"}, {"dtype": "bfloat16"}, {"rope": "other"}, {"tokenizer": "other"}, {"scaling": "2"}]
)
def test_blocks_of_another_identity_are_no_hits_and_no_hindrance(bench: Bench, change: dict[str, str]) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAIN)
    with bench.opened(other_geometry(**change)) as store:
        assert kept(store, CHAIN) == [False] * 8
        assert store.put(SHELF, CHAIN[:2]) == [True] * 2
    with bench.opened() as store:
        assert kept(store, CHAIN) == [True] * 8


def test_folders_of_other_identities_go_in_time(bench: Bench) -> None:
    with bench.opened(other_geometry(dtype="float16")) as store:
        store.put(SHELF, CHAIN)
    (bench.path / "mine").mkdir()
    (bench.path / "mine" / "index.sqlite").write_text("not yours")
    with bench.opened():
        assert len(list(bench.path.iterdir())) == 3
    bench.wall.now += 8 * 86400.0
    with bench.opened():
        pass
    assert sorted(path.name for path in bench.path.iterdir()) == sorted([bench.home.name, "mine"])


def test_a_folder_stamped_in_the_future_goes_in_time_too(bench: Bench) -> None:
    now = bench.wall.now
    bench.wall.now += 1e9
    with bench.opened(other_geometry(dtype="float16")):
        pass
    bench.wall.now = now
    with bench.opened():
        pass
    bench.wall.now += 8 * 86400.0
    with bench.opened():
        assert [path.name for path in bench.path.iterdir()] == [bench.home.name]


def test_other_identities_count_and_go_first_when_space_is_short(bench: Bench) -> None:
    with bench.opened(other_geometry(dtype="float16")) as store:
        for seed in range(5):
            store.put(SHELF, SAMPLES.chain(SHELF, 16, seed=seed))
    with bench.opened() as store:
        for seed in range(30):
            store.put(SHELF, SAMPLES.chain(SHELF, 16, seed=seed))
            assert used(bench.path) <= BYTES
        assert len(list(bench.path.iterdir())) == 1


def test_a_folder_that_another_engine_uses_is_never_removed(bench: Bench) -> None:
    with bench.opened(other_geometry(dtype="float16")) as first:
        first.put(SHELF, CHAIN)
        bench.wall.now += 1e9
        with bench.opened() as store:
            for seed in range(20):
                store.put(SHELF, SAMPLES.chain(SHELF, 16, seed=seed))
            assert store.stats().bytes <= BYTES
        assert kept(first, CHAIN) == [True] * 8


def test_a_second_engine_reads_only(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with bench.opened() as first:
        first.put(SHELF, CHAIN)
        with bench.opened() as second:
            assert kept(second, CHAIN) == [True] * 8
            assert second.put(SHELF, SAMPLES.chain(SHELF, 1, seed=1)) == [False]
            assert not second.stats().healthy
            assert "another engine" in second.stats().problem
        assert len([each for each in caplog.records if "takes_no_writes" in each.message]) == 1
        with pytest.raises(StorageError, match="another engine"):
            bench.store(strict=True).open()
        third = bench.store()
        third.open()
    bench.clock.now += 60.0
    assert third.put(SHELF, SAMPLES.chain(SHELF, 1, seed=1)) == [True], "the writer is gone"
    assert kept(third, CHAIN) == [True] * 8
    third.close()
    with bench.opened(strict=True) as store:
        assert store.stats().healthy


WRITER = """
import sys, pathlib
from octavo.tests.storage.disk_samples import *
bench = Bench(pathlib.Path(sys.argv[1]))
store = bench.store(strict=True)
store.open()
seed = 0
while True:
    print(int(all(store.put(SHELF, SAMPLES.chain(SHELF, 4, seed=seed)))), flush=True)
    seed += 1
"""


@pytest.mark.parametrize("puts", [1, 7, 40])
def test_after_sigkill_everything_confirmed_is_there_and_the_lock_is_free(bench: Bench, puts: int) -> None:
    command = [sys.executable, "-c", WRITER, str(bench.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:  # noqa: S603  # our own
        assert writer.stdout is not None
        confirmed = [writer.stdout.readline() for _ in range(puts)]
        writer.send_signal(signal.SIGKILL)
    assert confirmed[0] == b"1\n"
    with bench.opened(strict=True) as store:
        assert store.stats().bytes <= BYTES
        last = [kept(store, SAMPLES.chain(SHELF, 4, seed=seed)) for seed in range(max(puts - 10, 0), puts)]
        assert all(all(chain) for chain in last[-1:])
        assert store.put(SHELF, SAMPLES.chain(SHELF, 4, seed=10**6)) == [True] * 4
        assert store.verify().problems == ()


def test_modes_are_narrow_whatever_the_umask_and_the_past(bench: Bench) -> None:
    old = os.umask(0)
    try:
        bench.home.mkdir(parents=True)
        (bench.home / "used").write_text("1")
        with bench.opened(compression="zstd") as store:
            store.put(SHELF, CHAIN)
            found = {path: stat.S_IMODE(path.lstat().st_mode) for path in (bench.path, *bench.path.rglob("*"))}
    finally:
        os.umask(old)
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    assert any(path.name.endswith("-wal") for path in found)


def test_erase_leaves_no_byte_of_a_tenant_in_any_file(bench: Bench) -> None:
    gone, stays = SAMPLES.shelf("gone"), SAMPLES.shelf("stays")
    chains = {gone: SAMPLES.chain(gone, 6), stays: SAMPLES.chain(stays, 6, seed=9)}
    evicted = SAMPLES.chain(gone, 2, seed=5)
    with bench.opened(other_geometry(dtype="float16")) as store:
        store.put(gone, chains[gone])
        store.put(stays, chains[stays])
    with bench.opened() as store:
        store.put(gone, evicted)
        store.delete(gone, names(evicted))  # their frames are still in the segment
        for shelf, records in chains.items():
            store.put(shelf, records)
        (bench.home / "index.sqlite.broken-1").write_bytes(bytes(chains[gone][0].head.tokens))
        assert store.erase(gone.tenant) == 12
        everything = b"".join(path.read_bytes() for path in bench.path.rglob("*") if path.is_file())
        for record in chains[gone] + evicted:
            assert bytes(record.data[-200:]) not in everything
            assert record.head.tokens not in everything
            assert record.head.name not in everything
        assert kept(store, chains[stays], stays) == [True] * 6
    (bench.home / "index.sqlite").unlink()
    with bench.opened() as store:
        assert kept(store, chains[stays], stays) == [True] * 6
        assert kept(store, chains[gone] + evicted, gone) == [False] * 8
    with bench.opened(other_geometry(dtype="float16")) as store:
        assert kept(store, chains[stays], stays) == [True] * 6
        assert kept(store, chains[gone], gone) == [False] * 6


def test_erase_says_when_another_engine_may_hold_more(bench: Bench) -> None:
    with bench.opened(other_geometry(dtype="float16")), bench.opened() as store:
        store.put(SHELF, CHAIN)
        with pytest.raises(StorageError, match="another engine"):
            store.erase(SHELF.tenant)
        assert kept(store, CHAIN) == [False] * 8


def test_compaction_gives_back_what_is_dead_and_loses_nothing(bench: Bench) -> None:
    with bench.opened() as store:
        for seed in range(4):
            store.put(SHELF, SAMPLES.chain(SHELF, 8, seed=seed))
        store.delete(SHELF, names(SAMPLES.chain(SHELF, 8, seed=1)[3:]) + names(SAMPLES.chain(SHELF, 8, seed=2)))
        before = used(bench.home)
        assert store.compact() > 0
        assert used(bench.home) <= before - 13 * 4096 + 3 * 4096
        assert store.compact() == 0
        expected = [[True] * 8, [True] * 3 + [False] * 5, [False] * 8, [True] * 8]
        assert [kept(store, SAMPLES.chain(SHELF, 8, seed=seed)) for seed in range(4)] == expected
        assert store.verify().problems == ()
    with bench.opened() as store:
        assert [kept(store, SAMPLES.chain(SHELF, 8, seed=seed)) for seed in range(4)] == expected


def test_a_deleted_block_stays_deleted(bench: Bench) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAIN)
        assert store.delete(SHELF, names(CHAIN[6:]) * 2) == 2
    with bench.opened() as store:
        assert kept(store, CHAIN) == [True] * 6 + [False] * 2


def test_compression_keeps_what_is_smaller_and_reads_either(bench: Bench) -> None:
    flat = [_flat(record) for record in SAMPLES.chain(SHELF, 6)]
    with bench.opened(_big(), bytes=4 << 20, compression="zstd") as store:
        assert store.put(SHELF, flat) == [True] * 6
        packed = used(bench.home)
        assert [bytes(each.data) for each in store.get(SHELF, names(flat)) if each] == [bytes(r.data) for r in flat]
    with bench.opened(_big(), bytes=4 << 20) as store:
        assert [bytes(each.data) for each in store.get(SHELF, names(flat)) if each] == [bytes(r.data) for r in flat]
    assert packed < 6 * 40_000


def _big() -> TierGeometry:
    return TierGeometry(SAMPLES.identity, 40_000)


def _flat(record: Record) -> Record:
    return record._replace(data=memoryview(record.head.name * 1250))


def test_a_newer_format_is_set_aside(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAIN)
    (bench.home / "identity.json").write_bytes(msgspec.json.encode(Identified.of(SAMPLES.identity, 99)))
    with bench.opened() as store:
        assert store.stats().healthy
        assert kept(store, CHAIN) == [False] * 8
        assert store.put(SHELF, CHAIN) == [True] * 8
    aside = bench.path / f"{bench.home.name}.newer-1"
    assert (aside / "index.sqlite").exists()
    assert len([each for each in caplog.records if "set_aside" in each.message]) == 1


def test_a_damaged_format_number_is_no_newer_format(bench: Bench) -> None:
    with bench.opened() as store:
        store.put(SHELF, CHAIN)
    path = bench.home / "identity.json"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":9'))
    with contextlib.closing(sqlite3.connect(bench.home / "index.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
    with bench.opened() as store:
        assert store.stats().healthy
        assert kept(store, CHAIN) == [True] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x", "bytes": 1000}, "too little"),
        ({"path": "x\x00y", "bytes": 1 << 30}, "NUL"),
        ({"path": "x"}, "bytes"),
        ({"bytes": 1 << 30}, "path"),
        ({"path": "x", "bytes": 1 << 30, "compression": "lz4"}, "compression"),
        ({"path": "x", "bytes": 1 << 30, "colour": 1}, "colour"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        DiskTier.create(options, SAMPLES.geometry)


def test_the_smallest_tier_keeps_a_block(bench: Bench) -> None:
    with pytest.raises(InvalidRequest) as refused:
        store_settings(DiskOptions(path="x", bytes=1), _big())
    least = int(str(refused.value).rsplit(" ", 1)[1])
    with bench.opened(_big(), bytes=least) as store:
        assert store.put(SHELF, [_flat(CHAIN[0])]) == [True]
        assert used(bench.path) <= least


def test_a_link_to_the_folder_is_followed_and_one_inside_is_not(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    bench.path.symlink_to(tmp_path / "real")
    with bench.opened() as store:
        assert store.put(SHELF, CHAIN[:1]) == [True]
    home = tmp_path / "real" / bench.home.name
    home.rename(tmp_path / "elsewhere")
    home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="not a folder"):
        bench.store(strict=True).open()


def test_a_relative_path_stays_where_it_was(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bench.path = Path("relative")
    with bench.opened() as store:
        monkeypatch.chdir("/")
        assert store.put(SHELF, CHAIN) == [True] * 8
    assert used(tmp_path / "relative") > 8 * 4096


def test_nothing_is_logged_when_all_is_well(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with bench.opened() as store:
            store.put(SHELF, CHAIN)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_use_after_close_is_an_error(bench: Bench) -> None:
    store = bench.store()
    store.open()
    store.close()
    store.close()
    for call in (lambda: store.put(SHELF, CHAIN), lambda: store.get(SHELF, []), store.flush, store.compact):
        with pytest.raises(StorageError):
            call()
    assert store.peek(SHELF, names(CHAIN)) == 0
