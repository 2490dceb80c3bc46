"""What becomes of one request, to the second: the server's clock is the client's."""

from __future__ import annotations

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.bench.client import Answer, Client, Place
from octavo.engine.bench.recorder import Recorder
from octavo.engine.bench.rows import CONNECTION, ERROR_EVENT, MALFORMED, OK, REFUSED, TIMEOUT, TRUNCATED
from octavo.engine.bench.settings import Endpoint, Target
from octavo.tests.engine.bench.stub_server import (
    DONE,
    Body,
    FakeTime,
    Piece,
    Reply,
    Stub,
    chunk,
    event,
    refusal,
    story,
    text_chunk,
    usage,
)
from octavo.tests.engine.bench.stub_server import (
    Answer as ReplyOf,
)


def send(
    answer: ReplyOf, *, retries: int = 0, timeout: float = 60.0, endpoint: Endpoint = Endpoint.CHAT
) -> tuple[Answer, Recorder]:
    recorder = Recorder()

    async def run() -> Answer:
        time = FakeTime()
        target = Target(url="http://stub", retries=retries, timeout=timeout, endpoint=endpoint)
        async with httpx.AsyncClient(transport=Stub(answer, time), base_url=target.base_url) as http:
            return await Client(http, target, time.clock, recorder).send({"max_tokens": 2}, Place(3, 1, 0.0))

    return anyio.run(run), recorder


def outcome_of(*pieces: bytes, breaks: bool = False) -> tuple[str, str | None]:
    reply = Reply([Piece(0, piece) for piece in pieces], breaks=breaks)
    row = send(lambda _body: reply)[0].row
    return row.outcome, row.message


@given(st.floats(0, 9), st.floats(0, 9), st.lists(st.text("ab", min_size=1), min_size=1, max_size=6))
def test_times_tokens_and_text_are_those_of_the_server(first: float, gap: float, words: list[str]) -> None:
    (row, text), recorder = send(lambda _body: story(words, first=first, gap=gap, cached=4))
    assert (row.outcome, row.status, row.finish_reason, row.message) == (OK, 200, "stop", None)
    assert (row.conversation, row.turn) == (3, 1)
    assert text == "".join(words)
    assert row.ttft == pytest.approx(first)
    assert row.gaps == pytest.approx([gap] * (len(words) - 1))
    assert row.e2e == pytest.approx(first + gap * (len(words) - 1))
    assert row.tpot == (None if len(words) == 1 else pytest.approx(gap))
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens, row.counted) == (10, 4, len(words), False)
    assert recorder.rows == [row]
    assert recorder.content_events == len(words)
    assert recorder.in_flight == 0


def test_completions_have_their_text_elsewhere() -> None:
    pieces = [text_chunk("a"), text_chunk("", "length"), usage(3, 1), DONE]
    (row, text), _ = send(lambda _body: Reply([Piece(0, piece) for piece in pieces]), endpoint=Endpoint.COMPLETIONS)
    assert (row.outcome, text, row.output_tokens, row.cached_tokens) == (OK, "a", 1, None)


def test_reasoning_and_tool_calls_are_content_but_no_text_of_the_answer() -> None:
    deltas = [{"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}, {"content": "yes"}, {"role": "assistant"}]
    events = [event({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
    (row, text), _ = send(lambda _body: Reply([Piece(1, piece) for piece in [*events, chunk(finish="stop"), DONE]]))
    assert (row.ttft, row.gaps, text) == (1.0, (1.0, 1.0), "yes")


def test_without_a_usage_events_are_counted_and_the_row_says_so() -> None:
    row = send(lambda _body: Reply([Piece(0, piece) for piece in (chunk("a"), chunk("b", "stop"), DONE)]))[0].row
    assert (row.outcome, row.output_tokens, row.counted, row.prompt_tokens) == (OK, 2, True, None)


def test_an_answer_without_content_has_no_first_token() -> None:
    row = send(lambda _body: Reply([Piece(0, piece) for piece in (chunk(finish="stop"), usage(3, 0), DONE)]))[0].row
    assert (row.outcome, row.ttft, row.tpot, row.output_tokens) == (OK, None, None, 0)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], TRUNCATED),
        ([chunk("a")], TRUNCATED),
        ([chunk("a", "stop")], TRUNCATED),
        ([chunk("a"), DONE], TRUNCATED),
        ([chunk("a", "stop"), DONE.rstrip()], TRUNCATED),
        ([chunk("a", "stop"), DONE, b"data: {"], MALFORMED),
        ([chunk("a", "stop"), DONE, chunk("b")], MALFORMED),
        ([b"data: {]\n\n"], MALFORMED),
        ([b'data: {"choices": 3}\n\n'], MALFORMED),
        ([b'{"choices": []}\n\n'], MALFORMED),
        ([chunk("a"), event({"error": {"message": "no"}})], ERROR_EVENT),
        ([chunk("a"), b"event: error\ndata: {}\n\n"], ERROR_EVENT),
    ],
)
def test_a_stream_that_does_not_end_properly_is_an_error(pieces: list[bytes], expected: str) -> None:
    outcome, message = outcome_of(*pieces)
    assert outcome == expected
    assert message


def test_a_connection_that_breaks_inside_an_answer_cut_it_short() -> None:
    assert outcome_of(chunk("a"), breaks=True)[0] == TRUNCATED


def test_what_came_before_a_failure_is_kept() -> None:
    reply = Reply([Piece(2, chunk("a")), Piece(1, chunk("b"))])
    row = send(lambda _body: reply)[0].row
    assert (row.outcome, row.ttft, row.gaps, row.output_tokens) == (TRUNCATED, 2.0, (1.0,), 2)


def test_an_answer_that_is_no_stream_is_an_error() -> None:
    reply = Reply([Piece(0, b'{"choices": []}')], headers={"content-type": "application/json"})
    row = send(lambda _body: reply)[0].row
    assert row.outcome == MALFORMED
    assert "application/json" in (row.message or "")


def test_a_status_is_an_error_of_its_own_kind_and_its_body_is_shown_in_part() -> None:
    row = send(lambda _body: Reply([Piece(0, b"x" * 5000)], 503))[0].row
    assert (row.outcome, row.status) == ("http 503", 503)
    assert row.message == "x" * 200


def test_an_answer_that_never_ends_is_given_up() -> None:
    row = send(lambda _body: Reply([Piece(0, chunk("a"))], hangs=True), timeout=0.05)[0].row
    assert row.outcome == TIMEOUT


def test_no_connection_is_told_apart() -> None:
    def refuse(body: Body) -> Reply:
        raise httpx.ConnectError("refused")

    row = send(refuse)[0].row
    assert (row.outcome, row.status) == (CONNECTION, None)


def scripted(*replies: Reply) -> ReplyOf:
    left = list(replies)
    return lambda _body: left.pop(0)


def test_a_refusal_is_no_error_and_ends_the_request() -> None:
    (row, _), recorder = send(scripted(refusal("9")))
    assert (row.outcome, row.status, row.refusals) == (REFUSED, 429, 1)
    assert recorder.failed == 0


@pytest.mark.parametrize(
    ("retry_after", "pause"), [("7", 7.0), ("0.5", 0.5), (None, 1.0), ("soon", 1.0), ("999", 60.0)]
)
def test_with_retries_it_comes_again_when_it_was_told_to(retry_after: str | None, pause: float) -> None:
    (row, _), recorder = send(scripted(refusal(retry_after), story(["a"], first=2)), retries=1)
    assert (row.outcome, row.refusals) == (OK, 1)
    assert (row.sent, row.queue, row.ttft) == (pause, pause, 2.0)
    assert recorder.rows == [row]


def test_retries_come_to_an_end() -> None:
    (row, _), _ = send(scripted(*[refusal("1")] * 3), retries=2)
    assert (row.outcome, row.refusals, row.sent) == (REFUSED, 3, 2.0)


def test_other_errors_are_not_tried_again() -> None:
    (row, _), _ = send(scripted(Reply(status=500)), retries=3)
    assert (row.outcome, row.refusals) == ("http 500", 0)
