"""Headers on their way through the gateway: what is about one connection, or pretends to come from it, stays behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Final

import pytest

from octavo.engine.fleet.base import AnswerHead, HttpRequest, Scheme, Wanted, WholeAnswer
from octavo.engine.fleet.gateway import Gateway
from octavo.engine.fleet.passing import passed_on
from octavo.tests.engine.fleet.gateway_rig import COMPLETIONS, FORM, RESPONSES
from octavo.tests.engine.server.http_rig import Exchange

ANSWER: Final = (
    (b"content-type", b"application/json"),
    (b"Connection", b"close, X-Inner"),
    (b"x-inner", b"1"),
    (b"x-octavo-replica", b"somebody"),
    (b"x-request-id", b"mine"),
)


class Recording:
    """A fleet that keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[HttpRequest] = []
        self.asked: list[HttpRequest] = []

    @property
    def scheme(self) -> Scheme | None:
        return None

    async def send(self, request: HttpRequest, wanted: Wanted) -> AsyncGenerator[AnswerHead | bytes, None]:
        self.sent.append(request)
        yield AnswerHead(200, ANSWER, "a")
        yield b"{}"

    async def ask_all(self, request: HttpRequest) -> Mapping[str, WholeAnswer]:
        self.asked.append(request)
        return {}


@pytest.mark.asyncio
async def test_what_is_about_the_connection_stays_there() -> None:
    fleet = Recording()
    own = {"connection": "keep-alive, X-Mine,x-other", "x-mine": "1", "X-Other": "2", "te": "trailers"}
    given = {**own, "x-octavo-replica": "b", "authorization": "Bearer key", "x-request-id": "mine"}
    async with Exchange(Gateway(fleet, None).app, COMPLETIONS, dict(FORM), headers=given) as exchange:
        await exchange.whole()
    kept = {name for name, _ in fleet.sent[0].headers}
    assert kept == {b"content-type", b"authorization", b"x-request-id"}
    assert exchange.headers == {"content-type": "application/json", "x-octavo-replica": "a", "x-request-id": "mine"}


def test_a_header_without_a_value_names_nothing() -> None:
    headers = [(b"connection", b""), (b"connection", b" , "), (b"a", b"1")]
    assert list(passed_on(headers)) == [(b"a", b"1")]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "response_id", ["../../admin/stats", "resp_", "resp_" + "a" * 65, "resp_a?b", "\u00e9", "x" * 10**6]
)
async def test_what_is_no_id_is_asked_of_nobody(response_id: str) -> None:
    """It would become a path."""
    fleet = Recording()
    form = {"input": "a", "previous_response_id": response_id}
    async with Exchange(Gateway(fleet, None).app, RESPONSES, form) as exchange:
        await exchange.whole()
    assert (fleet.asked, len(fleet.sent)) == ([], 1)
    form["previous_response_id"] = "resp_0a"
    async with Exchange(Gateway(fleet, None).app, RESPONSES, form) as exchange:
        await exchange.whole()
    assert [request.path for request in fleet.asked] == [f"{RESPONSES}/resp_0a"]
