"""OpenAI's own client against a fleet: what it asks for, and what it does when a replica is lost under it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final, NamedTuple

import openai
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from openai.types.chat import ChatCompletionMessageParam

from octavo import AsyncEngine, EngineConfig
from octavo.engine.fleet.gateway import Gateway
from octavo.engine.fleet.local import LocalFleet
from octavo.engine.model.runner import StepInput
from octavo.engine.server.running import Address, serving_app
from octavo.engine.server.settings import ServerSettings
from octavo.tests.engine.server.scripted import AsciiCodec
from octavo.tests.system.client_rig import CALLS, CONFIG, GREETING, HERMES, LONG, PATIENCE, Speaker

pytestmark = pytest.mark.system
REPLICAS: Final = ("a", "b", "c")
WEATHER: Final[openai.types.chat.ChatCompletionFunctionToolParam] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Bell:
    """Stops the model at each step from ``at`` on, until it is told to go on."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.rung = threading.Event()
        self._steps = 0
        self._go = threading.Event()

    def __call__(self, step: StepInput) -> None:
        self._steps += 1
        if self.at is not None and self._steps >= self.at:
            self.rung.set()
            assert self._go.wait(PATIENCE)

    def go_on(self) -> None:
        self._go.set()


class Served(NamedTuple):
    """A gateway in a thread of its own."""

    client: openai.OpenAI
    fleet: LocalFleet
    engines: dict[str, AsyncEngine]
    portal: BlockingPortal

    def busy(self) -> str:
        (found,) = [name for name, engine in self.engines.items() if self.portal.call(engine.stats).running]
        return found


@contextmanager
def served(bell: Bell | None = None, config: EngineConfig = CONFIG) -> Iterator[Served]:
    @asynccontextmanager
    async def fleet() -> AsyncIterator[tuple[LocalFleet, dict[str, AsyncEngine], Address]]:
        settings = ServerSettings(tool_format=HERMES)
        async with AsyncExitStack() as stack:
            engines = {
                name: await stack.enter_async_context(
                    AsyncEngine(runner=Speaker(before_step=bell), codec=AsciiCodec(), config=config)
                )
                for name in REPLICAS
            }
            local = await stack.enter_async_context(LocalFleet(engines, settings=settings))
            gateway = Gateway(local, local.reader(), settings)
            address = await stack.enter_async_context(serving_app(gateway.app, gateway.service))
            yield local, engines, address
        for engine in engines.values():
            assert not engine.is_open

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(fleet()) as (local, engines, address):
        with openai.OpenAI(base_url=f"{address.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            yield Served(client, local, engines, portal)
        for engine in engines.values():
            census = portal.call(engine.census)
            assert (census.held, census.in_transfer) == (0, 0)


def said(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_chats_streams_tools_and_responses_are_those_of_a_server() -> None:
    with served() as found:
        client = found.client
        assert [model.id for model in client.models.list()] == ["fake"]
        answer = client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0)
        assert answer.choices[0].message.content == GREETING
        parts = client.chat.completions.create(model="fake", messages=said("Hi"), temperature=0, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == GREETING
        called = client.chat.completions.create(
            model="fake", messages=said("weather?"), temperature=0, tools=[WEATHER], max_tokens=len(CALLS) + 2
        )
        calls = called.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls if call.type == "function"] == ["weather", "clock"]
        first = client.responses.create(model="fake", input="Hi", temperature=0)
        assert first.output_text == GREETING
        assert client.responses.retrieve(first.id).id == first.id
        with client.responses.stream(model="fake", input="Hi", temperature=0, previous_response_id=first.id) as events:
            assert events.get_final_response().output_text == GREETING
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)


def test_errors_are_those_of_a_server() -> None:
    with served() as found:
        with pytest.raises(openai.NotFoundError):
            found.client.chat.completions.create(model="another", messages=said("Hi"))
        with pytest.raises(openai.BadRequestError) as told:
            found.client.completions.create(model="fake", prompt="Hi", max_tokens=10**6)
        assert told.value.code == "context_length_exceeded"
        for name in REPLICAS:
            found.portal.call(found.fleet.lose, name)
        with pytest.raises(openai.InternalServerError) as refused:
            found.client.chat.completions.create(model="fake", messages=said("Hi"))
        assert (refused.value.status_code, refused.value.code) == (503, "no_replica")


def test_a_lost_replica_is_not_noticed_by_who_waits_for_a_whole_answer() -> None:
    bell = Bell()
    with served(bell) as found:
        expected = found.client.completions.create(model="fake", prompt=LONG, max_tokens=20, temperature=0)
        bell.at = 30
        answers: list[openai.types.Completion] = []

        def ask() -> None:
            answers.append(found.client.completions.create(model="fake", prompt=LONG, max_tokens=20, temperature=0))

        asking = threading.Thread(target=ask)
        asking.start()
        assert bell.rung.wait(PATIENCE)
        lost = found.busy()
        found.portal.call(found.fleet.lose, lost)
        bell.go_on()
        asking.join(PATIENCE)
        assert [answer.choices[0].text for answer in answers] == [expected.choices[0].text]


def test_a_lost_stream_raises() -> None:
    bell = Bell()
    with served(bell) as found:
        bell.at = 6
        stream = found.client.completions.create(model="fake", prompt=LONG, max_tokens=40, temperature=0, stream=True)
        read = [next(iter(stream)).choices[0].text]
        assert bell.rung.wait(PATIENCE)
        found.portal.call(found.fleet.lose, found.busy())
        bell.go_on()
        with pytest.raises(openai.APIError) as told:
            read += [part.choices[0].text for part in stream]
        assert told.value.code == "replica_lost"
        again = found.client.completions.create(model="fake", prompt=LONG, max_tokens=40, temperature=0)
        assert again.choices[0].text.startswith("".join(read))
