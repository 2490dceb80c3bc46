"""Replicas that are lost, are full, or drain: every request is answered, by another one where that is possible."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final

import msgspec
import pytest

from octavo.tests.engine.fleet.gateway_rig import (
    CHAT,
    COMPLETIONS,
    FORM,
    PROMPT,
    RESPONSES,
    Door,
    DoorOf,
    Ordered,
    replica_of,
    the,
    turns,
)
from octavo.tests.engine.server.http_rig import read_events, read_stream, until

MESSAGES: Final = [{"role": "user", "content": "abcdefgh"}]


class Losing:
    """Loses the replica that takes the step with this number, counted over all of them."""

    def __init__(self, at: int) -> None:
        self.door: Door | None = None
        self.lost: str | None = None
        self._left = at

    async def __call__(self, step: int) -> None:
        self._left -= 1
        if self.door is not None and self._left == 0:
            self.lost = self.door.running()
            assert self.lost is not None
            self.door.fleet.lose(self.lost)
        await turns(3)  # a reader that never gets to wait is no picture of life


async def expected_text(door_of: DoorOf, path: str, body: Mapping[str, object]) -> str:
    async with door_of(count=1) as door:
        return text_of(path, the(await door.post(path, **body)))


def text_of(path: str, answer: Mapping[str, object]) -> str:
    (found,) = msgspec.convert(answer["output" if path == RESPONSES else "choices"], list[dict[str, object]])
    if path == COMPLETIONS:
        return str(found["text"])
    if path == CHAT:
        return str(msgspec.convert(found["message"], dict[str, object])["content"])
    return str(msgspec.convert(found["content"], list[dict[str, object]])[0]["text"])


BODIES: Final = (
    (COMPLETIONS, dict(FORM)),
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}),
    (RESPONSES, {"input": "abcdefgh", "max_output_tokens": 12, "temperature": 0}),
)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_an_answer_that_has_not_begun_begins_anew_elsewhere(
    path: str, body: dict[str, object], door_of: DoorOf
) -> None:
    """Whenever its replica is lost, an answer that comes in one piece is whole and the same."""
    expected = await expected_text(door_of, path, body)
    for at in range(1, 13, 3):
        losing = Losing(at)
        async with door_of(on_step=losing) as door:
            losing.door = door
            answer = await door.post(path, **body)
            assert text_of(path, the(answer)) == expected
            assert losing.lost is not None
            assert replica_of(answer) != losing.lost
            assert door.fleet.replicas == (replica_of(answer),)
            await door.quiet()
            shown = (await door.get("/metrics")).text
            assert f'octavo_fleet_lost_total{{replica="{losing.lost}"}} 1.0' in shown
            assert 'octavo_fleet_retries_total{cause="lost"} 1.0' in shown


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES[:2])
async def test_a_stream_that_is_lost_ends_with_an_error(path: str, body: dict[str, object], door_of: DoorOf) -> None:
    """At every step: nothing was told yet and it begins anew, or what was told is right and an error ends it."""
    expected, ends = await expected_text(door_of, path, body), set()
    for at in range(1, 14):
        losing = Losing(at)
        async with door_of(on_step=losing) as door:
            losing.door = door
            async with door.open(path, {**body, "stream": True}) as exchange:
                stream = read_stream(await exchange.whole())
                assert exchange.is_whole
            text = stream.text()
            ends.add(stream.error is None)
            if stream.error is None:
                assert (text, stream.finish_reasons()) == (expected, ["length"])
                continue
            assert stream.error["code"] == "replica_lost"
            assert stream.error["type"] == "server_error"
            assert expected.startswith(text)
            assert not stream.finish_reasons()
            assert replica_of(exchange) == losing.lost
            await door.quiet()
    assert False in ends


@pytest.mark.asyncio
async def test_a_stream_of_a_response_ends_with_its_failure(door_of: DoorOf) -> None:
    failures = 0
    for at in range(1, 14):
        losing = Losing(at)
        async with door_of(on_step=losing) as door:
            losing.door = door
            async with door.open(RESPONSES, {**BODIES[2][1], "stream": True}) as exchange:
                events = read_events(await exchange.whole())
            data = [json.loads(event.data) for event in events]
            assert [each["sequence_number"] for each in data] == list(range(len(data)))
            assert [each["type"] for each in data] == [event.name for event in events]
            last = data[-1]
            if last["type"] != "response.failed":
                continue
            failures += 1
            response = data[0]["response"]
            assert last["response"]["id"] == response["id"]
            assert last["response"]["error"]["code"] == "server_error"
            assert "replica_lost" in last["response"]["error"]["message"]
            changed = {name for name, value in last["response"].items() if response[name] != value}
            assert changed == {"status", "error"}
    assert failures > 3


@pytest.mark.asyncio
async def test_without_a_replica_there_is_a_time_to_come_again(door_of: DoorOf) -> None:
    async with door_of() as door:
        for replica in ("r0", "r1"):
            door.fleet.lose(replica)
        for path, body in BODIES:
            answer = await door.post(path, **body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
            assert int(answer.headers["retry-after"]) >= 1
        assert (await door.get("/v1/models")).status_code == 503
        assert (await door.get("/metrics")).status_code == 200
        refused = await door.post(RESPONSES, input="0", previous_response_id="resp_any")
        assert refused.status_code == 503


@pytest.mark.asyncio
async def test_a_response_is_lost_with_its_replica(door_of: DoorOf) -> None:
    """First it may be away for a moment, then nobody has it."""
    async with door_of() as door:
        made = await door.post(RESPONSES, input="abcd", max_output_tokens=2)
        door.fleet.lose(replica_of(made))
        answer = await door.get(f"{RESPONSES}/{the(made)['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert (await door.get(f"{RESPONSES}/{the(made)['id']}")).status_code == 404


# those that are there, and cannot


@pytest.mark.asyncio
async def test_one_that_drains_hands_on(door_of: DoorOf) -> None:
    async with door_of(policy=Ordered()) as door:
        door.services["r0"].is_draining = True
        assert replica_of(await door.post(COMPLETIONS, **FORM)) == "r1"
        assert 'octavo_fleet_retries_total{cause="busy"} 1.0' in (await door.get("/metrics")).text
        door.services["r1"].is_draining = True
        answer = await door.post(COMPLETIONS, **FORM)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        door.services["r0"].is_draining = door.services["r1"].is_draining = False


@pytest.mark.asyncio
async def test_who_has_no_room_hands_on_until_nobody_has(door_of: DoorOf) -> None:
    gate = asyncio.Event()

    async def on_step(step: int) -> None:
        await gate.wait()

    async with door_of(policy=Ordered(), max_waiting=1, max_running=1, on_step=on_step) as door:
        form, exchanges = {**FORM, "stream": True}, []
        async with AsyncExitStack() as stack:
            for _ in range(4):
                exchanges.append(await stack.enter_async_context(door.open(COMPLETIONS, form)))
                await turns(50)
            assert [len(engine.requests()) for engine in door.engines.values()] == [2, 2]  # one runs, one waits
            refused = await door.post(COMPLETIONS, **FORM)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            gate.set()
            ends = [read_stream(await exchange.whole()).finish_reasons() for exchange in exchanges]
        assert ends == [["length"]] * 4


@pytest.mark.asyncio
async def test_what_an_operator_ends_does_not_begin_anew(door_of: DoorOf) -> None:
    doors: list[Door] = []

    async def on_step(step: int) -> None:
        if doors and step == 4:
            (running,) = doors[0].engines["r0"].requests()
            doors[0].engines["r0"].abort(running.request_id)

    async with door_of(policy=Ordered(), on_step=on_step) as door:
        doors.append(door)
        answer = await door.post(COMPLETIONS, **{**FORM, "max_tokens": 40})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
        assert door.engines["r1"].stats().submitted == 0


@pytest.mark.asyncio
async def test_no_more_replicas_are_tried_than_it_says(door_of: DoorOf) -> None:
    policy = Ordered()
    async with door_of(count=5, policy=policy, gateway={"most_tries": 2}) as door:
        for service in door.services.values():
            service.is_draining = True
        answer = await door.post(COMPLETIONS, **FORM)
        assert (answer.status_code, replica_of(answer), len(policy.asked)) == (503, "r1", 2)
        for service in door.services.values():
            service.is_draining = False


# all at once


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_in_a_storm_every_request_has_an_end_and_nothing_stays(seed: int, door_of: DoorOf) -> None:
    """Crowds of clients, some of whom leave, while all replicas but one are lost at some moment."""
    draw, steps = random.Random(seed), 0  # noqa: S311  # no secret
    doors: list[Door] = []
    losses = sorted(draw.sample(range(30, 200), 4))

    async def on_step(step: int) -> None:
        nonlocal steps
        steps += 1
        if doors and losses and steps >= losses[0]:
            losses.pop(0)
            doors[0].fleet.lose(draw.choice(doors[0].fleet.replicas))
        await turns(2)

    texts = {path: await expected_text(door_of, path, body) for path, body in BODIES[:2]}
    async with door_of(count=5, on_step=on_step, num_blocks=256) as door:
        doors.append(door)
        tasks = len(asyncio.all_tasks())

        async def ask(number: int) -> str:
            path, body = BODIES[number % 2]
            stream, leaves = draw.random() < 0.5, draw.random() < 0.3
            await turns(draw.randrange(400))
            async with door.open(path, {**body, "stream": stream}) as exchange:
                if leaves:
                    await turns(draw.randrange(60))
                    return "left"
                raw = await exchange.whole()
                assert exchange.is_whole
                if exchange.status == 503:
                    return "refused"
                if not stream:
                    assert text_of(path, json.loads(raw)) == texts[path]
                    return "whole"
                told = read_stream(raw)
                assert texts[path].startswith(told.text())
                assert told.error is not None or told.text() == texts[path]
                return "whole" if told.error is None else "lost"

        ends = await asyncio.gather(*(ask(number) for number in range(60)))
        assert {"left", "whole"} <= set(ends)
        assert "refused" not in ends  # one is left, and three tries are enough for two losses
        await door.quiet()
        assert len(door.fleet.replicas) == 1
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        survivor = door.fleet.replicas[0]
        assert door.fleet.view.load(survivor) >= 0
        assert door.fleet.view.requests.tolist() == [0]
        assert replica_of(await door.post(COMPLETIONS, prompt=PROMPT, max_tokens=1)) == survivor
