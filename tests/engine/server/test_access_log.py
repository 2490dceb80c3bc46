from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest
from starlette.types import Message, Receive, Scope, Send

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.access_log import AccessLog
from octavo.engine.server.app import app_of
from octavo.engine.server.running import serving
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec
from octavo.tests.engine.server.socket_rig import EngineOf, completion, get, post, until, wire


class Line(NamedTuple):
    level: str
    event: str
    fields: dict[str, object]


class Notebook:
    """A logger that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def bind(self, **fields: object) -> Notebook:
        return self

    def debug(self, event: str, **fields: object) -> None:
        self.lines.append(Line("debug", event, fields))

    def info(self, event: str, **fields: object) -> None:
        self.lines.append(Line("info", event, fields))

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(Line("warning", event, fields))

    def error(self, event: str, **fields: object) -> None:
        self.lines.append(Line("error", event, fields))

    def exception(self, event: str, **fields: object) -> None:
        self.lines.append(Line("exception", event, fields))

    @property
    def requests(self) -> list[Line]:
        return [line for line in self.lines if line.event == "request"]


async def lines_of(engine_of: EngineOf, *requests: bytes, settings: ServerSettings | None = None) -> list[Line]:
    """What is logged when ``requests`` come, one after the other."""
    async with engine_of(codec=FakeCodec()) as engine:
        service = Service(settings or ServerSettings(), engine)
        service.logger = book = Notebook()
        async with serving(service) as address:
            for request in requests:
                async with wire(address) as connection:
                    await connection.send(request)
                    await connection.answer()
            await until(lambda: len(book.requests) == len(requests))
    return book.lines


@pytest.mark.asyncio
async def test_a_request_is_one_line_with_its_tokens(engine_of: EngineOf) -> None:
    same = completion("0123456789", max_tokens=3)
    first, second = await lines_of(engine_of, same, same)
    for line in (first, second):
        assert (line.level, line.event) == ("info", "request")
        seconds = line.fields.pop("seconds")
        assert isinstance(seconds, float)
        assert seconds >= 0
        assert line.fields.pop("request_id")
    shape = {"method": "POST", "route": "/v1/completions", "status": 200, "prompt_tokens": 10, "completion_tokens": 3}
    assert first.fields == {**shape, "cached_tokens": 0}
    assert second.fields == {**shape, "cached_tokens": 9}


@pytest.mark.asyncio
async def test_nothing_that_a_client_chose_gets_into_a_line(engine_of: EngineOf) -> None:
    """INPUT-10."""
    requests = [
        get("/nowhere/%0a%1b[31mSECRET?key=SECRET", "X-Secret: SECRET"),
        get("/v1/models/SECRET%1b[31mSECRET?a=SECRET"),
        get("/health?SECRET"),
        post("/v1/completions", {"model": "SECRET", "prompt": "SECRET"}, "Authorization: Bearer SECRET"),
        post("/v1/completions", b"SECRET"),
        b"SECRET / HTTP/1.1\r\nHost: SECRET\r\n\r\n",
    ]
    lines = await lines_of(engine_of, *requests)
    assert [(line.fields["method"], line.fields["route"], line.fields["status"]) for line in lines] == [
        ("GET", "-", 404),
        ("GET", "/v1/models/{model:path}", 404),
        ("GET", "/health", 200),
        ("POST", "/v1/completions", 404),
        ("POST", "/v1/completions", 400),
        ("OTHER", "-", 404),
    ]
    assert "SECRET" not in repr(lines)


@pytest.mark.asyncio
async def test_probes_do_not_fill_the_log(engine_of: EngineOf) -> None:
    lines = await lines_of(engine_of, get("/health"), get("/version"), get("/v1/models"))
    assert [line.level for line in lines] == ["debug", "debug", "info"]


@pytest.mark.asyncio
async def test_tenants_are_shown_by_a_digest(engine_of: EngineOf) -> None:
    keys = Keys({digest("key-of-a-1"): Caller("secret-a"), digest("key-of-b-1"): Caller("secret-b")})
    requests = [completion("01", f"Authorization: Bearer key-of-{name}-1") for name in "aab"]
    lines = await lines_of(engine_of, *requests, settings=ServerSettings(keys=keys))
    a, again, b = [line.fields["tenant"] for line in lines]
    assert a == again != b
    assert "secret" not in repr(lines)


@pytest.mark.asyncio
async def test_a_client_that_left_is_told_apart(engine_of: EngineOf) -> None:
    started = asyncio.Event()

    async def on_step(number: int) -> None:
        started.set()
        await asyncio.sleep(0)

    async with engine_of(codec=FakeCodec(), on_step=on_step, num_blocks=600) as engine:
        service = Service(ServerSettings(), engine)
        service.logger = book = Notebook()
        async with serving(service) as address:
            async with wire(address) as connection:
                await connection.send(completion(max_tokens=2000))
                await started.wait()
            await until(lambda: bool(book.requests))
    assert [(line.level, line.fields["status"]) for line in book.lines] == [("info", 499)]


async def _receive() -> Message:
    return {"type": "http.request"}


class Sent:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)


def scope_of(method: str = "POST") -> Scope:
    return {"type": "http", "method": method, "path": "/", "headers": []}


@pytest.mark.asyncio
@pytest.mark.parametrize("has_started", [False, True])
async def test_what_an_app_raises_ends_here_without_its_message(has_started: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("SECRET")

    service = Service(ServerSettings())
    service.logger = book = Notebook()
    await AccessLog(app, service)(scope_of(), _receive, Sent())
    assert [(line.level, line.event) for line in book.lines] == [("error", "answer_broken"), ("warning", "request")]
    assert book.lines[1].fields["status"] == (200 if has_started else 500)
    assert "SECRET" not in repr(book.lines)


@pytest.mark.asyncio
@pytest.mark.parametrize(("status", "level"), [(200, "info"), (429, "info"), (500, "warning"), (503, "info")])
async def test_failures_are_warnings_and_refusals_are_not(status: int, level: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    service = Service(ServerSettings())
    service.logger = book = Notebook()
    await AccessLog(app, service)(scope_of(), _receive, Sent())
    assert [line.level for line in book.lines] == [level]


@pytest.mark.asyncio
async def test_one_can_wait_until_nothing_is_under_way_but_listening() -> None:
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()

    service = Service(ServerSettings())
    service.logger = Notebook()
    log = AccessLog(app, service)
    tasks = [asyncio.create_task(log(scope_of(method), _receive, Sent())) for method in ("POST", "POST", "GET")]
    await asyncio.sleep(0)
    assert log.under_way == 2
    waiting = asyncio.create_task(log.wait_quiet())
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    await asyncio.wait_for(waiting, 5)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log.under_way == 0


def test_lifespan_and_others_pass_through() -> None:
    service = Service(ServerSettings())
    sent = Sent()

    async def run() -> None:
        received = iter(["lifespan.startup", "lifespan.shutdown"])

        async def receive() -> Message:
            return {"type": next(received)}

        await AccessLog(app_of(service), service)({"type": "lifespan"}, receive, sent)

    asyncio.run(run())
    assert [message["type"] for message in sent.messages] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
