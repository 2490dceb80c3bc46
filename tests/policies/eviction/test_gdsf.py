from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given

from octavo.policies.eviction import Entry, EvictionPolicy, Gdsf
from octavo.policies.testing import EvictionPolicyContract, PrefixModel
from octavo.tests.policies.eviction.replay import ACTS, CAPACITIES, Act, evictions


class TestGdsf(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Gdsf(capacity)


class Watched(Gdsf):
    """Compares each victim with ``Pr(f) = Clock + Fr(f) * Cost(f) / Size(f)`` as the report has it, kept beside."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.l_value = 0.0
        self.measured: list[float] = []
        self.frequency: dict[Entry, int] = {}
        self.priority: dict[Entry, float] = {}
        self.offered: list[Entry] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self.measure(entry)
        self.frequency[entry] = 1
        self.rank(entry)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        super().on_extend(entry, blocks, now)
        self.measure(entry)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        super().on_split(upper, lower, now)
        self.frequency[upper], self.priority[upper] = self.frequency[lower], self.priority[lower]

    def on_hit(self, entry: Entry, now: float) -> None:
        super().on_hit(entry, now)
        self.frequency[entry] += 1
        self.rank(entry)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        for entry in super().victims(count, now):
            lowest = min(self.priority[each] for each in self.priority if each.candidate and each.blocks)
            assert math.isclose(self.priority[entry], lowest, rel_tol=1e-9)
            self.l_value = max(self.l_value, lowest)
            yield entry

    def measure(self, entry: Entry) -> None:
        if entry.recompute_seconds:
            self.measured.append(entry.recompute_seconds)

    def rank(self, entry: Entry) -> None:
        cost, size = entry.recompute_seconds * entry.blocks, entry.blocks
        if self.measured:
            cost /= sum(self.measured) / len(self.measured)
        if not entry.recompute_seconds:
            cost = size
        self.priority[entry] = self.l_value + self.frequency[entry] * cost / size


@given(CAPACITIES, ACTS)
def test_each_victim_has_the_lowest_priority_of_the_report(capacity: int, acts: list[Act]) -> None:
    for _ in evictions(Watched(capacity), acts):
        pass


def put(model: PrefixModel, cost: float = 0.0, uses: int = 0, blocks: int = 1) -> Entry:
    entry = model.insert(blocks)
    entry.recompute_seconds = cost
    model.release(entry)
    for _ in range(uses):
        model.glance(entry)
    return entry


def test_the_clock_is_the_priority_of_the_last_victim() -> None:
    policy = Gdsf(8)
    model = PrefixModel(policy)
    entries = [put(model, uses=uses) for uses in (0, 1, 2)]
    assert [(act.entry, policy.clock) for act in model.evict(1)] == [(entries[0], 1.0)]
    young = put(model)
    assert policy.score(young, 0.0) == 2.0
    model.evict(3)
    assert policy.clock == 3.0


def test_a_part_of_a_victim_counts_and_what_is_dropped_for_other_reasons_does_not() -> None:
    policy = Gdsf(8)
    model = PrefixModel(policy)
    entry = put(model, uses=3, blocks=2)
    entry.blocks = 1
    policy.on_evict(entry, 1, 9.0)
    assert policy.clock == 0.0
    model.evict(1)
    assert policy.clock == 4.0


def test_twice_the_cost_is_worth_twice_the_uses() -> None:
    policy = Gdsf(8)
    entries = [Entry(1, 16, 0.0, 0.0, recompute_seconds=seconds) for seconds in (0.002, 0.002, 0.004)]
    for entry in entries:
        policy.on_insert(entry, 0.0)
    for entry in entries:
        policy.on_hit(entry, 0.0)
    often, _, dear = entries
    policy.on_hit(often, 0.0)
    policy.on_hit(often, 0.0)
    assert policy.score(dear, 0.0) == pytest.approx(policy.score(often, 0.0))


def test_a_head_that_is_cut_off_is_worth_what_the_whole_was() -> None:
    policy = Gdsf(8)
    model = PrefixModel(policy)
    lower = put(model, uses=3, blocks=4)
    model.evict(1)
    upper = model.split(lower, 1)
    assert policy.score(upper, 0.0) == policy.score(lower, 0.0) == 4.0


def test_the_number_of_blocks_makes_no_difference() -> None:
    policy = Gdsf(8)
    small, large = Entry(1, 16, 0.0, 0.0, recompute_seconds=0.1), Entry(5, 80, 0.0, 0.0, recompute_seconds=0.1)
    for entry in (small, large):
        policy.on_insert(entry, 0.0)
    assert policy.score(small, 0.0) == policy.score(large, 0.0)


def test_what_was_not_measured_counts_as_the_mean() -> None:
    policy = Gdsf(8)
    entries = [Entry(1, 16, 0.0, 0.0, recompute_seconds=seconds) for seconds in (0.01, 0.03, 0.0)]
    for entry in entries:
        policy.on_insert(entry, 0.0)
    cheap, dear, unknown = entries
    for entry in entries:
        policy.on_hit(entry, 0.0)
    scores = [policy.score(entry, 0.0) for entry in (cheap, unknown, dear)]
    assert scores == pytest.approx([1.0, 2.0, 3.0])


def test_state_is_taken_over_by_a_policy_with_another_clock() -> None:
    first, second = PrefixModel(Gdsf(8)), PrefixModel(Gdsf(8))
    put(first, uses=4)
    first.evict(1)
    entries = [put(first, uses=uses) for uses in (2, 0, 1)]
    first.evict(1)
    put(second, uses=9)
    second.evict(1)
    copies = [put(second) for _ in range(3)]
    state = first.policy.dump(entries.index)
    second.policy.load(state, lambda key: copies[key])
    assert [copies.index(act.entry) for act in second.evict(3)] == [1, 2, 0]


@pytest.mark.parametrize(
    "state",
    [
        {"keys": [0], "frequencies": [1], "behind": [math.nan]},
        {"keys": [0], "frequencies": [1], "behind": []},
        {"keys": [0], "frequencies": [-1], "behind": [0.0]},
        {"keys": [0], "frequencies": [], "behind": [0.0]},
        {"keys": [0], "frequencies": [1], "behind": ["0"]},
        {"keys": [0], "frequencies": [1]},
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, list[float]]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Gdsf(8).load(state, lambda _: None)
