"""Tiny checkpoints on disk, as the real ones look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def save_llama(tmp_path: Path) -> Callable[..., Path]:
    """Save a random two-layer Llama with a byte tokenizer; keyword arguments change its configuration."""
    import torch  # noqa: PLC0415  # other tests of this folder must not wait for it
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    def save(name: str = "model", *, seed: int = 0, tokenizer: bool = True, **changes: object) -> Path:
        torch.manual_seed(seed)
        settings: dict[str, object] = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "tie_word_embeddings": True,
            **changes,
        }
        config = LlamaConfig.from_dict(settings)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        if tokenizer:
            vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
            backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            fast = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)  # type: ignore[no-untyped-call]
            fast.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save
