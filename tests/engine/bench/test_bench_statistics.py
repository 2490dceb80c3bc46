from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.bench.rows import METRICS, OK, REFUSED, TRUNCATED, Row
from octavo.engine.bench.slo import parse_slo
from octavo.engine.bench.statistics import PERCENTILES, goodput, latencies, rates, spread, tokens, window
from octavo.errors import InvalidRequest

SECONDS = st.floats(0, 1000, allow_nan=False)
ROW = st.builds(
    lambda sent, ttft, gaps, rest, outcome: make_row(sent, ttft, gaps, rest, outcome=outcome),
    SECONDS,
    SECONDS,
    st.lists(SECONDS, max_size=5),
    SECONDS,
    st.sampled_from([OK, REFUSED, TRUNCATED]),
)


def make_row(
    sent: float = 0.0,
    ttft: float = 1.0,
    gaps: list[float] | None = None,
    rest: float = 0.0,
    outcome: str = OK,
    prompt: int | None = 10,
    cached: int | None = 4,
) -> Row:
    """A row whose tokens came one at a time."""
    between = tuple(gaps or ())
    return Row(
        conversation=0,
        turn=0,
        due=sent,
        sent=sent,
        ended=sent + ttft + sum(between) + rest,
        outcome=outcome,
        ttft=ttft,
        gaps=between,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=len(between) + 1,
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_percentiles_lie_between_the_two_values_at_their_rank(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    ordered = sorted(values)
    for percent in PERCENTILES:
        rank = percent / 100 * (len(values) - 1)
        low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
        expected = low + (high - low) * (rank - math.floor(rank))
        assert getattr(found, f"p{percent}") == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert found.maximum == ordered[-1]
    assert found.count == len(values)
    assert found.mean == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-6)


def test_of_nothing_there_is_no_spread() -> None:
    assert spread([]) is None
    assert latencies([]) == dict.fromkeys(METRICS)


@given(ROW)
def test_first_token_and_all_others_make_the_whole(row: Row) -> None:
    assert row.ttft is not None
    assert row.output_tokens is not None
    if row.output_tokens < 2:
        assert row.tpot is None
    else:
        assert row.tpot is not None
        assert row.ttft + row.tpot * (row.output_tokens - 1) == pytest.approx(row.e2e, abs=1e-9)


@given(st.lists(ROW, max_size=12))
def test_only_what_succeeded_counts(rows: list[Row]) -> None:
    good = [row for row in rows if row.is_ok]
    assert latencies(rows) == latencies(good)
    assert tokens(rows) == tokens(good)
    found = rates(rows)
    assert found.requests * window(rows) == pytest.approx(len(good) if window(rows) else 0)
    assert found.output_tokens * window(rows) == pytest.approx(tokens(rows).output if window(rows) else 0)
    gaps = latencies(rows)["itl"]
    assert (0 if gaps is None else gaps.count) == sum(len(row.gaps) for row in good)


def test_the_hit_share_is_of_the_requests_that_tell() -> None:
    rows = [make_row(prompt=100, cached=50), make_row(prompt=300, cached=None), make_row(prompt=100, cached=0)]
    assert tokens(rows).cache_hit_share == 0.25
    assert tokens(rows).prompt == 500
    assert tokens([make_row(cached=None)]).cache_hit_share is None


@given(st.lists(ROW, min_size=1, max_size=12), SECONDS, SECONDS)
def test_goodput_grows_with_the_limits_and_never_beyond_what_succeeded(rows: list[Row], a: float, b: float) -> None:
    tight, loose = goodput(rows, {"ttft": min(a, b)}), goodput(rows, {"ttft": max(a, b)})
    assert tight is not None
    assert loose is not None
    assert tight.requests <= loose.requests <= sum(row.is_ok for row in rows)
    assert tight.share == tight.requests / len(rows)


def test_a_good_request_keeps_every_objective() -> None:
    rows = [make_row(ttft=0.1, gaps=[0.01, 0.2]), make_row(ttft=0.1), make_row(ttft=0.9), make_row(outcome=REFUSED)]
    found = goodput(rows, {"ttft": 0.5, "itl": 0.1})
    assert found is not None
    assert found.requests == 1  # the one without a gap has none that is too long
    assert goodput(rows, {}) is None


def test_objectives_are_read() -> None:
    assert parse_slo("ttft:0.5, tpot:0.05") == {"ttft": 0.5, "tpot": 0.05}
    assert parse_slo("") == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:0", "ttft:nan", "ttft:inf", "speed:1", "ttft:1,ttft:2"])
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--slo"):
        parse_slo(text)
