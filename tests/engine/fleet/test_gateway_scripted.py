"""A gateway before a fleet that does what it likes: whatever comes, or does not, the client gets whole events and an
end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Final

import pytest

from octavo.engine.fleet.base import AnswerHead, HttpRequest, Scheme, Wanted, WholeAnswer
from octavo.engine.fleet.gateway import Gateway
from octavo.errors import ReplicaLost
from octavo.tests.engine.fleet.gateway_rig import COMPLETIONS, FORM, RESPONSES, DoorOf, turns
from octavo.tests.engine.server.http_rig import Exchange, read_events, read_stream

RESPONSE_FORM: Final = {"input": "abcdefgh", "max_output_tokens": 12, "temperature": 0}


class Scripted:
    """A fleet whose answers are given in advance: the parts of each, of which an exception is raised."""

    def __init__(self, *answers: list[AnswerHead | bytes | Exception]) -> None:
        self.wanted: list[Wanted] = []
        self.closed = 0
        self._answers = list(answers)

    @property
    def scheme(self) -> Scheme | None:
        return None

    async def send(self, request: HttpRequest, wanted: Wanted) -> AsyncGenerator[AnswerHead | bytes, None]:
        self.wanted.append(wanted)
        try:
            for part in self._answers.pop(0):
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed += 1

    async def ask_all(self, request: HttpRequest) -> Mapping[str, WholeAnswer]:
        return {}


def head(status: int = 200, kind: bytes = b"application/json", replica: str = "a") -> AnswerHead:
    return AnswerHead(status, [(b"content-type", kind), (b"connection", b"close")], replica)


@pytest.mark.asyncio
async def test_an_answer_in_one_piece_that_breaks_off_looks_broken() -> None:
    fleet = Scripted([head(), b'{"half":', ReplicaLost("gone", "a")])
    exchange = Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM))
    with pytest.RaisesGroup(ReplicaLost):
        async with exchange:
            await exchange.whole()
    assert (exchange.body, exchange.is_whole, fleet.closed) == (b'{"half":', False, 1)
    assert "connection" not in exchange.headers


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", range(1, 40))
async def test_half_an_event_is_not_told(cut: int) -> None:
    events = b'data: {"choices":[1]}\n\ndata: {"choices":[2]}\n\n'
    fleet = Scripted([head(kind=b"text/event-stream"), events[:cut], ReplicaLost("gone", "a")])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM)) as exchange:
        stream = read_stream(await exchange.whole())
    assert stream.error is not None
    assert len(stream.chunks) == events[:cut].count(b"\n\n")


@pytest.mark.asyncio
async def test_a_response_may_be_cut_anywhere(door_of: DoorOf) -> None:
    """In whatever pieces it came: what was told, and the failure, are one stream that is numbered through."""
    async with door_of() as door, door.open(RESPONSES, {**RESPONSE_FORM, "stream": True}) as whole:
        raw = await whole.whole()
    for cut in range(0, len(raw) - 1, 97):
        pieces = [raw[: cut // 2], raw[cut // 2 : cut]]
        fleet = Scripted([head(kind=b"text/event-stream"), *pieces, ReplicaLost("gone", "a")])
        async with Exchange(Gateway(fleet, None).app, RESPONSES, {"input": "a"}) as exchange:
            *told, last = read_events(await exchange.whole())
        assert told == read_events(raw)[: raw[:cut].count(b"\n\n")]
        data = json.loads(last.data)
        if told:
            assert (data["type"], data["sequence_number"]) == ("response.failed", len(told))
        else:
            assert data["error"]["code"] == "replica_lost"


@pytest.mark.asyncio
async def test_pieces_of_events_are_joined() -> None:
    events = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'
    fleet = Scripted([head(kind=b"text/event-stream"), *(bytes([byte]) for byte in events)])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM)) as exchange:
        assert await exchange.whole() == events
        assert exchange.is_whole


class Holding(Scripted):
    """Keeps what it gave, so that nothing ends just because nobody has it any more."""

    def __init__(self, *answers: list[AnswerHead | bytes | Exception]) -> None:
        super().__init__(*answers)
        self.given: list[AsyncGenerator[AnswerHead | bytes, None]] = []

    def send(self, request: HttpRequest, wanted: Wanted) -> AsyncGenerator[AnswerHead | bytes, None]:
        self.given.append(super().send(request, wanted))
        return self.given[-1]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
async def test_an_answer_is_closed_as_soon_as_its_client_has_left(kind: bytes) -> None:
    fleet = Holding([head(kind=kind), *[b"data: {}\n\n"] * 100])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM), window=1) as exchange:
        await exchange.read()
        await exchange.read()
        await turns(10)  # until it waits for the client: what is sent to one who has left never waits, and would go on
        assert fleet.closed == 0
        exchange.leave()
        await exchange.ended()
        assert fleet.closed == 1


@pytest.mark.asyncio
async def test_a_fleet_that_says_nothing_is_lost() -> None:
    fleet = Scripted([], [])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM)) as exchange:
        assert json.loads(await exchange.whole())["error"]["code"] == "no_replica"
    assert (exchange.status, fleet.closed) == (503, 2)


@pytest.mark.asyncio
async def test_whom_nobody_knew_by_name_is_made_up_for_once() -> None:
    nobody = ReplicaLost("died as it took it")
    fleet = Scripted([nobody], [head(), b"{}"])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM)) as exchange:
        assert await exchange.whole() == b"{}"
    fleet = Scripted([nobody], [nobody], [head(), b"{}"])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM)) as exchange:
        assert json.loads(await exchange.whole())["error"]["code"] == "no_replica"


@pytest.mark.asyncio
async def test_who_has_waited_for_a_replica_does_not_wait_again() -> None:
    fleet = Scripted([ReplicaLost("nobody came", has_waited=True)], [head(), b"{}"])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM)) as exchange:
        assert json.loads(await exchange.whole())["error"]["code"] == "no_replica"
    assert exchange.status == 503


@pytest.mark.asyncio
async def test_all_that_failed_is_avoided_from_then_on() -> None:
    fleet = Scripted([ReplicaLost("gone", "a")], [head(503, replica="b"), b"{}"], [head(replica="c"), b"{}"])
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM)) as exchange:
        assert await exchange.whole() == b"{}"
    assert [sorted(wanted.request.avoid) for wanted in fleet.wanted] == [[], ["a"], ["a", "b"]]
    assert fleet.closed == 3
