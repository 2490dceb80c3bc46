"""Text through the engine: stop strings, stop tokens, special tokens, characters in pieces; streamed and as a whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.runner import RowOutput, SampledToken, StepInput, StepOutput
from octavo.engine.output_text import OutputText
from octavo.engine.request import Chat
from octavo.engine.testing import FakeRunner

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
SPECIAL = 7
EOS = 6


class PiecesCodec:
    """Id i stands for the bytes ``pieces[i]``; ids 6 and 7 are the special tokens ``<eos>`` and ``<end>``."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [*pieces, *[b"?"] * (EOS - len(pieces)), b"<eos>", b"<end>", *(bytes([i]) for i in range(128))]

    def encode(self, text: str) -> list[int]:
        return [8 + byte for byte in text.encode()]

    def encode_chat(self, chat: Chat) -> list[int]:
        return self.encode("".join(str(message["content"]) for message in chat.messages))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in (EOS, SPECIAL))]
        return b"".join(self._pieces[i] for i in shown).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def special_token_id(self, text: str) -> int | None:
        return {"<eos>": EOS, "<end>": SPECIAL}.get(text)


class Scripted(FakeRunner):
    """Says the given tokens, one after the other, whatever the prompt."""

    def __init__(self, *script: int) -> None:
        super().__init__(vocab_size=136, eos_token_ids=frozenset({EOS}))
        self._script = script

    def execute(self, step: StepInput) -> StepOutput:
        rows = []
        for row in step.rows:
            if row.sampling is None:
                rows.append(RowOutput())
                continue
            said = len(row.sampling.history) - row.sampling.prompt_length
            token = self._script[said % len(self._script)]
            rows.append(RowOutput(sampled=tuple(SampledToken(token, 0.0) for _ in row.sampling.seeds)))
        return StepOutput(tuple(rows))


async def say(
    engine_of: EngineOf, read: Read, pieces: Sequence[bytes], script: Sequence[int], params: SamplingParams
) -> RequestOutput:
    """The output, once streamed and once at a single blow; both must be the same."""
    codec = PiecesCodec(*pieces)
    async with engine_of(runner=Scripted(*script), codec=codec) as engine:
        (streamed,) = await read(engine.generate([8], params))
        late = await engine.generate([8], params).start()
        await engine._loop.wait_idle()
        (whole,) = await read(late)
        assert (whole.text, whole.token_ids, whole.finish_reason) == (
            streamed.text,
            streamed.token_ids,
            streamed.finish_reason,
        )
        assert whole.text_delta == whole.text
    return streamed


def upto(count: int, **more: object) -> SamplingParams:
    return SamplingParams.from_mapping({"max_tokens": count, **more})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("pieces", "stop", "text", "found"),
    [
        ([b"hi", b"\nUs", b"er", b":", b" x"], ["\nUser:"], "hi", "\nUser:"),
        ([b"xa", b"b", b"a", b"b", b"c"], ["abab"], "x", "abab"),
        ([b"xa", b"b", b"a", b"b", b"c"], ["abab", "ab"], "x", "ab"),
        ([b"xa", b"bc", b"y"], ["abcd", "bc"], "xa", "bc"),
        ([b"\nUser", b":", b"x"], ["\nUser:"], "", "\nUser:"),
        ([b"a", b"aa", b"ab", b"x"], ["aab"], "aa", "aab"),
        ([b"one", b" \xe2\x82", b"\xac two"], ["\u20ac"], "one ", "\u20ac"),
    ],
)
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_across_tokens_is_never_shown(
    pieces: list[bytes], stop: list[str], text: str, found: str, include: bool, engine_of: EngineOf, read: Read
) -> None:
    """TEXT-01: the text before the earliest stop, streamed or not; the stop itself only when asked for."""
    output = await say(engine_of, read, pieces, range(len(pieces)), upto(20, stop=stop, include_stop=include))
    assert output.text == text + (found if include else "")
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, found)


@pytest.mark.asyncio
async def test_what_was_held_back_is_shown_at_the_limit(engine_of: EngineOf, read: Read) -> None:
    output = await say(engine_of, read, [b"x", b"ab"], [0, 1], upto(2, stop=["abc"]))
    assert (output.text, output.finish_reason, output.stop_reason) == ("xab", FinishReason.LENGTH, None)


@pytest.mark.asyncio
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("token", "piece"), [(EOS, "<eos>"), (SPECIAL, "<end>"), (2, "word")])
async def test_a_stop_token_takes_its_own_text_and_no_other(
    token: int, piece: str, include: bool, skip: bool, engine_of: EngineOf, read: Read
) -> None:
    """TEXT-06: special, ordinary, or the end of sequence; the id is in ``token_ids``, the text only when included."""
    params = upto(9, stop_token_ids=[token], include_stop=include, skip_special_tokens=skip)
    output = await say(engine_of, read, [b"a", b"b", b"word"], [0, 1, token, 0], params)
    shown = piece if include and not (skip and token != 2) else ""
    assert output.text == "ab" + shown
    assert (output.token_ids, output.finish_reason) == ((0, 1, token), FinishReason.STOP)
    assert output.stop_reason == token


@pytest.mark.asyncio
@pytest.mark.parametrize("include", [True, False])
async def test_text_held_back_for_a_stop_string_comes_before_the_stop_token(
    include: bool, engine_of: EngineOf, read: Read
) -> None:
    """Two kinds of stop at once: the order of the text is the order of the tokens."""
    params = upto(9, stop=["bcd"], stop_token_ids=[2], include_stop=include)
    output = await say(engine_of, read, [b"a", b"bc", b"!"], [0, 1, 2], params)
    assert output.text == ("abc!" if include else "abc")
    assert output.stop_reason == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("skip", [True, False])
async def test_a_stop_string_that_is_a_special_token_is_found(skip: bool, engine_of: EngineOf, read: Read) -> None:
    """TEXT-07: its text never shows, so it is found by its id."""
    params = upto(9, stop=["<end>"], skip_special_tokens=skip)
    output = await say(engine_of, read, [b"a", b"b"], [0, 1, SPECIAL, 0], params)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", FinishReason.STOP, "<end>")


@pytest.mark.asyncio
async def test_the_end_of_sequence_may_be_ignored(engine_of: EngineOf, read: Read) -> None:
    for params, tokens in ((upto(5), (0, EOS)), (upto(5, ignore_eos=True), (0, EOS, 1, 0, EOS))):
        output = await say(engine_of, read, [b"a", b"b"], [0, EOS, 1], params)
        assert output.token_ids == tokens
        assert output.text == "a" if len(tokens) == 2 else output.text == "aba"
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.asyncio
@pytest.mark.parametrize("least", range(6))
async def test_no_stop_is_honoured_before_min_tokens(least: int, engine_of: EngineOf, read: Read) -> None:
    """A stop string that is complete with token k + 1 stops where ``min_tokens`` is at most k."""
    output = await say(engine_of, read, [b"ab"], [0], upto(9, min_tokens=least, stop=["b"]))
    assert len(output.token_ids) == least + 1
    assert output.text == "ab" * least + "a"


@pytest.mark.asyncio
@pytest.mark.parametrize("least", [0, 1, 4])
async def test_end_tokens_are_banned_before_min_tokens(least: int, engine_of: EngineOf) -> None:
    runner = FakeRunner(vocab_size=8, eos_token_ids=frozenset({1, 2, 3, 4}))
    params = SamplingParams(max_tokens=12, min_tokens=least, n=8, seed=3, stop_token_ids=[5])
    async with engine_of(runner=runner) as engine:
        outputs = await engine.complete([0], params)
    lengths = {len(output.token_ids) for output in outputs}
    assert min(lengths) == least + 1
    assert all(not set(output.token_ids[:least]) & {1, 2, 3, 4, 5} for output in outputs)


@pytest.mark.asyncio
async def test_lone_bytes_arrive_with_bounded_delay(engine_of: EngineOf) -> None:
    """TEXT-04: 500 stray continuation bytes, then plain text; nothing is lost and nothing waits for the end."""
    codec = PiecesCodec(b"\x80", b"a")
    script = [0] * 500 + [1] * 100
    seen: list[RequestOutput] = []
    async with engine_of(runner=Scripted(*script), codec=codec, num_blocks=200) as engine:
        async for output in engine.generate([8], upto(600)):
            seen.append(output)
            assert len(output.token_ids) - len(output.text) <= 1
    assert seen[-1].text == codec.decode(script) == "\ufffd" * 500 + "a" * 100
    assert len(seen) == 600


@pytest.mark.asyncio
async def test_a_character_in_pieces_is_shown_once_and_whole(engine_of: EngineOf, read: Read) -> None:
    output = await say(engine_of, read, [b"\xf0\x9f", b"\x98", b"\x80!", b"\xe2\x82"], [0, 1, 2, 3], upto(4))
    assert output.text == "\U0001f600!\ufffd"


def test_a_copy_goes_its_own_way() -> None:
    text = OutputText(PiecesCodec(b"x", b"a", b"b"), SamplingParams(stop=["ab"]))
    for token in (0, 1):
        assert text.push(token) is None
    twin = text.copy()
    assert text.push(2) == "ab"
    assert twin.push(1) is None
    assert twin.finish() is None
    assert (text.text, twin.text) == ("x", "xaa")


def test_nothing_is_looked_for_before_it_may_stop() -> None:
    text = OutputText(PiecesCodec(b"ab"), SamplingParams(stop=["ab"]))
    assert text.push(0, may_stop=False) is None
    assert text.push(0) == "ab"
    assert text.text == "ab"


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60), st.booleans())
def test_the_text_is_the_same_whenever_somebody_looks(tokens: list[tuple[int, bool]], copied: bool) -> None:
    """Without stop strings it is made at a look: of all that has come, with characters in pieces, on a copy, too."""
    codec = PiecesCodec(b"\xf0\x9f", b"\x98\x80", b"a", b"\xe2", b"\x82", b"\xac")
    text, seen = OutputText(codec, SamplingParams()), ""
    for token, looks in tokens:
        assert text.push(token) is None
        if looks:
            assert text.text.startswith(seen)
            seen = text.text
        text = text.copy() if copied else text
    assert text.finish() is None
    assert text.text == codec.decode([token for token, _ in tokens])
    assert text.text.startswith(seen)


def test_a_tokenizer_that_fails_leaves_the_text_as_it_was() -> None:
    class Failing(PiecesCodec):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            if 1 in ids:
                raise ZeroDivisionError("bad")
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    text = OutputText(Failing(b"a", b"b"), SamplingParams())
    text.push(0)
    assert (text.text, text.fault) == ("a", None)
    text.push(1)
    assert text.text == "a"
    assert isinstance(text.fault, ZeroDivisionError)
    text.push(0)
    text.finish()
    assert text.text == text.copy().text == "a"
