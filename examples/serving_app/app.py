"""An engine inside your own FastAPI app: answers as server-sent events, and a cache that tenants do not share.

uvicorn app:app        # in this folder
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from octavo import AsyncEngine, EngineConfig, Generation, OctavoError, SamplingParams
from octavo.errors import EngineClosed, QueueFull, RequestRejected


def open_engine() -> AsyncEngine:
    """What is served. The model is loaded when the engine is entered."""
    return AsyncEngine.open("smollm2", EngineConfig(num_blocks=1024, max_waiting=64))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One engine, in the event loop of the app. At the end running requests get 20 seconds."""
    async with open_engine() as engine:
        app.state.engine = engine
        yield
        await engine.drain(timeout=20)


def engine_of(request: Request) -> AsyncEngine:
    """The engine of the app."""
    engine: AsyncEngine = request.app.state.engine
    return engine


Engine = Annotated[AsyncEngine, Depends(engine_of)]
Tenant = Annotated[
    str, Header(alias="X-Tenant", min_length=1, max_length=64)
]  # set by your authentication, not clients
app = FastAPI(title="Ask Octavo", lifespan=lifespan)


class Question(BaseModel):
    """What a client posts. The engine itself checks the values."""

    question: str
    max_tokens: int = 256
    temperature: float = 0.7


@app.post("/ask")
async def ask(question: Question, engine: Engine, tenant: Tenant) -> StreamingResponse:
    """An answer, piece by piece."""
    params = SamplingParams(max_tokens=question.max_tokens, temperature=question.temperature)
    answer = engine.generate([{"role": "user", "content": question.question}], params, tenant=tenant)
    await answer.start()  # a refusal becomes a status, and not a stream that breaks off
    return StreamingResponse(events(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def events(answer: Generation) -> AsyncIterator[str]:
    """Text, and last either ``done`` or ``error``. When the client leaves, the request ends in the engine, too."""
    async with answer:
        try:
            async for output in answer:
                if output.text_delta:
                    yield event("text", output.text_delta)
                if output.finish_reason in {"stop", "length"}:
                    yield event("done", {"reason": output.finish_reason, "cached_tokens": output.cached_tokens})
                elif output.finish_reason == "abort":  # not by the client, who is there to hear it: the app is ending
                    yield event("error", "aborted")
        except OctavoError:
            yield event("error", "failed")  # the engine has logged why


def event(name: str, data: object) -> str:
    """One server-sent event; JSON has no line breaks of its own."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


@app.get("/health")
async def health(engine: Engine) -> dict[str, int]:
    """How busy the engine is; 503 when it does not run."""
    load = engine.stats()
    return {"running": load.running, "waiting": load.waiting}


@app.exception_handler(EngineClosed)
@app.exception_handler(RequestRejected)
async def refused(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001  # FastAPI passes both
    """The engine says what is wrong; the client needs a status, and to hear when another try may help."""
    status = 503 if isinstance(error, EngineClosed) else 429 if isinstance(error, QueueFull) else 400
    return JSONResponse({"error": str(error)}, status, {"Retry-After": "1"} if status != 400 else None)
