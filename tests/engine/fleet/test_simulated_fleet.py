"""A fleet of engines and the simulation of its run: what is found in the caches is the same within a few points."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from octavo.engine.testing import FakeRunner
from octavo.policies.routing.base import Choice, RoutedRequest, RoutingPolicy
from octavo.policies.routing.fleet_view import FleetView
from octavo.policies.routing.power_of_two import PowerOfTwo
from octavo.policies.routing.prefix import Prefix
from octavo.policies.simulator import ATOMIC, ListTrace, Request, TraceInfo
from octavo.policies.simulator.fleet import FleetSetting, TierSetting, shortened, simulate
from octavo.storage.testing.contract import MemoryStore
from octavo.tests.engine.fleet.gateway_rig import COMPLETIONS, Door, DoorOf, the
from octavo.tests.engine.tier_rig import memory

BLOCK, CHATS, TURNS, ANSWER, TOGETHER = 4, 40, 4, 12, 5
POINTS = 0.05
"""Measured and simulated shares of prompt tokens differ by no more."""


class Noting(RoutingPolicy):
    """Another policy, and what it was asked and when."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self.asked: list[tuple[float, RoutedRequest]] = []

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        self.asked.append((time.monotonic(), request))
        return self._policy.choose(request, fleet)


class Sample(msgspec.Struct):
    text: str


class Details(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: Details


class Answer(msgspec.Struct):
    choices: list[Sample]
    usage: Usage


class Measured(NamedTuple):
    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens


async def talk(door: Door, seed: int) -> Measured:
    """Chats over one system prompt; a few say something at a time, in any order."""
    random = Random(seed)  # noqa: S311  # not for secrets
    said = {chat: text(random, 16) for chat in range(CHATS)} | dict.fromkeys(range(CHATS), text(random, 16))
    open_turns = [chat for chat in said for _ in range(TURNS)]
    random.shuffle(open_turns)
    prompt_tokens = cached_tokens = 0
    while open_turns:
        speaking = list(dict.fromkeys(open_turns[:TOGETHER]))
        for chat in speaking:
            open_turns.remove(chat)
            said[chat] += text(random, random.randint(10, 30))
        forms = [{"prompt": said[chat], "max_tokens": ANSWER, "temperature": 0} for chat in speaking]
        for chat, answer in zip(
            speaking, await asyncio.gather(*[door.post(COMPLETIONS, **form) for form in forms]), strict=True
        ):
            found = msgspec.convert(the(answer), Answer)
            said[chat] += found.choices[0].text
            prompt_tokens += found.usage.prompt_tokens
            cached_tokens += found.usage.prompt_tokens_details.cached_tokens
    return Measured(prompt_tokens, cached_tokens)


def text(random: Random, tokens: int) -> str:
    return "".join(chr(48 + random.randrange(64)) for _ in range(tokens))


def trace_of(asked: Sequence[tuple[float, RoutedRequest]]) -> ListTrace:
    """What was asked; what an answer left in the cache is known by the names of the next turn."""
    requests = list[Request]()
    for number, (at, request) in enumerate(asked):
        whole = (request.prompt_tokens + ANSWER - 1) // BLOCK
        names = list(request.names)
        later = (list(each.names) for _, each in asked[number + 1 :])
        published = next((more for more in later if more[: len(names)] == names), [])[len(names) : whole]
        arrival, tokens = at - asked[0][0], request.prompt_tokens
        requests.append(Request(arrival, tokens, ANSWER, shortened(names), shortened(published)))
    return ListTrace(TraceInfo("measured", BLOCK), requests)


OPTIONS = {"num_blocks": 240, "block_size": BLOCK, "eviction_policy": "lru", "max_running": TOGETHER}


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("routing", [Prefix, PowerOfTwo])
@pytest.mark.asyncio
async def test_the_simulator_finds_what_the_engines_found(
    door_of: DoorOf, replicas: int, routing: type[Prefix | PowerOfTwo]
) -> None:
    noting = Noting(routing())
    async with door_of(count=replicas, policy=noting, **OPTIONS) as door:
        measured = await talk(door, seed=replicas)
    found = simulate(trace_of(noting.asked), FleetSetting(replicas, 240, routing, service=ATOMIC))
    assert found.answered == CHATS * TURNS
    assert found.input_tokens == measured.prompt_tokens
    assert found.hit_ratio == pytest.approx(measured.hit_ratio, abs=POINTS)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.asyncio
async def test_and_what_they_found_in_a_store_that_they_share(door_of: DoorOf, replicas: int) -> None:
    noting, store = Noting(PowerOfTwo()), MemoryStore()
    runners = {f"r{number}": FakeRunner() for number in range(replicas)}

    def each(replica: str) -> dict[str, object]:
        return {"runner": runners[replica], "mounts": {"shared": memory(store=store)}}

    async with door_of(count=replicas, policy=noting, each=each, **OPTIONS) as door:
        measured = await talk(door, seed=replicas)
    setting = FleetSetting(replicas, 240, PowerOfTwo, service=ATOMIC, tier=TierSetting())
    found = simulate(trace_of(noting.asked), setting)
    assert found.hit_ratio_with_tier == pytest.approx(measured.hit_ratio, abs=POINTS)
    loaded, written = (
        sum(counts) for counts in zip(*((r.blocks_imported, r.blocks_exported) for r in runners.values()), strict=True)
    )
    assert found.blocks_down == pytest.approx(loaded, rel=0.2)
    assert found.blocks_up == pytest.approx(written, rel=0.4)  # engines write before they have to evict
