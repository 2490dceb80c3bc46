"""Client: sends one request, follows its answer, and makes a row of it whatever happens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import httpx
import msgspec

from ...errors import describe
from .clock import Clock
from .listener import MAX_MESSAGE, Failed, Listener
from .recorder import Recorder
from .rows import CONNECTION, MALFORMED, OK, REFUSED, TIMEOUT, TRUNCATED, Row
from .settings import Endpoint, Target
from .sse import MalformedStream, SseReader

PATHS = {Endpoint.CHAT: "/v1/chat/completions", Endpoint.COMPLETIONS: "/v1/completions"}
PAUSE = 1.0
"""Seconds before another try, where the server does not say."""


class Place(NamedTuple):
    """Of a request in its workload."""

    conversation: int
    turn: int
    due: float
    """When it is to be sent."""


class Answer(NamedTuple):
    """What came of a request."""

    row: Row
    text: str


@dataclass(slots=True)
class _Attempt:
    sent: float
    listener: Listener
    status: int | None = None
    retry_after: float = PAUSE


class Client:
    """Of one server. At most ``max_in_flight`` requests are under way, the others wait here."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        target: Target,
        clock: Clock,
        recorder: Recorder,
        max_in_flight: int | None = None,
    ) -> None:
        self._http = http
        self._path = PATHS[target.endpoint]
        self._timeout = target.timeout
        self._retries = target.retries
        self._clock = clock
        self._recorder = recorder
        self._slots = anyio.CapacityLimiter(max_in_flight or math.inf)

    async def send(self, body: dict[str, object], place: Place) -> Answer:
        """Never raises for what a server does; a refusal (429) is tried again as often as the target says."""
        content = msgspec.json.encode(body)
        for refusals in range(self._retries + 1):
            answer, pause = await self._try(content, place, refusals)
            if answer.row.outcome != REFUSED or refusals == self._retries:
                break
            await self._clock.sleep(min(pause, self._timeout))
        self._recorder.add(answer.row)
        return answer

    async def _try(self, content: bytes, place: Place, refusals: int) -> tuple[Answer, float]:
        async with self._slots:
            attempt = _Attempt(self._clock.now(), Listener(self._recorder.note_content))
            with self._recorder.under_way():
                failure = await self._exchange(content, attempt)
            ended = self._clock.now()
        refused = failure is not None and failure.outcome == REFUSED
        row = _row(place, attempt, ended, failure, refusals + refused)
        return Answer(row, attempt.listener.text), attempt.retry_after

    async def _exchange(self, content: bytes, attempt: _Attempt) -> Failed | None:
        """What went wrong, in the words of the report."""
        try:
            with anyio.fail_after(self._timeout):
                await self._stream(content, attempt)
        except Failed as failure:
            return failure
        except MalformedStream as error:
            return Failed(MALFORMED, str(error))
        except TimeoutError:
            return Failed(TIMEOUT, f"not over after {self._timeout:g} s")
        except httpx.HTTPError as error:
            return Failed(TRUNCATED if attempt.status == 200 else CONNECTION, describe(error))
        return None

    async def _stream(self, content: bytes, attempt: _Attempt) -> None:
        async with self._http.stream("POST", self._path, content=content) as response:
            attempt.status = response.status_code
            await _check(response, attempt)
            reader = SseReader()
            async for chunk in response.aiter_bytes():
                now = self._clock.now()
                for event in reader.feed(chunk):
                    attempt.listener.hear(event, now)
        if not attempt.listener.is_done:  # an event that broke off is part of the same story
            attempt.listener.close()
        reader.close()


async def _check(response: httpx.Response, attempt: _Attempt) -> None:
    """:raises Failed: when this is no stream of events."""
    if response.status_code != 200:
        attempt.retry_after = _seconds(response.headers.get("retry-after", ""))
        message = (await response.aread())[:MAX_MESSAGE].decode(errors="replace")
        raise Failed(REFUSED if response.status_code == 429 else f"http {response.status_code}", message)
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise Failed(MALFORMED, f"the answer is {kind or 'of no type'}, no text/event-stream")


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else PAUSE


def _row(place: Place, attempt: _Attempt, ended: float, failure: Failed | None, refusals: int) -> Row:
    heard, usage = attempt.listener, attempt.listener.usage
    details = usage.prompt_tokens_details
    counted = usage.completion_tokens is None
    return Row(
        conversation=place.conversation,
        turn=place.turn,
        due=place.due,
        sent=attempt.sent,
        ended=ended,
        outcome=OK if failure is None else failure.outcome,
        status=attempt.status,
        ttft=heard.moments[0] - attempt.sent if heard.moments else None,
        gaps=heard.gaps,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=None if details is None else details.cached_tokens,
        output_tokens=len(heard.moments) if counted else usage.completion_tokens,
        counted=counted,
        finish_reason=heard.finish_reason,
        refusals=refusals,
        message=None if failure is None else str(failure),
    )
