"""ResponseMaker: the same response, however its text comes in; tool calls and text in their order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import FinishReason, Metrics, RequestOutput
from octavo.engine.server.endpoints.response_maker import EventWriter, ResponseMaker
from octavo.engine.server.endpoints.response_params import unwritten
from octavo.engine.server.errors import ApiError
from octavo.engine.server.tools.base import Tool
from octavo.engine.server.tools.hermes import Hermes
from octavo.engine.server.wire.response_events import ItemAdded, ItemDone, StreamEvent, TextDelta
from octavo.engine.server.wire.response_form import ResponseForm
from octavo.engine.server.wire.responses import FunctionCall, OutputMessage, Response

TOOLS = [Tool("look_up"), Tool("add")]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = st.lists(st.sampled_from(["Let me see. ", "é", CALL, "<tool_call> no call", "\n"]), max_size=5)


def maker_of(*, calls: bool) -> ResponseMaker:
    numbers = map(str, itertools.count())
    response = unwritten(ResponseForm(input="abc"), "fake", "resp_0", 0)
    reader = Hermes().reader(TOOLS, lambda: next(numbers)) if calls else None
    return ResponseMaker(response, reader, block_size=4, new_number=lambda: next(numbers), wall=lambda: 7.9)


def output(whole: str, delta: str, finish: FinishReason | None) -> RequestOutput:
    return RequestOutput("r", 0, whole, delta, (1,) * len(whole), (), None, None, finish, None, 0.0, 9, 3, Metrics(0.0))


def made(deltas: Sequence[str], finish: FinishReason, *, calls: bool = True) -> tuple[Response, list[StreamEvent]]:
    maker, whole = maker_of(calls=calls), ""
    events = maker.begin()
    for number, delta in enumerate(deltas):
        whole += delta
        events += maker.push(output(whole, delta, finish if number == len(deltas) - 1 else None))
    return maker.response, events + maker.end()


def split(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)] or [""]


def plain(response: Response) -> object:
    """Without ids, whose numbers depend on the order in which they are drawn."""
    return [
        ("call", item.name, json.loads(item.arguments), item.status)
        if isinstance(item, FunctionCall)
        else ("text", [part.text for part in item.content], item.status)
        for item in response.output
    ]


@given(PIECES, st.lists(st.integers(0, 400), max_size=8), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_cuts_make_no_difference(pieces: list[str], cuts: list[int], finish: FinishReason) -> None:
    text = "".join(pieces)
    whole, _ = made([text], finish)
    response, events = made(split(text, cuts), finish)
    assert plain(response) == plain(whole)
    assert (response.status, response.usage) == (whole.status, whole.usage)
    # the stream tells the same: each item opens once, closes once, in order, and the deltas are its text
    assert [event.item for event in events if isinstance(event, ItemDone)] == response.output
    opened = [event.output_index for event in events if isinstance(event, ItemAdded)]
    assert opened == [event.output_index for event in events if isinstance(event, ItemDone)]
    assert opened == list(range(len(response.output)))
    for index, item in enumerate(response.output):
        if isinstance(item, OutputMessage):
            told = [event.delta for event in events if isinstance(event, TextDelta) and event.output_index == index]
            assert "".join(told) == item.content[0].text


def test_text_and_calls_are_items_in_their_order() -> None:
    response, events = made(["Well:", CALL, CALL, "done"], FinishReason.STOP)
    call = ("call", "add", {"a": 1}, "completed")
    assert plain(response) == [("text", ["Well:"], "completed"), call, call, ("text", ["done"], "completed")]
    kinds = [str(event.__struct_config__.tag).removeprefix("response.") for event in events]
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    one_call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*message, "output_item.done"),
        *(*one_call, "output_item.done"),
        *(*one_call, "output_item.done"),
        *(*message, "output_item.done"),
        "completed",
    ]


def test_a_call_alone_has_no_empty_message_beside_it() -> None:
    response, _ = made([CALL], FinishReason.STOP)
    assert [item.__struct_config__.tag for item in response.output] == ["function_call"]


@pytest.mark.parametrize("calls", [True, False])
def test_an_answer_of_nothing_is_an_empty_message(*, calls: bool) -> None:
    response, events = made([""], FinishReason.STOP, calls=calls)
    assert plain(response) == [("text", [""], "completed")]
    assert not any(isinstance(event, TextDelta) for event in events)


def test_without_tools_a_call_is_text() -> None:
    response, _ = made([CALL], FinishReason.STOP, calls=False)
    assert plain(response) == [("text", [CALL], "completed")]


def test_what_was_told_does_not_change_afterwards() -> None:
    """Events are written down later than they are made: they must not share what still grows."""
    maker = maker_of(calls=True)
    early = maker.begin() + maker.push(output("Well: ", "Well: ", None))
    written = [msgspec.json.encode(event) for event in early]
    maker.push(output("Well: " + CALL, CALL, None))
    maker.end()
    assert [msgspec.json.encode(event) for event in early] == written


def test_usage_counts_whole_blocks_as_written() -> None:
    response, _ = made(["abc"], FinishReason.STOP)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (9, 3, 12)
    assert (usage.input_tokens_details.cached_tokens, usage.input_tokens_details.cache_write_tokens) == (3, 5)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (500, "server_error"), (503, "server_error")],
)
def test_a_failure_keeps_the_items_that_are_done(status: int, code: str) -> None:
    maker, writer = maker_of(calls=True), EventWriter()
    for event in [*maker.begin(), *maker.push(output(CALL + "Well", CALL + "Well", None))]:
        writer(event)
    raw = writer(maker.fail(ApiError(status, "no")))
    name, data, *rest = raw.decode().split("\n")
    assert (name, rest) == ("event: response.failed", ["", ""])
    told = json.loads(data.removeprefix("data: "))
    assert [item["type"] for item in told["response"]["output"]] == ["function_call"]
    assert (told["response"]["status"], told["response"]["error"]) == ("failed", {"message": "no", "code": code})
    assert told["sequence_number"] == 9
