"""Conversations as clients send them become what chat templates expect, or an error that says where."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.model.chat_messages import MAX_DEPTH, Json, plain, plain_chat
from octavo.engine.request import Chat, ChatMessage
from octavo.errors import InvalidRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=10,
)


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def call(arguments: object) -> ChatMessage:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def arguments_of(message: ChatMessage) -> object:
    """What becomes of the arguments of a message's only call."""
    [written] = plain_chat(Chat([message])).messages
    [made] = json.loads(json.dumps(written["tool_calls"]))
    return made["function"]["arguments"]


def content_of(message: ChatMessage, *, as_parts: bool = False) -> Json:
    return plain_chat(Chat([message]), as_parts=as_parts).messages[0]["content"]


@given(value=JSON)
def test_json_stays_what_it_is(value: Json) -> None:
    assert plain(value, "it") == value


def test_the_copy_shares_nothing() -> None:
    inner = {"a": [1]}
    copy = plain(inner, "it")
    inner["a"].append(2)
    assert copy == {"a": [1]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nested(MAX_DEPTH + 1), "more than 64 levels"),
        ({"a": object()}, "holds a object, which is no JSON"),
        ({"a": {1}}, "holds a set"),
        ({"a": b"x"}, "holds a bytes"),
        ({1: "a"}, "a name that is no string"),
        ({"\ud800": 1}, "a name in it holds a lone surrogate"),
        (["\udfff"], "it holds a lone surrogate at character 0"),
    ],
)
def test_what_is_no_json_is_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        plain(value, "it")
    plain(nested(MAX_DEPTH), "it")


def test_parts_become_one_text() -> None:
    """Line breaks between them, as vLLM has it."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"text": "c"}]
    message = {"role": "user", "content": parts}
    assert content_of(message) == "a\nb\nc"
    assert content_of(message, as_parts=True) == [{"type": "text", "text": text} for text in "abc"]
    assert content_of({"role": "user", "content": []}) == ""


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": None, "refusal": None}])
def test_an_assistant_may_have_said_nothing(message: ChatMessage) -> None:
    assert plain_chat(Chat([{"role": "assistant", **message}])).messages == [{"role": "assistant", "content": ""}]


def test_nulls_are_absent_but_not_in_a_schema() -> None:
    tool = {**TOOL, "strict": None, "function": {**TOOL["function"], "description": None}}  # type: ignore[dict-item]
    chat = Chat([{"role": "user", "content": "a", "name": None}], tools=[tool])
    assert plain_chat(chat)[:2] == ([{"role": "user", "content": "a"}], [TOOL])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": 1', '{"a": 1'),  # what a model left unfinished
        ("[1]", "[1]"),
        ("5", "5"),
        ("9" * 5000, "9" * 5000),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_become_objects_where_they_are_some(arguments: object, expected: object) -> None:
    assert arguments_of(call(arguments)) == expected


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"\\udfff": 1}'])
def test_arguments_hide_no_surrogates(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        arguments_of(call(arguments))


@pytest.mark.parametrize(
    ("role", "known", "expected"),
    [("developer", (), "system"), ("developer", ("developer",), "developer"), ("ipython", ("ipython",), "ipython")],
)
def test_roles_are_those_of_the_api_and_of_the_template(role: str, known: tuple[str, ...], expected: str) -> None:
    assert plain_chat(Chat([{"role": role, "content": "a"}]), known).messages[0]["role"] == expected


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (Chat([{"role": "end", "content": "a"}]), "role of message 0 must be one of assistant, developer"),
        (Chat([{"role": None, "content": "a"}]), "role of message 0 must be a string"),
        (Chat("ab"), "messages must be a list, not str"),  # type: ignore[arg-type]
        (Chat(None), "messages must be a list, not NoneType"),  # type: ignore[arg-type]
        (Chat([{"role": "tool", "content": None}]), "message 0 must be an object with role and content"),
        (Chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "only text parts"),
        (Chat([{"role": "user", "content": [{"type": "text", "text": None}]}]), "only text parts"),
        (Chat([{"role": "user", "content": ["a"]}]), "only text parts"),
        (Chat([{"role": "assistant", "tool_calls": "x"}]), "tool_calls of message 0 must be a list"),
        (Chat([{"role": "assistant", "tool_calls": ["x"]}]), "tool call 0 of message 0 must be an object"),
        (Chat([{"role": "assistant", "tool_calls": [{}]}]), "function of tool call 0 of message 0 must be an object"),
        (Chat([{"role": "assistant", "tool_calls": [{"function": {}}]}]), "must have a function with a name"),
        (Chat([{"role": "user", "content": "a"}], tools=["x"]), "tool 0 must be an object"),  # type: ignore[list-item]
        (Chat([{"role": "user", "content": "a"}], tools={}), "tools must be a list, not dict"),  # type: ignore[arg-type]
        (Chat([{"role": "user", "content": "a"}], tools=[{"type": "function"}]), "function of tool 0"),
        (Chat([{"role": "user", "content": "a"}], tools=[{"type": "x", "function": {"name": "f"}}]), "tool 0 must be"),
        (Chat([{"role": "user", "content": "a"}], template_options=[]), "must be an object"),  # type: ignore[arg-type]
        (Chat([{"role": "user", "content": "a"}], continues_last=True), "the last message cannot go on"),
        (Chat([{"role": "assistant", "content": ""}], continues_last=True), "the last message cannot go on"),
    ],
)
def test_what_is_malformed_is_refused(chat: Chat, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        plain_chat(chat)
    assert len(str(refusal.value)) < 200
