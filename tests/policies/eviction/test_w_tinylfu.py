from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from octavo.policies.eviction import Entry, EvictionPolicy, Returned, WTinyLfu
from octavo.policies.testing import EvictionPolicyContract, PrefixModel
from octavo.tests.policies.eviction.replay import ACTS, CAPACITIES, Act, assert_alike


class TestWTinyLfu(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return WTinyLfu(capacity)


class Counter:
    def __init__(self, uses: int) -> None:
        self.uses = uses


class SlowWTinyLfu(EvictionPolicy):
    """The paper's figure 5 on plain lists, the least recently used first; counters are halved one by one. What is
    protected and has a count of 0 is the first victim, which is not in the paper."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.window_size = max(capacity // 100, 1)
        self.main_size = capacity - self.window_size
        self.protected_size = self.main_size * 4 // 5
        self.window: list[Entry] = []
        self.probation: list[Entry] = []
        self.protected: list[Entry] = []
        self.counters: dict[Entry, Counter] = {}
        self.every_counter: list[Counter] = []
        self.sample = 0

    def on_insert(self, entry: Entry, now: float) -> None:
        self.window.append(entry)
        self.counter(entry, 0)
        self.use(entry)
        self.spill()

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self.spill()
        self.demote()

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        queue = self.queue(lower)
        queue.insert(queue.index(lower) + 1, upper)
        self.counter(upper, self.counters[lower].uses)

    def on_hit(self, entry: Entry, now: float) -> None:
        self.use(entry)
        queue = self.queue(entry)
        queue.remove(entry)
        if queue is self.probation and entry.blocks <= self.protected_size:
            queue = self.protected
        queue.append(entry)
        self.demote()

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        if isinstance(returned.memory, Counter):
            counter = self.counters[entry]
            counter.uses = min(max(counter.uses, returned.memory.uses + 1), 15)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            self.queue(entry).remove(entry)
        memory = Counter(self.counters[entry].uses)
        self.every_counter.append(memory)
        return memory

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while any(entry.candidate for entry in self.window + self.probation + self.protected):
            self.spill()
            window, probation, protected = (
                [entry for entry in queue if entry.candidate] for queue in (self.window, self.probation, self.protected)
            )
            is_forgotten = bool(protected) and not self.counters[protected[0]].uses
            main = protected + probation if is_forgotten else probation + protected
            if not window or (main and total(self.window) <= self.window_size):
                yield main[0]
            elif main and self.counters[window[0]].uses > self.counters[main[0]].uses:
                self.window.remove(window[0])
                self.probation.append(window[0])
                yield main[0]
            else:
                yield window[0]

    def counter(self, entry: Entry, uses: int) -> None:
        self.counters[entry] = Counter(uses)
        self.every_counter.append(self.counters[entry])

    def use(self, entry: Entry) -> None:
        self.counters[entry].uses = min(self.counters[entry].uses + 1, 15)
        self.sample += entry.blocks
        if self.sample >= 10 * self.capacity:
            self.sample = 0
            for counter in self.every_counter:
                counter.uses //= 2

    def queue(self, entry: Entry) -> list[Entry]:
        return next(queue for queue in (self.window, self.probation, self.protected) if entry in queue)

    def spill(self) -> None:
        while self.window and total(self.window) > self.window_size:
            if total(self.probation) + total(self.protected) + self.window[0].blocks > self.main_size:
                return
            self.probation.append(self.window.pop(0))

    def demote(self) -> None:
        while total(self.protected) > self.protected_size:
            self.probation.append(self.protected.pop(0))


def total(queue: list[Entry]) -> int:
    return sum(entry.blocks for entry in queue)


@given(CAPACITIES, ACTS)
def test_it_drives_out_what_the_paper_does(capacity: int, acts: list[Act]) -> None:
    assert_alike(WTinyLfu, SlowWTinyLfu, capacity, acts)


class Shelf:
    """Single blocks that can go, in a pool of 11: one for the window, ten for the rest, eight of them protected."""

    def __init__(self) -> None:
        self.policy = WTinyLfu(11)
        self.model = PrefixModel(self.policy)

    def put(self, uses: int = 1) -> Entry:
        entry = self.model.insert(1)
        self.model.release(entry)
        self.use(entry, uses - 1)
        return entry

    def use(self, entry: Entry, times: int = 1) -> None:
        for _ in range(times):
            self.model.glance(entry)

    def evicted(self, count: int) -> list[Entry]:
        return [act.entry for act in self.model.evict(count)]


def test_while_there_is_room_nobody_is_refused() -> None:
    shelf = Shelf()
    entries = [shelf.put() for _ in range(11)]
    assert [shelf.policy.home(entry) is shelf.policy._window for entry in entries] == [False] * 10 + [True]


def test_the_newcomer_must_be_used_more_often_than_the_victim() -> None:
    shelf = Shelf()
    old = [shelf.put() for _ in range(10)]
    equal = shelf.put()
    younger = shelf.put()
    assert shelf.evicted(1) == [equal], "as often is not enough"
    shelf.use(younger)
    shelf.put()
    assert shelf.evicted(1) == [old[0]]
    assert shelf.policy.home(younger) is shelf.policy._probation


def test_what_the_window_holds_within_its_size_is_not_asked() -> None:
    shelf = Shelf()
    old = [shelf.put() for _ in range(10)]
    shelf.put()
    assert shelf.evicted(3) == old[:3]


def test_room_that_a_victim_left_is_for_the_window_without_a_contest() -> None:
    shelf = Shelf()
    large = shelf.model.insert(2)
    shelf.model.release(large)
    old = [shelf.put() for _ in range(8)]
    newcomers = [shelf.put(2), shelf.put(), shelf.put()]
    assert shelf.evicted(2) == [large], "the first newcomer is used more often, and it is smaller"
    assert shelf.evicted(1) == [old[0]], "the second was let in"
    assert [shelf.policy.home(entry) is shelf.policy._window for entry in newcomers] == [False, False, True]


def test_what_is_too_much_for_the_protected_part_is_on_probation_again() -> None:
    shelf = Shelf()
    entries = [shelf.put() for _ in range(10)]
    for entry in entries[:9]:
        shelf.use(entry)
    homes = [shelf.policy.home(entry) is shelf.policy._protected for entry in entries]
    assert homes == [False, *[True] * 8, False]
    assert shelf.evicted(10) == entries


def test_a_newcomer_that_beats_a_protected_one_does_not_go_in_its_place() -> None:
    shelf = Shelf()
    old = [shelf.put() for _ in range(8)]
    for _ in range(2):
        shelf.model.insert(1)  # held: nothing on probation can go
    for entry in old:
        shelf.use(entry)
    newcomers = [shelf.put(9), shelf.put()]
    [victim] = shelf.evicted(1)
    assert victim is old[0]
    assert shelf.policy.home(newcomers[0]) is shelf.policy._probation


def test_what_is_protected_and_forgotten_goes_before_what_is_on_probation() -> None:
    shelf = Shelf()
    forgotten = shelf.put(2)
    rest = [shelf.put() for _ in range(9)]
    shelf.use(forgotten)
    shelf.use(rest[-1], 11 * 10 * 4)
    shelf.model.hit(rest[-1])
    for entry in rest[:-1]:
        assert shelf.policy.frequency(entry) == 0
    assert shelf.evicted(1) == [forgotten]


def test_the_memory_of_uses_survives_eviction() -> None:
    policy = WTinyLfu(20)
    entry = Entry(1, 16, 0.0, 0.0)
    policy.on_insert(entry, 0.0)
    for _ in range(4):
        policy.on_hit(entry, 0.0)
    entry.blocks = 0
    memory = policy.on_evict(entry, 1, 0.0)
    back, new = (Entry(1, 16, 0.0, 0.0) for _ in range(2))
    for each in (back, new):
        policy.on_insert(each, 1.0)
    policy.on_ghost_hit(back, Returned(memory, 0, 1.0), 1.0)
    policy.on_ghost_hit(new, Returned("foreign", 0, 1.0), 1.0)
    assert [policy.frequency(back), policy.frequency(new)] == [6, 1]


def test_uses_are_not_counted_twice_when_only_the_tail_was_gone() -> None:
    policy = WTinyLfu(20)
    entry = Entry(2, 32, 0.0, 0.0)
    policy.on_insert(entry, 0.0)
    policy.on_hit(entry, 0.0)
    entry.blocks = 1
    memory = policy.on_evict(entry, 1, 0.0)
    policy.on_hit(entry, 1.0)
    entry.blocks = 2
    policy.on_extend(entry, 1, 1.0)
    policy.on_ghost_hit(entry, Returned(memory, 16, 1.0), 1.0)
    assert policy.frequency(entry) == 3


def test_counters_have_four_bits_and_are_halved_with_ten_pools_of_uses() -> None:
    policy = WTinyLfu(10)
    hot, other = Entry(1, 16, 0.0, 0.0), Entry(1, 16, 0.0, 0.0)
    for entry in (hot, other):
        policy.on_insert(entry, 0.0)
    for _ in range(97):
        policy.on_hit(hot, 0.0)
    assert policy.frequency(hot) == 15
    policy.on_hit(hot, 0.0)
    assert [policy.frequency(hot), policy.frequency(other)] == [7, 0]
    for expected in (3, 1, 0):
        for _ in range(100):
            policy.on_hit(other, 0.0)
        assert policy.frequency(hot) == expected


def test_a_run_larger_than_the_protected_part_is_never_protected() -> None:
    policy = WTinyLfu(11)
    entry = Entry(9, 144, 0.0, 0.0)
    policy.on_insert(entry, 0.0)
    policy.on_hit(entry, 0.0)
    assert policy.home(entry) is policy._probation


def test_state_is_taken_over() -> None:
    first, second = Shelf(), Shelf()
    entries = [first.put(1 + number % 3) for number in range(14)]
    copies = [second.put() for _ in range(14)]
    state = first.policy.dump(entries.index)
    second.policy.load(state, lambda key: copies[key])
    assert [second.policy.frequency(copy) for copy in copies] == [first.policy.frequency(entry) for entry in entries]
    assert [copies.index(entry) for entry in second.evicted(14)] == [
        entries.index(entry) for entry in first.evicted(14)
    ]


@pytest.mark.parametrize("state", [{"counted": [1], "uses": []}, {"counted": 1, "uses": [1]}, {}])
def test_a_state_that_does_not_fit_is_refused(state: dict[str, list[int]]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        WTinyLfu(8).load(state, lambda _: None)
