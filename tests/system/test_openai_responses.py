"""``/v1/responses`` driven by the openai client, over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.model.runner import StepInput
from octavo.engine.server.running import serving
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.server.http_rig import read_events

pytestmark = [pytest.mark.system, pytest.mark.asyncio]

EVENTS: pydantic.TypeAdapter[ResponseStreamEvent] = pydantic.TypeAdapter(ResponseStreamEvent)


@asynccontextmanager
async def client_for(runner: FakeRunner | None = None) -> AsyncIterator[tuple[openai.AsyncOpenAI, AsyncEngine]]:
    engine = AsyncEngine(
        runner=runner or FakeRunner(max_context=128),
        codec=FakeCodec(),
        config=EngineConfig(num_blocks=64, block_size=4),
    )
    async with engine, serving(engine) as address:
        base_url = f"{address.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=30) as client:
            yield client, engine


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0)


def assert_all_known(value: object) -> None:
    """No field that the client's types do not have, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        unknown = set(value.model_extra or ()) - {"store"}  # OpenAI answers with it; its client's type lacks it
        assert not unknown, f"{type(value).__name__} has no {unknown}"
        for name in value.model_fields_set:
            assert_all_known(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            assert_all_known(each)


async def test_a_response() -> None:
    async with client_for() as (client, engine):
        response = await client.responses.create(
            model="fake", input="abcd", instructions="ef", max_output_tokens=6, temperature=0, metadata={"a": "b"}
        )
        [expected] = await engine.complete("efabcd", greedy(6))
        assert response.output_text == expected.text
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens) == (6, 6)
        assert response.metadata == {"a": "b"}
        assert (await client.responses.retrieve(response.id)) == response
        follow_up = await client.responses.create(
            model="fake", input="gh", previous_response_id=response.id, max_output_tokens=4, temperature=0
        )
        [expected] = await engine.complete("abcd" + response.output_text + "gh", greedy(4))
        assert follow_up.output_text == expected.text
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_a_stream() -> None:
    async with client_for() as (client, _):
        whole = await client.responses.create(model="fake", input="abcd", max_output_tokens=6, temperature=0)
        events = await client.responses.create(
            model="fake", input="abcd", max_output_tokens=6, temperature=0, stream=True
        )
        kinds, deltas = [], []
        async for event in events:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
        assert "".join(deltas) == whole.output_text
        assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
        # the client's own accumulation of the same events
        async with client.responses.stream(model="fake", input="abcd", max_output_tokens=6, temperature=0) as stream:
            texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        assert texts[-1] == whole.output_text


async def test_every_answer_is_of_the_clients_types_and_has_nothing_else() -> None:
    """The client itself takes anything; here nothing may be missing, of another type, or unknown."""
    async with client_for() as (client, _):
        async with httpx.AsyncClient(base_url=str(client.base_url)) as plain:
            body = {"input": "abcd", "max_output_tokens": 5, "tools": None, "text": {"format": {"type": "text"}}}
            whole = Response.model_validate_json((await plain.post("responses", json=body)).content, strict=True)
            assert_all_known(whole)
            answer = await plain.post("responses", json={**body, "stream": True})
        events = [EVENTS.validate_json(event.data, strict=True) for event in read_events(answer.content)]
        assert len(events) > 8
        for number, event in enumerate(events):
            assert event.sequence_number == number
            assert_all_known(event)


async def test_errors_are_the_clients_errors() -> None:
    async with client_for() as (client, _):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="other", input="a")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model="fake", input="a", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="fake", input="a", previous_response_id="resp_none")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="fake", input="a")


async def test_a_failure_in_the_middle_is_told() -> None:
    def fail(step: StepInput) -> None:
        if runner.steps >= 3:
            raise RuntimeError("the device is gone")

    runner = FakeRunner(max_context=128, before_step=fail)
    async with client_for(runner) as (client, _):
        events = await client.responses.create(model="fake", input="abcd", stream=True)
        last = [event async for event in events][-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"


async def test_leaving_a_stream_ends_the_request() -> None:
    async with client_for(FakeRunner(max_context=4096, step_seconds=0.01)) as (client, engine):
        async with await client.responses.create(
            model="fake", input="abcd", stream=True, max_output_tokens=100
        ) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    break
        assert await engine.drain(timeout=20)
        assert engine.stats().finished == {"abort": 1}
