"""OpenAI's own client when something is in its way, and when it leaves; and its asynchronous half."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.settings import ServerSettings
from octavo.tests.system.client_rig import CONFIG, GREETING, LONG, Fault, Gate, Served, Speaker, served

pytestmark = pytest.mark.system

ONE_AT_A_TIME = ServerSettings(keys=Keys({digest("key"): Caller(name="alice", max_concurrent=1)}))


def said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@contextmanager
def client_of(
    server: Served,
    *,
    api_key: str = "key",
    max_retries: int = 0,
    timeout: float = 30,
    http_client: httpx2.Client | None = None,
) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url, api_key=api_key, max_retries=max_retries, timeout=timeout, http_client=http_client
    ) as client:
        yield client


def async_client(server: Served, timeout: float = 30) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0, timeout=timeout)


def endless(client: openai.OpenAI) -> openai.Stream[ChatCompletionChunk]:
    """A stream that has begun and does not end by itself for a long time."""
    stream = client.chat.completions.create(
        model="fake", messages=said(LONG), stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    return stream


def test_what_is_wrong_is_an_error_of_its_own_kind() -> None:
    with served(settings=ServerSettings(max_body_bytes=1000)) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="other", messages=said("Hi"))
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="fake", messages=said("Hi"), temperature=-1)
        with pytest.raises(openai.BadRequestError) as too_long:
            client.chat.completions.create(model="fake", messages=said("Hi"), max_tokens=100_000)
        with pytest.raises(openai.APIStatusError) as too_large:
            client.chat.completions.create(model="fake", messages=said("a" * 1000))
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="fake", input="Hi")
        assert client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0).choices
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
    assert (too_large.value.status_code, too_large.value.code) == (413, "body_too_large")


def test_a_stream_that_is_refused_is_refused_before_it_begins() -> None:
    with served() as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="fake", messages=said("Hi"), stream=True, top_p=2)
        assert bad.value.param == "top_p"


def test_a_key_opens_the_door() -> None:
    with served(settings=ONE_AT_A_TIME) as server:
        with client_of(server, api_key="other") as stranger, pytest.raises(openai.AuthenticationError) as shut:
            stranger.models.list()
        with client_of(server) as client:
            assert [model.id for model in client.models.list()] == ["fake"]
    assert shut.value.code == "invalid_api_key"
    assert "other" not in shut.value.message


def test_a_request_has_a_name() -> None:
    with served() as server, client_of(server) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="fake", messages=said("Hi"), extra_headers={"X-Request-Id": "mine-1"}
        )
        assert raw.headers["x-request-id"] == "mine-1"
        assert raw.http_response.status_code == 200
        answer = raw.parse()
        unnamed = client.chat.completions.create(model="fake", messages=said("Hi"))
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="fake", messages=[])
    assert answer._request_id == "mine-1"
    assert answer.id != "chatcmpl-mine-1"  # unique, whatever clients say
    assert unnamed.id == f"chatcmpl-{unnamed._request_id}"
    assert bad.value.request_id


def test_a_refusal_for_want_of_room_says_when_to_come_again_and_the_client_does() -> None:
    """Its place is freed as soon as it has been refused."""
    with served(Speaker(step_seconds=0.005), settings=ONE_AT_A_TIME) as server, client_of(server) as first:
        stream = endless(first)

        def make_room(response: httpx2.Response) -> None:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                stream.close()
                server.finished()

        transport = openai.DefaultHttpxClient(event_hooks={"response": [make_room]})
        with client_of(server, max_retries=2, http_client=transport) as second:
            answer = second.chat.completions.create(model="fake", messages=said("Hi"), temperature=0)
    assert answer.choices[0].message.content == GREETING
    assert server.tries() == [(0, 200), (0, 429), (1, 200)]


def test_one_who_is_refused_until_patience_ends_is_told_so() -> None:
    with served(Speaker(step_seconds=0.005), settings=ONE_AT_A_TIME) as server, client_of(server) as first:
        held = endless(first)
        with client_of(server, max_retries=1) as second, pytest.raises(openai.RateLimitError) as full:
            second.chat.completions.create(model="fake", messages=said("Hi"))
        held.close()
    assert full.value.code == "too_many_concurrent"
    assert int(full.value.response.headers["retry-after"]) >= 1
    assert server.tries() == [(0, 200), (0, 429), (1, 429)]


def test_a_full_queue_is_a_refusal_too() -> None:
    gate = Gate()
    config = dataclasses.replace(CONFIG, max_waiting=1, max_running=1)
    with served(Speaker(before_step=gate), config=config) as server, client_of(server) as client:
        runs = client.chat.completions.create(model="fake", messages=said("Hi"), stream=True, temperature=0)
        server.until(lambda stats: stats.running == 1)
        waits = client.chat.completions.create(model="fake", messages=said("Hi"), stream=True, temperature=0)
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="fake", messages=said("Hi"))
        gate.open()
        for stream in (runs, waits):
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == GREETING
    assert full.value.code == "queue_full"


def test_a_server_that_is_about_to_end_takes_nothing_new() -> None:
    with served() as server, client_of(server) as client:
        server.service.is_draining = True
        with pytest.raises(openai.InternalServerError) as closed:
            client.chat.completions.create(model="fake", messages=said("Hi"))
        server.service.is_draining = False
    assert (closed.value.status_code, closed.value.code) == (503, "shutting_down")


def test_a_failure_before_a_stream_and_one_within_it_are_both_told() -> None:
    with served(Speaker(before_step=Fault(4))) as server, client_of(server) as client:
        stream = client.chat.completions.create(model="fake", messages=said("Hi"), stream=True)
        with pytest.raises(openai.APIError) as within:
            list(stream)
        assert server.last.stream.error is not None
        assert client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0).choices
    with served(Speaker(before_step=Fault(1))) as server, client_of(server) as other:
        with pytest.raises(openai.InternalServerError) as whole:
            other.chat.completions.create(model="fake", messages=said("Hi"))
        assert other.chat.completions.create(model="fake", messages=said("Hi"), temperature=0).choices
    for failure in (within.value, whole.value):
        assert failure.code == "internal_error"
        assert "device" not in failure.message  # a foreign error may quote anybody's text


def test_a_client_that_has_waited_long_enough_leaves_nothing_behind() -> None:
    """Before the first token: the model has not taken a step when it goes."""
    gate = Gate()
    with served(Speaker(before_step=gate)) as server, client_of(server, timeout=2.0) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="fake", messages=said(LONG), max_tokens=100)
        gate.open()
        assert server.finished() == {"abort": 1}


def test_leaving_a_stream_ends_the_request() -> None:
    with served(Speaker(step_seconds=0.002)) as server, client_of(server) as client:
        with endless(client):
            pass
        assert server.finished() == {"abort": 1}
        other = endless(client)
        other.close()
        assert server.finished() == {"abort": 2}
        assert not any(exchange.is_whole for exchange in server.exchanges)


@pytest.mark.asyncio
async def test_async_answers_come_side_by_side_and_each_is_its_own() -> None:
    prompts = [LONG[number:] for number in range(12)]
    with served() as server:
        async with async_client(server) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="fake", messages=said(each), max_tokens=6, temperature=0)
                    for each in prompts
                )
            )
        texts = [answer.choices[0].message.content for answer in answers]
        assert texts == [server.text(prompt, max_tokens=6) for prompt in prompts]


@pytest.mark.asyncio
async def test_an_async_stream_adds_up_and_can_be_left() -> None:
    with served(Speaker(step_seconds=0.002)) as server:
        async with async_client(server) as client:
            stream = await client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == GREETING
            async with client.chat.completions.stream(
                model="fake", messages=said(LONG), extra_body={"ignore_eos": True}
            ) as events:
                async for event in events:
                    if event.type == "content.delta":
                        break
        assert server.finished() == {"stop": 1, "abort": 1}


@pytest.mark.asyncio
async def test_an_async_request_that_is_cancelled_before_its_first_token_is_aborted() -> None:
    gate = Gate()
    with served(Speaker(before_step=gate)) as server:
        async with async_client(server) as client:
            request = asyncio.create_task(
                client.chat.completions.create(model="fake", messages=said(LONG), max_tokens=100)
            )
            await server.has_begun(request)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            gate.open()
            assert server.finished() == {"abort": 1}
