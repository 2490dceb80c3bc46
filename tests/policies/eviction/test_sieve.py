from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from octavo.policies.eviction import Entry, EvictionPolicy, Sieve
from octavo.policies.testing import EvictionPolicyContract, PrefixModel
from octavo.tests.policies.eviction.replay import ACTS, CAPACITIES, Act, assert_alike


class TestSieve(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Sieve(capacity)


class SlowSieve(EvictionPolicy):
    """Algorithm 1 of the paper on a plain list, the tail first. The hand is an index."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[Entry] = []
        self.visited: set[Entry] = set()
        self.hand = 0

    def on_insert(self, entry: Entry, now: float) -> None:
        self.queue.append(entry)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        place = self.queue.index(lower)
        self.queue.insert(place + 1, upper)
        self.hand += place < self.hand
        if lower in self.visited:
            self.visited.add(upper)

    def on_hit(self, entry: Entry, now: float) -> None:
        self.visited.add(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            place = self.queue.index(entry)
            self.hand -= place < self.hand
            self.queue.remove(entry)
        return None

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while any(entry.candidate for entry in self.queue):
            if self.hand >= len(self.queue):
                self.hand = 0
            entry = self.queue[self.hand]
            if not entry.candidate:
                self.hand += 1
            elif entry in self.visited:
                self.visited.remove(entry)
                self.hand += 1
            else:
                yield entry


@given(CAPACITIES, ACTS)
def test_it_drives_out_what_the_paper_does(capacity: int, acts: list[Act]) -> None:
    assert_alike(Sieve, SlowSieve, capacity, acts)


def shelf(count: int) -> tuple[PrefixModel, list[Entry]]:
    model = PrefixModel(Sieve(16))
    entries = [model.insert(1) for _ in range(count)]
    for entry in reversed(entries):
        model.release(entry)
    return model, entries


def test_the_hand_spares_what_was_used_once_and_stays_where_it_evicts() -> None:
    """The example of the paper: A to G, of which A, B and G were used; H, A, D, I and B follow."""
    model, [a, b, c, d, e, f, g] = shelf(7)
    for used in (a, b, g):
        model.glance(used)
    assert [act.entry for act in model.evict(1)] == [c]
    h = model.insert(1)
    model.release(h)
    model.glance(a)
    model.glance(d)
    assert [act.entry for act in model.evict(1)] == [e]
    model.glance(b)
    assert [act.entry for act in model.evict(3)] == [f, h, d], "g is spared, then the hand begins anew: a and b too"


def test_it_does_not_scan_over_what_cannot_go() -> None:
    """The bit of an entry that is held stays set, however often the hand comes by."""
    model, [held, other, last] = shelf(3)
    model.hit(held)
    assert [act.entry for act in model.evict(1)] == [other]
    model.release(held)
    assert [act.entry for act in model.evict(2)] == [last, held]


def test_a_new_entry_is_ahead_of_the_hand_and_a_spared_one_behind() -> None:
    model, [first, _] = shelf(2)
    model.glance(first)
    model.evict(1)
    young = model.insert(1)
    model.release(young)
    assert [act.entry for act in model.evict(2)] == [young, first]


def test_pieces_of_a_run_share_place_and_bit() -> None:
    model = PrefixModel(Sieve(16))
    lower = model.insert(4)
    model.release(lower)
    other = model.insert(1)
    model.release(other)
    upper = model.split(lower, 2)
    assert [act.entry for act in model.evict(5)] == [lower, upper, other]


def test_the_head_of_a_run_that_was_used_has_its_bit() -> None:
    model, [used, other] = shelf(2)
    model.extend(used, 3)
    model.glance(used)
    head = model.split(used, 2)
    assert [act.entry for act in model.evict(2)] == [other, used]
    young = model.insert(1)
    model.release(young)
    assert [act.entry for act in model.evict(3)] == [used, young, head]


def test_bits_are_one_use_whatever_the_number() -> None:
    model, [often, _] = shelf(2)
    for _ in range(9):
        model.glance(often)
    model.evict(1)
    fresh = model.insert(1)
    model.release(fresh)
    model.glance(fresh)
    assert [act.entry for act in model.evict(2)] == [often, fresh], "the bit of often went in the first round"


def test_what_comes_with_uses_has_its_bit() -> None:
    policy = Sieve(4)
    entries = [Entry(1, 16, 0.0, 0.0, hits=hits, candidate=True) for hits in (2, 0)]
    for entry in entries:
        policy.on_insert(entry, 0.0)
        policy.on_candidate(entry, 0.0)
    assert list(policy.victims(2, 0.0)) == entries[::-1]


def test_state_is_taken_over_with_the_hand() -> None:
    first, entries = shelf(6)
    for used in (0, 1, 4):
        first.glance(entries[used])
    first.evict(1)
    state = first.policy.dump(entries.index)
    second, copies = shelf(6)  # one more than the first one has: the oldest now
    second.policy.load(state, lambda key: copies[key])
    rest = [entries.index(act.entry) for act in first.evict(5)]
    assert [copies.index(act.entry) for act in second.evict(6)] == [*rest[:2], 2, *rest[2:]]


def test_a_saved_entry_that_is_gone_moves_the_hand_no_further() -> None:
    first, entries = shelf(4)
    first.glance(entries[0])
    first.evict(1)
    state = first.policy.dump(entries.index)
    second, copies = shelf(4)
    second.evict(1)
    second.policy.load(state, lambda key: copies[key] if key != 0 else None)
    assert [copies.index(act.entry) for act in second.evict(3)] == [2, 3, 1]


@pytest.mark.parametrize(
    "state",
    [{"queue": 3, "used": [], "behind": 0}, {"queue": [], "used": [], "behind": "0"}, {"queue": []}],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, list[int]]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Sieve(8).load(state, lambda _: None)
