"""The small operations in C++ against their formulas, against torch's and against Transformers' own."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from octavo.engine.model.lowering import TorchOps
from octavo.engine.model.native.library import NativeOps
from octavo.tests.engine.model.native.native_rig import WatchedKernels, threads

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SIZES = [1, 2, 15, 16, 17, 40, 576]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}
BLOCKS, BLOCK_SIZE = 40, 4


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def within(rows: Tensor, pad: int = 5) -> Tensor:
    """The same in rows of a wider tensor, among NaN."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 2 * pad), torch.nan, dtype=rows.dtype)
    wide[:, pad:-pad] = rows
    return wide[:, pad:-pad]


@DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("heat", [1e-3, 1.0, 1e3])
def test_rms_norm_is_its_formula(
    kernels: WatchedKernels, dtype: torch.dtype, size: int, rows: int, heat: float
) -> None:
    x, weight, eps = noise(rows, size, dtype=dtype) * heat, noise(size, dtype=dtype, seed=1), 1e-5
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    ops = NativeOps(kernels, dtype)
    found = ops.rms_norm(x, weight, eps)
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= 4 * torch.finfo(dtype).eps * expected.abs() + 1e-12).all()
    assert torch.equal(ops.rms_norm(within(x), weight, eps), found)


@DTYPES
def test_rms_norm_of_nothing_but_zeros_is_zero(kernels: WatchedKernels, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 33, dtype=dtype)
    assert torch.equal(NativeOps(kernels, dtype).rms_norm(x, noise(33, dtype=dtype), 1e-6), x)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_silu_mul_is_that_of_torch(kernels: WatchedKernels, dtype: torch.dtype, size: int, rows: int) -> None:
    gate_up = noise(rows, 2 * size, dtype=dtype) * 5
    ops = NativeOps(kernels, dtype)
    found = ops.silu_mul(gate_up)
    torch.testing.assert_close(found, TorchOps().silu_mul(gate_up), rtol=TOLERANCE[dtype], atol=1e-35)
    assert torch.equal(ops.silu_mul(within(gate_up)), found)


@DTYPES
def test_silu_mul_at_the_ends_of_the_numbers(kernels: WatchedKernels, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    gates = torch.tensor([0.0, 80.0, 88.0, 89.0, 127.0, 1e4, 1e30, largest], dtype=dtype)
    gates = torch.cat((gates, -gates, torch.tensor([torch.inf, torch.nan], dtype=dtype)))
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    found, expected = NativeOps(kernels, dtype).silu_mul(gate_up), TorchOps().silu_mul(gate_up)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=1e-35, equal_nan=True)


class Turn(NamedTuple):
    """A rotation to carry out."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    share: float
    """Of a head's dimensions that turn."""
    seed: int

    @property
    def turned(self) -> int:
        return max(2, int(self.dim * self.share) // 2 * 2)

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The halves of a row differ, as they may."""
        angles = noise(self.tokens, self.turned, seed=self.seed + 1) * 3
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def projected(self, dtype: torch.dtype) -> Tensor:
        return noise(self.tokens, (self.heads + 2 * self.kv_heads) * self.dim, dtype=dtype, seed=self.seed)

    def by_head(self, qkv: Tensor) -> Tensor:
        return qkv.view(self.tokens, self.heads + 2 * self.kv_heads, self.dim)

    def slots(self) -> Tensor:
        return torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(self.seed))[: self.tokens]

    def pools(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = (
            torch.full((BLOCKS, BLOCK_SIZE, self.kv_heads, self.dim), torch.nan, dtype=dtype) for _ in range(2)
        )
        return keys, values

    def expected(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Query and key heads as Transformers turns them, values as they were."""
        heads = self.by_head(qkv).clone()
        turning = heads[None, :, : -self.kv_heads, : self.turned]
        turned, _ = apply_rotary_pos_emb(turning, turning, cos, sin, unsqueeze_dim=1)
        turning.copy_(turned)
        return heads


turns = st.builds(
    Turn,
    tokens=st.integers(0, 9),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([8, 16, 48, 64, 80]),
    share=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    seed=st.integers(0, 2**16),
)


def assert_turned(kernels: WatchedKernels, turn: Turn, dtype: torch.dtype, *, strided: bool) -> None:
    qkv, (cos, sin), slots, (keys, values) = turn.projected(dtype), turn.tables(dtype), turn.slots(), turn.pools(dtype)
    expected = turn.expected(qkv, cos, sin)
    if strided:
        qkv, cos, sin = within(qkv), within(cos), within(sin)
    NativeOps(kernels, dtype).rotate_store(qkv, cos, sin, slots, keys, values)
    # bfloat16: each product is rounded, as there; float32: the compiler may keep one exact
    tolerance = 0.0 if dtype == torch.bfloat16 else 1e-6
    after = turn.by_head(qkv)
    torch.testing.assert_close(after, expected, rtol=tolerance, atol=tolerance)
    stored = torch.cat([pool.flatten(0, 1)[slots] for pool in (keys, values)], dim=1)
    assert torch.equal(stored, after[:, turn.heads :])
    assert keys.isnan().sum() == values.isnan().sum() == keys.numel() - turn.tokens * turn.kv_heads * turn.dim


@DTYPES
@given(turns, st.booleans())
def test_rotation_is_that_of_transformers_and_goes_to_the_slots_alone(
    kernels: WatchedKernels, dtype: torch.dtype, turn: Turn, strided: bool
) -> None:
    assert_turned(kernels, turn, dtype, strided=strided)


@given(turns.filter(lambda turn: turn.tokens > 0))
def test_rotation_over_all_of_a_head_is_that_of_torch(kernels: WatchedKernels, turn: Turn) -> None:
    turn = turn._replace(share=1.0)
    (cos, sin), slots = turn.tables(torch.float32), turn.slots()
    results = []
    for ops in (NativeOps(kernels, torch.float32), TorchOps()):
        qkv, (keys, values) = turn.projected(torch.float32), turn.pools(torch.float32)
        ops.rotate_store(qkv, cos, sin, slots, keys, values)
        results.append((qkv, keys, values))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6, equal_nan=True)


@DTYPES
def test_large_steps_are_shared_between_threads_and_come_out_the_same(
    kernels: WatchedKernels, dtype: torch.dtype
) -> None:
    x, weight = noise(150, 640, dtype=dtype), noise(640, dtype=dtype, seed=1)
    turn = Turn(150, 6, 2, 64, 1.0, 3)
    ops = NativeOps(kernels, dtype)
    few = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)
    with threads(2):
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), few[0])
        assert torch.equal(ops.silu_mul(x), few[1])
        assert_turned(kernels, turn, dtype, strided=True)
