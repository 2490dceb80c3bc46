"""How single tokens are written: parts of characters above all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import Chat, TokenLogprob
from octavo.engine.server.endpoints.token_texts import IMPOSSIBLE, CompletionLog, TokenTexts

END = 256


class ByteCodec:
    """One token for each byte, and one special one that is ``<end>``."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, chat: Chat) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raw = b"".join(b"" if token == END and skip_special_tokens else self.token_bytes(token) for token in ids)
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else bytes([token_id])

    def special_token_id(self, text: str) -> int | None:
        return END if text == "<end>" else None


def scores(ids: Sequence[int]) -> list[TokenLogprob | None]:
    return [TokenLogprob(token, -1.0) for token in ids]


@given(st.text(max_size=20), st.data())
def test_offsets_are_places_in_the_text_however_it_is_cut(text: str, data: st.DataObject) -> None:
    ids = ByteCodec().encode(text)
    log, offsets = CompletionLog(TokenTexts(ByteCodec())), list[int]()
    while len(offsets) < len(ids):
        step = data.draw(st.integers(1, 5))
        part = ids[len(offsets) : len(offsets) + step]
        offsets += log.take(part, scores(part), 0).text_offset
    starts = [len(bytes(ids[:number]).decode("utf-8", "ignore")) for number in range(len(ids))]
    assert offsets == starts


@given(st.text(max_size=20))
def test_bytes_of_the_tokens_join_to_the_text(text: str) -> None:
    logprobs = TokenTexts(ByteCodec()).chat_logprobs([TokenLogprob(token, -1.0) for token in text.encode()])
    joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert joined.decode() == text


def test_different_tokens_keep_different_names() -> None:
    texts = TokenTexts(ByteCodec())
    assert len({texts.distinct_name(token) for token in range(256)}) == 256
    assert texts.distinct_name(0xE2) == "bytes:\\xe2"
    assert texts.distinct_name(65) == texts.name(65) == "A"
    assert texts.name(0xE2) == "\ufffd"


@pytest.mark.parametrize(("skip", "expected"), [(True, [0, 1, 1]), (False, [0, 1, 6])])
def test_special_tokens_take_room_where_they_are_shown(skip: bool, expected: list[int]) -> None:
    texts = TokenTexts(ByteCodec(), skip_special_tokens=skip)
    ids = [65, END, 66]
    found = CompletionLog(texts).take(ids, scores(ids), 0)
    assert (found.text_offset, found.tokens) == (expected, ["A", "<end>", "B"])


def test_what_is_impossible_has_a_number_that_json_can_hold() -> None:
    texts = TokenTexts(ByteCodec())
    score = TokenLogprob(65, -math.inf, ((66, -0.5), (65, -math.inf), (67, -math.inf)))
    (entry,) = texts.chat_logprobs([score]).content
    assert (entry.logprob, [top.logprob for top in entry.top_logprobs]) == (IMPOSSIBLE, [-0.5, IMPOSSIBLE, IMPOSSIBLE])
    (alternatives,) = CompletionLog(texts).take([65], [score], 2).top_logprobs
    assert alternatives == {"A": IMPOSSIBLE, "B": -0.5}
    (told,) = texts.prompt_logprobs([score], 1)
    assert told is not None
    assert [(name, entry.rank, entry.logprob) for name, entry in told.items()] == [
        ("65", None, IMPOSSIBLE),
        ("66", 1, -0.5),
    ]


def test_without_a_tokenizer_tokens_go_by_their_numbers() -> None:
    texts = TokenTexts(None)
    (entry,) = texts.chat_logprobs([TokenLogprob(7, -1.0)]).content
    assert (entry.token, entry.bytes) == ("token_id:7", None)
    assert TokenTexts(ByteCodec(), as_ids=True).distinct_name(65) == "token_id:65"
