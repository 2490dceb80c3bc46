"""From outputs of the engine to an answer, whole or as a stream: what chat and completions have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import anyio.to_thread
import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import ASGIApp

from ....telemetry.logging import fault_fields
from ...generation import Generation
from ..call import Call
from ..endpoint import json_response
from ..errors import ApiError, api_error
from ..event_stream import EventStream, event
from ..wire.generation import StreamOptions, Usage
from .side_by_side import Heard, outputs_of
from .usage import UsageMeter

LONG_ANSWER = 500
"""Tokens from which an answer is written in a worker thread: with log-probabilities it takes a while."""


class Head(NamedTuple):
    """What every part of an answer begins with."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    """The name that the client gave it."""
    fingerprint: str

    @classmethod
    def of(cls, call: Call, prefix: str, model: str) -> Head:
        """``prefix``: tells what kind of answer the id is of."""
        return cls(f"{prefix}-{call.id}", int(call.service.wall()), model, f"fp_{call.engine.model.fingerprint[:12]}")


class Answer(Protocol):
    """One answer in the making."""

    def chunks(self, heard: Heard, usage: Usage | UnsetType | None) -> Iterable[msgspec.Struct]:
        """What a stream tells of an output. ``usage``: to be written into each."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """What a stream tells in the end, for those who want to know."""

    def whole(self, last: Sequence[Heard], usage: Usage) -> msgspec.Struct:
        """The answer. ``last``: the last outputs of all samples, in order."""


async def respond(
    call: Call, generations: Sequence[Generation], answer: Answer, options: StreamOptions | None
) -> ASGIApp:
    """Answer with what comes out of ``generations``, which are started. ``options``: of a stream; ``None``: none."""
    if options is not None:
        events = _events(call, generations, answer, options)
        return EventStream(events, on_error=lambda error: event(msgspec.json.encode(told(call, error).body)))
    last, meter = dict[tuple[int, int], Heard](), UsageMeter()
    async with aclosing(outputs_of(generations)) as outputs:
        async for heard in outputs:
            last[heard.number, heard.output.index] = heard
            meter.note(heard)
            call.tokens = meter.tokens()

    def written() -> ASGIApp:
        return json_response(answer.whole([last[key] for key in sorted(last)], meter.usage()))

    is_long = meter.usage().total_tokens > LONG_ANSWER
    return await anyio.to_thread.run_sync(written) if is_long else written()


async def _events(
    call: Call, generations: Sequence[Generation], answer: Answer, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """One for each output, apart from those that say nothing to a client."""
    meter = UsageMeter()
    async with aclosing(outputs_of(generations)) as outputs:
        async for heard in outputs:
            meter.note(heard)
            call.tokens = meter.tokens()
            if chunks := b"".join(map(_encoded, answer.chunks(heard, _usage_within(meter, options)))):
                yield chunks
    if options.include_usage:
        yield _encoded(answer.usage_chunk(meter.usage()))


def _usage_within(meter: UsageMeter, options: StreamOptions) -> Usage | UnsetType | None:
    """What chunks with choices say of the usage: ``null``, as OpenAI has it, when it comes in the end."""
    if options.continuous_usage_stats:
        return meter.usage()
    return None if options.include_usage else UNSET


def _encoded(chunk: msgspec.Struct) -> bytes:
    return event(msgspec.json.encode(chunk))


def told(call: Call, error: Exception) -> ApiError:
    """What the client is told of an error in the middle of a stream; the log is told all of it."""
    refusal = api_error(error)
    if refusal.status >= 500 and not isinstance(error, ApiError):
        call.service.logger.error("request_failed", path=call.scope["path"], **fault_fields(error))
    return refusal
