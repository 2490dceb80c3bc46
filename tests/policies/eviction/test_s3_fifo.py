from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from octavo.policies.eviction import Entry, EvictionPolicy, Returned, S3Fifo
from octavo.policies.testing import EvictionPolicyContract, PrefixModel
from octavo.tests.policies.eviction.replay import ACTS, CAPACITIES, Act, assert_alike


class TestS3Fifo(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return S3Fifo(capacity)


class GhostOf:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks


class SlowS3Fifo(EvictionPolicy):
    """Algorithm 1 of the paper, on plain lists; their first item is the tail, the oldest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small_size = max(capacity // 10, 1)
        self.small: list[Entry] = []
        self.main: list[Entry] = []
        self.ghosts: list[GhostOf] = []
        self.freq: dict[Entry, int] = {}

    def on_insert(self, entry: Entry, now: float) -> None:
        self.small.append(entry)
        self.freq[entry] = 0

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        queue = self.small if lower in self.small else self.main
        queue.insert(queue.index(lower) + 1, upper)
        self.freq[upper] = self.freq[lower]

    def on_hit(self, entry: Entry, now: float) -> None:
        self.freq[entry] = min(self.freq[entry] + 1, 3)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        if isinstance(returned.memory, GhostOf) and returned.memory in self.ghosts:
            self.ghosts.remove(returned.memory)
            if entry in self.small:
                self.to_main(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        ghost = GhostOf(blocks)
        if entry in self.small:
            self.ghosts.append(ghost)
            while sum(each.blocks for each in self.ghosts) > self.capacity - self.small_size:
                self.ghosts.pop(0)
        if not entry.blocks:
            for queue in (self.small, self.main):
                if entry in queue:
                    queue.remove(entry)
        return ghost

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while any(entry.candidate for entry in self.small + self.main):
            yield self.victim()

    def victim(self) -> Entry:
        is_small_full = sum(entry.blocks for entry in self.small) >= self.small_size
        small = [entry for entry in self.small if entry.candidate]
        main = [entry for entry in self.main if entry.candidate]
        if small and (is_small_full or not main):
            if not is_small_full or self.freq[small[0]] <= 1:
                return small[0]
            self.to_main(small[0])
            return self.victim()
        if not self.freq[main[0]]:
            return main[0]
        self.freq[main[0]] -= 1
        self.main.remove(main[0])
        self.main.append(main[0])
        return self.victim()

    def to_main(self, entry: Entry) -> None:
        self.small.remove(entry)
        self.main.append(entry)
        self.freq[entry] = 0


@given(CAPACITIES, ACTS)
def test_it_drives_out_what_the_paper_does(capacity: int, acts: list[Act]) -> None:
    assert_alike(S3Fifo, SlowS3Fifo, capacity, acts)


class Shelf:
    """Single blocks that can go."""

    def __init__(self, capacity: int) -> None:
        self.model = PrefixModel(S3Fifo(capacity))

    def put(self, uses: int = 0) -> Entry:
        entry = self.model.insert(1)
        self.model.release(entry)
        for _ in range(uses):
            self.model.glance(entry)
        return entry

    def evicted(self, count: int) -> list[Entry]:
        return [act.entry for act in self.model.evict(count)]


@pytest.mark.parametrize(("uses", "first"), [(0, 0), (1, 0), (2, 1), (9, 1)])
def test_two_uses_take_it_from_the_small_queue_to_the_main_one(uses: int, first: int) -> None:
    shelf = Shelf(20)
    entries = [shelf.put(uses), *(shelf.put() for _ in range(4))]
    assert shelf.evicted(2) == entries[first : first + 2]


def test_below_a_tenth_the_main_queue_gives() -> None:
    shelf = Shelf(20)
    main = [shelf.put(2) for _ in range(3)]
    small = [shelf.put() for _ in range(2)]
    assert shelf.evicted(1) == [small[0]], "the used ones have moved, and the small queue had two blocks still"
    assert shelf.evicted(4) == [*main, small[1]]


def test_a_use_in_the_main_queue_is_worth_one_turn_each_and_three_at_most() -> None:
    shelf = Shelf(20)
    first, second = shelf.put(2), shelf.put(2)
    one = shelf.put()
    two = shelf.put()
    assert shelf.evicted(1) == [one]
    for _ in range(9):
        shelf.model.glance(first)
    shelf.model.glance(second)
    assert shelf.evicted(3) == [second, first, two]


def returned(policy: S3Fifo, memory: object, blocks: int = 1) -> Entry:
    entry = Entry(blocks, 16, 0.0, 0.0)
    policy.on_insert(entry, 0.0)
    policy.on_ghost_hit(entry, Returned(memory, 0, 1.0), 0.0)
    return entry


def evicted_memory(policy: S3Fifo, blocks: int = 1) -> object:
    entry = Entry(blocks, 16, 0.0, 0.0)
    policy.on_insert(entry, 0.0)
    entry.blocks = 0
    return policy.on_evict(entry, blocks, 0.0)


def test_what_comes_back_while_its_ghost_is_there_goes_into_the_main_queue() -> None:
    policy = S3Fifo(20)
    memories = [evicted_memory(policy) for _ in range(19)]
    late, known, foreign = (returned(policy, memory) for memory in (memories[0], memories[1], "foreign"))
    assert [policy.home(entry) is policy._main for entry in (late, known, foreign)] == [False, True, False]
    again = returned(policy, memories[1])
    assert policy.home(again) is policy._small, "a ghost comes back once"


def test_one_large_ghost_takes_the_room_of_many() -> None:
    policy = S3Fifo(20)
    memories = [evicted_memory(policy, blocks) for blocks in (1, 1, 17)]
    assert [policy.home(returned(policy, memory)) is policy._main for memory in memories] == [False, True, True]


def test_what_leaves_the_main_queue_leaves_no_ghost() -> None:
    policy = S3Fifo(20)
    entry = returned(policy, evicted_memory(policy))
    entry.blocks = 0
    assert policy.on_evict(entry, 1, 0.0) is None


def test_state_is_taken_over() -> None:
    first, second = PrefixModel(S3Fifo(20)), PrefixModel(S3Fifo(20))
    for model in (first, second):
        for _ in range(6):
            model.release(model.insert(1))
    for number, uses in ((0, 2), (3, 1), (4, 3)):
        for _ in range(uses):
            first.glance(first.entries[number])
    first.evict(1)  # the first one moves to the main queue, the second goes
    keys = {entry: first.name(entry) for entry in first.entries}
    entries = {second.name(entry): entry for entry in second.entries}
    second.policy.load(first.policy.dump(keys.__getitem__), entries.get)
    rest = [keys[act.entry] for act in first.evict(5)]
    seconds = {entry: name for name, entry in entries.items()}
    assert [name for act in second.evict(6) if (name := seconds[act.entry]) != 1] == rest


@pytest.mark.parametrize(
    "state",
    [
        {"used": [1], "uses": []},
        {"used": [1], "uses": [-1]},
        {"used": "1", "uses": [1]},
        {"used": [1.5], "uses": [1]},
        {},
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, list[int]]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        S3Fifo(8).load(state, lambda _: None)
