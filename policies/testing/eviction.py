"""What every eviction policy must hold."""

from __future__ import annotations

import gc
import json
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping

from ..eviction.base import EvictionPolicy, Json
from ..eviction.priority_ttl import PriorityTtl
from .metering import Meter, Metered
from .model import PrefixModel, close, walk

MOST_GROWTH = 3.0
"""How much more a policy may do per act with eight times the entries. O(log n) does 1.6 times as much at these sizes,
O(n) eight times as much."""
BROKEN: tuple[Json, ...] = (None, -1, "nonsense", [], {}, [None, "x", [1]], {"a": {"b": None}}, [[1, 2, 3, 4, 5]])
"""What a damaged state may hold anywhere."""


class EvictionPolicyContract(ABC):
    """Subclass, say how the policy is made, run pytest: it collects subclasses whose name starts with ``Test``."""

    @abstractmethod
    def make(self, capacity: int) -> EvictionPolicy:
        """A new policy for a pool of ``capacity`` blocks; with the same seed each time, if it draws random numbers."""

    def ranked(self, capacity: int) -> EvictionPolicy:
        """The policy as engines run it: one for each retention priority."""
        return PriorityTtl(capacity, self.make)

    def test_is_written_for_this_version(self) -> None:
        assert self.make(8).api_version[0] == EvictionPolicy.api_version[0]

    # whom it names

    def test_names_nothing_when_nothing_is_cached(self) -> None:
        assert list(self.make(8).victims(4, 0.0)) == []

    def test_never_names_what_is_held(self) -> None:
        model = PrefixModel(self.make(8))
        held, free = model.insert(2), model.insert(2)
        model.release(free)
        assert [act.entry for act in model.evict(4)] == [free]
        assert model.entries == [held]

    def test_never_names_what_is_held_again(self) -> None:
        model = PrefixModel(self.make(8))
        entry = model.insert(2)
        model.release(entry)
        model.hit(entry)
        assert model.evict(2) == []

    def test_never_names_what_has_children(self) -> None:
        model = PrefixModel(self.make(8))
        parent = model.insert(2)
        model.release(parent)
        model.insert(1, parent)
        assert model.evict(2) == []

    def test_names_candidates_only_whatever_happens(self) -> None:
        for seed in range(20):
            self._walk(seed, steps=200)

    def test_gives_up_every_candidate(self) -> None:
        for seed in range(20):
            model = self._walk(seed, steps=50)
            model.evict_all()
            assert model.entries == []

    def test_goes_on_to_the_parents(self) -> None:
        model = PrefixModel(self.make(8))
        root = model.insert(1)
        middle = model.insert(1, root)
        leaf = model.insert(1, middle)
        for entry in (root, middle, leaf):
            model.release(entry)
        assert [act.entry for act in model.evict(3)] == [leaf, middle, root]

    def test_goes_on_after_a_part_of_an_entry(self) -> None:
        model = PrefixModel(self.make(8))
        entry = model.insert(4)
        model.release(entry)
        model.evict(1)
        assert entry.blocks == 3
        model.evict(3, most=1)
        assert model.entries == []

    def test_goes_on_while_the_tree_is_taken_apart(self) -> None:
        """Between two victims blocks go and parents become candidates."""
        model = PrefixModel(self.make(32))
        roots = [model.insert(2) for _ in range(3)]
        leaves = [model.insert(1 + number % 3, roots[number % 3]) for number in range(9)]
        for entry in (*roots, *leaves):
            model.release(entry)
        blocks = model.blocks
        assert sum(act.blocks for act in model.evict(blocks, most=1)) == blocks
        assert model.entries == []

    def test_lower_priorities_go_first(self) -> None:
        model = PrefixModel(self.ranked(16))
        entries = [model.insert(1, priority=priority) for priority in (3, -1, 0, 7, 3)]
        for entry in entries:
            model.release(entry)
        for _ in range(3):
            model.glance(entries[1])  # much used, and yet it goes first
        assert [act.entry.priority for act in model.evict(5)] == [-1, 0, 3, 3, 7]

    def test_a_changed_priority_counts(self) -> None:
        model = PrefixModel(self.ranked(16))
        entries = [model.insert(1) for _ in range(4)]
        for entry in entries:
            model.release(entry)
        for entry, priority in zip(entries, (2, 1, 2, -1), strict=True):
            model.keep(entry, priority)
        model.keep(entries[0], 0)
        assert [act.entry for act in model.evict(3)] == [entries[3], entries[0], entries[1]]

    def test_priorities_hold_whatever_happens(self) -> None:
        for seed in range(10):
            model = PrefixModel(self.ranked(32), ranks_priorities=True)
            walk(model, seed, steps=200)
            for number, entry in enumerate(model.entries):
                model.keep(entry, number * 7 % 5 - 2)
            model.evict_all()
            assert model.entries == []

    def test_forgets_what_is_none_of_its_any_more(self) -> None:
        model = PrefixModel(self.make(16))
        for seed in range(4):
            walk(model, seed, steps=40)
            held = model.insert(2)
            model.release(model.insert(1))
            model.forget(held)
        assert all(act.entry is not held for act in model.evict_all())
        assert model.entries == []

    # how it is asked

    def test_a_call_that_is_broken_off_loses_nobody(self) -> None:
        model = PrefixModel(self.make(8))
        for _ in range(4):
            model.release(model.insert(2))
        victims = model.policy.victims(8, model.now)
        next(victims)
        close(victims)
        model.evict(8)
        assert model.entries == []

    def test_the_same_events_give_the_same_victims(self) -> None:
        def run() -> list[tuple[int, int]]:
            model = self._walk(seed=1, steps=300)
            names = {entry: model.name(entry) for entry in model.entries}
            return [(names[entry], blocks) for entry, blocks in model.evict_all()]

        assert run() == run()

    def test_does_hardly_more_for_a_victim_among_many_entries(self) -> None:
        """O(log n) at most, in calls and in looks at entries; half of the entries are held, which must not cost."""
        few, many = self._work(entries=24), self._work(entries=192)
        assert many <= MOST_GROWTH * few, f"{few:.0f} steps per act with 24 entries, {many:.0f} with 192"

    def test_remembers_no_more_the_longer_it_runs(self) -> None:
        """Ghosts are fine: their number is bounded by the pool. A trace of every entry that ever was is not."""
        capacity = 16
        policy = self.make(capacity)
        model = PrefixModel(policy)
        early = self._objects_after(model, rounds=4 * capacity)
        late = self._objects_after(model, rounds=40 * capacity)
        assert late <= early + 32 * capacity, f"{early} objects grew to {late}"

    # taking over, and state

    def test_takes_over_from_another_policy(self) -> None:
        """In the middle of everything, as when it is chosen in a running engine: memories are ``None`` then."""
        for seed in range(10):
            model = self._walk(seed, steps=80)
            model.use(self.make(32))
            walk(model, seed + 100, steps=80)
            model.evict_all()
            assert model.entries == []

    def test_its_state_is_plain_data_and_saving_it_changes_nothing(self) -> None:
        for seed in range(6):
            model, twin = self._walk(seed, steps=150), self._walk(seed, steps=150)
            first = _plain(model.policy.dump(model.key))
            assert _plain(model.policy.dump(model.key)) == first
            names = {entry: model.name(entry) for entry in model.entries}
            others = {entry: twin.name(entry) for entry in twin.entries}
            victims = [(names[entry], blocks) for entry, blocks in model.evict_all()]
            assert victims == [(others[entry], blocks) for entry, blocks in twin.evict_all()]

    def test_a_state_is_taken_over_after_a_restart(self) -> None:
        """All that was cached is again, or a part of it, or nothing."""
        for seed in range(6):
            for part in (1, 2, 0):
                model = self._walk(seed, steps=150)
                state = _plain(model.policy.dump(model.key))
                model.use(self.make(32))
                known = {model.key(entry): entry for entry in model.entries if part and model.key(entry) % part == 0}
                model.policy.load(state, known.get)
                walk(model, seed + 100, steps=80)
                model.evict_all()
                assert model.entries == []

    def test_a_state_gives_the_same_victims_each_time(self) -> None:
        def run() -> list[tuple[int, int]]:
            model = self._walk(seed=3, steps=200)
            state = _plain(model.policy.dump(model.key))
            model.use(self.make(32))
            model.policy.load(state, model.find)
            names = {entry: model.name(entry) for entry in model.entries}
            return [(names[entry], blocks) for entry, blocks in model.evict_all()]

        assert run() == run()

    def test_a_damaged_state_does_no_harm(self) -> None:
        """It is ignored, or refused with one of three errors; the policy goes on, or is replaced by a new one."""
        model = self._walk(seed=5, steps=150)
        state = _plain(model.policy.dump(model.key))
        for damaged in _damaged(state):
            policy = self.make(32)
            model.use(policy)
            try:
                policy.load(damaged, model.find)
            except (ValueError, TypeError, KeyError):
                continue
            walk(model, seed=7, steps=20)
        model.use(self.make(32))
        model.evict_all()
        assert model.entries == []

    # inside

    def _walk(self, seed: int, steps: int) -> PrefixModel:
        model = PrefixModel(self.make(32))
        walk(model, seed, steps)
        return model

    def _work(self, entries: int) -> float:
        """Steps per act while entries come, are used and go; the number of entries stays."""
        meter, rounds = Meter(), 2 * entries
        model = PrefixModel(Metered(self.make(entries), meter), new_entry=meter.entry())
        for number in range(entries):
            entry = model.insert(1)
            if number % 2:
                model.release(entry)
        meter.count = 0
        for number in range(rounds):
            entry = model.insert(1)
            model.release(entry)
            if number % 3 == 0:
                model.glance(entry)
            model.evict(1)
        return meter.count / rounds

    def _objects_after(self, model: PrefixModel, rounds: int) -> int:
        for _ in range(rounds):
            entry = model.insert(2)
            model.release(entry)
            model.hit(entry)
            model.glance(entry)
            model.release(entry)
            model.extend(entry, 2)
            model.split(entry, 1)
            model.evict_all()
        return _reachable(model.policy)


def _plain(state: Mapping[str, Json]) -> Mapping[str, Json]:
    """The state as it comes out of a file.

    :raises AssertionError: when it is no plain data.
    """
    text = json.dumps(state, allow_nan=False, sort_keys=True)
    assert len(text) < 1 << 20, "a state of more than 1 MiB is not saved"
    found = json.loads(text)
    assert isinstance(found, dict), "a state is a mapping"
    return found


def _damaged(state: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    """``state`` with each of its parts replaced, or missing, and what is no state at all."""
    found: list[Mapping[str, Json]] = [{}, *({"nonsense": wrong} for wrong in BROKEN)]
    for name, value in state.items():
        found.append({other: each for other, each in state.items() if other != name})
        found += [{**state, name: wrong} for wrong in BROKEN]
        if isinstance(value, list):
            found += [{**state, name: [*value, wrong]} for wrong in BROKEN]
        if isinstance(value, dict):
            found += [{**state, name: {**value, "nonsense": wrong}} for wrong in BROKEN]
    return found


def _reachable(root: object) -> int:
    """Objects that ``root`` keeps alive, code and classes aside."""
    shared = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
    seen: set[int] = set()
    todo: list[object] = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, shared):
            continue
        seen.add(id(item))
        todo.extend(gc.get_referents(item))
    return len(seen)
