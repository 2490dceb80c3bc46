"""What becomes of a request when Ray loses it, in every way that Ray has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from octavo.engine.fleet.base import AnswerHead, HttpRequest, Scheme, Wanted, WholeAnswer
from octavo.engine.fleet.ray.fleet import RayFleet
from octavo.engine.fleet.ray.ticket import Ticket
from octavo.errors import ReplicaLost
from octavo.policies.routing.base import RoutedRequest

REQUEST = HttpRequest("GET", "/health", b"", [], b"")
ANY = Wanted(RoutedRequest((), 1, 1, 4))
HEAD = AnswerHead(200, [], "r1")
Piece = str | AnswerHead | bytes


@dataclass
class FakeStream:
    """Some pieces, then an error, or nothing more."""

    pieces: Sequence[Piece]
    error: BaseException | None = None
    is_cancelled: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in self.pieces:
            yield piece
        if self.error is not None:
            raise self.error
        await self.gone.wait()
        raise asyncio.CancelledError

    def cancel(self) -> None:
        self.is_cancelled = True
        self.gone.set()


@dataclass
class FakeHandle:
    """A deployment whose replicas do as they are told."""

    stream: FakeStream
    everybody: Sequence[object] | BaseException = ()
    prepare: Callable[[Ticket], None] = lambda _: None
    schemes: list[Scheme | RayError] = field(default_factory=list)

    @property
    def answer(self) -> FakeHandle:
        return self

    @property
    def scheme(self) -> FakeScheme:
        return FakeScheme(self.schemes)

    def remote(self, request: HttpRequest, ticket: Ticket, /) -> FakeStream:
        self.prepare(ticket)
        return self.stream

    def options(self, *, stream: bool) -> FakeHandle:
        return self

    def broadcast(self, method: str, request: HttpRequest, seconds: float, /) -> FakeHandle:
        return self

    async def _fetch_replica_results_async(self) -> Sequence[FakeAnswer]:
        if isinstance(self.everybody, BaseException):
            raise self.everybody
        return [FakeAnswer(each) for each in self.everybody]


@dataclass
class FakeAnswer:
    """``None``: it never comes."""

    answer: object

    async def get_async(self) -> object:
        if self.answer is None:
            await anyio.sleep_forever()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@dataclass
class FakeScheme:
    found: list[Scheme | RayError]

    def remote(self) -> Awaitable[Scheme]:
        async def told() -> Scheme:
            first = self.found.pop(0)
            if isinstance(first, RayError):
                raise first
            return first

        return told()


async def read(fleet: RayFleet, wanted: Wanted = ANY) -> list[AnswerHead | bytes]:
    return [piece async for piece in fleet.send(REQUEST, wanted)]


@pytest.mark.parametrize("pieces", [[], ["r1"], ["r1", HEAD, b"some"]])
@pytest.mark.parametrize(
    "error", [ActorDiedError(), ActorUnavailableError("away", None), BackPressureError(1, 1), RayServeException()]
)
@pytest.mark.asyncio
async def test_it_is_lost_with_its_replica(pieces: Sequence[Piece], error: Exception) -> None:
    stream = FakeStream(pieces, error)
    with pytest.raises(ReplicaLost) as lost:
        await read(RayFleet(FakeHandle(stream)))
    assert lost.value.replica == ("r1" if pieces else None)
    assert lost.value.__cause__ is error
    assert stream.is_cancelled


@pytest.mark.asyncio
async def test_one_that_is_cancelled_by_others_is_lost_and_no_cancellation() -> None:
    """Its replica was to end and would wait no longer."""
    with pytest.raises(ReplicaLost, match="r1"):
        await read(RayFleet(FakeHandle(FakeStream(["r1", HEAD], asyncio.CancelledError()))))


@pytest.mark.asyncio
async def test_a_reader_that_is_cancelled_is_cancelled() -> None:
    stream = FakeStream(["r1", HEAD])
    with anyio.move_on_after(0.01) as scope:
        await read(RayFleet(FakeHandle(stream)))
    assert scope.cancelled_caught
    assert stream.is_cancelled


@pytest.mark.asyncio
async def test_nobody_takes_it_in_time() -> None:
    stream = FakeStream([])
    with pytest.raises(ReplicaLost, match="in time") as lost:
        await read(RayFleet(FakeHandle(stream), patience=0.01))
    assert (lost.value.replica, lost.value.has_waited) == (None, True)


@pytest.mark.asyncio
async def test_what_a_replica_has_taken_may_take_its_time() -> None:
    stream = FakeStream(["r1"])
    with anyio.move_on_after(0.05) as scope:
        await read(RayFleet(FakeHandle(stream), patience=0.001))
    assert scope.cancelled_caught


@pytest.mark.asyncio
async def test_what_the_router_has_refused_is_lost_for_its_reason() -> None:
    def refuse(ticket: Ticket) -> None:
        ticket.problem = "r2 is not there"

    handle = FakeHandle(FakeStream([], asyncio.CancelledError()), prepare=refuse)
    with pytest.raises(ReplicaLost, match="r2 is not there") as lost:
        await read(RayFleet(handle), ANY._replace(only="r2"))
    assert lost.value.replica == "r2"


@pytest.mark.asyncio
async def test_those_that_cannot_answer_are_missing_but_not_where_something_was_to_be_done() -> None:
    answer = WholeAnswer(HEAD, b"fine")
    handle = FakeHandle(FakeStream([]), [answer, ActorDiedError(), TimeoutError()])
    assert await RayFleet(handle).ask_all(REQUEST) == {"r1": answer}
    found = dict(await RayFleet(handle).ask_all(REQUEST._replace(method="POST")))
    assert found.pop("r1") == answer
    assert {name: silent.head.status for name, silent in found.items()} == {"unknown-2": 503, "unknown-3": 503}
    for error in (TimeoutError(), RayServeException()):
        assert await RayFleet(FakeHandle(FakeStream([]), error)).ask_all(REQUEST) == {}


@pytest.mark.asyncio
async def test_one_that_hangs_costs_no_answer_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.fleet.ray.fleet.LOOK_SECONDS", 0.01)
    answer = WholeAnswer(HEAD, b"fine")
    assert await RayFleet(FakeHandle(FakeStream([]), [None, answer])).ask_all(REQUEST) == {"r1": answer}


@pytest.mark.asyncio
async def test_it_learns_how_blocks_are_named_from_the_first_replica_that_can_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.engine.fleet.ray.fleet.MEETING_INTERVAL", 0.0)
    fleet = RayFleet(FakeHandle(FakeStream([]), schemes=[ActorDiedError(), Scheme("model", 16)]))
    assert fleet.scheme is None
    await fleet.meet()
    assert fleet.scheme == ("model", 16)
