"""Incremental text: the pieces join to the whole for every kind of tokenizer, at flat cost and with bounded delay."""
# ruff: noqa: S106  # the names of special tokens are no passwords

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from octavo.engine.model.detokenizer import MAX_IDS, IncrementalDetokenizer
from octavo.engine.model.text import HuggingFaceCodec, TextCodec

SAMPLE = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "naïve café — “quotes” … 日本語のテキスト、漢字。 한국어 텍스트",
    "emoji 👍🏽 👩\u200d👩\u200d👧 🇩🇪 done; combining e\u0301 n\u0303 done",
    "    indented\n\n\tcode == value  # two  spaces",
]
SPECIALS = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    """Like GPT-2: bytes as letters, a character may be spread over tokens and a token over characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2: a space is a letter, unknown characters are spelled in byte tokens, the first space vanishes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    for piece in ["▁", "▁▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "日", "▁日", ".", "\ufffd", "🙂"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "▁"), ("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "ab"), ("▁", "日")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    return tokenizer


def metaspace() -> Tokenizer:
    """Like a converted SentencePiece model: the decoder itself treats the first token apart."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in ["▁", "▁▁", "a", "b", "▁a", "▁b", "▁ab", "é", "日本", "."]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    return tokenizer


def word_piece() -> Tokenizer:
    """Like BERT: spaces come from the decoder, ``##`` glues."""
    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2}
    for piece in ["un", "##aff", "##able", "cat", "##s", ".", ",", "'", "##é", "日", "don", "##t"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", *SPECIALS])
    return tokenizer


def build(make: Callable[[], Tokenizer]) -> HuggingFaceCodec:
    tokenizer = make()
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]  # has no types
    return HuggingFaceCodec(wrapped)


CODECS = {make.__name__: build(make) for make in (byte_level, byte_fallback, metaspace, word_piece)}
BYTE_LEVEL, BYTE_FALLBACK = CODECS["byte_level"], CODECS["byte_fallback"]
every_codec = pytest.mark.parametrize("codec", list(CODECS.values()), ids=list(CODECS))


def pieces(codec: TextCodec, ids: Sequence[int], *, skip: bool = True, step: int = 1) -> list[str]:
    """What each push gives, and the flush at the end."""
    detokenizer = IncrementalDetokenizer(codec, skip_special_tokens=skip)
    return [*(detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)), detokenizer.flush()]


def level_ids(data: bytes) -> list[int]:
    """Byte-level ids, one for each byte."""
    found = (BYTE_LEVEL._backend.token_to_id(letter) for letter in (_byte_letters()[byte] for byte in data))
    return [token for token in found if token is not None]


def _byte_letters() -> list[str]:
    """GPT-2's map from bytes to printable letters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def fallback_ids(data: bytes) -> list[int]:
    return [byte + 3 for byte in data]


@every_codec
@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 440), max_size=70), skip=st.booleans(), step=st.sampled_from([1, 1, 2, 7, 40]))
def test_pieces_join_to_the_whole(codec: HuggingFaceCodec, ids: list[int], skip: bool, step: int) -> None:
    assert "".join(pieces(codec, ids, skip=skip, step=step)) == codec.decode(ids, skip_special_tokens=skip)


characters = st.one_of(st.characters(codec="utf-8"), st.sampled_from(list("日é👍🏽\u200d\u0301\ufffd \n")))


@pytest.mark.parametrize("codec", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(characters, max_size=40))
@example(text=SAMPLE[1])
@example(text=SAMPLE[2])
@example(text="\ufffd" * 30)
def test_no_character_is_given_out_in_part(codec: HuggingFaceCodec, text: str) -> None:
    """What is out is always a beginning of the text: no U+FFFD that later turns into something else."""
    ids = codec.encode(text)
    whole, shown = codec.decode(ids), ""
    for piece in pieces(codec, ids):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.binary(max_size=3) | characters.map(str.encode), max_size=40).map(b"".join))
@example(data=b"\xe2\x82" * 20)
@example(data=b"\xf0\x9f\x91" * 20 + "👍".encode())
@example(data="€".encode() * 6 + b"\x80" + "€".encode() * 12)
@example(data=b"\xed\xa0\x80\xc0\xaf\xff" * 8)
def test_any_bytes_read_as_in_python(data: bytes) -> None:
    """Both kinds of byte tokens, one byte at a time: good characters survive next to stray bytes."""
    expected = data.decode("utf-8", "replace")
    for codec, ids in ((BYTE_LEVEL, level_ids(data)), (BYTE_FALLBACK, fallback_ids(data))):
        assert codec.decode(ids).lstrip(" ") == expected.lstrip(" ")
        assert "".join(pieces(codec, ids)) == codec.decode(ids)


class Counting:
    """A codec that notes how many ids each decoding was asked for."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.asked: list[int] = []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.asked.append(len(ids))
        return self._codec.decode(ids, skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_chat(self, chat: object) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def special_token_id(self, text: str) -> int | None:
        raise NotImplementedError


ENDLESS = {
    "stray continuation bytes": (BYTE_LEVEL, level_ids(b"\x80" * 500)),
    "stray continuation bytes, fallback": (BYTE_FALLBACK, fallback_ids(b"\x80" * 500)),
    "lead bytes": (BYTE_FALLBACK, fallback_ids(b"\xf0" * 500)),
    "genuine U+FFFD": (BYTE_LEVEL, level_ids("\ufffd".encode() * 170)),
    "genuine U+FFFD as one token": (BYTE_FALLBACK, BYTE_FALLBACK.encode("\ufffd")[1:] * 500),
    "words": (BYTE_LEVEL, BYTE_LEVEL.encode("again " * 250)),
    "spaces": (BYTE_FALLBACK, BYTE_FALLBACK.encode("  ")[:1] * 500),
    "spaces that vanish at the start": (CODECS["metaspace"], [3] * 500),
    "skipped special tokens": (BYTE_LEVEL, [1] * 500),
    "unknown ids": (BYTE_LEVEL, [100_000] * 500),
}


@pytest.mark.parametrize("name", list(ENDLESS))
def test_work_per_token_is_flat_and_text_comes_soon(name: str) -> None:
    codec, ids = ENDLESS[name]
    ids = [*ids, *codec.encode("a b")[:3], *ids[:3]]
    counting = Counting(codec)
    detokenizer, shown = IncrementalDetokenizer(counting), 0
    for i, token in enumerate(ids, start=1):
        shown += len(detokenizer.push([token]))
        if i % 50 < 4:
            assert shown >= len(codec.decode(ids[:i])) - 1
    shown += len(detokenizer.flush())
    assert shown == len(codec.decode(ids))
    assert max(counting.asked) <= MAX_IDS + 1
    assert sum(counting.asked) <= 25 * len(ids)


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces(BYTE_LEVEL, level_ids("a👍".encode())) == ["a", "", "", "", "👍", ""]
    assert pieces(BYTE_FALLBACK, fallback_ids("a👍".encode())) == ["a", "", "", "", "👍", ""]


def test_special_tokens_between_the_bytes_of_a_character() -> None:
    first, *rest = level_ids("€".encode())
    assert "".join(pieces(BYTE_LEVEL, [first, *[1] * 30, *rest])) == "€"
    lead, *others = fallback_ids("€".encode())
    assert "".join(pieces(BYTE_FALLBACK, [lead, *[1] * 30, *others])) == "€"
    assert "".join(pieces(BYTE_LEVEL, [first, 1, *rest], skip=False)) == "\ufffd</s>\ufffd\ufffd"


def test_an_unfinished_character_comes_with_the_flush_and_once() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push(level_ids("a👍".encode()[:-1])) == "a"
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


def test_combining_marks_follow_their_letter() -> None:
    text = unicodedata.normalize("NFD", "é ñ")
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))) == text


def test_the_space_of_the_first_word_vanishes_and_no_other() -> None:
    ids = BYTE_FALLBACK.encode("ab ab" + " ab" * 30)
    assert "".join(pieces(BYTE_FALLBACK, ids)) == "ab ab" + " ab" * 30
    assert pieces(BYTE_FALLBACK, ids)[:2] == ["ab", " ab"]


@every_codec
@settings(max_examples=50, deadline=None)
@given(
    ids=st.lists(st.integers(0, 440), max_size=40),
    left=st.lists(st.integers(0, 440), max_size=20),
    right=st.lists(st.integers(0, 440), max_size=20),
)
def test_a_copy_goes_its_own_way(codec: HuggingFaceCodec, ids: list[int], left: list[int], right: list[int]) -> None:
    original = IncrementalDetokenizer(codec)
    head = original.push(ids)
    twin = original.copy()
    for detokenizer, tail in ((original, left), (twin, right)):
        assert head + detokenizer.push(tail) + detokenizer.flush() == codec.decode([*ids, *tail])


def test_pushing_nothing() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert [detokenizer.push([]), detokenizer.flush()] == ["", ""]
