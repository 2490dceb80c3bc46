from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from octavo.engine.model.attention import AttentionOptions, make_backend
from octavo.engine.model.attention.forward_context import AttentionCall, forward_context, paged_attention
from octavo.engine.model.attention.torch_backend import TorchBackend, _KeyView
from octavo.engine.model.runner import Row
from octavo.errors import ModelError

CPU = torch.device("cpu")


class Case(NamedTuple):
    """Rows with their own K and V, before they are laid out in blocks."""

    rows: tuple[tuple[int, int], ...]
    """(length, context) of each."""
    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    block_size: int
    window: int | None
    softcap: float | None
    sinks: bool
    scattered: bool
    seed: int


cases = st.builds(
    Case,
    rows=st.lists(
        st.tuples(st.just(1) | st.integers(2, 9), st.integers(0, 14)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=5,
    ).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.sampled_from([4, 8]),
    value_dim=st.sampled_from([4, 8]),
    block_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.floats(0.5, 5.0),
    sinks=st.booleans(),
    scattered=st.booleans(),
    seed=st.integers(0, 2**16),
)


class Laid(NamedTuple):
    """A case in paged form."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: tuple[Row, ...]
    options: AttentionOptions


def lay_out(case: Case, *, dtype: torch.dtype = torch.float64) -> Laid:
    random = torch.Generator().manual_seed(case.seed)
    counts = [-(-context // case.block_size) for _, context in case.rows]
    order = np.random.default_rng(case.seed).permutation(sum(counts) + 2) if case.scattered else np.arange(sum(counts))
    size = (len(order), case.block_size, case.kv_heads)
    keys = torch.full((*size, case.key_dim), float("nan"), dtype=dtype)
    values = torch.full((*size, case.value_dim), float("nan"), dtype=dtype)
    rows, start, used = [], 0, 0
    for (length, context), count in zip(case.rows, counts, strict=True):
        blocks = order[used : used + count].astype(np.int32)
        for pool in (keys, values):
            filled = torch.randn(context, case.kv_heads, pool.shape[-1], generator=random, dtype=dtype)
            for position in range(context):
                pool[blocks[position // case.block_size], position % case.block_size] = filled[position]
        rows.append(Row(start, length, context, blocks, None))
        start, used = start + length, used + count
    heads = case.kv_heads * case.group
    query = torch.randn(start, heads, case.key_dim, generator=random, dtype=dtype)
    sinks = torch.randn(heads, generator=random, dtype=dtype) if case.sinks else None
    return Laid(query, keys, values, tuple(rows), AttentionOptions(0.3, case.window, case.softcap, sinks))


def attend(laid: Laid, block_size: int, rows: Sequence[Row] | None = None) -> Tensor:
    step = make_backend("torch", CPU, None).plan(laid.rows if rows is None else rows, block_size)
    return step.attend(laid.query, laid.keys, laid.values, laid.options)


def by_definition(laid: Laid, block_size: int) -> Tensor:
    """One query, one head, one key at a time."""
    tokens, heads, _ = laid.query.shape
    out = torch.zeros(tokens, heads, laid.values.shape[-1], dtype=laid.query.dtype)
    group = heads // laid.keys.shape[2]
    for row in laid.rows:
        for i in range(row.length):
            position = row.context - row.length + i
            first = 0 if laid.options.window is None else max(0, position - laid.options.window + 1)
            seen = [(int(row.blocks[p // block_size]), p % block_size) for p in range(first, position + 1)]
            for head in range(heads):
                keys = torch.stack([laid.keys[block, slot, head // group] for block, slot in seen])
                values = torch.stack([laid.values[block, slot, head // group] for block, slot in seen])
                scores = keys @ laid.query[row.start + i, head] * laid.options.scaling
                if laid.options.softcap is not None:
                    scores = laid.options.softcap * torch.tanh(scores / laid.options.softcap)
                sink = scores.new_empty(0) if laid.options.sinks is None else laid.options.sinks[head].view(1)
                weights = torch.cat((scores, sink)).softmax(0)[: len(seen)]
                out[row.start + i, head] = weights @ values
    return out


@given(cases)
def test_any_mix_of_rows_equals_the_definition_over_poisoned_memory(case: Case) -> None:
    laid = lay_out(case)
    torch.testing.assert_close(
        attend(laid, case.block_size), by_definition(laid, case.block_size), rtol=1e-5, atol=1e-6
    )


@given(cases)
def test_a_row_gets_the_same_alone_as_in_company(case: Case) -> None:
    laid = lay_out(case)
    together = attend(laid, case.block_size)
    for row in laid.rows:
        own = slice(row.start, row.start + row.length)
        alone = attend(laid._replace(query=laid.query[own]), case.block_size, [row._replace(start=0)])
        torch.testing.assert_close(alone, together[own], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_padding_of_short_rows_reads_nothing_unwritten(block_size: int) -> None:
    case = Case(((1, 1), (1, 14), (1, 6)), 2, 2, 8, 8, block_size, None, None, sinks=False, scattered=True, seed=3)
    laid = lay_out(case)
    torch.testing.assert_close(attend(laid, block_size), by_definition(laid, block_size), rtol=1e-5, atol=1e-6)


def test_blocks_in_one_run_are_read_without_a_copy() -> None:
    pool = torch.rand(6, 4, 2, 3)
    run = Row(0, 1, 7, np.array([2, 3], dtype=np.int32), None)
    read = _KeyView([run], 4, None, torch.float32, CPU).read(pool)
    assert read.data_ptr() == pool[2].data_ptr()
    assert torch.equal(read[0], pool[2:4].flatten(0, 1)[:7])
    scattered = run._replace(blocks=np.array([3, 2], dtype=np.int32))
    assert torch.equal(_KeyView([scattered], 4, None, torch.float32, CPU).read(pool)[0], pool[[3, 2]].flatten(0, 1)[:7])


def test_a_window_reads_no_more_than_it_needs() -> None:
    pool = torch.rand(10, 4, 1, 2)
    row = Row(0, 3, 30, np.arange(8, dtype=np.int32), None)
    assert _KeyView([row], 4, 5, torch.float32, CPU).read(pool).shape[1] == 3 + 5 - 1


def test_half_precision_stays_in_half_precision_and_close() -> None:
    case = Case(((1, 9), (4, 6)), 2, 2, 8, 8, 4, None, None, sinks=False, scattered=True, seed=5)
    laid = lay_out(case, dtype=torch.bfloat16)
    out = attend(laid, 4)
    assert out.dtype == torch.bfloat16
    wide = laid._replace(query=laid.query.double(), keys=laid.keys.double(), values=laid.values.double())
    torch.testing.assert_close(out.double(), by_definition(wide, 4), rtol=0.05, atol=0.05)


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'tensorcore'.*auto, native, torch"):
        make_backend("tensorcore", CPU, None)


def test_native_is_refused_where_it_cannot_run_and_auto_does_without() -> None:
    with pytest.raises(ModelError, match="the CPU only, not on meta"):
        make_backend("native", torch.device("meta"), None)
    with pytest.raises(ModelError, match=r"Acceleration\.native on"):
        make_backend("native", CPU, None)
    assert isinstance(make_backend("auto", CPU, None), TorchBackend)


class Listener:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return call.query


class Layer(nn.Module):
    layer_idx = 3


QKV = torch.rand(3, 1, 2, 5, 16)


def test_a_call_reaches_the_context_with_what_it_asked_for() -> None:
    listener, sinks = Listener(), torch.rand(2)
    with forward_context(listener):
        out, weights = paged_attention(
            Layer(),
            QKV[0],
            QKV[1],
            QKV[2],
            None,
            scaling=0.5,
            sliding_window=7,
            softcap=2.0,
            s_aux=sinks,
            use_cache=False,
        )
    (call,) = listener.calls
    assert (call.layer, call.options) == (3, AttentionOptions(0.5, 7, 2.0, sinks))
    assert (call.causal, call.surprises, weights) == (True, (), None)
    assert out is call.query


def test_scaling_defaults_to_the_root_of_the_head_size() -> None:
    listener = Listener()
    with forward_context(listener):
        paged_attention(Layer(), QKV[0], QKV[1], QKV[2])
    assert listener.calls[0].options.scaling == 0.25


def test_tensors_that_would_be_ignored_are_named() -> None:
    listener = Listener()
    with forward_context(listener):
        paged_attention(
            Layer(), QKV[0], QKV[1], QKV[2], torch.zeros(1), position_bias=torch.zeros(1), position_ids=torch.zeros(1)
        )
    assert sorted(listener.calls[0].surprises) == ["attention_mask", "position_bias"]


def test_outside_a_context_the_model_says_whose_it_is() -> None:
    with pytest.raises(ModelError, match="runner"):
        paged_attention(Layer(), QKV[0], QKV[1], QKV[2])


def test_a_failing_pass_leaves_no_context_behind() -> None:
    with pytest.raises(ZeroDivisionError), forward_context(Listener()):
        raise ZeroDivisionError
    with pytest.raises(ModelError):
        paged_attention(Layer(), QKV[0], QKV[1], QKV[2])
