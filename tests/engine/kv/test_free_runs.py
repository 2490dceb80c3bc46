from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.kv.free_runs import FreeRuns

TOTAL = 40


def _check(runs: FreeRuns, free: set[int]) -> None:
    """Runs are disjoint, as long as they can be, and exactly the free ids."""
    found = sorted(runs.runs())
    assert [block for start, length in found for block in range(start, start + length)] == sorted(free)
    assert all(a + n < b for (a, n), (b, _) in pairwise(found)), "neighbours are joined"
    assert runs.count == len(free)
    ends = {end for start, length in found for end in (start, start + length - 1)}
    assert {i for i, length in enumerate(runs._length) if length} == ends
    assert runs._filled == sum(1 << b for b, starts in enumerate(runs._bins) if starts)


def _longest_run(free: set[int]) -> int:
    best = length = 0
    for block in range(TOTAL):
        length = length + 1 if block in free else 0
        best = max(best, length)
    return best


def test_whole_pool_is_one_run() -> None:
    assert FreeRuns(TOTAL).take(TOTAL) == (0, TOTAL)


def test_a_growing_sequence_stays_contiguous() -> None:
    runs = FreeRuns(TOTAL)
    start, _ = runs.take(4)
    for step in range(4, 12):
        assert runs.take(1, after=start + step - 1) == (start + step, 1)


def test_middle_or_end_of_a_run_is_not_taken_for_its_start() -> None:
    runs = FreeRuns(TOTAL)
    runs.take(TOTAL)
    runs.give(10, 5)
    assert runs.take(1, after=13) == (10, 1)  # 14 is free, the end of 10..14
    assert runs.take(1, after=11) == (11, 1)  # 12 is free, inside 11..14


def test_a_fitting_run_is_preferred_to_a_longer_first_one() -> None:
    runs = FreeRuns(TOTAL)
    runs.take(TOTAL)
    runs.give(0, 2)
    runs.give(4, 20)
    assert runs.take(4) == (4, 4)
    assert runs.take(1) == (0, 1)


@pytest.mark.parametrize("give_order", [(3, 5, 4), (5, 3, 4), (4, 3, 5), (4, 5, 3)])
def test_neighbours_join_whatever_the_order(give_order: tuple[int, ...]) -> None:
    runs = FreeRuns(TOTAL)
    runs.take(TOTAL)
    for block in give_order:
        runs.give(block, 1)
    assert list(runs.runs()) == [(3, 3)]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_takes_and_gives_keep_the_set(data: st.DataObject) -> None:
    runs = FreeRuns(TOTAL)
    free, taken = set(range(TOTAL)), set[int]()
    for _ in range(data.draw(st.integers(1, 40))):
        if bool(free) and data.draw(st.booleans()):
            wanted, after = data.draw(st.integers(1, 12)), data.draw(st.integers(-1, TOTAL))
            longest = _longest_run(free)
            starts_run = after + 1 in free and after not in free
            start, length = runs.take(wanted, after)
            got = set(range(start, start + length))
            assert got <= free
            assert 1 <= length <= wanted
            assert length == wanted or starts_run or longest < 2 * wanted
            if starts_run:
                assert start == after + 1 or after < 0
            free -= got
            taken |= got
        elif taken:
            block = data.draw(st.sampled_from(sorted(taken)))
            length = 1
            while block + length in taken and data.draw(st.booleans()):
                length += 1
            runs.give(block, length)
            taken -= set(range(block, block + length))
            free |= set(range(block, block + length))
        _check(runs, free)
