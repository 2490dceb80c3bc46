"""OpenAI's own client, the blocking one: chats, streams, samples, log-probabilities, stops, tools, formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from openai.types.responses import FunctionToolParam, ResponseInputItemParam

from octavo.tests.system.client_rig import ADVICE, GREETING, LONG, Served

pytestmark = pytest.mark.system


class Report(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: int = pydantic.Field(ge=-50, le=50)


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


class Clock(pydantic.BaseModel):
    """What time it is."""


WEATHER: Final = openai.pydantic_function_tool(Weather, name="weather")
CLOCK: Final[ChatCompletionFunctionToolParam] = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_as_the_engine_answers(server: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (GREETING, "stop")
    limited = client.chat.completions.create(model="fake", messages=said(LONG), max_tokens=9, temperature=0)
    assert limited.choices[0].message.content == server.text(LONG, max_tokens=9)
    assert limited.choices[0].finish_reason == "length"
    newer = client.chat.completions.create(model="fake", messages=said(LONG), max_completion_tokens=9, temperature=0)
    assert newer.choices[0].message.content == limited.choices[0].message.content
    assert limited.usage is not None
    assert (limited.usage.prompt_tokens, limited.usage.completion_tokens) == (len(LONG), 9)


def test_the_usage_tells_what_was_cached(client: openai.OpenAI) -> None:
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(model="fake", messages=said(LONG[::-1]), max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, len(LONG) - 1]  # the last one is computed again, for its logits


def test_a_stream_adds_up_to_the_whole(server: Served, client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="fake", messages=said("Hi"), temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == GREETING
    assert len(deltas) > len(GREETING) / 2  # it came in pieces
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(GREETING) + 1
    assert server.last.stream.text() == GREETING
    assert [chunk.id for chunk in chunks] == [server.last.stream.chunks[0]["id"]] * len(chunks)


def test_the_clients_own_reader_of_streams_understands_them(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=said("weather?"), tools=[CLOCK, WEATHER], temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    contents = [event.delta for event in events if event.type == "content.delta"]
    called = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert "".join(contents).strip() == "Let me see."
    assert [(event.name, event.index, json.loads(event.arguments)) for event in called] == [
        ("weather", 0, {"city": "Oslo"}),
        ("clock", 1, {}),
    ]
    assert final.choices[0].finish_reason == "tool_calls"


def test_samples_are_those_of_the_engine(server: Served, client: openai.OpenAI) -> None:
    expected = server.continuations(LONG, n=3, seed=7, temperature=1.0, max_tokens=8)
    texts = [output.text for output in expected]
    answer = client.chat.completions.create(model="fake", messages=said(LONG), n=3, seed=7, temperature=1, max_tokens=8)
    assert [choice.message.content for choice in answer.choices] == texts
    assert len(set(texts)) == 3
    stream = client.chat.completions.create(
        model="fake", messages=said(LONG), n=3, seed=7, temperature=1, max_tokens=8, stream=True
    )
    joined = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
    assert joined == texts


def test_log_probabilities_are_those_of_the_engine(server: Served, client: openai.OpenAI) -> None:
    (expected,) = server.continuations(LONG, max_tokens=5, logprobs=2)
    assert expected.logprobs is not None
    whole = client.chat.completions.create(
        model="fake", messages=said(LONG), max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].logprobs is not None
    told = whole.choices[0].logprobs.content or []
    assert [bytes(each.bytes or []) for each in told] == [bytes([token]) for token in expected.token_ids]
    assert [each.logprob for each in told] == pytest.approx([score.logprob for score in expected.logprobs])
    for each, score in zip(told, expected.logprobs, strict=True):
        assert {top.token: top.logprob for top in each.top_logprobs} == pytest.approx(
            {chr(token): value for token, value in score.top}
        )
    stream = client.chat.completions.create(
        model="fake", messages=said(LONG), max_tokens=5, temperature=0, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [chunk.choices[0].logprobs for chunk in stream if chunk.choices]
    assert [each for part in streamed if part is not None for each in part.content or []] == told


@pytest.mark.parametrize("stop", [",", ["?", ", y"]])
def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI, stop: str | list[str]) -> None:
    whole = client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0, stop=stop)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello", "stop")
    assert whole.choices[0].model_extra == {"stop_reason": stop if isinstance(stop, str) else stop[1]}
    stream = client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello"  # nothing of it slipped out


def test_tools_are_called_and_what_they_say_is_heard(server: Served, client: openai.OpenAI) -> None:
    messages = said("weather?")
    first = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER, CLOCK], temperature=0)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("clock", {}),
    ]
    messages.append(choice.message.model_dump(exclude_none=True))  # type: ignore[arg-type]  # as its manual has it
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in calls]
    second = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER, CLOCK], temperature=0)
    assert second.choices[0].message.content == ADVICE
    assert second.choices[0].message.tool_calls is None
    assert second.usage is not None
    assert second.usage.prompt_tokens > len("weather?Let me see.cold")  # it heard of the tools and of the calls, too
    assert [each.form["messages"] for each in server.exchanges][-1] == messages


def test_a_tool_that_has_to_be_called_is_called_as_its_schema_says(client: openai.OpenAI) -> None:
    """Of its own the model would greet."""
    required = client.chat.completions.parse(
        model="fake",
        messages=said("Hi"),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    with client.chat.completions.stream(
        model="fake",
        messages=said("Hi"),
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
    ) as stream:
        named = stream.get_final_completion()
    for answer in (required, named):
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        assert not answer.choices[0].message.content


def test_a_pydantic_model_is_filled(client: openai.OpenAI) -> None:
    """Of its own the model would greet."""
    answer = client.chat.completions.parse(model="fake", messages=said("Hi"), response_format=Report, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Report)
    older = client.beta.chat.completions.parse(model="fake", messages=said("Hi"), response_format=Report, temperature=0)
    assert older.choices[0].message.parsed == answer.choices[0].message.parsed
    with client.chat.completions.stream(
        model="fake", messages=said("Hi"), response_format=Report, temperature=0
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_fields_beyond_openais_reach_the_engine(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=said("Hi"), extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}, "top_k": 1}
    )
    content = answer.choices[0].message.content or ""
    assert content[:3].isdigit()
    assert content[3:] in ("-a", "-b", "-c")
    goes_on = client.chat.completions.create(
        model="fake", messages=said("Hi"), temperature=0, max_tokens=20, extra_body={"ignore_eos": True, "unheard": 1}
    )
    assert goes_on.choices[0].finish_reason == "length"
    assert (goes_on.choices[0].message.content or "").startswith(GREETING)


def test_completions_echo_with_log_probabilities(server: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=[list(b"Hi"), list(LONG.encode())], max_tokens=3, temperature=0, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["HiHel", LONG + server.text(LONG, max_tokens=3)]
    (expected,) = server.continuations(LONG, max_tokens=3, logprobs=1, prompt_logprobs=1)
    assert expected.prompt_logprobs is not None
    assert expected.logprobs is not None
    scores = [each.logprob for each in (*expected.prompt_logprobs, *expected.logprobs) if each is not None]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    nothing, *likely = logprobs.token_logprobs or []
    assert str(nothing) == "None"  # before the first token; its type does not know that
    assert likely == pytest.approx(scores)
    assert logprobs.text_offset == list(range(len(LONG) + 3))
    stream = client.completions.create(model="fake", prompt="Hi", temperature=0, stop="!", stream=True, n=2)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["Hello, you"] * 2


def test_responses_fill_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="fake", input="Hi", text_format=Report, temperature=0)
    assert isinstance(answer.output_parsed, Report)
    with client.responses.stream(model="fake", input="Hi", text_format=Report, temperature=0) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_responses_call_tools_and_hear_what_they_say(server: Served, client: openai.OpenAI) -> None:
    tools: list[FunctionToolParam] = [
        {"type": "function", "name": name, "parameters": None, "strict": None} for name in ("weather", "clock")
    ]
    asked = client.responses.create(model="fake", input="weather?", tools=tools, temperature=0)
    assert asked.output_text.strip() == "Let me see."
    calls = [item for item in asked.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Oslo"}), ("clock", {})]
    heard: list[ResponseInputItemParam] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "cold"} for call in calls
    ]
    with client.responses.create(
        model="fake", input=heard, previous_response_id=asked.id, tools=tools, temperature=0, stream=True
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ADVICE
    assert server.last.is_whole


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").model_extra is not None
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
