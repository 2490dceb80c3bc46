from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.telemetry.metrics.histogram import Exemplar, Histogram

BOUNDS = (0.1, 1.0, 10.0)
values = st.floats(min_value=0.0, max_value=100.0, allow_nan=False)


@given(st.lists(st.tuples(values, st.integers(1, 5))))
def test_each_value_is_in_the_first_bucket_that_takes_it(seen: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, weight in seen:
        histogram.observe(value, weight)
    state = histogram.state()
    for index, upper in enumerate((*BOUNDS, math.inf)):
        lower = -math.inf if index == 0 else BOUNDS[index - 1]
        assert state.counts[index] == sum(weight for value, weight in seen if lower < value <= upper)
    assert state.observations == sum(weight for _, weight in seen)
    assert state.sum == pytest.approx(sum(value * weight for value, weight in seen))


@given(st.lists(values, min_size=1))
def test_each_bucket_keeps_its_latest_exemplar(seen: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for when, value in enumerate(seen):
        histogram.observe_traced(Exemplar(value, f"{when:032x}", float(when)))
    state = histogram.state()
    assert state.observations == len(seen)
    for index, exemplar in state.exemplars.items():
        lower, upper = (-math.inf, *BOUNDS)[index], (*BOUNDS, math.inf)[index]
        last = max(when for when, value in enumerate(seen) if lower < value <= upper)
        assert exemplar == Exemplar(seen[last], f"{last:032x}", float(last))
    assert {index for index, count in enumerate(state.counts) if count} == set(state.exemplars)


def test_a_state_does_not_change_afterwards() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe_traced(Exemplar(0.5, "a" * 32, 1.0))
    before = histogram.state()
    histogram.observe_traced(Exemplar(0.5, "b" * 32, 2.0))
    histogram.observe(50.0)
    assert before.counts == (0, 1, 0, 0)
    assert before.exemplars == {1: Exemplar(0.5, "a" * 32, 1.0)}
