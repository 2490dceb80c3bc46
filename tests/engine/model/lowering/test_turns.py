"""What positions turn by, looked up: the model's own, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.engine.model.lowering.turns import Turns

LIMIT = 600
ROPES: dict[str, dict[str, object]] = {
    "plain": {"rope_type": "default", "rope_theta": 10_000.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
}


class Asked(LlamaRotaryEmbedding):
    """Notes how far it was asked."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.reached = [*getattr(self, "reached", []), int(position_ids.max())]
        cos, sin = super().forward(x, position_ids)
        return cos, sin


def module(rope: str) -> Asked:
    positions = dict(ROPES[rope])
    return Asked(
        LlamaConfig(hidden_size=96, num_attention_heads=2, max_position_embeddings=LIMIT, rope_parameters=positions)
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_look_gives_what_the_module_says(rope: str, dtype: torch.dtype) -> None:
    own, embedding = module(rope), torch.zeros(5, 96, dtype=dtype)
    turns = Turns(module(rope), embedding, LIMIT)
    for wanted in ([0], [7, 3, 3], list(range(40)), [299, 1, 300], [LIMIT - 1]):
        positions = torch.tensor(wanted)
        expected = own(torch.zeros(1, len(wanted), 96, dtype=dtype), positions[None])
        for got, table in zip(turns.at(positions), expected, strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, table[0])


def test_the_module_is_asked_seldom_and_never_beyond_the_limit() -> None:
    asked = module("dynamic")
    turns = Turns(asked, torch.zeros(5, 96), LIMIT)
    for position in range(LIMIT):
        turns.at(torch.tensor([position]))
    assert len(asked.reached) < 12
    assert max(asked.reached) == LIMIT - 1
