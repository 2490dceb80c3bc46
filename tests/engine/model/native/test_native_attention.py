"""Attention in C++ against a softmax in float64, over blocks in any order and shared in any way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.engine.model.attention import AttentionOptions, make_backend
from octavo.engine.model.attention.native_backend import NativeBackend
from octavo.engine.model.attention.torch_backend import TorchBackend
from octavo.engine.model.native.library import NativePlan
from octavo.engine.model.runner import Int32Array, Row
from octavo.errors import ModelError
from octavo.tests.engine.model.native.native_rig import WatchedKernels, threads

CPU = torch.device("cpu")
Layout: TypeAlias = Literal["dense", "beside keys and values", "heads first"]
"""How the tokens' queries lie in memory."""
DIMS = [16, 48, 64, 80, 128]
ATOL = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
RTOL = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class Branch(NamedTuple):
    """A row: the first blocks of an earlier one, then its own."""

    parent: int
    """Which of the earlier ones, modulo their number."""
    kept: float
    """Share of the parent's blocks."""
    own: int
    """Tokens after the shared blocks, at least 1."""
    length: int
    """Tokens of it in this step, at most all."""


class Shape(NamedTuple):
    kv_heads: int = 2
    group: int = 3
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    layout: Layout = "dense"


class Case(NamedTuple):
    query: Tensor
    keys: Tensor
    values: Tensor
    rows: tuple[Row, ...]
    scaling: float
    shape: Shape


branches = st.builds(
    Branch,
    parent=st.integers(0, 7),
    kept=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    own=st.integers(1, 70),
    length=st.just(1) | st.integers(2, 40),
)
shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8) | st.sampled_from([13, 32]),
    key_dim=st.sampled_from(DIMS),
    value_dim=st.sampled_from(DIMS),
    block_size=st.sampled_from([1, 4, 5, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["dense", "beside keys and values", "heads first"]),
)


def grow(branches: Sequence[Branch], block_size: int, most: int = 200) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """:returns: (length, context) and the blocks of each row, numbered as they are needed."""
    sizes: list[tuple[int, int]] = []
    tables: list[list[int]] = []
    fresh = 0
    for branch in branches:
        parent = tables[branch.parent % len(tables)] if tables else []
        table = parent[: min(round(branch.kept * len(parent)), (most - 1) // block_size)]
        context = min(len(table) * block_size + branch.own, most)
        new = -(-context // block_size) - len(table)
        tables.append([*table, *range(fresh, fresh + new)])
        sizes.append((min(branch.length, context), context))
        fresh += new
    return sizes, tables


def lay_out(branches: Sequence[Branch], shape: Shape, *, seed: int = 0, heat: float = 1.0, most: int = 200) -> Case:
    """In random blocks and a random order of rows; NaN where no row looks.

    :param heat: factor on the scores.
    """
    random, order = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    sizes, tables = grow(branches, shape.block_size, most)
    places = order.permutation(max(block for table in tables for block in table) + 3)
    blocks: list[Int32Array] = [places[table].astype(np.int32) for table in tables]
    starts = dict.fromkeys(range(len(sizes)), 0)
    tokens = 0
    for i in order.permutation(len(sizes)):
        starts[int(i)] = tokens
        tokens += sizes[i][0]
    rows = tuple(Row(starts[i], *size, blocks[i], None) for i, size in enumerate(sizes))
    keys, values = (
        torch.randn(len(places), shape.block_size, shape.kv_heads, dim, generator=random).to(shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    unseen = torch.ones(len(places) * shape.block_size, dtype=torch.bool)
    for row in rows:
        unseen[slots_of(row, shape.block_size)] = False
    for pool in (keys, values):
        pool.flatten(0, 1)[unseen] = torch.nan
    query = laid_query(tokens, shape, random)
    return Case(query, keys, values, rows, heat / shape.key_dim**0.5, shape)


def laid_query(tokens: int, shape: Shape, random: torch.Generator) -> Tensor:
    heads = shape.kv_heads * shape.group
    query = torch.randn(tokens, heads, shape.key_dim, generator=random).to(shape.dtype)
    if shape.layout == "heads first":
        return query.transpose(0, 1).contiguous().transpose(0, 1)
    if shape.layout == "dense":
        return query
    wide = torch.full((tokens, heads + 2 * shape.kv_heads, shape.key_dim), torch.nan, dtype=shape.dtype)
    wide[:, :heads] = query
    return wide[:, :heads]


def slots_of(row: Row, block_size: int) -> Tensor:
    positions = np.arange(row.context)
    return torch.from_numpy(row.blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size)


def by_definition(case: Case, window: int | None = None) -> Tensor:
    group, block_size = case.shape.group, case.shape.block_size
    out = torch.full((*case.query.shape[:2], case.values.shape[-1]), torch.nan, dtype=torch.float64)
    for row in case.rows:
        slots, own = slots_of(row, block_size), slice(row.start, row.start + row.length)
        keys, values = (
            pool.flatten(0, 1)[slots].double().repeat_interleave(group, 1) for pool in (case.keys, case.values)
        )
        scores = torch.einsum("thd,khd->htk", case.query[own].double(), keys) * case.scaling
        distance = torch.arange(row.context - row.length, row.context)[:, None] - torch.arange(row.context)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[own] = torch.einsum("htk,khd->thd", weights, values)
    return out


def attend(kernels: WatchedKernels, case: Case, *, shares: bool, window: int | None = None) -> Tensor:
    """By the kernels, or the test fails."""
    before = kernels.asked["attend"]
    step = NativeBackend(kernels, shares=shares).plan(case.rows, case.shape.block_size)
    out = step.attend(case.query, case.keys, case.values, AttentionOptions(case.scaling, window))
    assert kernels.asked["attend"] == before + 1
    assert out.dtype == case.query.dtype
    assert out.is_contiguous()
    return out


def assert_right(kernels: WatchedKernels, case: Case) -> None:
    expected = by_definition(case)
    for shares in (True, False):
        found = attend(kernels, case, shares=shares).double()
        torch.testing.assert_close(found, expected, rtol=RTOL[case.shape.dtype], atol=ATOL[case.shape.dtype])


@given(st.lists(branches, min_size=1, max_size=7), shapes, st.integers(0, 2**16), st.sampled_from([1, 2]))
def test_any_rows_over_any_blocks(
    kernels: WatchedKernels, rows: list[Branch], shape: Shape, seed: int, count: int
) -> None:
    with threads(count):
        assert_right(kernels, lay_out(rows, shape, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_prefixes_within_prefixes(kernels: WatchedKernels, block_size: int, dtype: torch.dtype) -> None:
    """A trunk, two limbs on it, twigs on these: decoding, with one chunk among them."""
    trunk = Branch(0, 0.0, 96, 1)
    limbs = [Branch(0, 1.0, 48, 1), Branch(0, 1.0, 64, 1)]
    twigs = [Branch(1 + i % 2, 1.0, 5 + i, 20 if i == 3 else 1) for i in range(8)]
    case = lay_out([trunk, *limbs, *twigs], Shape(block_size=block_size, dtype=dtype), most=400)
    for count in (1, 2):
        with threads(count):
            assert_right(kernels, case)


@pytest.mark.parametrize("own", [1, 15, 16])
def test_beams_that_share_all_but_the_last_block(kernels: WatchedKernels, own: int) -> None:
    beams = [Branch(0, 1.0, 128, 1), *(Branch(0, 1.0, own, 1) for _ in range(7))]
    assert_right(kernels, lay_out(beams, Shape()))


@pytest.mark.parametrize("length", [1, 7])
def test_rows_with_one_and_the_same_table(kernels: WatchedKernels, length: int) -> None:
    case = lay_out([Branch(0, 0.0, 100, length)], Shape())
    (row,) = case.rows
    twins = tuple(row._replace(start=i * length) for i in range(4))
    query = torch.randn(4 * length, 6, 64, generator=torch.Generator().manual_seed(1))
    assert_right(kernels, case._replace(rows=twins, query=query))


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_token_of_all_sees_itself_alone(kernels: WatchedKernels, dtype: torch.dtype, group: int) -> None:
    case = lay_out([Branch(0, 0.0, 1, 1)], Shape(group=group, dtype=dtype))
    out = attend(kernels, case, shares=True)
    (row,) = case.rows
    value = case.values[int(row.blocks[0]), 0]
    assert torch.equal(out[0], value.repeat_interleave(group, 0))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_and_long_chunks(kernels: WatchedKernels, dtype: torch.dtype, count: int) -> None:
    """So long that one row's keys are shared out between threads, with tokens that see nothing of the last share."""
    shape = Shape(kv_heads=1, dtype=dtype)
    cases = [
        lay_out([Branch(0, 0.0, 2300, 1)], shape, most=4000),
        lay_out([Branch(0, 0.0, 2100, 1), Branch(0, 0.9, 700, 3)], shape, most=4000),
        lay_out([Branch(0, 0.0, 1500, 512)], shape, most=4000),
        lay_out([Branch(0, 0.0, 600, 600), Branch(0, 0.0, 90, 1)], shape, most=4000),
    ]
    with threads(count):
        for case in cases:
            assert_right(kernels, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_any_size(kernels: WatchedKernels, dtype: torch.dtype) -> None:
    """Thousands, where a softmax without its peak overflows, and none at all, where all keys count the same."""
    rows = [Branch(0, 0.0, 150, 1), Branch(0, 0.8, 60, 9)]
    for heat in (0.0, 1000.0):
        case = lay_out(rows, Shape(dtype=dtype), heat=heat)
        found = attend(kernels, case, shares=True).double()
        torch.testing.assert_close(found, by_definition(case), rtol=3e-2, atol=3e-3 if heat else 3e-2)


@pytest.mark.parametrize("first", [-1e30, 1e30])
def test_a_peak_that_comes_late_or_early(kernels: WatchedKernels, first: float) -> None:
    case = lay_out([Branch(0, 0.0, 200, 1)], Shape(kv_heads=1, group=1))
    (row,) = case.rows
    case.keys[int(row.blocks[0]), 0] = first * case.query[0, 0].sign()
    case.keys[int(row.blocks[12]), 7] = 40 * case.query[0, 0].sign()
    out = attend(kernels, case, shares=True)
    winner = case.values[int(row.blocks[0]), 0] if first > 0 else case.values[int(row.blocks[12]), 7]
    torch.testing.assert_close(out[0], winner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slope", [0.01, 0.1, 1.0])
def test_scores_that_climb_by_a_little_with_every_key(
    kernels: WatchedKernels, slope: float, dtype: torch.dtype
) -> None:
    """By less and by more from run to run than sums are allowed to exceed what they are relative to."""
    case = lay_out([Branch(0, 0.0, 700, 1)], Shape(kv_heads=1, dtype=dtype), most=700)
    (row,) = case.rows
    case.query.zero_()
    case.query[..., 0] = 1.0
    climb = torch.arange(700, dtype=dtype) * slope
    case.keys.flatten(0, 1)[slots_of(row, 16)] = climb[:, None, None].expand(700, 1, 64)
    assert_right(kernels, case._replace(scaling=1.0))


def test_more_threads_than_processors(kernels: WatchedKernels) -> None:
    """Who is sent to sleep in the middle finds others far ahead."""
    case = lay_out([Branch(0, 0.0, 40, 1) for _ in range(24)], Shape(kv_heads=1, group=1))
    expected = by_definition(case)
    with threads(6):
        step = NativeBackend(kernels, shares=True).plan(case.rows, 16)
        for _ in range(300):
            out = step.attend(case.query, case.keys, case.values, AttentionOptions(case.scaling))
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=3e-5)


def test_a_window_as_long_as_the_longest_row_is_none(kernels: WatchedKernels) -> None:
    case = lay_out([Branch(0, 0.0, 70, 1), Branch(0, 1.0, 20, 5)], Shape())
    longest = max(row.context for row in case.rows)
    out = attend(kernels, case, shares=True, window=longest)
    torch.testing.assert_close(out.double(), by_definition(case, longest), rtol=1e-4, atol=3e-5)


CASE = lay_out([Branch(0, 0.0, 40, 1), Branch(0, 1.0, 20, 5)], Shape(group=2))
PLAIN = AttentionOptions(0.2)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(CASE, PLAIN._replace(softcap=3.0), id="softcap"),
        pytest.param(CASE, PLAIN._replace(sinks=torch.ones(4)), id="sinks"),
        pytest.param(CASE, PLAIN._replace(window=67), id="window"),
        pytest.param(lay_out([Branch(0, 0.0, 9, 2)], Shape(key_dim=24)), PLAIN, id="key size"),
        pytest.param(lay_out([Branch(0, 0.0, 9, 2)], Shape(value_dim=24)), PLAIN, id="value size"),
        pytest.param(lay_out([Branch(0, 0.0, 9, 2)], Shape(group=33)), PLAIN, id="group"),
        pytest.param(lay_out([Branch(0, 0.0, 9, 2)], Shape(dtype=torch.float16)), PLAIN, id="float16"),
        pytest.param(lay_out([Branch(0, 0.0, 9, 2)], Shape(dtype=torch.float64)), PLAIN, id="float64"),
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_torch(
    kernels: WatchedKernels, case: Case, options: AttentionOptions
) -> None:
    before = kernels.asked["attend"]
    found, expected = (
        backend.plan(case.rows, case.shape.block_size).attend(case.query, case.keys, case.values, options)
        for backend in (NativeBackend(kernels, shares=True), TorchBackend(CPU))
    )
    assert kernels.asked["attend"] == before
    assert torch.equal(found, expected)


def test_layers_of_one_step_may_differ(kernels: WatchedKernels) -> None:
    """One plan serves layers with other heads and other sizes, and those that only torch can do."""
    branches = [Branch(0, 0.0, 90, 1), Branch(0, 1.0, 20, 4)]
    cases = [
        lay_out(branches, Shape(kv_heads=k, group=g, value_dim=d)) for k, g, d in ((2, 3, 64), (1, 4, 16), (2, 3, 24))
    ]
    step = NativeBackend(kernels, shares=True).plan(cases[0].rows, 16)
    for case in [*cases, *cases]:
        out = step.attend(case.query, case.keys, case.values, AttentionOptions(case.scaling))
        torch.testing.assert_close(out.double(), by_definition(case), rtol=1e-4, atol=3e-5)


def test_a_backend_is_found_by_its_name(kernels: WatchedKernels) -> None:
    assert isinstance(make_backend("native", CPU, kernels), NativeBackend)
    assert isinstance(make_backend("auto", CPU, kernels), NativeBackend)
    assert isinstance(make_backend("torch", CPU, kernels), TorchBackend)
    assert isinstance(make_backend("auto", torch.device("meta"), kernels), TorchBackend)


@pytest.mark.parametrize("dtype", ATOL)
def test_keys_that_are_no_numbers_are_not_passed_over(kernels: WatchedKernels, dtype: torch.dtype) -> None:
    """A whole run of them, alone and as a prefix of two rows; a third row does not see them."""
    branches = [Branch(0, 0.0, 200, 1), Branch(0, 0.5, 60, 1), Branch(0, 0.0, 90, 1)]
    case = lay_out(branches, Shape(dtype=dtype), most=200)
    for block in case.rows[0].blocks[:4]:
        case.keys[block] = torch.nan
    for shares in (True, False):
        out = attend(kernels, case, shares=shares)
        assert all(out[row.start].isnan().all() for row in case.rows[:2])
        assert out[case.rows[2].start].isfinite().all()


@pytest.mark.parametrize(
    "rows",
    [
        [Row(0, 1, 33, np.zeros(2, dtype=np.int32), None)],
        [Row(0, 3, 2, np.zeros(1, dtype=np.int32), None)],
        [Row(0, 2, 2, np.zeros(1, dtype=np.int32), None), Row(1, 1, 1, np.zeros(1, dtype=np.int32), None)],
    ],
    ids=["short table", "more tokens than context", "overlap"],
)
def test_rows_that_would_read_foreign_memory_are_refused(kernels: WatchedKernels, rows: Sequence[Row]) -> None:
    with pytest.raises(ModelError, match="rows of a step"):
        NativePlan(kernels, rows, 16, 1, shares=True)
