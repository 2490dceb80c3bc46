"""Tiny random models of real families, saved and opened like any other: the whole engine against eager ``generate``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

VOCAB = 97
BLOCK = 4
NEW = 14
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
TINY: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # at the usual 0.02 attention hardly shows in the logits
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # with few layers tied ones repeat the last token whatever came before
}
GEMMA: dict[str, object] = {"sliding_window": 6, "head_dim": 12, "num_hidden_layers": 4, "query_pre_attn_scalar": 12}
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "head_dim": 12,
        "rope_parameters": YARN,
    },
}
Ids: TypeAlias = list[int]
AtRest: TypeAlias = Callable[[AsyncEngine], None]


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    model: object = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    model.train(mode=False)
    return model


def prompts() -> list[Ids]:
    """Four that share 25 tokens, one of them to the end, and two strangers."""
    rng = np.random.default_rng(1)
    shared = rng.integers(3, VOCAB, 25).tolist()
    tails = [rng.integers(3, VOCAB, length).tolist() for length in (0, 1, 9, 14)]
    return [*(shared + tail for tail in tails), rng.integers(3, VOCAB, 1).tolist(), rng.integers(3, VOCAB, 30).tolist()]


def eager(model: PreTrainedModel, prompt: Ids) -> tuple[int, ...]:
    assert isinstance(model, GenerationMixin)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None  # else it rules where the call says nothing
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0),  # type: ignore[no-untyped-call]
    )
    return tuple(found[0].tolist()[len(prompt) :])


async def together(engine: AsyncEngine, asked: Sequence[Ids]) -> list[RequestOutput]:
    return [output for (output,) in await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in asked))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_equals_eager_generate(family: str, tmp_path: Path, assert_at_rest: AtRest) -> None:
    model, asked = build(family), prompts()
    expected = [eager(model, prompt) for prompt in asked]
    assert len(set(expected)) == len(asked), "equal texts would hide a mix-up"
    model.save_pretrained(tmp_path)
    settings = {"block_size": BLOCK, "check_every_step": True, "max_batch_tokens": 32, "admission_reserve": 0.0}

    async with AsyncEngine.open(str(tmp_path), EngineConfig(num_blocks=96, **settings)) as engine:  # type: ignore[arg-type]  # a plain dict
        cold = await together(engine, asked)
        assert [output.token_ids for output in cold] == expected
        # three of the four waited for the first one's blocks instead of computing them again
        assert sorted(output.cached_tokens for output in cold[:4])[1] >= 24
        again = await together(engine, asked)
        assert [output.token_ids for output in again] == expected
        assert [output.cached_tokens for output in again] == [len(prompt) - 1 for prompt in asked]
        assert_at_rest(engine)

    async with AsyncEngine.open(str(tmp_path), EngineConfig(num_blocks=18, **settings)) as engine:  # type: ignore[arg-type]  # a plain dict
        for _ in range(2):
            assert [output.token_ids for output in await together(engine, asked)] == expected
        assert engine.stats().preemptions > 0
        assert engine.stats().cache.evictions
        assert_at_rest(engine)
