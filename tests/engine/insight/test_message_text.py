"""Prompts of every kind in the words of the GenAI conventions."""

from __future__ import annotations

import pytest

from octavo import Chat, SamplingParams
from octavo.engine.insight.message_text import input_messages
from octavo.engine.insight.request_trace import input_text, operation_of
from octavo.engine.request import ChatMessage, Prompt
from octavo.telemetry import names

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CASES: list[tuple[ChatMessage, list[object]]] = [
    ({"role": "user", "content": "a"}, [{"type": "text", "content": "a"}]),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
        [{"type": "text", "content": "a"}, {"type": "text", "content": "b"}],
    ),
    ({"role": "assistant", "content": None}, []),
    (
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        [{"type": "text", "content": "a"}, {"type": "tool_call", "id": "c", "name": "f", "arguments": '{"a": 1}'}],
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": None}]},
        [{"type": "tool_call", "id": None, "name": None, "arguments": None}],
    ),
    (
        {"role": "tool", "content": "a", "tool_call_id": "c"},
        [{"type": "tool_call_response", "id": "c", "response": "a"}],
    ),
]


@pytest.mark.parametrize(("message", "parts"), CASES)
def test_a_message_is_its_parts(message: ChatMessage, parts: list[object]) -> None:
    expected = [{"role": message["role"], "parts": parts}]
    assert input_messages(Chat([message])) == input_messages([message]) == expected


def test_text_and_ids_are_messages_of_a_user() -> None:
    assert input_messages("a") == [{"role": "user", "parts": [{"type": "text", "content": "a"}]}]
    assert input_messages((1, 2)) == [{"role": "user", "parts": [{"type": "token_ids", "content": [1, 2]}]}]


@pytest.mark.parametrize(
    ("prompt", "operation"),
    [("a", "text_completion"), ([1], "text_completion"), ([{"role": "user"}], "chat"), (Chat([]), "chat")],
)
def test_conversations_are_chats(prompt: Prompt, operation: str) -> None:
    assert operation_of(prompt) == operation


def test_what_is_no_json_is_shown_all_the_same() -> None:
    call = {"function": {"name": "f", "arguments": {1}}}
    shown = input_text(Chat([{"role": "assistant", "tool_calls": [call]}]), SamplingParams())
    assert '"{1}"' in str(shown[names.INPUT_MESSAGES])
