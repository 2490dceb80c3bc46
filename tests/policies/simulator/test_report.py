"""Rows as tables and as JSON."""

from __future__ import annotations

import json

import pytest

from octavo.policies.simulator.report import HEADINGS, as_json, capacity_of, cells, failures, notes, percent, scaled
from octavo.policies.simulator.rows import Kind, Row

FULL = Row(
    trace="t",
    kind=Kind.POLICY,
    policy="lfu",
    capacity=1828,
    capacity_share=0.01,
    block_tokens=512,
    requests=12031,
    refused=2,
    uses=288500,
    hits=57700,
    hit_ratio=0.2,
    hit_tokens=29542400,
    input_tokens=144800000,
    saved_seconds=1477.12,
    saved_flops=4.75e17,
    evicted=228972,
    evicted_then_wanted=1234,
    waits=17,
    wait_seconds=8.25,
    gap_closed=-0.0312,
)
FAILED = Row("t", Kind.POLICY, "mine", 1828, 0.01, 512, 12031, error="ValueError: no")
BOUND = Row("t", Kind.BOUND, "bound", 1828, 0.01, 512, 12031, hits=100000, uses=288500, hit_ratio=0.3466)
LIMIT = Row("t", Kind.LIMIT, "limit", 182790, 1.0, 512, 12031, hit_ratio=0.3664)

KEYS = (
    "trace kind policy capacity capacity_share block_tokens requests refused uses hits hit_ratio hit_tokens "
    "input_tokens saved_seconds saved_flops evicted evicted_then_wanted waits wait_seconds gap_closed error"
)


def test_json_has_an_object_for_each_row_with_stable_names() -> None:
    """Programs read these names: one that goes or changes breaks them."""
    read = json.loads(as_json([FULL, FAILED, LIMIT]))
    assert [list(row) for row in read] == [KEYS.split()] * 3
    assert read[0] == {**FULL._asdict(), "kind": "policy"}
    assert read[1]["error"] == "ValueError: no"
    assert (read[1]["hit_ratio"], read[2]["gap_closed"]) == (None, None)
    assert [row["kind"] for row in read] == ["policy", "policy", "limit"]


def test_json_of_nothing_is_an_empty_array() -> None:
    assert json.loads(as_json([])) == []


def test_a_line_of_the_table_shows_the_numbers() -> None:
    assert dict(zip(HEADINGS, cells([FULL])[0], strict=True)) == {
        "policy": "lfu",
        "hit ratio": "0.2000",
        "gap closed": "-3.1%",
        "prefill saved": "1,477 s",
        "FLOPs saved": "475 P",
        "evicted": "228,972",
        "wanted again": "1,234",
        "waits": "17",
    }


def test_what_is_unknown_is_a_dash_and_what_failed_says_so() -> None:
    failed, bound, limit = cells([FAILED, BOUND, LIMIT])
    assert failed == ("mine", "failed", *[""] * 6)
    assert bound == ("bound", "0.3466", *["-"] * 6)
    assert limit[:2] == ("no eviction", "0.3664")
    assert capacity_of(LIMIT) == "100% (182,790)"


def test_failures_are_sentences() -> None:
    assert failures([FULL, FAILED, BOUND]) == ["mine at 1% (1,828): ValueError: no"]


def test_requests_that_no_pool_of_the_size_can_serve_are_noted_once_a_size() -> None:
    assert notes([FULL, FULL._replace(policy="lru"), FAILED, BOUND, LIMIT]) == [
        "at 1% (1,828), 2 requests are larger than the pool: all missed"
    ]
    assert notes([FULL._replace(refused=0)]) == []


@pytest.mark.parametrize(
    ("share", "shown"), [(0.009995, "1%"), (0.025, "2.5%"), (1.0, "100%"), (0.0004, "0.04%"), (0.001, "0.1%")]
)
def test_shares_are_shown_to_a_tenth(share: float, shown: str) -> None:
    assert percent(share) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.0, "0"), (999.0, "999"), (1.5e6, "1.5 M"), (2e9, "2 G"), (3.21e12, "3.21 T"), (4e15, "4 P"), (5e20, "500 E")],
)
def test_large_numbers_have_decimal_prefixes(number: float, shown: str) -> None:
    assert scaled(number) == shown
