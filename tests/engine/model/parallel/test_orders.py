"""Orders on their way through MessagePack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.model.parallel.orders import (
    Allocate,
    Close,
    Execute,
    Export,
    Import,
    Order,
    decode,
    encode,
    execute_order,
    packed,
    step_of,
)
from octavo.engine.model.runner import Row, RowSampling, StepInput
from octavo.engine.request import SamplingParams

NUMBERS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@st.composite
def steps(draw: st.DrawFn) -> StepInput:
    rows = tuple(draw(st.lists(drawn_rows(), max_size=4)))
    tokens = sum(row.length for row in rows)
    some = st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)
    slots = st.lists(st.integers(0, 2**63 - 1), min_size=tokens, max_size=tokens)
    pairs = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3))
    return StepInput(
        tokens=np.array(draw(some), dtype=np.int32),
        positions=np.array(draw(some), dtype=np.int32),
        slots=np.array(draw(slots), dtype=np.int64),
        rows=rows,
        copies=np.array(pairs, dtype=np.int32).reshape(-1, 2),
    )


@st.composite
def drawn_rows(draw: st.DrawFn) -> Row:
    length, more = draw(st.integers(1, 9)), draw(st.integers(0, 90))
    params = SamplingParams(temperature=1.3, logit_bias={5: 2.0}, n=2)
    sampling = RowSampling(params, (7, 8), np.arange(3, dtype=np.int32), 2, frozenset({1}))
    targets = np.array(draw(NUMBERS), dtype=np.int32) if draw(st.booleans()) else None
    blocks = np.array(draw(NUMBERS), dtype=np.int32)
    return Row(
        draw(st.integers(0, 99)), length, length + more, blocks, sampling if draw(st.booleans()) else None, targets
    )


@given(steps())
def test_a_step_arrives_with_all_that_its_logits_depend_on(step: StepInput) -> None:
    order = decode(encode(execute_order(step)))
    assert isinstance(order, Execute)
    found = step_of(order)
    for name in ("tokens", "positions", "slots", "copies"):
        sent, came = getattr(step, name), getattr(found, name)
        assert (sent.dtype, sent.shape, sent.tolist()) == (came.dtype, came.shape, came.tolist())
    for row, other in zip(step.rows, found.rows, strict=True):
        assert row[:3] == other[:3]
        assert row.blocks.tolist() == other.blocks.tolist()


@given(steps())
def test_logits_are_wanted_at_the_same_places_and_nothing_is_drawn(step: StepInput) -> None:
    for row, other in zip(step.rows, step_of(execute_order(step)).rows, strict=True):
        assert (row.sampling is None) == (other.sampling is None)
        assert other.sampling is None or other.sampling.seeds == ()
        scored = [0 if each.prompt_targets is None else len(each.prompt_targets) for each in (row, other)]
        assert scored[0] == scored[1]


@pytest.mark.parametrize(
    "order", [Allocate(7, 16), Export(packed(np.array([3, 1], dtype=np.int32))), Import(b""), Close()]
)
def test_other_orders_arrive_as_they_were_sent(order: Order) -> None:
    assert decode(encode(order)) == order
