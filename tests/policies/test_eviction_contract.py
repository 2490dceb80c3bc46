"""The shipped contract on the shipped policies, the same machinery under generated trees, and faults it must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.plugins import PluginGroup
from octavo.policies.eviction import (
    CostAware,
    Entry,
    EvictionPolicy,
    Lfu,
    Lru,
    PriorityTtl,
    S3Fifo,
    Sieve,
    WTinyLfu,
)
from octavo.policies.eviction.base import Tail
from octavo.policies.testing import EvictionPolicyContract, PrefixModel, play

ACTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 999), st.integers(0, 999)), max_size=120)
_INSTALLED = PluginGroup("octavo.eviction_policies", EvictionPolicy)
POLICIES = [_INSTALLED.resolve(report.name) for report in _INSTALLED.report()]
MOVING = {S3Fifo, Sieve, WTinyLfu}
"""Looking for a victim is a step of these algorithms: it gives what it passes a second chance, and moves it."""


class TestLru(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Lru(capacity)


class TestLfu(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Lfu(capacity)


class TestCostAware(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return CostAware(capacity)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20)
@given(acts=ACTS)
def test_any_tree_is_evicted_from_its_leaves_to_nothing(
    policy: type[EvictionPolicy], acts: list[tuple[int, int, int]]
) -> None:
    model = PrefixModel(policy(32))
    for action, pick, amount in acts:
        play(model, action, pick, amount)
    before = model.blocks
    assert sum(act.blocks for act in model.evict_all()) == before
    assert model.entries == []


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in MOVING])
@settings(max_examples=20)
@given(acts=ACTS)
def test_looking_at_the_victims_changes_nothing(policy: type[EvictionPolicy], acts: list[tuple[int, int, int]]) -> None:
    model = PrefixModel(policy(32))
    for action, pick, amount in acts:
        play(model, action, pick, amount)
    first = [named.entry if isinstance(named, Tail) else named for named in model.policy.victims(1000, model.now)]
    assert sorted(map(model.name, first)) == sorted(map(model.name, model.candidates))
    again = model.policy.victims(1000, model.now)
    assert [named.entry if isinstance(named, Tail) else named for named in again] == first


class _Faulty(Lru):
    """A base for policies with one fault each."""


class _NamesTheHeld(_Faulty):
    def on_held(self, entry: Entry) -> None:
        """Forgets to forget."""


class _NamesTheGone(_Faulty):
    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        """Forgets to forget."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while (entry := self._queue.first()) is not None:
            yield entry


class _NamesNothing(_Faulty):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(())


class _LosesWhatItNamed(_Faulty):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while (entry := self._queue.first()) is not None:
            self._queue.discard(entry)
            yield entry


class _NeverForgets(_Faulty):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.seen: list[Entry] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        self.seen.append(entry)


class _OtherVersion(_Faulty):
    api_version = (2, 0)


class _ClingsToTheLost(_Faulty):
    """Names what has another priority now, although it was told that it lost it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._seen: dict[Entry, None] = {}

    def on_insert(self, entry: Entry, now: float) -> None:
        self._seen[entry] = None

    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        super().on_evict(entry, blocks, now)
        if not entry.blocks:
            self._seen.pop(entry, None)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield from [entry for entry in self._seen if entry.candidate]
        yield from super().victims(count, now)


class _Impartial(PriorityTtl):
    """Knows no priorities."""

    def on_candidate(self, entry: Entry, now: float) -> None:
        priority, entry.priority = entry.priority, 0
        super().on_candidate(entry, now)
        entry.priority = priority


class _Stubborn(PriorityTtl):
    """Sticks to the priority that it saw first."""

    def __init__(self, capacity: int, make: Callable[[int], EvictionPolicy]) -> None:
        super().__init__(capacity, make)
        self._first: dict[Entry, int] = {}

    def on_candidate(self, entry: Entry, now: float) -> None:
        priority, entry.priority = entry.priority, self._first.setdefault(entry, entry.priority)
        super().on_candidate(entry, now)
        entry.priority = priority


class _Moody(_Faulty):
    """Its order depends on the addresses of objects in memory, here played by a counter that outlives the policy."""

    made: list[int] = []  # noqa: RUF012  # the fault

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.made.append(capacity)
        self._sign = -1.0 if len(self.made) % 2 else 1.0

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._queue.push(entry, self._sign * entry.last_use)


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (_NamesTheHeld, EvictionPolicyContract.test_never_names_what_is_held_again),
        (_NamesTheHeld, EvictionPolicyContract.test_never_names_what_has_children),
        (_NamesTheHeld, EvictionPolicyContract.test_names_candidates_only_whatever_happens),
        (_NamesTheGone, EvictionPolicyContract.test_gives_up_every_candidate),
        (_NamesNothing, EvictionPolicyContract.test_goes_on_to_the_parents),
        (_NamesNothing, EvictionPolicyContract.test_gives_up_every_candidate),
        (_LosesWhatItNamed, EvictionPolicyContract.test_a_call_that_is_broken_off_loses_nobody),
        (_LosesWhatItNamed, EvictionPolicyContract.test_goes_on_after_a_part_of_an_entry),
        (_NeverForgets, EvictionPolicyContract.test_remembers_no_more_the_longer_it_runs),
        (_OtherVersion, EvictionPolicyContract.test_is_written_for_this_version),
        (_ClingsToTheLost, EvictionPolicyContract.test_priorities_hold_whatever_happens),
        (_Moody, EvictionPolicyContract.test_the_same_events_give_the_same_victims),
    ],
)
def test_a_fault_is_caught(policy: type[EvictionPolicy], test: Callable[[EvictionPolicyContract], None]) -> None:
    class Contract(EvictionPolicyContract):
        def make(self, capacity: int) -> EvictionPolicy:
            return policy(capacity)

    with pytest.raises(AssertionError):
        test(Contract())


@pytest.mark.parametrize(
    ("wrapper", "test"),
    [
        (_Impartial, EvictionPolicyContract.test_lower_priorities_go_first),
        (_Impartial, EvictionPolicyContract.test_priorities_hold_whatever_happens),
        (_Stubborn, EvictionPolicyContract.test_a_changed_priority_counts),
        (_Stubborn, EvictionPolicyContract.test_priorities_hold_whatever_happens),
    ],
)
def test_a_wrong_order_of_priorities_is_caught(
    wrapper: Callable[[int, Callable[[int], EvictionPolicy]], EvictionPolicy],
    test: Callable[[EvictionPolicyContract], None],
) -> None:
    class Contract(TestLru):
        def ranked(self, capacity: int) -> EvictionPolicy:
            return wrapper(capacity, self.make)

    with pytest.raises(AssertionError):
        test(Contract())
