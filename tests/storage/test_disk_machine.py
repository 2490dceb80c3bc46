"""The disk tier against a dictionary, whatever comes after what."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.storage.base import Meta, Record
from octavo.storage.disk.store import DiskStore
from octavo.storage.naming import BlockName, Shelf
from octavo.tests.storage.disk_samples import BYTES, SAMPLES, Bench, names

SHELVES = [SAMPLES.shelf("a"), SAMPLES.shelf("b"), SAMPLES.shelf("a", adapter="x")]
CHAINS = {(shelf, seed): SAMPLES.chain(shelf, 12, seed=seed) for shelf in SHELVES for seed in range(6)}
shelves = st.sampled_from(SHELVES)
seeds = st.integers(0, 5)
counts = st.integers(1, 12)


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="octavo-disk-"))
        self.bench = Bench(self.root / "disk")
        self.store = self.opened()
        self.put_ever: dict[tuple[Shelf, BlockName], bytes] = {}
        self.gone: set[tuple[Shelf, BlockName]] = set()

    def opened(self) -> DiskStore:
        store = self.bench.store(segment_bytes=10 * 4096)
        store.open()
        return store

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def check(self, shelf: Shelf, records: list[Record]) -> None:
        for record, stored in zip(records, self.store.get(shelf, names(records)), strict=True):
            key = (shelf, record.head.name)
            if stored is not None:
                assert key not in self.gone, "deleted or never put"
                assert bytes(stored.data) == self.put_ever[key]

    @rule(
        shelf=shelves,
        seed=seeds,
        first=counts,
        count=counts,
        priority=st.integers(-1, 1),
        ttl=st.sampled_from([None, 5.0]),
    )
    def put(self, shelf: Shelf, seed: int, first: int, count: int, priority: int, ttl: float | None) -> None:
        meta = Meta(self.bench.wall(), 0.0, 1, priority, ttl)
        records = [each._replace(meta=meta) for each in CHAINS[shelf, seed][first - 1 : first - 1 + count]]
        kept = self.store.put(shelf, records)
        there = self.store.contains(shelf, names(records))
        assert kept == there
        for record in records:
            self.put_ever[shelf, record.head.name] = bytes(record.data)
            self.gone.discard((shelf, record.head.name))
        self.check(shelf, records)

    @rule(shelf=shelves, seed=seeds)
    def get(self, shelf: Shelf, seed: int) -> None:
        records = CHAINS[shelf, seed]
        peeked = self.store.peek(shelf, names(records))
        there = [stored is not None for stored in self.store.get(shelf, names(records))]
        assert [*there, False].index(False) == peeked
        for record, is_there in zip(records, there, strict=True):
            assert not is_there or (shelf, record.head.name) in self.put_ever
        self.check(shelf, [record for record, is_there in zip(records, there, strict=True) if is_there])

    @rule(shelf=shelves, seed=seeds, at=counts, count=counts)
    def delete(self, shelf: Shelf, seed: int, at: int, count: int) -> None:
        records = CHAINS[shelf, seed][at - 1 : at - 1 + count]
        there = sum(self.store.contains(shelf, names(records)))
        assert self.store.delete(shelf, names(records)) == there
        self.gone |= {(shelf, record.head.name) for record in records}

    @rule(shelf=shelves)
    def erase(self, shelf: Shelf) -> None:
        there = len([each for each in self.store.listing(None) if each.shelf.tenant == shelf.tenant])
        assert self.store.erase(shelf.tenant) == there
        for (other, _), records in CHAINS.items():
            if other.tenant == shelf.tenant:
                self.gone |= {(other, record.head.name) for record in records}

    @rule(shelf=shelves, seed=seeds)
    def touch(self, shelf: Shelf, seed: int) -> None:
        self.store.touch(shelf, {name: Meta(self.bench.wall(), hits=3) for name in names(CHAINS[shelf, seed])})

    @rule()
    def compact(self) -> None:
        before = {each.head.name for each in self.store.listing(None)}
        self.store.compact()
        assert {each.head.name for each in self.store.listing(None)} == before

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule(seconds=st.sampled_from([0.5, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.bench.wall.now += seconds

    @rule()
    def reopen(self) -> None:
        before = {(each.shelf, each.head.name) for each in self.store.listing(None)}
        self.store.close()
        self.store = self.opened()
        assert {(each.shelf, each.head.name) for each in self.store.listing(None)} == before

    @rule()
    def crash(self) -> None:
        """The files as they are, without a goodbye."""
        before = {(each.shelf, each.head.name) for each in self.store.listing(None)}
        copy = self.root / "copy"
        shutil.copytree(self.bench.path, copy)
        self.store.close()
        shutil.rmtree(self.bench.path)
        copy.rename(self.bench.path)
        self.store = self.opened()
        assert before <= {(each.shelf, each.head.name) for each in self.store.listing(None)}

    @rule()
    @precondition(lambda self: len(self.put_ever) > 10)
    def lose_the_index(self) -> None:
        """What was deleted may be found again then, but nothing is lost."""
        before = {(each.shelf, each.head.name) for each in self.store.listing(None)}
        self.store.close()
        (self.bench.home / "index.sqlite").unlink()
        self.store = self.opened()
        found = {(each.shelf, each.head.name) for each in self.store.listing(None)}
        assert before <= found
        self.gone -= found

    @invariant()
    def the_bound_holds(self) -> None:
        files = [path.lstat().st_size for path in self.bench.path.rglob("*") if path.is_file()]
        assert sum(files) <= BYTES
        assert self.store.stats().bytes <= BYTES
        assert self.store.stats().healthy
        assert self.store.stats().corrupt == 0

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.store._parts is not None
        state = self.store._parts.state
        live = dict.fromkeys(state.segments.sizes, 0)
        for entry in state.entries.all():
            live[entry.location.segment] += entry.location.length
        assert live == state.segments.live
        sizes = {number: state.segments.path(number).stat().st_size for number in live}
        assert sizes == state.segments.sizes


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=50, stateful_step_count=30)
