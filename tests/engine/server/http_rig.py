"""What tests of the server share: a request driven by hand, and a reader of event streams that forgives nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

import anyio
import httpx
from starlette.types import ASGIApp, Message

from octavo import AsyncEngine

Json: TypeAlias = dict[str, "object"]
PATIENCE = 15.0
"""Seconds after which a test that hangs is told so; no result depends on it."""
LINE = re.compile(r"(data|event): [^\r\n]+")


class Event(NamedTuple):
    """One server-sent event."""

    name: str | None
    data: str


def read_events(raw: bytes) -> list[Event]:
    """The events of a whole body. Fails on anything that a strict reader would stumble over."""
    text = raw.decode("utf-8")
    assert text.endswith("\n\n"), "the last event is cut off"
    return [_event(block) for block in text.removesuffix("\n\n").split("\n\n")]


def _event(block: str) -> Event:
    lines = block.split("\n")
    for line in lines:
        assert LINE.fullmatch(line), f"no line of an event stream: {line!r}"
    fields = [line.split(": ", 1) for line in lines]
    assert [name for name, _ in fields] in (["data"], ["event", "data"]), f"not one event: {block!r}"
    return Event(fields[0][1] if len(fields) == 2 else None, fields[-1][1])


@dataclass
class Stream:
    """A whole stream in OpenAI's form: chunks, then either ``[DONE]`` or an error, never both."""

    chunks: list[Json]
    error: Json | None

    def choices(self, index: int = 0) -> list[Json]:
        """What the chunks say of one choice, in order."""
        found = [choice for chunk in self.chunks for choice in _objects(chunk["choices"])]
        return [choice for choice in found if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        """The joined text of one choice, of chat or of completions."""
        return "".join(_text_of(choice) for choice in self.choices(index))

    def finish_reasons(self, index: int = 0) -> list[object]:
        """Of one choice; exactly one in a stream that is whole."""
        return [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"] is not None]


def read_stream(raw: bytes) -> Stream:
    """Parse a body strictly: each event is JSON, and there is exactly one end."""
    events = read_events(raw)
    assert all(event.name is None for event in events)
    last = events[-1].data
    bodies = [json.loads(event.data) for event in (events[:-1] if last == "[DONE]" else events)]
    assert all("error" not in body for body in bodies[:-1]), "something comes after an error"
    if last == "[DONE]":
        assert bodies
        assert "error" not in bodies[-1], "an error and a success"
        return Stream(bodies, None)
    assert "error" in bodies[-1], "the stream has no end"
    return Stream(bodies[:-1], bodies[-1]["error"])


def _text_of(choice: Json) -> str:
    text = choice.get("text", "")
    delta = choice.get("delta")
    if isinstance(delta, dict):
        text = delta.get("content") or ""
    assert isinstance(text, str)
    return text


def _objects(values: object) -> list[Json]:
    assert isinstance(values, list)
    return values


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else go on until ``condition`` holds."""
    with anyio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110  # it comes from many sides
            await asyncio.sleep(0)


class Exchange:
    """One HTTP request, driven at the ASGI border: ``async with Exchange(app, "/v1/...", body) as exchange``.

    The client reads when it likes: an app that sends more than ``window`` messages ahead has to wait.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: object = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        window: int = 0,
    ) -> None:
        """``body``: bytes as they are, anything else as JSON. ``window``: 0 for no limit."""
        self.messages: list[Message] = []
        """All that the app has sent and the client has read."""
        self._app = app
        self._scope = _scope(method, path, headers or {})
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._is_asked = False
        self._gone = anyio.Event()
        self._sent: asyncio.Queue[Message] = asyncio.Queue(window)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        while not self._sent.empty():
            self._sent.get_nowait()
        await self.ended()

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def ended(self) -> None:
        """Wait until the app has returned; raises what it raised."""
        assert self._task is not None
        with anyio.fail_after(PATIENCE):
            await asyncio.shield(self._task)

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def read(self) -> Message | None:
        """The next message; ``None`` when the app has returned."""
        assert self._task is not None
        if self._sent.empty() and not self._task.done():
            message = asyncio.ensure_future(self._sent.get())
            with anyio.fail_after(PATIENCE):
                await asyncio.wait({message, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                self.messages.append(message.result())
                return self.messages[-1]
            message.cancel()
        if self._sent.empty():
            return None
        self.messages.append(self._sent.get_nowait())
        return self.messages[-1]

    async def whole(self) -> bytes:
        """Read to the end; the body."""
        while await self.read() is not None:
            pass
        await self.ended()
        return self.body

    @property
    def status(self) -> int:
        assert self.messages[0]["type"] == "http.response.start"
        status = self.messages[0]["status"]
        assert isinstance(status, int)
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        """As far as it was read."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def is_whole(self) -> bool:
        """Whether the end of the body was read."""
        return len(self.messages) > 1 and not self.messages[-1].get("more_body", False)

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._gone.is_set():  # as servers do: what is sent to nobody is dropped
            await self._sent.put(message)


def _scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, object]:
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), *raw],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 80),
    }


@dataclass
class Server:
    """An app over an engine with the fake model, and a client for it."""

    engine: AsyncEngine
    app: ASGIApp
    client: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, **body: object) -> Json:
        """The JSON of an answer that must be a success."""
        answer = await self.client.post(path, json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    async def refused(self, path: str, /, *status: int, **body: object) -> Json:
        """The error of an answer that must have this ``status``, by default 400."""
        answer = await self.client.post(path, json=body, headers=self.headers)
        assert answer.status_code in (status or (400,)), answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error, dict)
        return error

    async def stream(self, path: str, **body: object) -> Stream:
        """A whole stream, read strictly."""
        async with self.open(path, {"stream": True, **body}) as exchange:
            raw = await exchange.whole()
            assert exchange.status == 200, raw
            assert exchange.headers["content-type"].startswith("text/event-stream")
            assert exchange.is_whole
            return read_stream(raw)

    def open(self, path: str, body: Mapping[str, object], *, window: int = 0) -> Exchange:
        """A request to be driven by hand."""
        return Exchange(self.app, path, body, headers=self.headers, window=window)


ServerOf: TypeAlias = Callable[..., AbstractAsyncContextManager[Server]]
"""``async with server_of(...) as server``: see the fixture."""
