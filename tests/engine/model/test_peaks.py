"""The search in blocks against sorting everything."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.engine.model.peaks import BLOCK, find_peaks, starts


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@st.composite
def score_tables(draw: st.DrawFn) -> Tensor:
    """Few distinct values, so that ties abound, and bans; each row has a finite score."""
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK + 3]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    values = rng.integers(0, draw(st.sampled_from([2, 50, 10**6])), (rows, vocab)).astype(np.float32)
    values[rng.random((rows, vocab)) < draw(st.sampled_from([0.0, 0.3, 0.99]))] = -np.inf
    values[:, rng.integers(vocab)] = 3.0
    return torch.from_numpy(values)


def some_rows(scores: Tensor) -> Tensor:
    """Backwards and one twice: neither the order nor a repetition matters."""
    return torch.tensor([*range(len(scores) - 1, -1, -1), 0])


@settings(max_examples=80, deadline=None)
@given(scores=score_tables(), data=st.data())
def test_the_best_are_those_of_a_sort(scores: Tensor, data: st.DataObject) -> None:
    rows, peaks = some_rows(scores), find_peaks(scores)
    count = data.draw(st.integers(1, min(scores.shape[1], 40)))
    expected = scores[rows].sort(dim=-1, descending=True).values[:, :count]
    assert torch.equal(peaks.top(rows, count), expected)
    assert peaks.ids.tolist() == [int(np.argmax(row.numpy())) for row in scores]
    assert torch.equal(peaks.bests, scores.amax(dim=-1))


@settings(max_examples=80, deadline=None)
@given(scores=score_tables(), floor=st.sampled_from([-1e30, 0.0, 1.0, 3.0, 40.0, 9e5, 1e9]))
def test_a_floor_finds_all_that_reach_it_in_order(scores: Tensor, floor: float) -> None:
    rows = some_rows(scores)
    cells = find_peaks(scores).at_least(rows, torch.full((len(rows),), floor))
    owners, ids = np.nonzero(scores[rows].numpy() >= floor)
    assert (cells.owners.tolist(), cells.ids.tolist()) == (owners.tolist(), ids.tolist())
    assert torch.equal(cells.values, scores[rows[cells.owners], cells.ids])


def test_each_row_has_its_own_floor() -> None:
    scores = torch.arange(2 * BLOCK, dtype=torch.float32).expand(2, -1)
    cells = find_peaks(scores).at_least(torch.tensor([0, 1]), torch.tensor([2.0 * BLOCK - 2, 2.0 * BLOCK - 1]))
    assert list(zip(cells.owners.tolist(), cells.ids.tolist(), strict=True)) == [
        (0, 2 * BLOCK - 2),
        (0, 2 * BLOCK - 1),
        (1, 2 * BLOCK - 1),
    ]


def test_a_row_that_is_not_a_number_leaves_others_alone() -> None:
    scores = torch.zeros((2, 3 * BLOCK))
    scores[0, 70] = math.nan
    scores[1, 150] = 1.0
    peaks = find_peaks(scores)
    assert int(peaks.ids[1]) == 150
    assert peaks.maxima.isnan().tolist() == [[False, True, False], [False, False, False]]


def test_columns_of_a_wider_table() -> None:
    """What lies beyond the columns shown is not seen, though it is next to them in memory."""
    wide = torch.full((2, 2 * BLOCK), 9.0)
    wide[:, :BLOCK] = torch.arange(BLOCK, dtype=torch.float32)
    peaks = find_peaks(wide[:, :BLOCK])
    assert peaks.vocab == BLOCK
    assert peaks.top(torch.tensor([0, 1]), 2).tolist() == [[BLOCK - 1, BLOCK - 2]] * 2


def test_starts() -> None:
    assert starts(np.array([2, 0, 3])).tolist() == [0, 2, 2]
    assert starts(np.zeros(0, dtype=np.int64)).tolist() == []
