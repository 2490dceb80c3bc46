"""The FastAPI example: with a fake model in all its branches, and once with the real one behind a real server."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import anyio
import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Scope

from octavo import AsyncEngine, EngineConfig
from octavo.engine.model.runner import StepInput
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ModelError

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving_app" / "app.py"
BLUE = {"X-Tenant": "blue"}
LONG = "A" * 100


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serving_app_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # where FastAPI looks up the names in annotations
        patch.setitem(__import__("sys").modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def serving(
    example: ModuleType, *, before_step: Callable[[StepInput], None] | None = None, max_waiting: int = 64
) -> AsyncIterator[tuple[FastAPI, AsyncEngine, httpx.AsyncClient]]:
    engine = AsyncEngine(
        runner=FakeRunner(before_step=before_step),
        codec=FakeCodec(),
        config=EngineConfig(num_blocks=64, max_waiting=max_waiting, max_running=1),
    )
    example.__dict__["open_engine"] = lambda: engine
    app: FastAPI = example.app
    async with (
        example.lifespan(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://app", headers=BLUE) as client,
    ):
        yield app, engine, client


def wait(gate: threading.Event) -> None:
    assert gate.wait(30)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the engine does in its own time."""
    with anyio.fail_after(10):
        while not holds():  # noqa: ASYNC110  # there is nothing to be told by
            await anyio.sleep(0.001)


def events(body: str) -> list[tuple[str, object]]:
    """Strictly: each event is a name and JSON."""
    assert body.endswith("\n\n")
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def ask(question: str = LONG, **more: object) -> dict[str, object]:
    return {"question": question, "max_tokens": 8, "temperature": 0, **more}


@pytest.mark.asyncio
async def test_an_answer_is_a_stream_with_one_end(example: ModuleType) -> None:
    async with serving(example) as (_, engine, client):
        answer = await client.post("/ask", json=ask())
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        *texts, (name, data) = events(answer.text)
        assert (name, data) == ("done", {"reason": "length", "cached_tokens": 0})
        assert {name for name, _ in texts} == {"text"}
        (expected,) = await engine.complete(LONG, example.SamplingParams(max_tokens=8, temperature=0.0))
        assert "".join(str(text) for _, text in texts) == expected.text


@pytest.mark.asyncio
async def test_tenants_share_nothing(example: ModuleType) -> None:
    async with serving(example) as (_, _, client):
        cached = []
        for tenant in ("blue", "blue", "green"):
            answer = await client.post("/ask", json=ask(), headers={"X-Tenant": tenant})
            (_, data) = events(answer.text)[-1]
            assert isinstance(data, dict)
            cached.append(data["cached_tokens"])
        assert cached[0] == cached[2] == 0
        assert cached[1] > 0


@pytest.mark.asyncio
async def test_refusals_have_a_status_and_the_engines_words(example: ModuleType) -> None:
    async with serving(example) as (_, _, client):
        refused = await client.post("/ask", json=ask(temperature=-1))
        assert refused.status_code == 400
        assert "temperature" in refused.json()["error"]
        assert (await client.post("/ask", json=ask("A" * 5000))).status_code == 400  # it never fits
        assert (await client.post("/ask", json={})).status_code == 422
        assert (await client.post("/ask", json=ask(), headers={"X-Tenant": ""})).status_code == 422


@pytest.mark.asyncio
async def test_a_full_queue_says_when_to_come_again_and_health_tells(example: ModuleType) -> None:
    gate = threading.Event()
    async with serving(example, before_step=lambda _: wait(gate), max_waiting=1) as (_, engine, client):
        async with anyio.create_task_group() as tasks:
            try:
                tasks.start_soon(lambda: client.post("/ask", json=ask()))
                await until(lambda: engine.stats().running == 1)
                tasks.start_soon(lambda: client.post("/ask", json=ask("B")))
                await until(lambda: engine.stats().waiting == 1)
                assert (await client.get("/health")).json() == {"running": 1, "waiting": 1}
                full = await client.post("/ask", json=ask("C"))
            finally:
                gate.set()
        assert full.status_code == 429
        assert full.headers["retry-after"] == "1"
        assert "max_waiting" in full.json()["error"]


@pytest.mark.asyncio
async def test_a_failure_in_the_stream_is_an_event_and_the_engine_lives(example: ModuleType) -> None:
    steps = []

    def fail_once(step: StepInput) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise ModelError("a secret of the house")

    async with serving(example, before_step=fail_once) as (_, _, client):
        broken = await client.post("/ask", json=ask())
        assert events(broken.text)[-1] == ("error", "failed")
        assert "secret" not in broken.text
        assert events((await client.post("/ask", json=ask())).text)[-1][0] == "done"


@pytest.mark.asyncio
async def test_a_client_that_leaves_before_the_first_token_holds_nothing(example: ModuleType) -> None:
    gate = threading.Event()
    async with serving(example, before_step=lambda _: wait(gate)) as (app, engine, _):
        gone = anyio.Event()
        body = [json.dumps(ask(max_tokens=500)).encode()]

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        headers = [(b"x-tenant", b"blue"), (b"content-type", b"application/json")]
        scope: Scope = {"type": "http", "method": "POST", "path": "/ask", "headers": headers, "query_string": b""}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app, scope, receive, send)
            try:
                await until(lambda: engine.stats().running == 1)
                gone.set()
            finally:
                gate.set()
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().finished.get("abort") == 1
        assert engine.census().held == 0


@pytest.mark.asyncio
async def test_an_app_that_ends_tells_its_clients(example: ModuleType) -> None:
    gate = threading.Event()
    bodies: list[str] = []
    async with serving(example, before_step=lambda _: wait(gate)) as (_, engine, client):

        async def listen() -> None:
            bodies.append((await client.post("/ask", json=ask(max_tokens=500))).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            try:
                await until(lambda: engine.stats().running == 1)
                tasks.start_soon(engine.drain, 0.0)
                await until(lambda: engine._submission.is_draining)
            finally:
                gate.set()
        closed = await client.post("/ask", json=ask())
        assert closed.status_code == 503
        assert closed.headers["retry-after"] == "1"
    assert events(bodies[0])[-1] == ("error", "aborted")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_example_as_it_is_with_the_real_model(example: ModuleType) -> None:
    async with (
        example.lifespan(example.app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=example.app), base_url="http://app", headers=BLUE
        ) as client,
    ):
        answer = await client.post("/ask", json=ask("What is the capital of France?"), timeout=60)
        assert "Paris" in "".join(str(text) for name, text in events(answer.text) if name == "text")


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100
