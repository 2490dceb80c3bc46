"""LangChain: its chat model, over chat completions and over responses, and its older model for completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable
from typing import TYPE_CHECKING, Literal

import openai
import pydantic
import pytest

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.settings import ServerSettings
from octavo.tests.system.client_rig import ADVICE, GREETING, LONG, Fault, Gate, Served, Speaker, served

if TYPE_CHECKING:  # slow: for the tests that need it, and for nobody who only collects them
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_openai import ChatOpenAI, OpenAI

pytestmark = pytest.mark.system


class Report(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]
    degrees: int = pydantic.Field(ge=-50, le=50)


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


class Clock(pydantic.BaseModel):
    """What time it is."""


@pytest.fixture(autouse=True)
def nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")


def chat_of(server: Served, **options: object) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415  # see above

    given = {"model": "fake", "temperature": 0, "max_retries": 0, "timeout": 30, **options}
    return ChatOpenAI.model_validate({"base_url": server.url, "api_key": "key", **given})


def completing(server: Served, **options: object) -> OpenAI:
    from langchain_openai import OpenAI  # noqa: PLC0415  # see above

    given = {"model": "fake", "temperature": 0, "max_retries": 0, **options}
    return OpenAI.model_validate({"base_url": server.url, "api_key": "key", **given})


def added_up(chunks: Iterable[AIMessage]) -> AIMessage:
    """LangChain's own sum of a stream."""
    from langchain_core.messages import AIMessageChunk  # noqa: PLC0415  # see above

    first, *others = (chunk for chunk in chunks if isinstance(chunk, AIMessageChunk))
    return first.__add__(list(others))


def tool_names(message: AIMessage) -> list[tuple[str, dict[str, object]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_chat(server: Served, *, use_responses_api: bool) -> None:
    answer = chat_of(server, use_responses_api=use_responses_api).invoke("Hi")
    assert answer.text == GREETING
    assert server.last.path == ("/v1/responses" if use_responses_api else "/v1/chat/completions")
    limited = chat_of(server, max_tokens=9, use_responses_api=use_responses_api).invoke(LONG)
    assert limited.text == server.text(LONG, max_tokens=9)
    assert limited.usage_metadata is not None
    assert (limited.usage_metadata["input_tokens"], limited.usage_metadata["output_tokens"]) == (len(LONG), 9)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_the_usage_tells_what_was_cached(server: Served, *, use_responses_api: bool) -> None:
    model = chat_of(server, max_tokens=1, use_responses_api=use_responses_api)
    cached = []
    for _ in range(2):
        usage = model.invoke(f"{'XY'[use_responses_api]}{LONG}").usage_metadata
        assert usage is not None
        cached.append(usage["input_token_details"]["cache_read"])
    assert cached == [0, len(LONG)]  # the last one is computed again, for its logits


def test_roles_and_parts_of_messages_arrive(server: Served) -> None:
    answer = chat_of(server, max_tokens=5).invoke(
        [("system", "ab"), ("human", "cd"), ("ai", "ef"), {"role": "user", "content": [{"type": "text", "text": "gh"}]}]
    )
    assert answer.text == server.text("abcdefgh", max_tokens=5)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_stream_adds_up_to_the_whole(server: Served, *, use_responses_api: bool) -> None:
    model = chat_of(server, use_responses_api=use_responses_api, stream_usage=True)
    chunks = list(model.stream("Hi"))
    whole = added_up(chunks)
    assert "".join(chunk.text for chunk in chunks) == GREETING == whole.text
    assert sum(bool(chunk.text) for chunk in chunks) > len(GREETING) / 2  # it came in pieces
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(GREETING) + 1
    if not use_responses_api:
        assert whole.response_metadata["finish_reason"] == "stop"
        assert server.last.stream.text() == GREETING


def test_a_batch_is_answered_in_order(server: Served) -> None:
    prompts = [LONG[number:] for number in range(6)]
    texts = [answer.text for answer in chat_of(server, max_tokens=5).batch(list(prompts))]
    assert texts == [server.text(prompt, max_tokens=5) for prompt in prompts]


def test_samples_are_those_of_the_engine(server: Served) -> None:
    expected = server.continuations(LONG, n=3, seed=7, temperature=1.0, max_tokens=8)
    model = chat_of(server, n=3, seed=7, temperature=1, max_tokens=8)
    texts = [each.text for each in model.generate([[_human(LONG)]]).generations[0]]
    assert texts == [output.text for output in expected]
    assert len(set(texts)) == 3


def test_log_probabilities_are_those_of_the_engine(server: Served) -> None:
    (expected,) = server.continuations(LONG, max_tokens=5, logprobs=2)
    model = chat_of(server, logprobs=True, top_logprobs=2, max_tokens=5)
    for answer in (model.invoke(LONG), added_up(model.stream(LONG))):
        told = answer.response_metadata["logprobs"]["content"]
        assert [each["bytes"] for each in told] == [[token] for token in expected.token_ids]
        scores = [score.logprob for score in expected.logprobs or ()]
        assert [each["logprob"] for each in told] == pytest.approx(scores)
        assert [len(each["top_logprobs"]) for each in told] == [2] * 5


def test_a_stop_string_ends_the_text_before_itself(server: Served) -> None:
    model = chat_of(server)
    whole = model.invoke("Hi", stop=[", y"])
    assert (whole.text, whole.response_metadata["finish_reason"]) == ("Hello", "stop")
    assert added_up(model.stream("Hi", stop=[", y"])).text == "Hello"


@pytest.mark.parametrize("use_responses_api", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_are_called_and_what_they_say_is_heard(
    server: Served, *, use_responses_api: bool, is_streamed: bool
) -> None:
    model = chat_of(server, use_responses_api=use_responses_api).bind_tools(
        [{"type": "function", "function": {"name": "weather"}}, {"type": "function", "function": {"name": "clock"}}]
    )
    asked = added_up(model.stream("weather?")) if is_streamed else model.invoke("weather?")
    assert tool_names(asked) == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert not asked.invalid_tool_calls
    assert asked.text.strip() == "Let me see."
    heard = [{"role": "tool", "tool_call_id": call["id"], "content": "cold"} for call in asked.tool_calls]
    answer = model.invoke([("human", "weather?"), asked, *heard])
    assert answer.text == ADVICE
    assert not answer.tool_calls


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_a_tool_that_has_to_be_called_is_called_as_its_schema_says(server: Served, choice: str) -> None:
    """Of its own the model would greet."""
    tools = [Weather, Clock] if choice == "Weather" else [Weather]
    answer = chat_of(server).bind_tools(tools, tool_choice=choice, parallel_tool_calls=False).invoke("Hi")
    ((name, arguments),) = tool_names(answer)
    assert name == "Weather"
    Weather.model_validate(arguments)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_pydantic_model_is_filled(server: Served, method: Literal["json_schema", "function_calling"]) -> None:
    """Of its own the model would greet."""
    assert isinstance(chat_of(server).with_structured_output(Report, method=method).invoke("Hi"), Report)
    assert ("tools" in server.last.form) == (method == "function_calling")


def test_a_format_reaches_the_engine_through_responses_too(server: Served) -> None:
    model = chat_of(server, use_responses_api=True).with_structured_output(Report)
    assert isinstance(model.invoke("Hi"), Report)
    assert server.last.path == "/v1/responses"


def test_the_older_client_sends_nulls_and_they_mean_nothing(server: Served) -> None:
    model = completing(server, max_tokens=20)
    assert model.invoke("Hi", stop=["!"]) == "Hello, you"
    assert (server.last.form["seed"], server.last.form["logprobs"]) == (None, None)
    assert "".join(model.stream("Hi", stop=["!"])) == "Hello, you"
    both = model.generate(["Hi", "cold"], stop=["!"])
    assert [each[0].text for each in both.generations] == ["Hello, you", ADVICE]


def test_what_is_wrong_is_an_error_of_its_own_kind(server: Served) -> None:
    from langchain_core.exceptions import ModelInvalidRequestError, ModelNotFoundError  # noqa: PLC0415  # see above

    with pytest.raises(ModelNotFoundError) as unknown:
        chat_of(server, model="other").invoke("Hi")
    assert isinstance(unknown.value, openai.NotFoundError)
    with pytest.raises(ModelInvalidRequestError):
        chat_of(server, temperature=-1).invoke("Hi")
    with pytest.raises(ModelInvalidRequestError):  # before the stream begins
        next(chat_of(server, top_p=2).stream("Hi"))
    assert chat_of(server).invoke("Hi").text == GREETING


def test_a_conversation_that_is_too_long_is_known_as_such(server: Served) -> None:
    """Agents shorten it then, and go on."""
    from langchain_core.exceptions import ContextOverflowError  # noqa: PLC0415  # see above

    for model in (chat_of(server), chat_of(server, max_tokens=50), chat_of(server, use_responses_api=True)):
        with pytest.raises(ContextOverflowError):
            model.invoke("a" * 4096)


def test_want_of_room_and_an_end_that_is_near_are_errors_of_their_own() -> None:
    from langchain_core.exceptions import ModelRateLimitError  # noqa: PLC0415  # see above

    settings = ServerSettings(keys=Keys({digest("key"): Caller(name="alice", max_concurrent=1)}))
    with served(Speaker(step_seconds=0.005), settings=settings) as server:
        stream = chat_of(server, extra_body={"ignore_eos": True}).stream(LONG)
        next(stream)
        with pytest.raises(ModelRateLimitError):
            chat_of(server).invoke("Hi")
        assert isinstance(stream, Generator)
        stream.close()
        server.finished()
        server.service.is_draining = True
        with pytest.raises(openai.InternalServerError) as closed:
            chat_of(server).invoke("Hi")
        server.service.is_draining = False
    assert closed.value.status_code == 503


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_failure_within_a_stream_is_told(*, use_responses_api: bool) -> None:
    with served(Speaker(before_step=Fault(4))) as server:
        with pytest.raises(Exception, match="the server failed on this request"):
            list(chat_of(server, use_responses_api=use_responses_api).stream("Hi"))
        assert chat_of(server).invoke("Hi").text == GREETING


def test_leaving_a_stream_ends_the_request() -> None:
    with served(Speaker(step_seconds=0.002)) as server:
        for _ in chat_of(server, extra_body={"ignore_eos": True}).stream(LONG):
            break
        assert server.finished() == {"abort": 1}


@pytest.mark.asyncio
async def test_an_async_stream_adds_up_and_can_be_left() -> None:
    with served(Speaker(step_seconds=0.002)) as server:
        model = chat_of(server)
        assert "".join([chunk.text async for chunk in model.astream("Hi")]) == GREETING
        stream = chat_of(server, extra_body={"ignore_eos": True}).astream(LONG)
        await anext(stream)
        assert isinstance(stream, AsyncGenerator)
        await stream.aclose()
        assert await asyncio.to_thread(server.finished) == {"stop": 1, "abort": 1}  # LangChain ends it in the loop


@pytest.mark.asyncio
async def test_an_async_request_that_is_cancelled_before_its_first_token_is_aborted() -> None:
    gate = Gate()
    with served(Speaker(before_step=gate)) as server:
        request = asyncio.create_task(chat_of(server, max_tokens=100).ainvoke(LONG))
        await server.has_begun(request)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        gate.open()
        assert server.finished() == {"abort": 1}


def _human(text: str) -> HumanMessage:
    from langchain_core.messages import HumanMessage  # noqa: PLC0415  # see above

    return HumanMessage(text)
