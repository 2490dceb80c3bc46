from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.storage.manager.rates import Rate, best_prefix
from octavo.tests.storage.manager_rig import Clock

whole = st.integers(0, 20).map(float)  # sums are exact then


@given(st.lists(st.tuples(st.none() | whole, whole), max_size=12))
def test_the_best_prefix_saves_most_and_is_the_longest_that_does(blocks: list[tuple[float | None, float]]) -> None:
    reload = [cost for cost, _ in blocks]
    compute = [cost for _, cost in blocks]

    def saved(length: int) -> float:
        return sum(c - r for r, c in blocks[:length] if r is not None and c > 0)

    best = best_prefix(reload, compute)
    assert saved(best) == max(saved(length) for length in range(len(blocks) + 1))
    assert all(saved(length) < saved(best) for length in range(best + 1, len(blocks) + 1))


def test_what_is_not_known_is_loaded() -> None:
    assert best_prefix([None, None], [1.0, 1.0]) == 2
    assert best_prefix([9.0, 9.0], [0.0, 0.0]) == 2
    assert best_prefix([9.0, 9.0], []) == 2
    assert best_prefix([9.0, None], [1.0, 1.0]) == 0  # but not at any price
    assert best_prefix([], [1.0]) == 0


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 100)), min_size=1, max_size=20))
def test_a_rate_lies_between_what_was_measured(batches: list[tuple[int, float]]) -> None:
    rate = Rate(Clock())
    for blocks, seconds in batches:
        rate.note(blocks, seconds)
    each = [seconds / blocks for blocks, seconds in batches]
    measured = rate.seconds()
    assert measured is not None
    assert min(each) * 0.999 <= measured <= max(each) * 1.001


def test_newer_batches_count_more() -> None:
    rate = Rate(Clock())
    for _ in range(20):
        rate.note(1, 10.0)
    for _ in range(20):
        rate.note(1, 1.0)
    assert rate.seconds() == pytest.approx(1.0, rel=0.15)


def test_an_old_measurement_does_not_speak_against_a_tier_for_ever() -> None:
    clock = Clock()
    rate = Rate(clock, stale=60.0)
    assert rate.fresh() is None
    rate.note(2, 8.0)
    rate.note(0, 99.0)
    assert rate.fresh() == rate.seconds() == 4.0
    clock.now += 60.5
    assert rate.fresh() is None
    assert rate.seconds() == 4.0
