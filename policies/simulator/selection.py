"""Parts of traces: the first requests, or some of the sessions."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice

from ...errors import InvalidRequest
from .trace import Request, Trace


class First(Trace):
    """The first ``count`` requests of a trace."""

    def __init__(self, trace: Trace, count: int) -> None:
        """:raises InvalidRequest: when ``count`` is below 1."""
        if count < 1:
            raise InvalidRequest(f"the first {count} requests of a trace are none; take at least 1")
        self.info = trace.info
        self.has_priorities = trace.has_priorities
        self.requests = None if trace.requests is None else min(count, trace.requests)
        self._trace = trace
        self._count = count

    def __iter__(self) -> Iterator[Request]:
        return islice(self._trace, self._count)


class SomeSessions(Trace):
    """The requests of about ``share`` of the sessions, the same ones under the same seed; requests of no known session
    are all kept."""

    def __init__(self, trace: Trace, share: float, seed: int = 0) -> None:
        """:raises InvalidRequest: when ``share`` is not above 0 and at most 1."""
        if not 0 < share <= 1:
            raise InvalidRequest(f"a share of the sessions is above 0 and at most 1, not {share}")
        self.info = trace.info
        self.has_priorities = trace.has_priorities
        self._trace = trace
        self._share = share
        self._seed = seed

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._trace if request.session < 0 or self._keeps(request.session))

    def _keeps(self, session: int) -> bool:
        digest = blake2b(f"{self._seed}/{session}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self._share * 2.0**64
