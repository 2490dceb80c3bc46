"""Products over stacked and packed weights compute what plain linear layers do."""

from __future__ import annotations

from itertools import product as every

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.engine.model.lowering.linear import DenseProduct, Pack, PackedProduct, can_pack

CPU = torch.device("cpu")
NEEDS_PACKING = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linears(biases: tuple[bool, ...], dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    made = [nn.Linear(20, 5 + 3 * i, bias=bias, dtype=dtype) for i, bias in enumerate(biases)]
    for i, each in enumerate(p for linear in made for p in linear.parameters()):
        each.data = noise(*each.shape, dtype=dtype, seed=i + 1)
    return made


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got.float() - expected.float()).norm() <= TOLERANCE[got.dtype] * expected.float().norm()


@pytest.mark.parametrize("biases", [b for n in (1, 2, 3) for b in every((False, True), repeat=n)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pack", [None, pytest.param(PackedProduct, marks=NEEDS_PACKING)])
def test_settling_changes_no_result(biases: tuple[bool, ...], dtype: torch.dtype, pack: Pack | None) -> None:
    if pack is not None and not can_pack(CPU, dtype):
        pytest.skip("this processor has no fast product in this dtype")
    layers = linears(biases, dtype)
    with torch.inference_mode():
        loose = DenseProduct.of(layers)
        settled = loose.settled(pack)
        assert isinstance(settled, DenseProduct if pack is None else PackedProduct)
        for rows in (0, 1, 3, 40):
            x = noise(rows, 20, dtype=dtype)
            expected = torch.cat([layer(x) for layer in layers], dim=-1)
            residual = noise(*expected.shape, dtype=dtype, seed=9)
            kept = residual.clone()
            for each in (loose, settled, settled.settled(pack)):
                assert_close(each(x), expected)
                assert_close(each.add(x, residual), expected + residual)
                assert torch.equal(residual, kept)


def test_dense_weights_of_one_layer_are_shared() -> None:
    [layer] = linears((True,))
    settled = DenseProduct.of([layer]).settled(None)
    layer.weight.data.zero_()
    assert torch.equal(settled(noise(2, 20)), layer.bias.expand(2, -1))


@NEEDS_PACKING
def test_a_pack_that_computes_something_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    [layer] = linears((True,))
    monkeypatch.setattr(PackedProduct, "__call__", lambda _self, x: functional.linear(x, layer.weight))
    assert isinstance(DenseProduct.of([layer]).settled(PackedProduct), DenseProduct)


def test_only_the_cpu_packs_and_only_floats() -> None:
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float64)
