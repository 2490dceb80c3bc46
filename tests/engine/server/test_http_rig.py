"""The rig itself: a reader that forgives nothing, and a client that leaves."""

from __future__ import annotations

import pytest

from octavo.tests.engine.server.http_rig import ServerOf, read_stream

CHUNK = b'data: {"choices": []}\n\n'
ERROR = b'data: {"error": {"message": "m"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "raw",
    [
        CHUNK,  # no end
        CHUNK + ERROR + DONE,  # two ends
        ERROR + CHUNK,
        CHUNK + DONE + DONE,
        CHUNK + DONE.strip(),  # cut off
        b'{"error": {}}\n\n',  # bare JSON
        b"data: {broken\n\n" + DONE,
        b'data: {"choices": []}\n' + DONE,  # two events in one
        DONE,  # nothing but the end
    ],
)
def test_a_stream_that_is_not_right_is_seen(raw: bytes) -> None:
    with pytest.raises((AssertionError, ValueError)):
        read_stream(raw)


def test_a_stream_that_is_right_is_read() -> None:
    assert read_stream(CHUNK + CHUNK + DONE).error is None
    assert read_stream(CHUNK + ERROR).error == {"message": "m"}


@pytest.mark.asyncio
async def test_the_app_answers(server_of: ServerOf) -> None:
    async with server_of() as server:
        answer = await server.client.get("/health")
        assert answer.status_code == 200
        async with server.open("/nowhere", {}) as exchange:
            assert b"error" in await exchange.whole()
            assert exchange.status == 404
