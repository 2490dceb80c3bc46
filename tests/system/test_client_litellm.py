"""LiteLLM, as a client of OpenAI and as one of vLLM: the strictest reader of streams among the clients."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final, Literal

import pydantic
import pytest

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.settings import ServerSettings
from octavo.tests.system.client_rig import ADVICE, GREETING, LONG, Fault, Gate, Served, Speaker, served

pytestmark = [
    pytest.mark.system,
    pytest.mark.parametrize("provider", ["openai", "hosted_vllm"]),
    pytest.mark.filterwarnings("ignore:.*using the `ReadOnly` qualifier:UserWarning"),  # modules that it imports late
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.*' attribute:DeprecationWarning"),  # its own habit
]
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Final = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


class Report(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    degrees: int = pydantic.Field(ge=-50, le=50)


@pytest.fixture(scope="session")
def litellm() -> ModuleType:
    """Slow to import: for the tests that need it, and for nobody who only collects them."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import litellm  # noqa: PLC0415  # see above
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    litellm.disable_streaming_logging = True  # an event loop for each chunk, which nobody here listens to
    return litellm


@pytest.fixture(autouse=True)
def tidy(litellm: ModuleType) -> Iterator[None]:
    """It makes itself an event loop where there is none, and keeps connections for requests that never come."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    for kept in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if not inspect.iscoroutinefunction(kept.close):
            kept.close()
    litellm.in_memory_llm_clients_cache.flush_cache()
    asyncio.set_event_loop(None)
    loop.close()


class Client:
    """LiteLLM with what every request has. Its answers are of too many types to name them."""

    def __init__(self, litellm: ModuleType, provider: str, server: Served) -> None:
        self._litellm = litellm
        self._given = {
            "model": f"{provider}/fake",
            "api_base": server.url,
            "api_key": "key",
            "temperature": 0,
            "max_retries": 0,
            "timeout": 30,
        }

    def chat(self, said: str | list[Any], **options: object) -> Any:  # noqa: ANN401  # see above
        return self._litellm.completion(messages=messages_of(said), **{**self._given, **options})

    async def achat(self, said: str | list[Any], **options: object) -> Any:  # noqa: ANN401  # see above
        return await self._litellm.acompletion(messages=messages_of(said), **{**self._given, **options})

    def complete(self, prompt: object, **options: object) -> Any:  # noqa: ANN401  # see above
        return self._litellm.text_completion(prompt=prompt, **{**self._given, **options})


def messages_of(said: str | list[Any]) -> list[Any]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


@pytest.fixture
def client(litellm: ModuleType, provider: str, server: Served) -> Client:
    return Client(litellm, provider, server)


def test_a_chat(server: Served, client: Client) -> None:
    answer = client.chat("Hi")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (GREETING, "stop")
    limited = client.chat(LONG, max_tokens=9)
    assert limited.choices[0].message.content == server.text(LONG, max_tokens=9)
    assert limited.choices[0].finish_reason == "length"
    assert (limited.usage.prompt_tokens, limited.usage.completion_tokens) == (len(LONG), 9)
    again = client.chat(LONG, max_tokens=9)
    assert again.usage.prompt_tokens_details.cached_tokens == len(LONG) - 1


def test_a_stream_adds_up_to_the_whole(server: Served, client: Client, litellm: ModuleType) -> None:
    chunks = list(client.chat("Hi", stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == GREETING
    assert len(deltas) > len(GREETING) / 2  # it came in pieces
    whole = litellm.stream_chunk_builder(chunks)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (GREETING, "stop")
    assert whole.usage.completion_tokens == len(GREETING) + 1
    assert server.last.stream.text() == GREETING


def test_samples_are_those_of_the_engine(server: Served, client: Client) -> None:
    expected = server.continuations(LONG, n=3, seed=7, temperature=1.0, max_tokens=8)
    answer = client.chat(LONG, n=3, seed=7, temperature=1, max_tokens=8)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [output.text for output in expected]
    assert len(set(texts)) == 3


def test_log_probabilities_are_those_of_the_engine(server: Served, client: Client) -> None:
    (expected,) = server.continuations(LONG, max_tokens=5, logprobs=2)
    answer = client.chat(LONG, max_tokens=5, logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs.content
    assert [bytes(each.bytes) for each in told] == [bytes([token]) for token in expected.token_ids]
    assert [each.logprob for each in told] == pytest.approx([score.logprob for score in expected.logprobs or ()])
    assert [len(each.top_logprobs) for each in told] == [2] * 5


def test_a_stop_string_ends_the_text_before_itself(client: Client) -> None:
    whole = client.chat("Hi", stop=["?", ", y"])
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello", "stop")
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in client.chat("Hi", stop=",", stream=True)) == "Hello"
    )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_are_called_and_what_they_say_is_heard(client: Client, litellm: ModuleType, *, is_streamed: bool) -> None:
    asked = client.chat("weather?", tools=[WEATHER, CLOCK], stream=is_streamed)
    if is_streamed:
        asked = litellm.stream_chunk_builder(list(asked))
    (choice,) = asked.choices
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("clock", {}),
    ]
    heard = [{"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in calls]
    answer = client.chat([*messages_of("weather?"), choice.message, *heard], tools=[WEATHER, CLOCK])
    assert answer.choices[0].message.content == ADVICE


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_has_to_be_called_is_called_as_its_schema_says(client: Client, choice: object) -> None:
    """Of its own the model would greet."""
    answer = client.chat("Hi", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert not answer.choices[0].message.content


def test_a_pydantic_model_is_filled(client: Client) -> None:
    """Of its own the model would greet."""
    Report.model_validate_json(client.chat("Hi", response_format=Report).choices[0].message.content)


def test_completions(server: Served, client: Client) -> None:
    assert client.complete("Hi", max_tokens=20).choices[0].text == GREETING
    assert server.last.path == "/v1/completions"
    streamed = client.complete("Hi", max_tokens=20, stop=["!"], stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == "Hello, you"
    both = client.complete(["Hi", "cold"], max_tokens=20)
    assert [choice.text for choice in both.choices] == [GREETING, ADVICE]


def test_what_is_wrong_is_an_error_of_its_own_kind(
    server: Served, client: Client, litellm: ModuleType, provider: str
) -> None:
    with pytest.raises(litellm.NotFoundError, match="other"):
        client.chat("Hi", model=f"{provider}/other")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        client.chat("Hi", temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        client.chat("a" * 4096, max_tokens=50)
    with pytest.raises(litellm.BadRequestError, match="top_p"):  # before the stream begins
        client.chat("Hi", top_p=2, stream=True)
    server.service.is_draining = True
    with pytest.raises(litellm.ServiceUnavailableError, match="shutting down"):
        client.chat("Hi")
    server.service.is_draining = False
    assert client.chat("Hi").choices[0].message.content == GREETING


def test_want_of_room_and_a_wrong_key_are_errors_of_their_own(litellm: ModuleType, provider: str) -> None:
    settings = ServerSettings(keys=Keys({digest("key"): Caller(name="alice", max_concurrent=1)}))
    with served(Speaker(step_seconds=0.005), settings=settings) as server:
        client = Client(litellm, provider, server)
        with pytest.raises(litellm.AuthenticationError):
            client.chat("Hi", api_key="other")
        stream = client.chat(LONG, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        with pytest.raises(litellm.RateLimitError):
            client.chat("Hi")
        stream.close()
        server.finished()
        assert client.chat("Hi").choices[0].message.content == GREETING


def test_a_failure_within_a_stream_is_told(litellm: ModuleType, provider: str) -> None:
    with served(Speaker(before_step=Fault(4))) as server:
        client = Client(litellm, provider, server)
        with pytest.raises(litellm.ServiceUnavailableError, match="the server failed on this request"):
            list(client.chat("Hi", stream=True))
        assert client.chat("Hi").choices[0].message.content == GREETING


def test_leaving_a_stream_ends_the_request(litellm: ModuleType, provider: str) -> None:
    with served(Speaker(step_seconds=0.002)) as server:
        stream = Client(litellm, provider, server).chat(LONG, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        stream.close()
        assert server.finished() == {"abort": 1}


@pytest.mark.asyncio
async def test_an_async_stream_adds_up_and_can_be_left(litellm: ModuleType, provider: str) -> None:
    with served(Speaker(step_seconds=0.002)) as server:
        client = Client(litellm, provider, server)
        stream = await client.achat("Hi", stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == GREETING
        left = await client.achat(LONG, stream=True, extra_body={"ignore_eos": True})
        await anext(left)
        await left.aclose()
        assert await asyncio.to_thread(server.finished) == {"stop": 1, "abort": 1}
        await litellm.close_litellm_async_clients()


@pytest.mark.asyncio
async def test_an_async_request_that_is_cancelled_before_its_first_token_is_aborted(
    litellm: ModuleType, provider: str
) -> None:
    gate = Gate()
    with served(Speaker(before_step=gate)) as server:
        request = asyncio.create_task(Client(litellm, provider, server).achat(LONG, max_tokens=100))
        await server.has_begun(request)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        gate.open()
        assert server.finished() == {"abort": 1}
        await litellm.close_litellm_async_clients()
