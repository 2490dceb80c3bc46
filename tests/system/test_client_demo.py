"""OpenAI's own client, and a real model behind the server: with tokens that are no characters, and a chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from octavo import AsyncEngine
from octavo.engine.request import Chat
from octavo.engine.server.settings import ServerSettings
from octavo.errors import ModelError
from octavo.tests.system.client_rig import CONFIG, Served, serve

pytestmark = [pytest.mark.system, pytest.mark.slow]

MODEL: Final = "smollm2"
TEMPLATE: Final = """
{%- if tools %}<|im_start|>system
Call functions like <tool_call>[{"name": "f", "arguments": {}}]</tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- if message['tool_calls'] %}<tool_call>{{ message['tool_calls'] | tojson }}</tool_call>{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The model's own knows nothing of tools. From this one the server sees, too, how they are called."""


class Report(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: int = pydantic.Field(ge=-50, le=50)


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


WEATHER: Final = openai.pydantic_function_tool(Weather, name="weather")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    config = dataclasses.replace(CONFIG, num_blocks=64, block_size=16, dtype="float32")
    try:
        engine = AsyncEngine.open(MODEL, config, chat_template=TEMPLATE)
    except ModelError as missing:
        pytest.skip(str(missing))
    with serve(engine, ServerSettings()) as server:
        yield server
        server.check()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_as_the_engine_answers_and_goes_on_from_the_cache(
    server: Served, client: openai.OpenAI
) -> None:
    messages = said("Say: caf\u00e9, na\u00efve, \u65e5\u672c\u8a9e, \U0001f642")
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    text = answer.choices[0].message.content
    assert text
    assert text == server.text(Chat([{"role": "user", "content": messages[0]["content"]}]), max_tokens=12)
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True, logprobs=True
    )
    pieces, spelled = [], b""
    for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        logprobs = chunk.choices[0].logprobs
        spelled += b"".join(bytes(each.bytes or ()) for each in (logprobs and logprobs.content) or ())
    assert "".join(pieces) == text
    assert spelled.startswith(text.encode().removesuffix("\ufffd".encode()))
    longer = [*messages, *_turn(text), *said("Again.")]
    follow_up = client.chat.completions.create(model=MODEL, messages=longer, max_tokens=1)
    assert follow_up.usage is not None
    assert follow_up.usage.prompt_tokens_details is not None
    assert answer.usage is not None
    assert (follow_up.usage.prompt_tokens_details.cached_tokens or 0) >= answer.usage.prompt_tokens


def test_a_pydantic_model_is_filled(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=said("The weather in Rome?"), response_format=Report, temperature=0, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Report)


def test_a_tool_is_called_and_what_it_says_is_heard(client: openai.OpenAI) -> None:
    messages = said("The weather in Oslo?")
    asked = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    (call,) = asked.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    plain: ChatCompletionMessageParam = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": call.function.arguments}}
        ],
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[*messages, plain, {"role": "tool", "tool_call_id": call.id, "content": "cold"}],
        tools=[WEATHER],
        max_tokens=3,
    )
    assert answer.usage is not None
    assert asked.usage is not None
    assert answer.usage.prompt_tokens > asked.usage.prompt_tokens


def test_a_stop_string_that_no_token_ends_at_is_found(server: Served, client: openai.OpenAI) -> None:
    whole = server.text("The capital of France is", max_tokens=12)
    stop = whole[8:11]
    assert stop
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=12, temperature=0, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in answer) == whole[: whole.index(stop)]


def _turn(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "assistant", "content": text}]
