"""The bytes of single tokens join to the text that they were made of."""
# ruff: noqa: S106  # the names of special tokens are no passwords

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.engine.model.text import HuggingFaceCodec
from octavo.engine.testing import FakeCodec
from octavo.tests.engine.model.tokenizer_rig import MAKERS, byte_level, wrap

BYTE_LEVEL = HuggingFaceCodec(wrap(byte_level()))
BYTE_FALLBACK = HuggingFaceCodec(wrap(MAKERS["byte_fallback"]()))
any_text = st.text(st.characters(codec="utf-8"), max_size=30)


def joined(codec: HuggingFaceCodec, ids: list[int]) -> bytes:
    return b"".join(map(codec.token_bytes, ids))


def word_piece() -> HuggingFaceCodec:
    tokenizer = Tokenizer(
        models.WordPiece({"<unk>": 0, "<s>": 1, "<|im_end|>": 2, "un": 3, "##s": 4}, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.WordPiece()
    return HuggingFaceCodec(wrap(tokenizer))


def metaspace() -> HuggingFaceCodec:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "b": 2, "▁": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return HuggingFaceCodec(wrap(tokenizer))


@settings(max_examples=200, deadline=None)
@given(text=any_text)
@example(text="naïve 日本 👍 <|im_start|> <tool>\0\x80")
def test_byte_level_tokens_join_to_the_text(text: str) -> None:
    assert joined(BYTE_LEVEL, BYTE_LEVEL.encode(text)) == b"<s>" + text.encode()


@settings(max_examples=200, deadline=None)
@given(text=any_text.filter(lambda text: "▁" not in text))
def test_byte_fallback_tokens_join_to_the_text(text: str) -> None:
    """The tokenizer puts a space before it."""
    expected = b"<s> " + text.encode() if text else b"<s>"
    assert joined(BYTE_FALLBACK, BYTE_FALLBACK.encode(text)) == expected


def test_every_byte_has_a_token() -> None:
    for codec in (BYTE_LEVEL, BYTE_FALLBACK):
        alone = {codec.token_bytes(token) for token in range(400)}
        assert {bytes((byte,)) for byte in range(256)} <= alone


def test_parts_of_words_carry_their_space() -> None:
    assert [word_piece().token_bytes(token) for token in (3, 4)] == [b" un", b"s"]
    assert [metaspace().token_bytes(token) for token in (1, 2, 3)] == [b" a", b"b", b" "]


@pytest.mark.parametrize(
    "codec", [BYTE_LEVEL, BYTE_FALLBACK, word_piece(), metaspace(), FakeCodec(special=frozenset({7}))]
)
def test_unknown_ids_have_none(codec: HuggingFaceCodec | FakeCodec) -> None:
    assert [codec.token_bytes(token) for token in (-1, 5000, 2**32, 2**63, -(2**70))] == [b""] * 5


def test_added_tokens_have_their_name() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("éé", special=False)])
    codec = HuggingFaceCodec(wrap(tokenizer))
    assert joined(codec, codec.encode("aééb")) == "<s>aééb".encode()
    assert [codec.token_bytes(token) for token in (0, 1)] == [b"<s>", b"<|im_start|>"]
    assert [FakeCodec(special=frozenset({7})).token_bytes(token) for token in (7, 8)] == [b"<7>", b"8"]
