"""A second look at what a client was sent: by a reader of streams that forgives nothing, and as OpenAI's own types."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import pydantic
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from octavo.tests.engine.server.http_rig import Json, Stream, read_events, read_stream

BEYOND_OPENAI: Final = {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs", "store", "name"}
"""Fields of answers that its types lack: those of vLLM, ``store``, which OpenAI answers with, and the ``name`` in the
event that ends a call, which not all releases of its client know."""


@dataclass
class Exchange:
    """One request as the server saw it, and its answer as the server gave it."""

    path: str
    headers: dict[str, str]
    sent: bytes = b""
    status: int = 0
    got: bytes = b""
    is_whole: bool = False
    """Whether the end of the answer was sent."""

    @property
    def form(self) -> Json:
        """What the client asked for."""
        read = json.loads(self.sent)
        assert isinstance(read, dict)
        return read

    @property
    def stream(self) -> Stream:
        """The answer, read strictly."""
        return read_stream(self.got)


def check(exchange: Exchange) -> None:
    """Read an answer that is whole, strictly, as what OpenAI's client takes it for."""
    if exchange.status != 200:
        assert set(json.loads(exchange.got)["error"]) == {"message", "type", "param", "code"}
    elif exchange.path == "/v1/responses":
        _check_response(exchange)
    elif exchange.path == "/v1/chat/completions":
        _check_answer(exchange, ChatCompletion, ChatCompletionChunk)
    elif exchange.path == "/v1/completions":
        _check_answer(exchange, Completion, Completion)


def _check_response(exchange: Exchange) -> None:
    if not exchange.form.get("stream"):
        assert_all_known(Response.model_validate_json(exchange.got, strict=True))
        return
    kind: pydantic.TypeAdapter[ResponseStreamEvent] = pydantic.TypeAdapter(ResponseStreamEvent)
    for event in read_events(exchange.got):
        assert_all_known(kind.validate_json(event.data, strict=True))


def _check_answer(exchange: Exchange, whole: type[pydantic.BaseModel], chunk: type[pydantic.BaseModel]) -> None:
    if not exchange.form.get("stream"):
        if not exchange.form.get("echo"):  # its type does not know that nothing is likely before the first token
            assert_all_known(whole.model_validate_json(exchange.got, strict=True))
        return
    stream = exchange.stream
    for each in stream.chunks:
        if whole is not chunk:  # the type of completions does not know that a chunk may be without an end
            assert_all_known(chunk.model_validate_json(json.dumps(each), strict=True))
    assert len({(each["id"], each["created"], each["model"]) for each in stream.chunks}) <= 1
    if stream.error is None:
        _check_ends(exchange, stream)


def _check_ends(exchange: Exchange, stream: Stream) -> None:
    """Every sample has one beginning and one end, and the usage comes last, for whom it was meant."""
    samples = exchange.form.get("n") or 1
    assert isinstance(samples, int)
    for index in range(samples):
        choices = stream.choices(index)
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in ("stop", "length", "tool_calls")
        if exchange.path == "/v1/chat/completions":
            roles = [delta.get("role") for choice in choices if isinstance(delta := choice["delta"], dict)]
            assert roles == ["assistant", *[None] * (len(choices) - 1)]
    options = exchange.form.get("stream_options")
    wants_usage = isinstance(options, dict) and options.get("include_usage") is True
    assert [bool(each["choices"]) for each in stream.chunks].count(False) == int(wants_usage)
    if wants_usage:
        assert isinstance(stream.chunks[-1]["usage"], dict)


def assert_all_known(value: object) -> None:
    """No field that the client's types do not have, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        unknown = set(value.model_extra or ()) - BEYOND_OPENAI
        assert not unknown, f"{type(value).__name__} has no {unknown}"
        for name in value.model_fields_set:
            assert_all_known(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            assert_all_known(each)
