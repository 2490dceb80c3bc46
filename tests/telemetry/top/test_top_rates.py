"""Two scrapes give rates: exact, never negative, right across restarts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.telemetry.metrics import catalogue as c
from octavo.telemetry.metrics.histogram import Histogram
from octavo.telemetry.top.rates import Estimate, by, increase, mean, quantile, together, total
from octavo.telemetry.top.reading import Scrape, Series, Values
from octavo.tests.telemetry.top.top_rig import exposition, scrape, written

A, B = frozenset({("engine", "a")}), frozenset({("engine", "b")})


def steps(when: float, **engines: float) -> Scrape:
    return scrape("".join(exposition([(c.STEPS, value, {})], engine=name) for name, value in engines.items()), when)


def observed(*values: float, engine: str = "a") -> str:
    """A histogram as the collector writes it."""
    histogram = Histogram(c.TIME_TO_FIRST_TOKEN.bounds)
    for value in values:
        histogram.observe(value)
    state, seen, lines = histogram.state(), 0, ""
    for bound, number in zip((*state.bounds, math.inf), state.counts, strict=True):
        seen += number
        le = "+Inf" if math.isinf(bound) else str(bound)
        lines += written(f"{c.TIME_TO_FIRST_TOKEN.name}_bucket", seen, {"le": le, "engine": engine})
    lines += written(f"{c.TIME_TO_FIRST_TOKEN.name}_count", seen, {"engine": engine})
    return lines + written(f"{c.TIME_TO_FIRST_TOKEN.name}_sum", state.sum, {"engine": engine})


def estimated(share: float, *values: float) -> Estimate | None:
    return quantile(scrape(observed(*values), 0.0).values, c.TIME_TO_FIRST_TOKEN, share)


def test_what_grew_is_the_difference() -> None:
    grown = increase(steps(1.0, a=10, b=5), steps(3.5, a=12, b=105))
    assert grown.seconds == 2.5
    assert grown.restarts == 0
    assert total(grown.values, c.STEPS) == 102


def test_gauges_do_not_grow() -> None:
    before, after = (scrape(exposition([(c.RUNNING, n, {}), (c.STEPS, n, {})]), n) for n in (1, 2))
    assert set(increase(before, after).values) == {c.STEPS.name}


def test_what_was_not_there_grew_from_nothing() -> None:
    assert total(increase(steps(0.0, a=10), steps(1.0, a=11, b=7)).values, c.STEPS) == 8


def test_what_is_gone_has_not_grown() -> None:
    assert total(increase(steps(0.0, a=10, b=7), steps(1.0, a=11)).values, c.STEPS) == 1


def test_an_engine_that_began_anew_grew_from_nothing_in_all_that_it_counts() -> None:
    """Its tokens have passed their old value: their difference would be wrong, and positive."""
    before = scrape(exposition([(c.STEPS, 100, {}), (c.GENERATED_TOKENS, 50, {})], engine="a"), 0.0)
    after = scrape(exposition([(c.STEPS, 3, {}), (c.GENERATED_TOKENS, 60, {})], engine="a"), 1.0)
    grown = increase(before, after)
    assert grown.restarts == 1
    assert total(grown.values, c.STEPS) == 3
    assert total(grown.values, c.GENERATED_TOKENS) == 60


def test_the_restart_of_one_engine_changes_nothing_for_another() -> None:
    grown = increase(steps(0.0, a=100, b=100), steps(1.0, a=2, b=101))
    assert (grown.restarts, total(grown.values, c.STEPS)) == (1, 3)


def test_a_restart_shows_in_the_buckets_alone() -> None:
    before, after = scrape(observed(0.001, 0.001), 0.0), scrape(observed(5.0, 5.0, 5.0), 1.0)
    grown = increase(before, after)
    assert grown.restarts == 1
    assert quantile(grown.values, c.TIME_TO_FIRST_TOKEN, 0.5) == Estimate(3.5, beyond=False)


values = st.dictionaries(
    st.sampled_from([Series(A, frozenset()), Series(B, frozenset())]), st.integers(0, 10), max_size=2
)


@given(st.lists(values, min_size=2, max_size=6))
def test_nothing_ever_grows_by_less_than_nothing(readings: list[dict[Series, float]]) -> None:
    scrapes = [Scrape(float(when), {c.STEPS.name: series}) for when, series in enumerate(readings)]
    for before, after in pairwise(scrapes):
        assert all(value >= 0 for value in increase(before, after).values[c.STEPS.name].values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=8))
def test_many_small_windows_are_one_large_one(growths: list[tuple[int, int]]) -> None:
    scrapes, a, b = [], 0, 0
    for when, (of_a, of_b) in enumerate(growths):
        a, b = a + of_a, b + of_b
        scrapes.append(steps(float(when), a=a, b=b))
    parts = [increase(before, after) for before, after in pairwise(scrapes)]
    assert together(parts) == increase(scrapes[0], scrapes[-1])


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 1.0])
@given(st.lists(st.floats(0.0001, 119.0), min_size=1, max_size=30))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(share: float, sample: list[float]) -> None:
    true = sorted(sample)[max(0, math.ceil(share * len(sample)) - 1)]
    upper = next(bound for bound in c.SECONDS if true <= bound)
    lower = max((bound for bound in c.SECONDS if bound < true), default=0.0)
    found = estimated(share, *sample)
    assert found is not None
    assert not found.beyond
    assert lower <= found.value <= upper


def test_quantiles_are_those_of_promql() -> None:
    """Two in (0.1, 0.2], two in (0.5, 1]: half of all ends at 0.2, three quarters in the middle of (0.5, 1]."""
    assert estimated(0.5, 0.15, 0.15, 0.7, 0.7) == Estimate(0.2, beyond=False)
    assert estimated(0.75, 0.15, 0.15, 0.7, 0.7) == Estimate(0.75, beyond=False)
    assert estimated(0.5, 0.0005) == Estimate(0.0005, beyond=False)


def test_above_the_last_bound_nobody_knows() -> None:
    assert estimated(0.95, 0.1, 500.0, 900.0) == Estimate(120.0, beyond=True)


def test_nothing_observed_is_no_quantile_and_no_mean() -> None:
    empty: Values = {}
    assert estimated(0.5) is None
    assert quantile(empty, c.TIME_TO_FIRST_TOKEN, 0.5) is None
    assert mean(empty, c.TIME_TO_FIRST_TOKEN) is None
    assert mean(scrape(observed(), 0.0).values, c.TIME_TO_FIRST_TOKEN) is None


def test_engines_are_one_in_quantiles_and_means() -> None:
    text = observed(0.15, 0.15, engine="a") + observed(0.7, 0.7, engine="b")
    assert quantile(scrape(text, 0.0).values, c.TIME_TO_FIRST_TOKEN, 0.75) == Estimate(0.75, beyond=False)
    assert mean(scrape(text, 0.0).values, c.TIME_TO_FIRST_TOKEN) == pytest.approx(0.425)


def test_sums_are_taken_by_the_labels_that_are_asked_for() -> None:
    text = "".join(
        exposition([(c.EVICTIONS, n, {"reason": reason, "policy": "lru", "tier": "device"})], engine=engine)
        for n, reason, engine in ((1, "forget", "a"), (2, "allocate", "a"), (4, "allocate", "b"))
    )
    found = scrape(text, 0.0).values
    assert by(found, c.EVICTIONS, "tier", "reason") == {("device", "allocate"): 6, ("device", "forget"): 1}
    assert by(found, c.EVICTIONS, "reason", fold=max) == {("allocate",): 4, ("forget",): 1}
    assert total(found, c.EVICTIONS) == 7
    assert total(found, c.STEPS) is None
