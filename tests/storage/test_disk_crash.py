"""The disk tier after a crash at any point: each block whole or absent, what was confirmed is there, what was deleted
is not.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo.storage.base import Record
from octavo.storage.disk.store import DiskStore
from octavo.storage.naming import Shelf
from octavo.tests.storage.disk_samples import BYTES, SAMPLES, SHELF, Bench, kept, names
from octavo.tests.storage.shim import Crash, RecordingFilesystem

OTHER = SAMPLES.shelf("other")
CHAINS = {(shelf, seed): SAMPLES.chain(shelf, 4, seed=seed) for shelf in (SHELF, OTHER) for seed in range(6)}
Key = tuple[Shelf, int, int]


class Moment(NamedTuple):
    """What had to hold when so many operations were done."""

    operations: int
    present: frozenset[Key]
    gone: frozenset[Key]


class Diary:
    """Runs steps on a store and notes after each what may be relied on."""

    def __init__(self, bench: Bench, fs: RecordingFilesystem) -> None:
        self.bench = bench
        self.fs = fs
        self.moments = [Moment(0, frozenset(), frozenset())]
        self.gone: set[Key] = set()

    def note(self, store: DiskStore) -> None:
        present = {
            (shelf, seed, at)
            for (shelf, seed), records in CHAINS.items()
            for at, is_kept in enumerate(kept(store, records, shelf))
            if is_kept
        }
        self.gone -= present
        self.moments.append(Moment(len(self.fs.operations), frozenset(present), frozenset(self.gone)))


def put(store: DiskStore, diary: Diary, shelf: Shelf, *seeds: int) -> None:
    for seed in seeds:
        store.put(shelf, CHAINS[shelf, seed])
        diary.note(store)


def delete(store: DiskStore, diary: Diary, shelf: Shelf, seed: int, at: slice) -> None:
    store.delete(shelf, names(CHAINS[shelf, seed][at]))
    diary.gone |= {(shelf, seed, number) for number in range(4)[at]}
    diary.note(store)


def writes(diary: Diary) -> None:
    with diary.bench.opened() as store:
        put(store, diary, SHELF, 0, 1)
        put(store, diary, OTHER, 0)
        delete(store, diary, SHELF, 0, slice(2, 4))
        put(store, diary, SHELF, 0)
    with diary.bench.opened() as store:
        put(store, diary, SHELF, 2)


def compaction(diary: Diary) -> None:
    with diary.bench.opened() as store:
        put(store, diary, SHELF, 0, 1, 2)
        delete(store, diary, SHELF, 1, slice(1, 4))
        store.compact()
        diary.note(store)
        put(store, diary, SHELF, 3)
        store.flush()
        diary.note(store)


def erasing(diary: Diary) -> None:
    with diary.bench.opened() as store:
        put(store, diary, SHELF, 0)
        put(store, diary, OTHER, 1, 2)
        store.erase(OTHER.tenant)
        diary.gone |= {(OTHER, seed, at) for seed in (1, 2) for at in range(4)}
        diary.note(store)
        put(store, diary, OTHER, 1)


def eviction(diary: Diary) -> None:
    """Segments of seven blocks, so that they come and go."""
    with diary.bench.opened(segment_bytes=8 * 4096) as store:
        put(store, diary, SHELF, 0, 1, 2, 3)
        assert store._parts is not None
        room, segments = store._parts.room, store._parts.state.segments
        room._capacity = segments.bytes + room._overhead(16) + 6 * 4096
        put(store, diary, OTHER, 0, 1, 2, 3)
        assert store.stats().evicted > 0
        put(store, diary, SHELF, 4, 0)


def a_broken_index(diary: Diary) -> None:
    """It turns out to be damaged while it is in use."""
    with diary.bench.opened() as store:
        put(store, diary, SHELF, 0, 1)
        assert store._parts is not None
        store._puts.make_amends(store._parts, sqlite3.DatabaseError("malformed"), 0, frozenset())
        diary.note(store)
        put(store, diary, SHELF, 2)


Scenario = Callable[[Diary], None]
Recorded = Callable[[Scenario], Diary]
SCENARIOS: list[Scenario] = [writes, compaction, erasing, eviction, a_broken_index]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    @cache
    def record(scenario: Scenario) -> Diary:
        root = tmp_path_factory.mktemp(scenario.__name__)
        fs = RecordingFilesystem(root)
        diary = Diary(Bench(root / "disk", fs), fs)
        scenario(diary)
        return diary

    return record


def check(diary: Diary, count: int, how: Crash, target: Path) -> None:
    diary.fs.replay(count, how, target)
    before = [moment for moment in diary.moments if moment.operations <= count][-1]
    after = next((moment for moment in diary.moments if moment.operations >= count), before)
    with Bench(target / "disk").opened(strict=True) as store:
        for (shelf, seed), records in CHAINS.items():
            for at, is_kept in enumerate(kept(store, records, shelf)):
                key = (shelf, seed, at)
                assert is_kept or key not in before.present & after.present, f"lost {seed}/{at} at {count} {how}"
                assert not is_kept or key not in before.gone & after.gone, f"{seed}/{at} is back at {count} {how}"
        was_erasing = before.gone != after.gone  # what is wiped goes from the index afterwards
        assert store.stats().corrupt == 0 or was_erasing, "the index named what was not there"
        assert store.stats().bytes <= BYTES
        assert store.put(SHELF, CHAINS[SHELF, 5]) == [True] * 4
        assert store.verify().problems == ()
    shutil.rmtree(target)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("how", Crash)
def test_a_crash_anywhere_loses_nothing_that_was_confirmed(
    scenario: Scenario, how: Crash, recorded: Recorded, tmp_path: Path
) -> None:
    diary = recorded(scenario)
    for count in range(len(diary.fs.operations) + 1):
        check(diary, count, how, tmp_path / "after")


def test_the_scenarios_do_what_they_are_for(recorded: Recorded) -> None:
    kinds = {each.__name__: {done.kind for done in recorded(each).fs.operations} for each in SCENARIOS}
    assert {"create", "write", "fsync", "fsync_folder", "commit", "rename"} <= kinds["writes"]
    assert "unlink" in kinds["compaction"]
    assert "unlink" in kinds["eviction"]


def test_records_are_what_they_seem() -> None:
    """The check of a wrong byte in ``kept`` can fail."""
    with pytest.raises(AssertionError, match="wrong byte"):
        kept(_Lying(), CHAINS[SHELF, 0][:1])  # type: ignore[arg-type]  # stands for a store


class _Lying:
    def get(self, shelf: Shelf, wanted: list[bytes]) -> list[Record]:
        record = CHAINS[SHELF, 0][0]
        return [record._replace(data=memoryview(bytes(len(record.data))))]
