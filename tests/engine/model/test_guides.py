"""Guides: what they allow is what a list of all texts says, and asking changes nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.model import llguide
from octavo.engine.model.guides import Guide
from octavo.engine.model.llguide import GuideVocabulary, Spelling
from octavo.engine.output_format import MAX_DEFINITION, OutputFormat
from octavo.engine.testing import FakeCodec
from octavo.errors import CannotContinue, InvalidRequest, ModelError
from octavo.tests.engine.guided_rig import END, HEAD, SIZE, WordCodec, some_case

LETTERS = FakeCodec(special=frozenset({62, 63}))
ENDS = frozenset({62, 63})
PLAIN = GuideVocabulary(LETTERS, 70, ENDS)
"""One character a token, two end tokens, six ids that the tokenizer does not know."""
ENDLESS = GuideVocabulary(FakeCodec(), 64, frozenset())
WORDS = GuideVocabulary(WordCodec(), HEAD, frozenset({END}))


def ids(guide: Guide) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")).tolist())


def choice(vocabulary: GuideVocabulary, *choices: str) -> Guide:
    wanted = OutputFormat.choice(choices)
    return vocabulary.guide(wanted.kind, wanted.definition)


texts = st.lists(st.text("abc01Z", min_size=1, max_size=5), min_size=1, max_size=6)


@given(texts, st.randoms(use_true_random=False))
def test_what_is_allowed_is_what_continues_one_of_the_texts(choices: list[str], rng: random.Random) -> None:
    """The second opinion is the list of all texts. The end tokens come exactly where one of them is complete."""
    guide, so_far = choice(PLAIN, *choices), ""
    while not guide.is_done:
        going_on = {text[len(so_far)] for text in choices if text.startswith(so_far) and text != so_far}
        expected = set(LETTERS.encode("".join(going_on))) | (ENDS if so_far in choices else set())
        assert ids(guide) == expected
        token = rng.choice(sorted(expected))
        guide.accept(token)
        if token in ENDS:
            break
        so_far += LETTERS.decode([token])
    assert guide.is_done
    assert so_far in choices


@given(st.integers(0, 2**32), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_any_way_through_a_format_keeps_to_it(seed: int, rng: random.Random) -> None:
    """With words of several characters, and an end token whose name is a text that some formats want."""
    case = some_case(random.Random(seed))  # noqa: S311  # a test
    guide, codec, drawn = WORDS.guide(case.wanted.kind, case.wanted.definition), WordCodec(), list[int]()
    while not guide.is_done and len(drawn) < 300:
        allowed = ids(guide)
        assert allowed
        assert max(allowed) < SIZE
        drawn.append(END if END in allowed and len(drawn) > 40 else rng.choice(sorted(allowed)))
        guide.accept(drawn[-1])
    if guide.is_done:
        assert case.holds(codec.decode(drawn))


@given(texts, st.data())
def test_asking_changes_nothing_and_copies_go_their_own_way(choices: list[str], data: st.DataObject) -> None:
    guide = choice(WORDS, *choices)
    while not guide.is_done:
        first, copy = ids(guide), guide.copy()
        assert ids(guide) == first == ids(copy)
        copy.accept(data.draw(st.sampled_from(sorted(first))))
        assert ids(guide) == first
        guide.accept(data.draw(st.sampled_from(sorted(first))))


def test_special_tokens_are_no_text() -> None:
    guide = choice(WORDS, "<end>", "<x")
    guide.accept(ord("<"))
    assert END not in ids(guide)
    marked = GuideVocabulary(FakeCodec(special=frozenset({61})), 64, frozenset({63}))
    assert ids(choice(marked, "<61>", "m")) == {ord("<") - 48}  # nor is 61 an "m" any more
    assert ids(choice(ENDLESS, "ab")) == {ord("a") - 48}


def test_what_is_forced_is_written_as_the_tokenizer_writes_it() -> None:
    """Not letter by letter: a model has hardly ever seen that."""
    guide, drawn = choice(WORDS, "abcd12"), list[int]()
    while not guide.is_done:
        [token] = ids(guide)
        guide.accept(token)
        drawn.append(token)
    assert [WordCodec().decode([token]) for token in drawn] == ["abc", "d", "12"]
    assert drawn == WordCodec().encode("abcd12")


@given(st.lists(st.sampled_from(["abc", '"a"', '":', "true", "12", "x", " "]), min_size=30, max_size=60))
@settings(max_examples=20)
def test_a_long_forced_text_is_spelled_a_piece_at_a_time(parts: list[str]) -> None:
    """And comes out the same: token by token, the whole of it would be spelled again and again."""
    text = "".join(parts)
    asked: list[int] = []
    spell = Spelling._encoded

    def spy(self: Spelling, wanted: bytes) -> list[int]:
        asked.append(len(wanted))
        return spell(self, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llguide, "MAX_FORCED", 24)
        patch.setattr(Spelling, "_encoded", spy)
        guide, drawn = choice(WORDS, text), list[int]()
        while not guide.is_done:
            [token] = ids(guide)
            guide.accept(token)
            drawn.append(token)
    assert drawn == WordCodec().encode(text)
    assert max(asked) <= 24


class PrefixingCodec(FakeCodec):
    """Begins every text with a special token, as some tokenizers do, or with a space that is no part of it."""

    def __init__(self, first: Sequence[int]) -> None:
        super().__init__(special=frozenset({63}))
        self._first = list(first)

    def encode(self, text: str) -> list[int]:
        return self._first + super().encode(text)


@pytest.mark.parametrize("first", [[63], [5], [63, 5], []])
@given(text=st.text("abc01", min_size=1))
def test_forced_text_is_spelled_whatever_a_tokenizer_adds(first: list[int], text: str) -> None:
    codec = PrefixingCodec(first)
    spelling = Spelling(codec, [codec.token_bytes(token) for token in range(64)], frozenset({63}), 63)
    assert codec.decode(spelling(text.encode())) == text


def test_a_tokenizer_is_followed_where_other_tokens_would_do() -> None:
    class Letters(WordCodec):
        def encode(self, text: str) -> list[int]:
            return [END, *map(ord, text)]

    codec = Letters()
    spelling = Spelling(codec, [codec.token_bytes(token) for token in range(SIZE)], frozenset({END}), END)
    assert spelling(b"abcd") == list(b"abcd")


def test_what_the_tokens_cannot_write_is_told_without_the_text() -> None:
    guide = choice(PLAIN, "a", "bé")
    assert ids(guide) == set(LETTERS.encode("ab"))
    guide.accept(LETTERS.encode("b")[0])
    with pytest.raises(CannotContinue, match="tokens cannot write") as caught:
        guide.allowed()
    assert "é" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^it wants a text that this model's tokens cannot write$"):
        choice(PLAIN, "éa")


@pytest.mark.parametrize("token", [ord("z"), END, SIZE])
def test_a_token_that_is_not_allowed_is_refused_without_its_text(token: int) -> None:
    guide = choice(WORDS, "ab", "xy")
    with pytest.raises(ModelError, match=r"^a token was chosen that the output format does not allow$"):
        guide.accept(token)


def test_a_format_that_grows_too_complex_is_told_so() -> None:
    guide = WORDS.guide("regex", "x{1000000}")
    with pytest.raises(CannotContinue, match="too complex"):
        guide.accept(ord("x"))


def test_only_the_empty_text_is_no_format() -> None:
    with pytest.raises(ValueError, match="empty text"):
        WORDS.guide("regex", "")
    assert ids(WORDS.guide("regex", "a?")) == {ord("a"), END}


def test_no_model_can_go_on_with_spaces_for_ever() -> None:
    guide = WORDS.guide("json_schema", '{"type": "object"}')
    guide.accept(ord("{"))
    for _ in range(64):
        guide.accept(ord(" "))
    assert ord(" ") not in ids(guide)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OutputFormat.choice([]),
        lambda: OutputFormat.choice("abc"),
        lambda: OutputFormat.choice([1]),  # type: ignore[list-item]  # what is tested
        lambda: OutputFormat.regex("\ud800"),
        lambda: OutputFormat.regex(5),  # type: ignore[arg-type]  # what is tested
        lambda: OutputFormat.json_schema({"a": {1, 2}}),
        lambda: OutputFormat.json_schema({"maximum": float("nan")}),
        lambda: OutputFormat.grammar("x" * (MAX_DEFINITION + 1)),
        lambda: OutputFormat("xml", "x"),  # type: ignore[arg-type]  # what is tested
    ],
)
def test_what_is_no_format_is_refused_when_it_is_made(make: type[OutputFormat]) -> None:
    with pytest.raises(InvalidRequest):
        make()  # type: ignore[call-arg]  # a function without arguments


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=6), min_size=1, max_size=4))
def test_choices_may_hold_any_character(choices: list[str]) -> None:
    if not any(choices):
        return
    guide, wanted = choice(WORDS, *choices), max(choices, key=len)
    for character in wanted:
        guide.accept(ord(character))
    assert guide.is_done or END in ids(guide)
    assert re.fullmatch("|".join(map(re.escape, choices)), wanted)


def test_panics_of_native_code_become_ordinary_errors() -> None:
    class Panic(BaseException):
        pass

    class Matcher:
        def consume_token(self, token: int) -> bool:
            raise Panic("boom")

        compute_bitmask = deep_copy = is_stopped = lambda self: self.consume_token(0)

    guide = choice(WORDS, "ab")
    guide._matcher = Matcher()  # type: ignore[attr-defined]  # what is tested
    for act in (guide.allowed, guide.copy, lambda: guide.accept(1), lambda: guide.is_done):
        with pytest.raises(ModelError, match="llguidance failed: Panic: boom"):
            act()
