"""Biases are made once for a request, forgotten with it, and the same however they are kept."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.engine.model import bias
from octavo.engine.model.bias import BiasTable
from octavo.engine.model.runner import RowSampling
from octavo.engine.request import SamplingParams

VOCAB = 64
SCORES = torch.zeros((1, VOCAB))


def row(params: SamplingParams, banned: frozenset[int] = frozenset()) -> RowSampling:
    return RowSampling(params, (1,), np.zeros(1, dtype=np.int32), 1, banned)


def terms(table: BiasTable, asked: RowSampling, scores: Tensor = SCORES) -> list[float]:
    """What is added to each id."""
    ids, values = table.of(asked, scores)
    whole = values if ids is None else torch.zeros(scores.shape[1]).index_add(0, ids, values)
    assert whole.dtype == torch.float32
    result: list[float] = whole.tolist()
    return result


@settings(max_examples=100, deadline=None)
@given(
    biases=st.dictionaries(
        st.integers(0, VOCAB + 3), st.one_of(st.floats(-5, 5, width=32), st.sampled_from([-100.0, 100.0]))
    ),
    banned=st.frozensets(st.integers(0, VOCAB + 3)),
)
def test_terms_follow_the_rules(biases: dict[int, float], banned: frozenset[int]) -> None:
    without = banned | {token for token, value in biases.items() if value == -100}
    forced = {token for token, value in biases.items() if value == 100 and token < VOCAB} - without
    soft = {token: value for token, value in biases.items() if abs(value) < 100}
    expected = [
        -np.inf if token in without or (forced and token not in forced) else soft.get(token, 0.0)
        for token in range(VOCAB)
    ]
    assert terms(BiasTable(), row(SamplingParams(logit_bias=biases), banned)) == expected


@pytest.mark.parametrize("count", [1, VOCAB // bias.DENSE_SHARE - 1, VOCAB // bias.DENSE_SHARE, VOCAB])
def test_many_terms_are_kept_for_the_whole_vocabulary(count: int) -> None:
    made = BiasTable().of(row(SamplingParams(logit_bias=dict.fromkeys(range(count), 1.5))), SCORES)
    assert (made.ids is None) == (count * bias.DENSE_SHARE >= VOCAB)
    assert len(made.terms) == (VOCAB if made.ids is None else count)


def test_made_once_for_a_request() -> None:
    table, params = BiasTable(), SamplingParams(logit_bias={3: 1.0})
    first = table.of(row(params), SCORES)
    assert table.of(row(params), torch.ones((5, VOCAB))) is first
    assert table.of(row(replace(params)), SCORES) is not first


def test_bans_that_end_are_seen() -> None:
    table, params = BiasTable(), SamplingParams(logit_bias={3: 100.0})
    free = terms(table, row(params))
    assert [token for token, term in enumerate(free) if term == 0.0] == [3]
    held = terms(table, row(params, frozenset({3})))
    assert [token for token, term in enumerate(held) if term != 0.0] == [3]
    assert terms(table, row(params)) == free


def test_another_vocabulary_is_another_bias() -> None:
    table, params = BiasTable(), SamplingParams(logit_bias={3: 1.0, 40: 2.0})
    assert terms(table, row(params))[40] == 2.0
    assert terms(table, row(params), SCORES[:, :30]) == [0.0] * 3 + [1.0] + [0.0] * 26


def test_what_was_made_goes_with_the_request() -> None:
    table = BiasTable()
    kept = SamplingParams(logit_bias={1: 1.0})
    table.of(row(kept), SCORES)
    for token in range(200):
        table.of(row(SamplingParams(logit_bias={token: 1.0})), SCORES)
    gc.collect()
    assert len(table) == 1
    assert terms(table, row(kept))[1] == 1.0


def test_a_table_that_goes_first() -> None:
    params = SamplingParams(logit_bias={1: 1.0})
    BiasTable().of(row(params), SCORES)
    gc.collect()
    table = BiasTable()
    assert terms(table, row(params))[1] == 1.0
    assert len(table) == 1
