"""What a benchmark asks a server before it begins: is it there, what does it serve, how does it count tokens."""

from __future__ import annotations

from typing import TypeVar

import anyio
import httpx
import msgspec

from ...errors import InvalidRequest, describe
from .clock import Clock
from .settings import Form
from .vocabulary import TEXT, WORDS, Vocabulary

T = TypeVar("T", bound=msgspec.Struct)
PATIENCE = 10.0
"""Seconds for each of these answers."""
PAUSE = 0.5
MAX_SHOWN = 80


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Version(msgspec.Struct):
    version: str


async def wait_for_server(http: httpx.AsyncClient, clock: Clock, patience: float) -> None:
    """Until it lists its models, for at most ``patience`` seconds.

    :raises InvalidRequest: when it still does not.
    """
    until = clock.now() + patience
    while True:
        problem = await _problem(http)
        if problem is None:
            return
        if clock.now() >= until:
            raise InvalidRequest(f"--url: no server is ready at {http.base_url}: {problem}")
        await clock.sleep(PAUSE)


async def served_model(http: httpx.AsyncClient) -> str:
    """The first one.

    :raises InvalidRequest: when the server does not list any.
    """
    models = await _ask(http, "GET", "/v1/models", _Models)
    if models is None or not models.data:
        raise InvalidRequest("the server lists no models: name one with --model")
    return models.data[0].id


async def server_version(http: httpx.AsyncClient) -> str | None:
    """``None``: it does not tell."""
    answer = await _ask(http, "GET", "/version", _Version)
    return None if answer is None else answer.version[:MAX_SHOWN]


async def vocabulary_of(http: httpx.AsyncClient, model: str, form: Form) -> Vocabulary:
    """Measured by ``/tokenize`` as vLLM, llama.cpp and Octavo have it; else a word counts as a token.

    :raises InvalidRequest: when ids are wanted and cannot be had.
    """
    question = {"model": model, "prompt": TEXT, "content": TEXT, "add_special_tokens": False}
    answer = await _ask(http, "POST", "/tokenize", _Tokens, question)
    if answer is None or not answer.tokens:
        if form is Form.IDS:
            raise InvalidRequest("prompts of ids need a server that has /tokenize; this one has not")
        return Vocabulary(form)
    return Vocabulary(form, len(answer.tokens) / len(WORDS), measured=True, ids=tuple(sorted(set(answer.tokens))))


async def _problem(http: httpx.AsyncClient) -> str | None:
    try:
        with anyio.fail_after(PATIENCE):
            response = await http.get("/v1/models")
    except (httpx.HTTPError, TimeoutError) as error:
        return describe(error)
    if response.status_code == 404:  # it is there, and lists no models
        return None
    return None if response.is_success else f"HTTP {response.status_code} {response.text[:200]}"


async def _ask(
    http: httpx.AsyncClient, method: str, path: str, form: type[T], body: dict[str, object] | None = None
) -> T | None:
    """``None``: no answer of that form."""
    try:
        with anyio.fail_after(PATIENCE):
            response = await http.request(method, path, json=body)
        return msgspec.json.decode(response.content, type=form) if response.is_success else None
    except (httpx.HTTPError, TimeoutError, msgspec.DecodeError):
        return None
