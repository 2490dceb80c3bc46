"""An OpenAI-compatible server that answers as a test wants: as a transport with a clock of its own, and on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import anyio
import anyio.lowlevel
import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from octavo.engine.bench.clock import Clock

Body = dict[str, object]
QUIET = 20
"""Rounds of the event loop in which all others get as far as they can."""
PATHS = ("/v1/chat/completions", "/v1/completions")


class FakeTime:
    """Moves to the next moment that somebody sleeps until, once nobody has anything else to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = Clock(lambda: self.now, self.sleep)
        self._sleepers: list[tuple[float, int]] = []
        self._numbers = count()

    async def sleep(self, seconds: float) -> None:
        await anyio.lowlevel.checkpoint()
        if seconds <= 0:
            return
        me = (self.now + seconds, next(self._numbers))
        self._sleepers.append(me)
        try:
            await self._turn(me)
        finally:
            self._sleepers.remove(me)
        self.now = me[0]

    async def _turn(self, me: tuple[float, int]) -> None:
        quiet, seen = 0, self.now
        while quiet < QUIET or min(self._sleepers) != me:
            await anyio.lowlevel.checkpoint()
            quiet, seen = (quiet + 1, seen) if seen == self.now else (0, self.now)


class Piece(NamedTuple):
    delay: float
    """Seconds before it."""
    data: bytes


@dataclass
class Reply:
    pieces: Sequence[Piece] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    breaks: bool = False
    """Whether the connection breaks after the last piece."""
    hangs: bool = False


Answer = Callable[[Body], Reply]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(content: str | None = None, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]})


def text_chunk(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    told = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": told})


DONE = b"data: [DONE]\n\n"


def story(words: Sequence[str], *, first: float = 0.0, gap: float = 0.0, cached: int | None = 0) -> Reply:
    """A proper answer: a role, the words, an end, the usage."""
    delays = [first, *[gap] * (len(words) - 1)]
    contents = [Piece(delay, chunk(word)) for delay, word in zip(delays, words, strict=True)]
    ends = [Piece(0, chunk(finish="stop")), Piece(0, usage(10, len(words), cached)), Piece(0, DONE)]
    return Reply([Piece(0, chunk("")), *contents, *ends])


def plain(body: Body) -> Reply:
    """As many words as were asked for, in the form of the endpoint."""
    tokens = body["max_tokens"]
    assert isinstance(tokens, int)
    if "messages" in body:
        return story(["ab"] * tokens)
    pieces = [Piece(0, text_chunk("ab"))] * tokens
    return Reply([*pieces, Piece(0, text_chunk("", "length")), Piece(0, usage(10, tokens, 0)), Piece(0, DONE)])


def refusal(retry_after: str | None = None) -> Reply:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return Reply([Piece(0, b'{"error": {"message": "full"}}')], 429, headers)


class Stub(httpx.AsyncBaseTransport):
    """Without a network. ``answer`` may be anything that a ``Reply`` can be."""

    def __init__(self, answer: Answer = plain, time: FakeTime | None = None, *, tokenizes: bool = False) -> None:
        self.answer = answer
        self.time = time or FakeTime()
        self.tokenizes = tokenizes
        self.bodies: list[Body] = []
        self.sent_at: list[float] = []
        self.headers = httpx.Headers()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path in PATHS:
            return self._completion(request)
        self.headers = request.headers
        found = _aside(path, json.loads(request.content or b"{}"), tokenizes=self.tokenizes)
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)

    def _completion(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        self.sent_at.append(self.time.now)
        reply = self.answer(body)
        return httpx.Response(reply.status, headers=reply.headers, stream=_Stream(reply, self.time))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, reply: Reply, time: FakeTime) -> None:
        self._reply = reply
        self._time = time

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._reply.pieces:
            await self._time.sleep(piece.delay)
            yield piece.data
        if self._reply.breaks:
            raise httpx.RemoteProtocolError("peer closed the connection")
        if self._reply.hangs:
            await anyio.sleep_forever()


def _aside(path: str, body: Body, *, tokenizes: bool) -> object:
    """Everything but completions. A word is two tokens."""
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": "stub-model"}]}
    if path == "/version":
        return {"version": "stub 1"}
    if path == "/tokenize" and tokenizes:
        words = str(body["prompt"]).split()
        return {"tokens": [token for place, _ in enumerate(words) for token in (2 * place, 2 * place + 1)]}
    return None


class Loopback:
    """The same as a real server."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.url = ""
        self._server: uvicorn.Server | None = None

    def app(self) -> Starlette:
        routes = [Route(path, self._completion, methods=["POST"]) for path in PATHS]
        return Starlette(routes=[*routes, Route("/{rest:path}", self._other, methods=["GET", "POST"])])

    def die(self) -> None:
        """At once, with all connections."""
        assert self._server is not None
        self._server.should_exit = self._server.force_exit = True

    async def _completion(self, request: Request) -> Response:
        reply = self.answer(msgspec.json.decode(await request.body(), type=Body))
        return StreamingResponse(_flow(reply), reply.status, reply.headers)

    async def _other(self, request: Request) -> Response:
        found = _aside(request.url.path, {}, tokenizes=False)
        return Response(status_code=404) if found is None else JSONResponse(found)

    @contextmanager
    def running(self) -> Iterator[Loopback]:
        config = uvicorn.Config(self.app(), port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        thread = threading.Thread(target=self._server.run)
        thread.start()
        try:
            while not self._server.started:
                time.sleep(0.005)
            host, port = self._server.servers[0].sockets[0].getsockname()
            self.url = f"http://{host}:{port}"
            yield self
        finally:
            self.die()
            thread.join()


async def _flow(reply: Reply) -> AsyncIterator[bytes]:
    for piece in reply.pieces:
        await anyio.sleep(piece.delay)
        yield piece.data
    if reply.breaks:
        raise ConnectionResetError
    if reply.hangs:
        await anyio.sleep_forever()
