from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Entry
from octavo.policies.eviction.candidates import CandidateQueue


def entry(last_use: float = 0.0) -> Entry:
    return Entry(blocks=1, depth=16, insert_time=0.0, last_use=last_use, candidate=True)


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(-5, 5))), max_size=200))
def test_it_is_a_sorted_dictionary(acts: list[tuple[int, int | None]]) -> None:
    entries = [entry(last_use) for last_use in range(10)]
    queue, model = CandidateQueue(), dict[Entry, float]()
    for which, key in acts:
        chosen = entries[which]
        if key is None:
            queue.discard(chosen)
            model.pop(chosen, None)
        else:
            queue.push(chosen, key)
            model[chosen] = key
        expected = sorted(model, key=lambda item: (model[item], item.last_use))
        assert queue.first() is (expected[0] if expected else None)
        assert len(queue) == len(model)
        assert [item in queue for item in entries] == [item in model for item in entries]
    assert list(queue.drain()) == sorted(model, key=lambda item: (model[item], item.last_use))


def test_memory_follows_what_is_live() -> None:
    """Descending keys all go to the heap, where each discard leaves a stale item behind."""
    queue = CandidateQueue()
    queue.push(entry(), 1e9)
    kept = entry()
    queue.push(kept, -1e9)
    for key in range(10_000):
        item = entry()
        queue.push(item, -float(key))
        queue.discard(item)
    assert len(queue) == 2
    assert len(queue._heap) < 100
    assert queue.first() is kept


def test_keys_in_order_need_no_heap() -> None:
    queue = CandidateQueue()
    for key in range(1000):
        queue.push(entry(), float(key))
    assert not queue._heap


def test_an_entry_that_shrank_has_another_turn_and_one_that_did_not_has_none() -> None:
    queue = CandidateQueue()
    shrinks, stays = entry(), entry()
    shrinks.blocks = 3
    queue.push(shrinks, 1.0)
    queue.push(stays, 2.0)
    turns: list[Entry] = []
    for item in itertools.islice(queue.drain(), 10):
        turns.append(item)
        if item is shrinks and item.blocks > 1:
            item.blocks -= 1
    assert turns == [shrinks, shrinks, shrinks, stays]
    assert list(queue.drain()) == [shrinks, stays]


def test_what_is_held_during_the_turns_of_others_does_not_come_back() -> None:
    queue = CandidateQueue()
    first, second = entry(), entry()
    queue.push(first, 1.0)
    queue.push(second, 2.0)
    turns = queue.drain()
    assert [next(turns), next(turns)] == [first, second]
    first.candidate = False
    queue.discard(first)
    assert list(turns) == []
    assert list(queue.drain()) == [second]
