from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest

from octavo.engine.fleet.ray.scaling import WaitingTokens
from octavo.errors import InvalidRequest


class Context(NamedTuple):
    aggregated_metrics: Mapping[str, Mapping[object, float]] | None
    total_num_requests: float = 0.0


@pytest.mark.parametrize(
    ("waiting", "requests", "wanted"),
    [
        ([], 0, 0),
        ([0, 0], 0, 0),
        ([1], 1, 1),
        ([1000, 0], 1, 1),
        ([1000, 1], 1, 2),
        ([4000, 1000], 2, 5),
        ([0, 0, 0], 33, 3),  # they all only decode: none waits, none may go
        ([2000], 160, 10),
    ],
)
def test_as_many_as_the_tokens_and_the_requests_ask_for(waiting: list[float], requests: float, wanted: int) -> None:
    policy = WaitingTokens(tokens=1000, requests=16)
    context = Context({"waiting_tokens": dict(enumerate(waiting)), "running": {0: 9e9}}, requests)
    assert policy(context) == (wanted, {})


def test_nothing_is_known_yet() -> None:
    assert WaitingTokens(1000, 16)(Context(None, 5)) == (1, {})


@pytest.mark.parametrize(("tokens", "requests"), [(0, 1), (1, 0), (-1, 1)])
def test_targets_must_be_above_zero(tokens: float, requests: float) -> None:
    with pytest.raises(InvalidRequest):
        WaitingTokens(tokens, requests)
