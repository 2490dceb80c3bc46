"""A random model of two layers whose tokens are letters: what it says means nothing, but it is always the same, and a
whole fleet of it runs on a laptop.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = string.ascii_letters + string.digits + " _.,:;-+*/()?!\n"
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save(folder: Path, *, context: int = 2048) -> str:
    """Write it to ``folder``; returns the path."""
    _tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))  # noqa: S106  # no password
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # the library's constructor has no types
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = TEMPLATE
    return wrapped
