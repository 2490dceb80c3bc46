"""Parts of traces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.errors import InvalidRequest
from octavo.policies.simulator.selection import First, SomeSessions
from octavo.policies.simulator.trace import Request, Trace, TraceInfo


class Numbered(Trace):
    info = TraceInfo("numbered", 16)
    requests = 300

    def __iter__(self) -> Iterator[Request]:
        return (Request(float(number), 16, 1, b"", session=number % 100 - 1) for number in range(300))


def test_the_first_requests_each_time() -> None:
    first = First(Numbered(), 7)
    assert [request.arrival for request in first] == [0, 1, 2, 3, 4, 5, 6]
    assert len(list(first)) == 7
    assert (first.requests, first.info) == (7, Numbered.info)
    assert len(list(First(Numbered(), 999))) == 300
    assert First(Numbered(), 999).requests == 300


@pytest.mark.parametrize("count", [0, -1])
def test_the_first_none_is_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match="at least 1"):
        First(Numbered(), count)


def test_sessions_are_kept_whole_or_not_at_all() -> None:
    some = SomeSessions(Numbered(), 0.3, seed=5)
    kept = list(some)
    sessions = {request.session for request in kept}
    assert -1 in sessions
    assert 15 < len(sessions) < 45
    assert kept == [request for request in Numbered() if request.session in sessions]
    assert kept == list(some)
    assert {request.session for request in SomeSessions(Numbered(), 0.3, seed=6)} != sessions
    assert list(SomeSessions(Numbered(), 1)) == list(Numbered())


def test_a_larger_share_keeps_what_a_smaller_one_did() -> None:
    small = {request.session for request in SomeSessions(Numbered(), 0.2)}
    assert small < {request.session for request in SomeSessions(Numbered(), 0.6)}


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="above 0 and at most 1"):
        SomeSessions(Numbered(), share)
