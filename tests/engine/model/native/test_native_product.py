"""Matrix products in C++ against float64, for all sizes that do not fit their tiles, and by any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from octavo.engine.model.lowering.linear import DenseProduct
from octavo.engine.model.native import product as native_product
from octavo.engine.model.native.library import DTYPES
from octavo.engine.model.native.product import NativeProduct, can_lay_out
from octavo.tests.engine.model.native.native_rig import WatchedKernels, threads

OUTPUTS = [1, 15, 16, 17, 47, 48, 49, 97, 144, 150]
INPUTS = [2, 6, 30, 48, 130]
MOST_ROWS = 40
GUARD = 3


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def among_nan(tensor: Tensor) -> Tensor:
    """The same, dense, with NaN before and behind it in memory."""
    wall = torch.full((GUARD, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
    return torch.cat((wall, tensor, wall))[GUARD:-GUARD]


def strided(rows: Tensor, pad: int = 5) -> Tensor:
    """The same in rows of a wider tensor, among NaN."""
    wide = torch.full((len(rows) + 2 * GUARD, rows.shape[1] + 2 * pad), torch.nan, dtype=rows.dtype)
    wide[GUARD:-GUARD, pad:-pad] = rows
    return wide[GUARD:-GUARD, pad:-pad]


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = True) -> Layer:
        vector = among_nan(noise(outputs, dtype=dtype, seed=2)) if bias else None
        return cls(among_nan(noise(outputs, inputs, dtype=dtype, seed=1)), vector)

    def assert_agrees(self, found: Tensor, x: Tensor, residual: Tensor | None = None) -> None:
        """Off by what adding up in float32 explains, and by one rounding to the dtype."""
        added = [part.double() for part in (self.bias, residual) if part is not None]
        expected = functional.linear(x.double(), self.weight.double()) + sum(added)
        size = functional.linear(x.double().abs(), self.weight.double().abs()) + sum(part.abs() for part in added)
        allowed = 6 * torch.finfo(torch.float32).eps * size
        if x.dtype != torch.float32:
            allowed = allowed + torch.finfo(x.dtype).eps / 2 * (expected.abs() + allowed)
        assert (found.dtype, found.shape) == (x.dtype, expected.shape)
        assert ((found.double() - expected).abs() <= allowed).all()


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="module")
def able(kernels: WatchedKernels, dtype: torch.dtype) -> WatchedKernels:
    """They are tried where others would be faster, too."""
    return kernels


def made(kernels: WatchedKernels, layer: Layer) -> NativeProduct:
    before = kernels.asked["product"]
    product = NativeProduct(kernels, *layer)
    assert kernels.asked["product"] == before + 1
    return product


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_every_number_of_rows_gives_the_sums(
    able: WatchedKernels, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    layer = Layer.of(outputs, inputs, dtype)
    product = made(able, layer)
    everything = noise(MOST_ROWS, inputs, dtype=dtype)
    expected = product(everything)
    layer.assert_agrees(expected, everything)
    for rows in range(MOST_ROWS):
        x = everything[:rows]
        assert torch.equal(product(strided(x)), expected[:rows]), "a row does not depend on its neighbours"
        assert torch.equal(product(among_nan(x)), expected[:rows])


@pytest.mark.parametrize("inputs", [602, 4098, 70_002])
def test_more_rows_than_lie_near_the_processor(able: WatchedKernels, dtype: torch.dtype, inputs: int) -> None:
    """They are multiplied, and what is converted is converted, some at a time."""
    rows = 150
    layer, x, residual = Layer.of(17, inputs, dtype), noise(rows, inputs, dtype=dtype), noise(rows, 17, dtype=dtype)
    product = made(able, layer)
    found = product.add(x, residual)
    layer.assert_agrees(found, x, residual)
    assert torch.equal(found, torch.cat([product.add(x[i : i + 1], residual[i : i + 1]) for i in range(rows)]))


@pytest.mark.parametrize("bias", [False, True])
@given(st.integers(0, MOST_ROWS), st.integers(1, 150), st.integers(1, 80), st.sampled_from([1, 2, 3, 4]))
def test_sums_with_bias_and_residual_by_any_number_of_threads(
    able: WatchedKernels, dtype: torch.dtype, bias: bool, rows: int, outputs: int, pairs: int, count: int
) -> None:
    layer = Layer.of(outputs, 2 * pairs, dtype, bias=bias)
    x, residual = strided(noise(rows, 2 * pairs, dtype=dtype)), among_nan(noise(rows, outputs, dtype=dtype, seed=3))
    kept = residual.clone()
    product = NativeProduct(able, *layer)
    alone = product(x), product.add(x, residual)
    layer.assert_agrees(alone[0], x)
    layer.assert_agrees(alone[1], x, residual)
    if count > 1 and rows % 4 == 1:  # more threads than processors take their time
        with threads(count):
            product = NativeProduct(able, *layer)
            assert torch.equal(product(x), alone[0])
            assert torch.equal(product.add(x, residual), alone[1])
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_teams_of_all_sizes_share_panels_that_do_not_come_out_even(
    able: WatchedKernels, dtype: torch.dtype, count: int
) -> None:
    layer = Layer.of(5 * 48 - 3, 62, dtype)
    with threads(count):
        product = made(able, layer)
        for rows in (0, 1, 7, 13):
            x, residual = noise(rows, 62, dtype=dtype), noise(rows, 5 * 48 - 3, dtype=dtype, seed=3)
            layer.assert_agrees(product(x), x)
            layer.assert_agrees(product.add(x, residual), x, residual)


def test_a_residual_in_any_layout(able: WatchedKernels, dtype: torch.dtype) -> None:
    layer, x, residual = Layer.of(50, 14, dtype), noise(5, 14, dtype=dtype), noise(5, 50, dtype=dtype, seed=3)
    product = made(able, layer)
    for other in (strided(residual), residual.t().contiguous().t()):
        assert torch.equal(product.add(x, other), product.add(x, residual))


def test_a_weight_in_any_layout_is_copied(able: WatchedKernels, dtype: torch.dtype) -> None:
    layer, x = Layer.of(50, 14, dtype), noise(5, 14, dtype=dtype)
    product = made(able, layer)
    expected = product(x)
    for other in (strided(layer.weight), layer.weight.t().contiguous().t()):
        assert torch.equal(NativeProduct(able, other, layer.bias)(x), expected)
    layer.weight.zero_()
    assert torch.equal(product(x), expected)


def test_columns_that_fill_up_the_last_panel_are_zero(able: WatchedKernels, dtype: torch.dtype) -> None:
    """Not what lies behind the weight: sums over that could be anything, if never read."""
    panels = made(able, Layer.of(50, 14, dtype)).panels
    assert panels.isfinite().all()
    assert panels.count_nonzero() == 50 * 14


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_is_written_beside_the_answer(able: WatchedKernels, dtype: torch.dtype, count: int) -> None:
    run = able.function("product", dtype)
    for outputs in (1, 17, 50, 95):
        layer = Layer.of(outputs, 14, dtype)
        panels = made(able, layer).panels
        for rows in (0, 1, 9):
            x, whole = (
                strided(noise(rows, 14, dtype=dtype)),
                torch.full((rows * outputs + 128,), torch.nan, dtype=dtype),
            )
            out = whole[64 : 64 + rows * outputs]
            run(
                *(x.data_ptr(), x.stride(0), rows),
                *(panels.data_ptr(), None if layer.bias is None else layer.bias.data_ptr()),
                *(14, outputs, 4 // dtype.itemsize, None, out.data_ptr(), count),
            )
            layer.assert_agrees(out.view(rows, outputs), x)
            assert whole.isnan().sum() == 128


@given(st.integers(0, MOST_ROWS), st.integers(1, 150), st.integers(1, 80))
def test_floats_that_are_bfloat16_give_the_same_bits_from_half_of_the_memory(
    kernels: WatchedKernels, rows: int, outputs: int, pairs: int
) -> None:
    layer, x = Layer.of(outputs, 2 * pairs, torch.bfloat16), noise(rows, 2 * pairs)
    weight, bias = layer.weight.float(), noise(outputs, seed=2)
    product = NativeProduct(kernels, weight, bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_product, "_narrowed", lambda weight: weight)
        wide = NativeProduct(kernels, weight, bias)
    assert product.panels.nbytes == wide.panels.nbytes // 2
    assert torch.equal(product(x), wide(x))
    residual = noise(rows, outputs, seed=3)
    assert torch.equal(product.add(x, residual), wide.add(x, residual))


@pytest.mark.parametrize("other", [1 + 2**-8, 1e-42, torch.nan])
def test_one_number_that_is_no_bfloat16_keeps_a_weight_as_it_is(kernels: WatchedKernels, other: float) -> None:
    weight, x = noise(50, 14, dtype=torch.bfloat16).float(), noise(3, 14)
    weight[49, 13] = other
    product = NativeProduct(kernels, weight, None)
    assert product.panels.dtype == torch.float32
    if other == other:  # noqa: PLR0124  # not NaN
        Layer(weight, None).assert_agrees(product(x), x)


def test_numbers_that_are_none_stay_in_their_row(able: WatchedKernels, dtype: torch.dtype) -> None:
    layer, x = Layer.of(50, 14, dtype), noise(19, 14, dtype=dtype)
    product = made(able, layer)
    expected = product(x)
    broken = x.clone()
    broken[[3, 17]] = torch.tensor([[torch.nan], [torch.inf]], dtype=dtype)
    found = product(broken)
    others = [i for i in range(19) if i not in {3, 17}]
    assert torch.equal(found[others], expected[others])
    assert not found[[3, 17]].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("inputs", [1, 2, 13, 64])
def test_what_can_be_laid_out(kernels: WatchedKernels, dtype: torch.dtype, inputs: int) -> None:
    expected = kernels.has_products and dtype in DTYPES and inputs % 2 == 0
    assert can_lay_out(kernels, torch.empty(5, inputs, dtype=dtype)) == expected
    assert not can_lay_out(kernels, torch.empty(5, inputs, dtype=dtype, device="meta"))


def test_products_are_for_processors_that_multiply_and_add_at_once(
    kernels: WatchedKernels, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["kernels"] == "any processor":
        assert not kernels.has_products


def test_it_settles_dense_weights_and_settles_no_further(able: WatchedKernels, dtype: torch.dtype) -> None:
    layers = [Layer.of(20, 14, dtype), Layer.of(31, 14, dtype, bias=False)]
    dense = DenseProduct([layer.weight for layer in layers], [layer.bias for layer in layers])
    settled = dense.settled(lambda weight, bias: NativeProduct(able, weight, bias))
    assert isinstance(settled, NativeProduct)
    assert settled.settled(None) is settled
    x = noise(3, 14, dtype=dtype)
    for layer, (begin, end) in zip(layers, pairwise((0, 20, 51)), strict=True):
        layer.assert_agrees(settled(x)[:, begin:end], x)


def test_more_teams_than_processors_at_once(able: WatchedKernels, dtype: torch.dtype) -> None:
    """Threads that wait for each other give way to those that they wait for."""
    layer, x = Layer.of(150, 62, dtype), noise(11, 62, dtype=dtype)
    product = made(able, layer)
    expected = product(x)

    def compute(_: int) -> Sequence[Tensor]:
        return [product(x) for _ in range(3)]

    with threads(2 * (os.cpu_count() or 1) + 1), ThreadPoolExecutor(3) as pool:
        for found in pool.map(compute, range(6)):
            assert all(torch.equal(each, expected) for each in found)


FEWER = """
import ctypes, sys
import numpy as np
library, rows, inputs, outputs = ctypes.CDLL(sys.argv[1]), 9, 14, 150
random = np.random.default_rng(0)
x, weight = (random.integers(-9, 9, (n, inputs)).astype(np.float32) for n in (rows, outputs))
room = np.zeros(192 * inputs + 16, np.float32)
panels = room[-room.ctypes.data % 64 // 4:]
out = np.full((rows, outputs), np.nan, np.float32)
number, at = ctypes.c_int64, lambda array: ctypes.c_void_p(array.ctypes.data)
library.octavo_lay_out_float32(at(panels), at(weight), number(outputs), number(inputs), 4)
library.octavo_product_float32(at(x), number(inputs), number(rows), at(panels), None, number(inputs), number(outputs),
                               number(1), None, at(out), 4)
assert (out == x @ weight.T).all()
"""


@pytest.mark.parametrize("limit", ["1", "2", "3"])
def test_fewer_threads_than_asked_for_do_all_of_the_work(library_file: Path, limit: str) -> None:
    command = [sys.executable, "-c", FEWER, str(library_file)]
    environment = {**os.environ, "OMP_THREAD_LIMIT": limit}
    subprocess.run(command, check=True, env=environment, timeout=60)  # noqa: S603  # ours
