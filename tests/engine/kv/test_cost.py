from __future__ import annotations

import pytest

from octavo.engine.kv.cost import CostModel


def test_nothing_is_known_before_a_measurement() -> None:
    assert CostModel().seconds(100) == 0.0


def test_cost_is_per_block() -> None:
    cost = CostModel()
    cost.observe(depth=64, blocks=4, seconds=2.0)
    assert cost.seconds(64) == cost.seconds(100) == 0.5


def test_new_measurements_count_for_a_fifth() -> None:
    cost = CostModel()
    cost.observe(64, 1, 1.0)
    cost.observe(64, 1, 2.0)
    assert cost.seconds(64) == pytest.approx(1.2)


def test_depths_are_apart_and_the_nearest_one_answers() -> None:
    cost = CostModel()
    cost.observe(64, 1, 1.0)
    cost.observe(4096, 1, 9.0)
    assert (cost.seconds(64), cost.seconds(4096)) == (1.0, 9.0)
    assert (cost.seconds(1), cost.seconds(128), cost.seconds(2048), cost.seconds(10**6)) == (1.0, 1.0, 9.0, 9.0)
