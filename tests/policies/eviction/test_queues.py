from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Arc, Entry
from octavo.policies.eviction.base import Json
from octavo.policies.eviction.queues import EntryList, Ghost, GhostList
from octavo.policies.testing import PrefixModel, play
from octavo.tests.policies.eviction.comparison import ACTS, Act


def entry(blocks: int = 1) -> Entry:
    return Entry(blocks, depth=16, insert_time=0.0, last_use=0.0)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99), st.integers(1, 5)), max_size=200))
def test_it_is_a_list(acts: list[tuple[int, int, int]]) -> None:
    entries, model = EntryList(), list[Entry]()
    offered: set[Entry] = set()
    for action, pick, amount in acts:
        chosen = model[pick % len(model)] if model else entry()
        if action < 2 or not model:
            model.append(entry(amount))
            entries.append(model[-1], offered=amount == 1)
            offered |= {model[-1]} if amount == 1 else set()
        elif action == 2:
            model.remove(chosen)
            assert entries.remove(chosen) == (chosen in offered)
            offered.discard(chosen)
        elif action == 3:
            chosen.blocks += amount
            entries.resize(chosen)
        elif action == 4 and chosen.blocks > 1:
            upper = entry(chosen.blocks - 1)
            chosen.blocks = 1
            entries.split(upper, chosen)
            model.insert(model.index(chosen) + 1, upper)
        elif action == 5:
            entries.withdraw(chosen)
            offered.discard(chosen)
        elif not any(other.candidate for other in model if other is not chosen):
            entries.offer(chosen)
            offered.add(chosen)
        assert list(entries) == model
        assert len(entries) == len(model)
        assert entries.blocks == sum(item.blocks for item in model)
        assert entries.oldest is (model[0] if model else None)
        assert all(item in entries for item in model)
        assert (entries.candidate is None) == (not offered)


def test_a_candidate_comes_in_its_place_however_late_it_is_offered() -> None:
    entries = EntryList()
    items = [entry() for _ in range(5)]
    for item in items:
        entries.append(item)
    named: list[Entry | None] = []
    for late in (3, 4, 1, 0):
        entries.offer(items[late])
        named.append(entries.candidate)
    assert named == [items[3], items[3], items[1], items[0]]


def test_a_piece_stands_beside_what_it_was_cut_off() -> None:
    entries = EntryList()
    items = [entry(3) for _ in range(3)]
    for item in items:
        entries.append(item)
    upper = entry(1)
    items[1].blocks = 2
    entries.split(upper, items[1])
    assert list(entries) == [items[0], items[1], upper, items[2]]
    assert entries.blocks == 9
    entries.offer(items[2])
    entries.offer(upper)
    assert entries.candidate is upper


def test_the_oldest_ghosts_go_first() -> None:
    ghosts = GhostList()
    first, second, third = (ghosts.add(blocks) for blocks in (3, 2, 4))
    ghosts.trim(9)
    assert ghosts.blocks == 9
    ghosts.trim(7)
    assert first.blocks == 1
    ghosts.trim(6)
    assert [ghost in ghosts for ghost in (first, second, third)] == [False, True, True]
    assert ghosts.take(third) is third
    assert (ghosts.blocks, len(ghosts)) == (2, 1)
    ghosts.trim(-1)
    assert (ghosts.blocks, len(ghosts)) == (0, 0)


@pytest.mark.parametrize("memory", [None, [], "ghost", Ghost(1)])
def test_what_is_no_ghost_of_the_list_is_not_found(memory: object) -> None:
    ghosts = GhostList()
    ghosts.add(1)
    assert ghosts.take(memory) is None
    assert memory not in ghosts
    assert ghosts.blocks == 1


@given(ACTS)
def test_looking_at_the_victims_changes_nothing(acts: list[Act]) -> None:
    model = PrefixModel(Arc(16))
    for act in acts:
        play(model, *act)
    first = list(model.policy.victims(1000, model.now))
    assert set(first) == set(model.candidates)
    assert list(model.policy.victims(1000, model.now)) == first


@pytest.mark.parametrize("state", [{"t1": "12"}, {"t1": 3}, {"t2": ["1"]}, {"t2": None}])
def test_a_state_without_keys_is_refused(state: Mapping[str, Json]) -> None:
    with pytest.raises(TypeError):
        Arc(8).load(state, lambda _: None)


def test_entries_that_the_state_does_not_name_stay_and_are_older() -> None:
    model = PrefixModel(Arc(8))
    entries = [model.insert(1) for _ in range(4)]
    names = dict(enumerate(entries))
    model.policy.load({"t1": [2, 0, 99]}, names.get)
    for item in entries:
        model.release(item)
    assert [act.entry for act in model.evict(4)] == [entries[1], entries[3], entries[2], entries[0]]


def test_an_entry_that_the_policy_was_not_told_of_is_passed_over() -> None:
    policy = Arc(8)
    policy.load({"t1": [1], "t2": [2]}, lambda _: entry())
    assert policy.dump(lambda _: 0) == {"t1": [], "t2": [], "target": 0.0}


def test_what_was_forgotten_is_in_no_list() -> None:
    policy = Arc(8)
    model = PrefixModel(policy)
    forgotten, kept = model.insert(2), model.insert(1)
    policy.on_forget(forgotten)
    model.release(kept)
    assert list(policy.victims(3, model.now)) == [kept]
    assert policy.dump(model.name) == {"t1": [model.name(kept)], "t2": [], "target": 0.0}
