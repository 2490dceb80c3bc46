"""Tool calls in chats: what the model is told, what it is held to, and how its calls come out."""

from __future__ import annotations

import json
from typing import Final

import pytest

from octavo.engine.request import Chat
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.server.http_rig import Json, ServerOf, Stream
from octavo.tests.engine.server.scripted import AsciiCodec, Scripted

CHAT: Final = "/v1/chat/completions"
HERMES: Final = ServerSettings(tool_format="octavo.engine.server.tools.hermes:Hermes")
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS, "strict": True},
}
TIME: Final = {"type": "function", "function": {"name": "time"}}
MESSAGES: Final = [{"role": "user", "content": "abc"}]
SAYS: Final = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
PROMPT_TOKENS: Final = 5
"""A stand-in for each of the two tools, and three letters."""


def scripted(script: str = SAYS) -> dict[str, object]:
    return {"runner": Scripted(script, PROMPT_TOKENS), "codec": AsciiCodec(), "settings": HERMES}


def only(answer: Json) -> Json:
    choices = answer["choices"]
    assert isinstance(choices, list)
    (choice,) = choices
    assert isinstance(choice, dict)
    return choice


def calls_of(stream: Stream) -> list[Json]:
    deltas = [choice["delta"] for choice in stream.choices()]
    return [call for delta in deltas if isinstance(delta, dict) for call in delta.get("tool_calls", [])]


@pytest.mark.asyncio
async def test_calls_come_out_of_the_text_with_the_text_before_them(server_of: ServerOf) -> None:
    async with server_of(**scripted()) as server:
        whole = only(await server.post(CHAT, messages=MESSAGES, tools=[WEATHER, TIME]))
        stream = await server.stream(CHAT, messages=MESSAGES, tools=[WEATHER, TIME], tool_choice="auto")
    message = whole["message"]
    assert isinstance(message, dict)
    assert (message["content"].strip(), whole["finish_reason"]) == ("Let me see.", "tool_calls")
    called = [
        (call["type"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]
    assert called == [("function", "weather", {"city": "Oslo"}), ("function", "time", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert stream.text() == message["content"]
    assert stream.finish_reasons() == ["tool_calls"]
    assert [call["index"] for call in calls_of(stream)] == [0, 1]
    assert [call["function"] for call in calls_of(stream)] == [call["function"] for call in message["tool_calls"]]
    assert all("tool_call>" not in str(chunk) for chunk in stream.chunks)


@pytest.mark.asyncio
async def test_a_message_that_is_nothing_but_a_call_has_no_content(server_of: ServerOf) -> None:
    script = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    async with server_of(**scripted(script)) as server:
        whole = only(await server.post(CHAT, messages=MESSAGES, tools=[WEATHER, TIME], n=1))
    assert isinstance(whole["message"], dict)
    assert whole["message"]["content"] is None
    assert len(whole["message"]["tool_calls"]) == 1


@pytest.mark.asyncio
async def test_text_without_calls_is_text(server_of: ServerOf) -> None:
    """What looks like the beginning of a call and is none comes out whole."""
    script = "a < b and <tool_ is no call <tool_call>{broken"
    async with server_of(**scripted(script)) as server:
        whole = only(await server.post(CHAT, messages=MESSAGES, tools=[WEATHER, TIME], logprobs=True))
        stream = await server.stream(CHAT, messages=MESSAGES, tools=[WEATHER, TIME], logprobs=True)
    assert isinstance(whole["message"], dict)
    assert (whole["message"]["content"], whole["finish_reason"]) == (script, "stop")
    assert "tool_calls" not in whole["message"]
    assert (stream.text(), stream.finish_reasons()) == (script, ["stop"])
    logprobs = whole["logprobs"]
    assert isinstance(logprobs, dict)
    tokens = [entry["token"] for entry in logprobs["content"]]
    assert "".join(tokens[:-1]) == script, "each token has its log-probability, also while its text is held back"


@pytest.mark.asyncio
async def test_a_call_that_is_cut_short_says_so(server_of: ServerOf) -> None:
    async with server_of(**scripted()) as server:
        whole = only(await server.post(CHAT, messages=MESSAGES, tools=[WEATHER, TIME], max_tokens=40))
        assert whole["finish_reason"] == "length"


@pytest.mark.asyncio
async def test_the_template_hears_of_tools_as_models_know_them(server_of: ServerOf) -> None:
    class Watching(AsciiCodec):
        def encode_chat(self, chat: Chat) -> list[int]:
            seen.append(list(chat.tools))
            return super().encode_chat(chat)

    seen: list[list[object]] = []
    bare = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}
    async with server_of(**{**scripted(), "codec": Watching()}) as server:
        for choice in (None, "auto", "none"):
            await server.post(CHAT, messages=MESSAGES, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=1)
        await server.post(CHAT, messages=MESSAGES, tools=[], max_tokens=1)
    assert seen == [[bare, TIME], [bare, TIME], [], []]


@pytest.mark.asyncio
async def test_without_tools_markers_are_text(server_of: ServerOf) -> None:
    script = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    async with server_of(**{**scripted(), "runner": Scripted(script, 3)}) as server:
        for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            whole = only(await server.post(CHAT, messages=MESSAGES, **body))
            assert isinstance(whole["message"], dict)
            assert (whole["message"]["content"], whole["finish_reason"]) == (script, "stop")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
async def test_tools_that_make_no_sense_are_refused(fields: dict[str, object], param: str, server_of: ServerOf) -> None:
    async with server_of(**scripted()) as server:
        assert str((await server.refused(CHAT, messages=MESSAGES, **fields))["param"]).startswith(param)


@pytest.mark.asyncio
async def test_a_model_of_which_nobody_knows_how_it_calls_gets_no_tools(server_of: ServerOf) -> None:
    async with server_of() as server:
        error = await server.refused(CHAT, messages=MESSAGES, tools=[TIME])
        assert error["param"] == "tools"
        assert "--tool-format" in str(error["message"])
