"""Who comes in, as whom, and how often at once; and by which name a request is known."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo import AsyncEngine, SamplingParams
from octavo.engine.server.access import Caller, Door, Keys, admit, digest
from octavo.engine.server.call import Call
from octavo.engine.server.endpoint import Endpoint, Handler, json_response
from octavo.engine.server.errors import ApiError
from octavo.engine.server.event_stream import EventStream, event
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.errors import InvalidRequest
from octavo.tests.engine.conftest import EngineOf
from octavo.tests.engine.server.http_rig import PATIENCE, Exchange, ServerOf

LONG = SamplingParams(max_tokens=60, temperature=0.0)
KEYS = Keys({digest("key-a"): Caller("a", 5, 2, "a"), digest("key-b"): Caller("b", 0, None, "b")})
ADMIN = "an-admin-token"


# the doors


@pytest.mark.parametrize(
    ("door", "header", "keys", "token", "expected"),
    [
        (Door.OPEN, None, KEYS, ADMIN, Caller()),
        (Door.CLIENT, None, Keys(), ADMIN, Caller()),
        (Door.CLIENT, "Bearer whatever", Keys(), None, Caller()),
        (Door.CLIENT, "Bearer key-a", KEYS, None, Caller("a", 5, 2, "a")),
        (Door.CLIENT, "bearer  key-b ", KEYS, None, Caller("b", 0, None, "b")),
        (Door.CLIENT, None, KEYS, ADMIN, 401),
        (Door.CLIENT, "Bearer ", KEYS, ADMIN, 401),
        (Door.CLIENT, "Bearer key-c", KEYS, ADMIN, 401),
        (Door.CLIENT, "Bearer KEY-A", KEYS, ADMIN, 401),
        (Door.CLIENT, "Basic key-a", KEYS, ADMIN, 401),
        (Door.CLIENT, "key-a", KEYS, ADMIN, 401),
        (Door.CLIENT, f"Bearer {ADMIN}", KEYS, ADMIN, 401),
        (Door.CLIENT, "Bearer \udcff", KEYS, ADMIN, 401),
        (Door.ADMIN, f"Bearer {ADMIN}", KEYS, ADMIN, Caller()),
        (Door.ADMIN, "Bearer key-a", KEYS, ADMIN, 403),
        (Door.ADMIN, None, Keys(), ADMIN, 403),
        (Door.ADMIN, None, Keys(), None, 403),
        (Door.ADMIN, "Bearer ", Keys(), None, 403),
        (Door.ADMIN, "Bearer ungültig", KEYS, ADMIN, 403),
    ],
)
def test_who_comes_in_at_which_door(
    door: Door, header: str | None, keys: Keys, token: str | None, expected: Caller | int
) -> None:
    if isinstance(expected, Caller):
        assert admit(door, header, keys, token) == expected
        return
    with pytest.raises(ApiError) as caught:
        admit(door, header, keys, token)
    assert caught.value.status == expected
    assert ("WWW-Authenticate" in caught.value.headers) == (expected == 401)
    assert ADMIN not in str(caught.value)
    assert "key-" not in str(caught.value)


# so many at once


def app_with(handler: Handler, engine: AsyncEngine, keys: Keys = KEYS) -> tuple[Starlette, Service]:
    service = Service(ServerSettings(keys=keys, stall_timeout=0.05), engine)
    return Starlette(routes=[Route("/", Endpoint(service, handler), methods=["POST"])]), service


async def stream(call: Call) -> ASGIApp:
    generation = call.generate([1] * 4, LONG)
    await generation.start()

    async def events() -> AsyncGenerator[bytes, None]:
        async for output in generation:
            yield event(str(len(output.token_ids)).encode())

    return EventStream(events(), on_error=lambda _: event(b"error"))


async def generate(call: Call) -> ASGIApp:
    tokens = 0
    async for output in call.generate([1] * 4, LONG):
        tokens = len(output.token_ids)
    return json_response(tokens)


async def refuse(call: Call) -> ASGIApp:
    async for _ in call.generate(list[int](), LONG):
        pass
    raise AssertionError


async def break_down(call: Call) -> ASGIApp:
    await call.generate([1] * 4, LONG).start()
    raise ZeroDivisionError


def opened(app: ASGIApp, key: str = "key-a", window: int = 0) -> Exchange:
    return Exchange(app, "/", {}, headers={"Authorization": f"Bearer {key}"}, window=window)


async def begun(exchange: Exchange, service: Service, name: str, count: int) -> None:
    while service.under_way[name] < count and exchange.is_running:
        await anyio.lowlevel.checkpoint()


@pytest.mark.asyncio
async def test_no_more_than_allowed_and_each_key_for_itself(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        app, service = app_with(stream, engine)
        async with opened(app) as one, opened(app) as two:
            await one.read()
            await two.read()
            async with opened(app) as three, opened(app, "key-b") as other:
                await three.whole()
                assert three.status == 429
                assert int(three.headers["retry-after"]) >= 1
                assert b"too_many_concurrent" in three.body
                await other.read()
                assert other.status == 200
                assert dict(service.under_way) == {"a": 2, "b": 1}
            one.leave()
            await one.ended()
            async with opened(app) as four:
                await four.read()
                assert four.status == 200
        assert dict(service.under_way) == {}


async def leave(exchange: Exchange) -> None:
    await exchange.read()
    exchange.leave()


async def leave_at_once(exchange: Exchange) -> None:
    exchange.leave()


async def read_all(exchange: Exchange) -> None:
    await exchange.whole()


async def read_nothing(exchange: Exchange) -> None:
    """Until the server has had enough of it."""
    with anyio.fail_after(PATIENCE):
        while exchange.is_running:  # noqa: ASYNC110  # nobody tells
            await anyio.sleep(0.01)


WAYS: list[tuple[Handler, Callable[[Exchange], Awaitable[None]], int]] = [
    (stream, read_all, 0),
    (stream, leave, 0),
    (stream, leave_at_once, 0),
    (stream, read_nothing, 1),
    (generate, read_all, 0),
    (generate, leave_at_once, 0),
    (refuse, read_all, 0),
    (break_down, read_all, 0),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("handler", "end", "window"), WAYS)
async def test_however_a_request_ends_its_place_is_free_again(
    handler: Handler, end: Callable[[Exchange], Awaitable[None]], window: int, engine_of: EngineOf
) -> None:
    async with engine_of() as engine:
        app, service = app_with(handler, engine)
        for _ in range(3):  # more than there are places
            async with opened(app, window=window) as exchange:
                await begun(exchange, service, "a", 1)
                await end(exchange)
                await exchange.ended()
            assert not exchange.messages or exchange.status != 429
            assert dict(service.under_way) == {}


@pytest.mark.asyncio
async def test_many_generations_of_one_request_take_one_place(engine_of: EngineOf) -> None:
    ids: list[str | None] = []

    async def three(call: Call) -> ASGIApp:
        generations = [await call.generate([number] * 4, LONG).start() for number in range(3)]
        ids.extend([call.id, *(generation.request_id for generation in generations)])
        return json_response(dict(call.service.under_way))

    async with engine_of() as engine:
        app, _ = app_with(three, engine)
        async with opened(app) as exchange:
            assert await exchange.whole() == b'{"a":1}'
    assert ids[1:] == [ids[0], f"{ids[0]}-2", f"{ids[0]}-3"]


# names of requests


@pytest.mark.asyncio
@pytest.mark.parametrize("sent", ["abc-123", "x" * 128, "!~"])
async def test_the_clients_name_for_a_request_comes_back(sent: str, server_of: ServerOf) -> None:
    async with server_of() as server:
        for path in ("/v1/models", "/version"):
            answer = await server.client.get(path, headers={"X-Request-Id": sent})
            assert answer.headers["x-request-id"] == sent
        answer = await server.client.post("/tokenize", content=b"{", headers={"X-Request-Id": sent})
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, sent)


@pytest.mark.asyncio
@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", "a\tb", "\xe9", "\x00"])
async def test_a_name_that_is_none_is_replaced(sent: str | None, server_of: ServerOf) -> None:
    headers = [] if sent is None else [(b"x-request-id", sent.encode("latin-1"))]
    async with server_of() as server:
        answers = [await server.client.get("/version", headers=headers) for _ in range(2)]
    named = [answer.headers["x-request-id"] for answer in answers]
    assert named[0] != named[1]
    assert all(len(name) == 32 and name.isalnum() for name in named)


@pytest.mark.asyncio
async def test_clients_that_use_the_same_name_get_their_own_texts(server_of: ServerOf) -> None:
    """TENANT-04: twenty at once, half of them streams."""
    async with server_of(num_blocks=256) as server:
        prompts = [chr(48 + number) * (4 + number) for number in range(20)]
        server.headers = {"X-Request-Id": "the-same"}
        expected = {}
        for prompt in prompts:
            done = await server.engine.complete(prompt, SamplingParams(max_tokens=6, temperature=0.0))
            expected[prompt] = done[0].text
        found: dict[str, str] = {}
        ids: list[object] = []

        async def ask(number: int, prompt: str) -> None:
            body = {"model": "fake", "prompt": prompt, "max_tokens": 6, "temperature": 0}
            if number % 2:
                whole = await server.stream("/v1/completions", **body)
                found[prompt] = whole.text()
                ids.append(whole.chunks[0]["id"])
            else:
                answer = await server.client.post("/v1/completions", json=body, headers=server.headers)
                assert answer.headers["x-request-id"] == "the-same"
                found[prompt] = answer.json()["choices"][0]["text"]
                ids.append(answer.json()["id"])

        async with anyio.create_task_group() as tasks:
            for number, prompt in enumerate(prompts):
                tasks.start_soon(ask, number, prompt)
        assert found == expected
        assert len(set(ids)) == 20


@pytest.mark.asyncio
async def test_callers_without_a_name_are_counted_by_tenant(engine_of: EngineOf) -> None:
    keys = Keys({digest("key-a"): Caller("a"), digest("key-b"): Caller("b", max_concurrent=1)})
    async with engine_of() as engine:
        service = Service(ServerSettings(keys=keys), engine)
        app = Endpoint(service, stream)
        async with opened(app) as one, opened(app, "key-b") as other:
            await one.read()
            await other.read()
            assert other.status == 200
            assert dict(service.under_way) == {"a": 1, "b": 1}


@pytest.mark.parametrize("token", ["a token\n", " a token ", "ein schlüssel"])
def test_an_admin_token_that_cannot_come_out_of_a_header_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="ASCII") as raised:
        ServerSettings(admin_token=token)
    assert token.strip() not in str(raised.value)
