"""Chats of several turns over the OpenAI routes: what they say, who sends them, and what came back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from time import perf_counter
from typing import NamedTuple, TypeAlias, TypedDict

import httpx

Message: TypeAlias = dict[str, str]
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
TRIES = 6
"""Attempts of a client: what was lost with a replica is asked again."""
PAUSE = 0.2
"""Seconds before the next attempt."""


class Plan(NamedTuple):
    """What is said. Letters stand for tokens: how many a token has depends on the model."""

    chats: int = 200
    fewest_turns: int = 2
    most_turns: int = 4
    system_letters: int = 16
    """Of the prompt that all share. The longer it is, the less it matters who answers: everybody soon has it."""
    turn_letters: int = 160
    answer_tokens: int = 16
    users: int = 24
    """Who talk at the same time, each of them one chat after another."""
    think_seconds: float = 0.4
    """From an answer to the next question, on average (exponentially distributed). Without it the replica that has
    just answered is the one that is idle, and gets the next turn by being so."""
    seed: int = 0


class Turn(NamedTuple):
    """One answer."""

    chat: int
    number: int
    """In its chat, from 0."""
    messages: Sequence[Message]
    """What was sent."""
    text: str
    began: float
    """Seconds since the start of the run, of the attempt that was answered."""
    first: float
    """Seconds until the first piece of the answer; those of all of it, where it came at once."""
    seconds: float
    tries: int
    replica: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


def scripts(plan: Plan) -> Iterator[list[str]]:
    """What the users say, chat by chat."""
    random = Random(plan.seed)  # noqa: S311  # not for secrets
    for _ in range(plan.chats):
        turns = random.randint(plan.fewest_turns, plan.most_turns)
        yield [said(random, plan.turn_letters) for _ in range(turns)]


def said(random: Random, letters: int) -> str:
    """Some words."""
    text = ""
    while len(text) < letters:
        text += random.choice(WORDS) + "_"
    return text[:letters]


async def drive(
    client: httpx.AsyncClient, model: str, plan: Plan, on_turn: Callable[[Turn], None] = lambda _: None
) -> list[Turn]:
    """Have all chats, and return their turns in the order in which they were answered."""
    start, turns = perf_counter(), list[Turn]()
    system = said(Random(plan.seed + 1), plan.system_letters)  # noqa: S311
    thinking = Random(plan.seed + 2)  # noqa: S311
    waiting = enumerate(scripts(plan))

    async def user() -> None:
        for chat, script in waiting:
            messages: list[Message] = [{"role": "system", "content": system}]
            for number, text in enumerate(script):
                await asyncio.sleep(thinking.expovariate(1.0) * plan.think_seconds)
                messages.append({"role": "user", "content": text})
                asked = _Asked(client, model, plan.answer_tokens, start, is_streamed=chat % 2 == 0)
                turn = await asked.turn(chat, number, tuple(messages))
                messages.append({"role": "assistant", "content": turn.text})
                turns.append(turn)
                on_turn(turn)

    async with asyncio.TaskGroup() as users:
        for _ in range(plan.users):
            users.create_task(user())
    return turns


class Lost(Exception):
    """The answer did not come, or not to its end."""


class _Usage(TypedDict):
    """As OpenAI has it."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int]


class _Found(NamedTuple):
    replica: str
    first: float | None
    """When the first piece came."""
    text: str
    usage: _Usage


class _Asked:
    """One question, until it is answered."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, answer_tokens: int, start: float, *, is_streamed: bool
    ) -> None:
        self._client = client
        self._start = start
        self._is_streamed = is_streamed
        self._body = {
            "model": model,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}),
        }

    async def turn(self, chat: int, number: int, messages: Sequence[Message]) -> Turn:
        for tries in range(1, TRIES + 1):
            began = perf_counter()
            try:
                replica, first, text, usage = await (self._streamed if self._is_streamed else self._plain)(messages)
            except (httpx.HTTPError, Lost) as lost:
                if tries == TRIES:
                    raise Lost(f"chat {chat}, turn {number}: {lost!r}") from lost
                await asyncio.sleep(PAUSE)
                continue
            now = perf_counter()
            return Turn(
                chat=chat,
                number=number,
                messages=messages,
                text=text,
                began=began - self._start,
                first=(first or now) - began,
                seconds=now - began,
                tries=tries,
                replica=replica,
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                answer_tokens=usage["completion_tokens"],
            )
        raise Lost  # not reached: the last attempt returns or raises

    async def _plain(self, messages: Sequence[Message]) -> _Found:
        answer = await self._client.post("/v1/chat/completions", json={**self._body, "messages": messages})
        if answer.status_code != httpx.codes.OK:
            raise Lost(answer.text)
        whole = answer.json()
        return _Found(_replica(answer), None, whole["choices"][0]["message"]["content"], whole["usage"])

    async def _streamed(self, messages: Sequence[Message]) -> _Found:
        first, text, usage = None, "", None
        body = {**self._body, "messages": messages}
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise Lost((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise Lost(line)
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    first = first or perf_counter()
                    text += choice["delta"].get("content") or ""
        if usage is None:
            raise Lost("the stream ended without its last words")
        return _Found(_replica(answer), first, text, usage)


def _replica(answer: httpx.Response) -> str:
    return str(answer.headers.get("x-octavo-replica", ""))
