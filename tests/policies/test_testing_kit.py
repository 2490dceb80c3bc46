"""The kit for authors of policies: it holds for what is shipped, finds each kind of fault, and needs no pytest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import pytest

from octavo.policies.eviction import Entry, EvictionPolicy, Lru, Returned
from octavo.policies.eviction.base import NAME_BYTES, Json, Tail
from octavo.policies.eviction.priority_ttl import PriorityTtl
from octavo.policies.scheduling.base import Job, SchedulingPolicy
from octavo.policies.scheduling.fair import Fair
from octavo.policies.scheduling.fcfs import Fcfs
from octavo.policies.scheduling.prefix_first import PrefixFirst
from octavo.policies.scheduling.priority import Priority
from octavo.policies.testing import EvictionPolicyContract, PrefixModel, SchedulingPolicyContract, play, walk


class Diary(Lru):
    """Writes down what it hears."""

    wants_requests = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.requests: list[tuple[int, bytes]] = []
        self.done: list[tuple[int, bytes]] = []
        self.ghosts: list[Returned] = []
        self.inserted: list[Entry] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self.inserted.append(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        super().on_evict(entry, blocks, now)
        return entry, blocks

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self.ghosts.append(returned)

    def on_request(self, number: int, names: bytes, now: float) -> None:
        self.requests.append((number, names))

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        self.done.append((number, names))


# the model


def test_what_was_evicted_comes_back_with_its_memory() -> None:
    diary = Diary(16)
    model = PrefixModel(diary)
    root = model.insert(2)
    leaf = model.insert(3, root)
    model.release(leaf)
    model.evict(1)
    (tail,) = model.ghosts
    assert (tail.above, tail.depth, tail.memory) == (leaf, 64, (leaf, 1))
    model.evict(2)
    (rest,) = model.ghosts
    assert (rest.above, rest.depth, rest.memory) == (root, 32, (leaf, 2))
    names = rest.names
    again = model.bring_back(rest)
    assert (again.blocks, again.depth, again.hits) == (2, 64, 0)
    assert [(each.memory, each.depth, each.blocks) for each in diary.ghosts] == [((leaf, 2), 32, 2)]
    assert diary.requests[-1][1].endswith(names)
    assert model.ghosts == []


def test_ghosts_are_as_many_as_the_pool_has_blocks() -> None:
    model = PrefixModel(Diary(4))
    for _ in range(9):
        model.release(model.insert(1))
    model.evict(9)
    assert [ghost.when for ghost in model.ghosts] == sorted(ghost.when for ghost in model.ghosts)
    assert len(model.ghosts) == 4


def test_random_walks_bring_ghosts_back_and_tell_of_requests() -> None:
    diary = Diary(32)
    model = PrefixModel(diary)
    walk(model, seed=1, steps=600)
    assert len(diary.ghosts) > 5
    assert len(diary.requests) > 100
    numbers = [number for number, _ in diary.requests]
    assert len(set(numbers)) == len(numbers)
    assert {number for number, _ in diary.done} <= set(numbers)
    assert all(len(names) % NAME_BYTES == 0 for _, names in (*diary.requests, *diary.done))


def test_names_are_those_of_the_blocks_and_outlive_splits() -> None:
    diary = Diary(32)
    model = PrefixModel(diary)
    entry = model.insert(4)
    model.release(entry)
    model.split(entry, 1)
    model.glance(entry)
    first, again = (names for _, names in diary.requests)
    assert (len(first), again) == (4 * NAME_BYTES, first)
    assert [names for _, names in diary.done] == [first, first]


def test_a_policy_that_takes_over_hears_of_all_parents_first_and_gets_no_memory() -> None:
    model = PrefixModel(Diary(64))
    walk(model, seed=2, steps=400)
    diary = Diary(64)
    model.use(diary)
    assert set(diary.inserted) == set(model.entries)
    order = {entry: at for at, entry in enumerate(diary.inserted)}
    for entry in model.entries:
        above = model._nodes[entry].parent
        assert above is None or order[above.entry] < order[entry]
    assert all(ghost.memory is None for ghost in model.ghosts)
    assert [act.entry.candidate for act in model.evict_all()]


def test_keys_are_of_the_living_and_lead_back_to_them() -> None:
    model = PrefixModel(Diary(32))
    walk(model, seed=3, steps=200)
    assert [model.find(model.key(entry)) for entry in model.entries] == model.entries
    with pytest.raises(KeyError):
        model.key(Entry(1, 4, 0.0, 0.0))
    assert model.find(0) is None


def test_tails_are_understood() -> None:
    class Nibbling(Lru):
        def victims(self, count: int, now: float) -> Iterator[Entry]:
            for entry in super().victims(count, now):
                yield Tail(entry, 1)  # type: ignore[misc]  # as policies of another base may

    model = PrefixModel(Nibbling(8))
    entry = model.insert(4)
    model.release(entry)
    assert model.evict(3) == [(entry, 1)] * 3


# faults that it finds


class _Scans(Lru):
    """Looks at all candidates for each victim."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while self._mine:
            yield min(self._mine, key=lambda entry: entry.last_use)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._mine: dict[Entry, None] = {}

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._mine[entry] = None

    def on_held(self, entry: Entry) -> None:
        del self._mine[entry]

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            del self._mine[entry]
        return None


class _ScansInAList(_Scans):
    """The same in C: no key, no call, but each one is compared."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while self._mine:
            last = [*self._mine][-1]
            listed = [*self._mine]
            listed.remove(last)
            yield last


class _ScansTheHeld(Lru):
    """Walks past what cannot go."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._all: dict[Entry, None] = {}

    def on_insert(self, entry: Entry, now: float) -> None:
        self._all[entry] = None

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            del self._all[entry]
        return super().on_evict(entry, blocks, now)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield from [entry for entry in self._all if entry.candidate]


class _Stateful(Lru):
    """Counts hits; a base for faults of its state."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses = 0

    def on_hit(self, entry: Entry, now: float) -> None:
        super().on_hit(entry, now)
        self.uses += 1

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"uses": self.uses}


class _NotPlain(_Stateful):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"uses": {1, 2}}  # type: ignore[dict-item]  # the fault


class _NotFinite(_Stateful):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"uses": float("inf")}


class _CountsItsSaves(_Stateful):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        self.uses += 1
        return super().dump(key)


class _SavingDisturbs(_Stateful):
    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        first = self._queue.first()
        if first is not None:
            self._queue.push(first, 1e9)
        return {}


class _Trusting(_Stateful):
    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        self.uses = state["uses"].__index__()  # type: ignore[union-attr]  # the fault


class _BelievesInEntries(_Stateful):
    """Takes what it finds for a candidate."""

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"mine": [key(entry) for entry in self._queue._ordered]}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        for number in state["mine"]:  # type: ignore[union-attr]  # the fault
            found = entry(number)  # type: ignore[arg-type]
            self._queue.push(found, found.last_use)  # type: ignore[arg-type,union-attr]


class _NeedsItsMemory(Lru):
    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        super().on_evict(entry, blocks, now)
        return [blocks]

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        assert isinstance(returned.memory, list)
        returned.memory.append(1)


class _NeverLetsGo(Lru):
    """Names what it was told to forget."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._lost: list[Entry] = []

    def on_forget(self, entry: Entry) -> None:
        self._lost.append(entry)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield from self._lost
        yield from super().victims(count, now)


class _StopsAtParents(Lru):
    """Names what there was at the call, and refuses to be asked again."""

    calls = 0

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        self.calls += 1
        if self.calls < 2:
            yield from list(super().victims(count, now))


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (_Scans, EvictionPolicyContract.test_does_hardly_more_for_a_victim_among_many_entries),
        (_ScansInAList, EvictionPolicyContract.test_does_hardly_more_for_a_victim_among_many_entries),
        (_ScansTheHeld, EvictionPolicyContract.test_does_hardly_more_for_a_victim_among_many_entries),
        (_NotPlain, EvictionPolicyContract.test_its_state_is_plain_data_and_saving_it_changes_nothing),
        (_NotFinite, EvictionPolicyContract.test_its_state_is_plain_data_and_saving_it_changes_nothing),
        (_CountsItsSaves, EvictionPolicyContract.test_its_state_is_plain_data_and_saving_it_changes_nothing),
        (_SavingDisturbs, EvictionPolicyContract.test_its_state_is_plain_data_and_saving_it_changes_nothing),
        (_Trusting, EvictionPolicyContract.test_a_damaged_state_does_no_harm),
        (_BelievesInEntries, EvictionPolicyContract.test_a_state_is_taken_over_after_a_restart),
        (_NeedsItsMemory, EvictionPolicyContract.test_takes_over_from_another_policy),
        (_NeverLetsGo, EvictionPolicyContract.test_forgets_what_is_none_of_its_any_more),
        (_StopsAtParents, EvictionPolicyContract.test_goes_on_while_the_tree_is_taken_apart),
    ],
)
def test_a_fault_of_a_policy_is_found(
    policy: type[EvictionPolicy], test: Callable[[EvictionPolicyContract], None]
) -> None:
    class Contract(EvictionPolicyContract):
        def make(self, capacity: int) -> EvictionPolicy:
            return policy(capacity)

    with pytest.raises((AssertionError, TypeError, AttributeError, ValueError)):
        test(Contract())


@pytest.mark.parametrize("entries", [24, 192])
def test_the_meter_counts_the_same_each_time(entries: int) -> None:
    class Contract(EvictionPolicyContract):
        def make(self, capacity: int) -> EvictionPolicy:
            return PriorityTtl(capacity, Lru)

    profile = sys.getprofile()
    assert Contract()._work(entries) == Contract()._work(entries)
    assert sys.getprofile() is profile


# scheduling


class TestFcfs(SchedulingPolicyContract):
    longest_wait = 0.0

    def make(self) -> SchedulingPolicy:
        return Fcfs()


class TestPriority(SchedulingPolicyContract):
    longest_wait = 5 * 30.0

    def make(self) -> SchedulingPolicy:
        return Priority()


class TestPriorityWithAMargin(SchedulingPolicyContract):
    def make(self) -> SchedulingPolicy:
        return Priority(margin=3)


class TestPrefixFirst(SchedulingPolicyContract):
    longest_wait = 3.0

    def make(self) -> SchedulingPolicy:
        return PrefixFirst(max_delay=3.0)


class TestFair(SchedulingPolicyContract):
    def make(self) -> SchedulingPolicy:
        return Fair()


class _Words(SchedulingPolicy):
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (job.tenant or "",)  # type: ignore[return-value]  # the fault


class _NotANumber(SchedulingPolicy):
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (float("nan") if job.order % 7 else 0.0,)


class _Fickle(SchedulingPolicy):
    def __init__(self) -> None:
        self._asked = 0

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        self._asked += 1
        return (self._asked * 7919 % 13,)


class _Quarrelsome(Fcfs):
    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        return waiting.tenant != running.tenant


class _LearnsByDisplacing(Fcfs):
    def __init__(self) -> None:
        self._asked = 0

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (self._asked, job.order)

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        self._asked += 1
        return False


class _Starving(SchedulingPolicy):
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (-job.priority, job.order)


class _Random(Fcfs):
    made: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.made.append(0)
        self._sign = 1 - 2 * (len(self.made) % 2)

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (self._sign * job.order,)


class _OtherVersion(Fcfs):
    api_version = (2, 0)


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (_Words, SchedulingPolicyContract.test_ranks_are_numbers_that_can_be_compared),
        (_NotANumber, SchedulingPolicyContract.test_ranks_are_numbers_that_can_be_compared),
        (_Fickle, SchedulingPolicyContract.test_asking_changes_nothing),
        (_LearnsByDisplacing, SchedulingPolicyContract.test_asking_changes_nothing),
        (_Quarrelsome, SchedulingPolicyContract.test_nobody_displaces_who_would_displace_him),
        (_Starving, SchedulingPolicyContract.test_who_has_waited_long_enough_goes_before_every_newcomer),
        (_Random, SchedulingPolicyContract.test_the_same_events_give_the_same_ranks),
        (_OtherVersion, SchedulingPolicyContract.test_is_written_for_this_version),
    ],
)
def test_a_fault_of_a_scheduling_policy_is_found(
    policy: type[SchedulingPolicy], test: Callable[[SchedulingPolicyContract], None]
) -> None:
    class Contract(SchedulingPolicyContract):
        longest_wait = 1000.0

        def make(self) -> SchedulingPolicy:
            return policy()

    with pytest.raises(AssertionError):
        test(Contract())


# without pytest


def test_the_kit_needs_no_pytest() -> None:
    code = "import sys, octavo.policies.testing; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603  # our own code
    assert {"pytest", "_pytest", "hypothesis"}.isdisjoint(done.stdout.split())


def test_play_takes_numbers_of_any_size() -> None:
    model = PrefixModel(Lru(16))
    for number in range(300):
        play(model, number * 10**12 + 7, number**9, number**5)
    assert model.entries
