"""Small tokenizers of several kinds, with chat templates."""
# ruff: noqa: S106  # the names of special tokens are no passwords

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ ' ' ~ message.name if message.name }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% endfor %}<|im_end|>\n{% endfor %}{{ extra }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of Hermes and Qwen: tools as JSON, calls as JSON, one more variable."""
SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>", "<unk>"]
SAMPLE = ["user assistant system hello world, how are you?\n", "naïve café 日本語 👍 im_start im_end | < >"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Puts a space before every text, as Llama 2 does."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz<>|_[].?!/:", "▁h", "▁a", "us", "er"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("u", "s"), ("e", "r"), ("▁", "h"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def lower_case() -> Tokenizer:
    """Normalises before it looks for special tokens, and has words only: everything else is ``<unk>``."""
    vocabulary = {"<unk>": 0, "hello": 1, "user": 2, "assistant": 3, "world": 4, "<": 5, ">": 6, "|": 7}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(text, normalized=True) for text in SPECIALS])
    return tokenizer


def wrap(tokenizer: Tokenizer, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # the library's constructor has no types
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    wrapped.chat_template = template
    return wrapped


MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "lower_case": lower_case}
