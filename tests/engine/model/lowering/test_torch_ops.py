"""The small operations against their formulas and against Transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from octavo.engine.model.lowering import TorchOps

HEADS, KV_HEADS, DIM, BLOCKS, BLOCK_SIZE = 6, 2, 8, 5, 4


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tables(tokens: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -2, DIM // 2)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e3])
def test_rms_norm_is_its_formula(dtype: torch.dtype, size: float) -> None:
    x, weight, eps = (noise(5, 24) * size).to(dtype), noise(24, seed=1).to(dtype), 1e-5
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    got = TorchOps().rms_norm(x, weight, eps)
    assert got.dtype == dtype
    assert ((got.double() - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs() + 1e-12).all()


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    gate_up = noise(3, 14)
    gate, up = gate_up[:, :7], gate_up[:, 7:]
    assert torch.allclose(TorchOps().silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 7])
def test_rotation_is_that_of_transformers_and_goes_to_the_slots_alone(tokens: int) -> None:
    qkv = noise(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    before = qkv.clone().view(tokens, -1, DIM)
    cos, sin = tables(tokens)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(3))[:tokens]
    keys, values = (torch.full((BLOCKS, BLOCK_SIZE, KV_HEADS, DIM), torch.nan) for _ in range(2))
    TorchOps().rotate_store(qkv, cos, sin, slots, keys, values)
    expected = apply_rotary_pos_emb(
        before[None, :, :HEADS], before[None, :, HEADS:-KV_HEADS], cos, sin, unsqueeze_dim=1
    )
    query, key = (tensor[0] for tensor in expected)
    after = qkv.view(tokens, -1, DIM)
    assert torch.allclose(after[:, :HEADS], query, atol=1e-6)
    assert torch.allclose(keys.flatten(0, 1)[slots], key, atol=1e-6)
    assert torch.equal(after[:, -KV_HEADS:], before[:, -KV_HEADS:])
    assert torch.equal(values.flatten(0, 1)[slots], before[:, -KV_HEADS:])
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[slots] = False
    assert keys.flatten(0, 1)[untouched].isnan().all()
    assert values.flatten(0, 1)[untouched].isnan().all()


def test_no_angle_is_no_rotation() -> None:
    qkv = noise(4, (HEADS + 2 * KV_HEADS) * DIM)
    before = qkv.clone()
    keys, values = (torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, DIM) for _ in range(2))
    TorchOps().rotate_store(qkv, torch.ones(4, DIM), torch.zeros(4, DIM), torch.arange(4), keys, values)
    assert torch.equal(qkv, before)
