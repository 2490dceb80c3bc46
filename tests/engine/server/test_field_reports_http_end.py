"""Field reports over HTTP: the end of the server, and streams that end in another task than the one that reads them.

Which report is tested where is in ``test_field_reports_http.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Message

from octavo.engine.server.lifecycle import Ending
from octavo.tests.engine.server.host_rig import FOREVER, Streams, form, hosted, maker
from octavo.tests.engine.server.http_rig import Exchange, ServerOf
from octavo.tests.engine.server.http_rig import until as until_turned
from octavo.tests.engine.server.socket_rig import completion, until

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
ASKED: Final[dict[str, dict[str, object]]] = {
    CHAT: {"messages": [{"role": "user", "content": "abcdefgh"}]},
    COMPLETIONS: {"prompt": "abcdefgh"},
    RESPONSES: {"input": "abcdefgh", "max_output_tokens": 40},
}


# STOP


@pytest.mark.asyncio
async def test_those_who_wait_in_the_queue_get_their_turn_before_the_end() -> None:
    """STOP-01: also those of which nothing was computed, and one whose body was not complete at the signal."""
    make = maker(step_seconds=0.002, max_running=2)
    async with hosted(make, Ending(drain_timeout=FOREVER)) as server:
        streams = Streams(server.client, 2, max_tokens=40)
        await streams.all_begun()
        waiting = [asyncio.create_task(server.client.post(COMPLETIONS, json=form(4))) for _ in range(3)]
        await until(lambda: server.service.engine.stats().waiting == 3)
        head, _, body = completion().partition(b"\r\n\r\n")
        address = server.client.base_url
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head + b"\r\n\r\n" + body[:10])
        await writer.drain()
        assert (await server.client.get("/health")).status_code == 200
        server.stop.ask()
        await until(lambda: server.service.is_draining)
        writer.write(body[10:])
        assert b" 503 " in await reader.readline()
        for text in await streams.texts():
            assert text.endswith("data: [DONE]\n\n")
        assert [(await task).status_code for task in waiting] == [200] * 3
        assert await server.result()
        writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("drain_timeout", [0.05, 0.0])
async def test_those_who_wait_in_the_queue_do_not_hang(drain_timeout: float) -> None:
    """STOP-01: with streams that never end before them, in every form."""
    async with hosted(maker(step_seconds=0.002, max_running=1), Ending(drain_timeout=drain_timeout)) as server:
        streams = Streams(server.client, 1, max_tokens=3900)
        await streams.all_begun()
        two: dict[str, object] = {"prompt": ["abc", "def"]}
        bodies = {**ASKED, COMPLETIONS: two}
        waiting = [
            asyncio.create_task(server.client.post(route, json={**body, "stream": stream}))
            for route, body in bodies.items()
            for stream in (False, True)
        ]
        await until(lambda: server.service.engine.stats().waiting == 8)
        server.stop.ask()
        assert await server.result()
        for task in waiting:
            answer = await task
            assert answer.status_code in (200, 503)
            told = ('"aborted"', '"shutting_down"', "event: response.failed\n")
            assert [what in answer.text for what in told].count(True) == 1
            assert "[DONE]" not in answer.text
        assert '"error"' in (await streams.texts())[0]


# CONC-09


class Framework(BaseHTTPMiddleware):
    """Runs what is below it in another task, and reads its answer in its own."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


@pytest.fixture
def no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("route", [COMPLETIONS, RESPONSES])
@pytest.mark.usefixtures("no_complaints")
async def test_a_framework_between_the_client_and_the_app(route: str, server_of: ServerOf) -> None:
    """CONC-09: its stream is read in another task than it is made in, and the client leaves."""
    async with server_of(num_blocks=256) as server:
        host = Starlette(routes=[Mount("/api", server.app)], middleware=[Middleware(Framework), Middleware(Framework)])
        async with Exchange(host, f"/api{route}", {**ASKED[route], "stream": True, "top_p": 0}) as exchange:
            assert exchange.status == 200 if await exchange.whole() else False
        for turns in (0, 1, 2, 5, 20):
            async with Exchange(host, f"/api{route}", {**ASKED[route], "stream": True}) as exchange:
                for _ in range(2 if turns else 0):
                    await exchange.read()
                for _ in range(turns):
                    await asyncio.sleep(0)
            await server.engine._loop.wait_idle()
        finished = dict(server.engine.stats().finished)
        assert finished.pop("length") >= 1
        assert finished.pop("abort") >= 1
        assert not finished


@pytest.mark.asyncio
@pytest.mark.parametrize("route", [COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("no_complaints")
async def test_a_server_that_cancels_the_app_instead_of_telling_it(
    route: str, stream: bool, server_of: ServerOf
) -> None:
    """CONC-09: at any turn, from another task."""
    async with server_of() as server:
        for turn in range(0, 40, 4):
            exchange = server.open(route, {**ASKED[route], "max_tokens": 60, "stream": stream})
            task = asyncio.ensure_future(server.app(exchange._scope, exchange._receive, exchange._send))
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.engine._loop.wait_idle()
            assert server.engine.census().held == 0
        assert set(server.engine.stats().finished) == {"abort"}


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_complaints")
async def test_an_answer_that_nobody_reads_to_its_end_and_drops(server_of: ServerOf) -> None:
    """CONC-09: the handler's answer is made and never sent, or dropped when it is half sent."""
    async with server_of() as server:
        for stop_after in (0, 1, 3):
            sent: list[Message] = []

            async def send(message: Message, sent: list[Message] = sent, stop_after: int = stop_after) -> None:
                sent.append(message)
                if len(sent) > stop_after:
                    raise asyncio.CancelledError

            exchange = server.open(COMPLETIONS, {**ASKED[COMPLETIONS], "max_tokens": 60, "stream": True})
            task = asyncio.ensure_future(server.app(exchange._scope, exchange._receive, send))
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_turned(lambda: not server.engine.requests())
        assert server.engine.stats().finished == {"abort": 3}
