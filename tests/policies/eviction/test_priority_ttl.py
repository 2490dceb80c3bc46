from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Arc, Entry, EvictionPolicy, Lfu, Lru, PriorityTtl, Returned
from octavo.policies.eviction.base import Json
from octavo.policies.eviction.priority_ttl import MOST_POLICIES
from octavo.policies.replica import Replica
from octavo.policies.testing import EvictionPolicyContract, PrefixModel, play

ACTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 999), st.integers(0, 999)), max_size=120)


class TestPriorityTtl(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return PriorityTtl(capacity)


class TestPriorityTtlOverLfu(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return PriorityTtl(capacity, Lfu)


class Diary(Lru):
    """Writes down what it is told, and what it has: an event of another's entry is an error."""

    wants_requests = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.mine: set[Entry] = set()
        self.offered: set[Entry] = set()
        self.returned: list[Returned] = []
        self.requests: list[tuple[int, bytes]] = []
        self.loaded: list[Entry | None] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        assert entry not in self.mine
        self.mine.add(entry)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        assert lower in self.mine
        self.on_insert(upper, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        assert entry in self.mine
        super().on_hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        assert entry in self.mine - self.offered
        self.offered.add(entry)
        super().on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        self.offered.remove(entry)
        super().on_held(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        assert entry in self.offered
        if not entry.blocks:
            self.offered.remove(entry)
            self.mine.remove(entry)
        super().on_evict(entry, blocks, now)
        return f"memory of {id(self)}"

    def on_forget(self, entry: Entry) -> None:
        assert entry not in self.offered
        self.mine.remove(entry)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        assert entry in self.mine
        self.returned.append(returned)

    def on_request(self, number: int, names: bytes, now: float) -> None:
        self.requests.append((number, names))

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        self.requests.append((-number, names))

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"keys": sorted(key(entry) for entry in self.mine)}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        keys = state.get("keys", [])
        assert isinstance(keys, list)
        self.loaded = [entry(key) for key in keys]


class Shelf:
    """A wrapper, and the diaries that it made, in order."""

    def __init__(self) -> None:
        self.made: list[Diary] = []
        self.policy = PriorityTtl(32, self._make)
        self.model = PrefixModel(self.policy, ranks_priorities=True)

    def _make(self, capacity: int) -> EvictionPolicy:
        self.made.append(Diary(capacity))
        return self.made[-1]

    def free(self, blocks: int = 1, priority: int = 0, expires: float | None = None) -> Entry:
        """A new candidate."""
        entry = self.model.insert(blocks, priority=priority)
        entry.expires = expires
        self.model.release(entry)
        return entry


@given(ACTS)
def test_each_policy_has_the_entries_of_one_priority_and_there_are_no_idle_ones(
    acts: list[tuple[int, int, int]],
) -> None:
    shelf = Shelf()
    for action, pick, amount in acts:
        play(shelf.model, action, pick, amount)
        levels = {level.priority: level.policy for level in shelf.policy._levels.values()}
        having = {priority: policy.mine for priority, policy in levels.items() if isinstance(policy, Diary)}
        assert set().union(*having.values()) == set(shelf.model.entries)
        assert all(mine or not priority for priority, mine in having.items())
        for entry in shelf.model.candidates:
            assert entry in having[entry.priority]
    shelf.model.evict_all()
    assert list(shelf.policy._levels) == [0]
    assert not shelf.policy._elsewhere
    assert not shelf.policy._ready


@given(ACTS)
def test_without_priorities_it_is_the_policy_itself(acts: list[tuple[int, int, int]]) -> None:
    plain, wrapped = PrefixModel(Lru(32)), PrefixModel(PriorityTtl(32))
    for action, pick, amount in acts:
        if action != 4:  # may change a priority
            assert shown(plain, action, pick, amount) == shown(wrapped, action, pick, amount)


def shown(model: PrefixModel, action: int, pick: int, amount: int) -> list[tuple[float, int, int]]:
    return [(act.entry.insert_time, act.entry.depth, act.blocks) for act in play(model, action, pick, amount)]


def test_a_silent_change_counts_from_the_next_use() -> None:
    shelf = Shelf()
    entry = shelf.model.insert(1)
    entry.priority = 2
    shelf.model.hit(entry)
    assert [diary.mine for diary in shelf.made] == [set(), {entry}]


def test_a_parent_of_a_lower_priority_goes_as_soon_as_its_child_is_gone() -> None:
    shelf = Shelf()
    parent = shelf.model.insert(1, priority=-1)
    child = shelf.model.insert(1, parent)
    for entry in (parent, child):
        shelf.model.release(entry)
    others = [shelf.free() for _ in range(2)]
    assert [act.entry for act in shelf.model.evict(4)] == [child, parent, *others]


def test_what_has_expired_counts_as_plain_though_nobody_lowers_it() -> None:
    shelf = Shelf()
    dear = shelf.free(priority=3, expires=10.0)
    unwanted = shelf.free(priority=-3, expires=10.0)
    later = shelf.free(priority=3, expires=90.0)
    plain = shelf.free()
    assert list(shelf.policy.victims(9, 9.9)) == [unwanted, plain, dear, later]
    assert list(shelf.policy.victims(9, 10.0)) == [dear, unwanted, plain, later]
    assert list(shelf.policy.victims(9, 90.0)) == [dear, unwanted, later, plain]


def test_what_expired_while_it_was_held_is_plain_when_it_is_released() -> None:
    shelf = Shelf()
    shelf.model.now = 5.0
    held = shelf.model.insert(1, priority=3)
    held.expires = 7.0
    other = shelf.free()
    shelf.model.now = 8.0
    shelf.model.release(held)
    assert list(shelf.policy.victims(2, 9.0)) == [held, other]


def test_a_new_term_brings_it_back() -> None:
    shelf = Shelf()
    entry = shelf.free(priority=1, expires=10.0)
    other = shelf.free()
    assert list(shelf.policy.victims(2, 20.0)) == [entry, other]
    shelf.model.now = 20.0
    entry.expires = 40.0
    shelf.model.keep(entry, 1)
    assert list(shelf.policy.victims(2, 30.0)) == [other, entry]


def test_a_memory_comes_back_to_the_policy_that_made_it_only() -> None:
    shelf = Shelf()
    plain, dear, kept = shelf.free(), shelf.free(priority=1), shelf.free(priority=1)
    memories: dict[Entry, object] = {}
    for entry in (plain, dear):
        entry.blocks = 0
        entry.candidate = False
        memories[entry] = shelf.policy.on_evict(entry, 1, 9.0)
    back = shelf.model.insert(1)
    for memory in (memories[plain], memories[dear], None, "foreign"):
        shelf.policy.on_ghost_hit(back, Returned(memory, 3, 4.0), 9.0)
    first, second = shelf.made
    own = f"memory of {id(first)}"
    assert first.returned == [Returned(memory, 3, 4.0) for memory in (own, None, None, None)]
    shelf.policy.on_ghost_hit(kept, Returned(memories[dear], 3, 4.0), 9.0)
    assert second.returned == [Returned(f"memory of {id(second)}", 3, 4.0)]


def test_a_memory_of_an_earlier_policy_of_the_same_priority_is_worth_nothing() -> None:
    shelf = Shelf()
    entry = shelf.free(priority=1)
    entry.blocks = 0
    entry.candidate = False
    memory = shelf.policy.on_evict(entry, 1, 9.0)
    back = shelf.free(priority=1)
    shelf.policy.on_ghost_hit(back, Returned(memory, 0, 1.0), 9.0)
    assert shelf.made[2].returned == [Returned(None, 0, 1.0)]


def test_a_policy_without_memories_costs_none() -> None:
    policy = PriorityTtl(4)
    entry = Entry(0, 0, 0.0, 0.0)
    policy.on_candidate(entry, 0.0)
    assert policy.on_evict(entry, 1, 0.0) is None


def test_requests_are_told_to_all_if_they_want_it() -> None:
    shelf = Shelf()
    shelf.free(priority=1)
    assert shelf.policy.wants_requests
    assert not PriorityTtl(4).wants_requests
    shelf.policy.on_request(1, b"12345678", 0.0)
    shelf.policy.on_complete(1, b"1234567887654321", 0.0)
    assert [diary.requests[-2:] for diary in shelf.made] == [[(1, b"12345678"), (-1, b"1234567887654321")]] * 2


def test_it_goes_by_the_name_of_the_policy_underneath() -> None:
    assert PriorityTtl(4, Lfu).name == "Lfu"


def test_state_is_saved_and_loaded_priority_by_priority() -> None:
    shelf, other = Shelf(), Shelf()
    entries = [shelf.free(priority=priority) for priority in (0, 1, 1, 2)]
    state = shelf.policy.dump(entries.index)
    assert state == {"0": {"keys": [0]}, "1": {"keys": [1, 2]}, "2": {"keys": [3]}}
    restored = [other.free(priority=priority) for priority in (0, 1, 0)]
    other.policy.load(state, dict(enumerate(restored)).get)
    plain, dear = other.made
    assert plain.loaded == [restored[0]]
    assert dear.loaded == [restored[1], None], "what is not of that priority now is nothing to it"


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="priority 0 must be a mapping"):
        PriorityTtl(4).load({"0": 3}, lambda _: None)


class Breaking(Lru):
    """Names one candidate at a time, or nothing."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.is_mute = False

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        first = self._queue.first()
        return iter([] if self.is_mute or first is None else [first])


def test_a_policy_that_ends_early_is_asked_again_before_the_next_priority_is() -> None:
    model = PrefixModel(PriorityTtl(8, Breaking), ranks_priorities=True)
    for priority in (1, 0, 1, 0):
        model.release(model.insert(1, priority=priority))
    assert [act.entry.priority for act in model.evict(4)] == [0, 0, 1, 1]


def test_a_policy_that_names_nothing_gives_no_leave_to_take_what_is_dearer() -> None:
    made: list[Breaking] = []

    def make(capacity: int) -> EvictionPolicy:
        made.append(Breaking(capacity))
        return made[-1]

    model = PrefixModel(PriorityTtl(8, make))
    for priority in (0, 1):
        model.release(model.insert(1, priority=priority))
    made[0].is_mute = True
    assert list(model.policy.victims(2, 0.0)) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 9)), max_size=60))
def test_in_a_replica_too_time_ends_what_was_asked_for(requests: list[tuple[int, int, int]]) -> None:
    """Nobody makes priorities fall back there. Each victim must be of the lowest priority as it is at that moment."""
    replica = Replica(12, Checked(12))
    for now, (which, blocks, ttl) in enumerate(requests):
        names = b"".join((which << 32 | block).to_bytes(8, "little") for block in range(blocks))
        lease = replica.admit(names, 0, float(now))
        assert lease is not None
        replica.publish(lease, blocks, float(now))
        lease.node.priority, lease.node.expires = ttl % 3, float(now + ttl)
        replica.finish(lease, float(now))


def test_callers_who_name_many_priorities_do_not_get_a_policy_for_each() -> None:
    made: list[Diary] = []

    def make(capacity: int) -> Diary:
        made.append(Diary(capacity))
        return made[-1]

    policy = PriorityTtl(1000, make)
    entries = [Entry(1, 16, 0.0, 0.0, priority=priority) for priority in range(100, 0, -1)]
    for entry in entries:
        policy.on_insert(entry, 0.0)
        entry.candidate = True
        policy.on_candidate(entry, 0.0)
    assert len(made) == MOST_POLICIES
    assert [*policy.victims(100, 0.0)] == entries[::-1], "the lowest priority goes first all the same"


class Checked(PriorityTtl):
    """Compares what it names with all candidates."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._candidates: set[Entry] = set()

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._candidates.add(entry)
        super().on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        self._candidates.discard(entry)
        super().on_held(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            self._candidates.discard(entry)
        return super().on_evict(entry, blocks, now)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        for entry in super().victims(count, now):
            assert isinstance(entry, Entry)
            assert worth(entry, now) == min(worth(each, now) for each in self._candidates)
            yield entry


def worth(entry: Entry, now: float) -> int:
    return 0 if entry.expires is None or entry.expires <= now else entry.priority


@pytest.mark.parametrize("make", [Lru, Arc])
def test_it_wants_to_hear_of_returns_as_the_policy_underneath(make: Callable[[int], EvictionPolicy]) -> None:
    assert PriorityTtl(8, make).wants_returns is make(8).wants_returns is (make is Arc)
