"""The timeline: which requests of a trace are in flight together, whatever the cache is.

Requests are admitted in order of arrival. One for which there is no room waits, and all behind it do, until a request
that runs is over. One that is larger than the pool is refused: it takes nothing, and everything that it asks for is
missed. A request takes the time of prefill for the tokens that were not cached, and then of its answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from ...errors import ContractBroken
from ..eviction.base import NAME_BYTES
from .costs import pairs
from .results import Outcome
from .service import Service
from .trace import Request, Trace

_EVERY = 256  # requests between two words on progress

Held = TypeVar("Held")


class Demand(NamedTuple):
    """What one request of a trace wants of the pool."""

    number: int
    """From 0, in order of arrival; refused ones count."""
    blocks: int
    """Of the prompt."""
    private: int
    """For the answer, and for what the prompt has beyond its whole blocks."""


class Pool(Protocol[Held]):
    """A cache of some kind."""

    capacity: int

    def admit(self, request: Request, demand: Demand, now: float) -> tuple[Held, int] | None:
        """Hold every block of a request; with it, how many of its prompt were there. ``None``: no room, no change."""

    def finish(self, held: Held, now: float) -> None:
        """Let them go."""

    @property
    def evicted(self) -> int: ...

    @property
    def wanted_again(self) -> int: ...


class _Running(NamedTuple, Generic[Held]):
    """A heap item; ``number`` is unique, so what is held is never compared."""

    end: float
    number: int
    held: Held


class _Tally:
    """What an outcome is made of."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.requests = self.refused = self.uses = self.hits = self.hit_tokens = self.input_tokens = self.waits = 0
        self.hit_pairs = self.wait_seconds = 0.0

    def asked(self, request: Request, blocks: int) -> None:
        self.requests += 1
        self.uses += blocks
        self.input_tokens += request.input_tokens

    def found(self, request: Request, blocks: int) -> int:
        """``blocks`` of a prompt were there; returns how many tokens were not."""
        tokens = min(blocks * self._block_tokens, request.input_tokens)
        self.hits += blocks
        self.hit_tokens += tokens
        self.hit_pairs += pairs(tokens)
        return request.input_tokens - tokens

    def outcome(self, *, evicted: int, wanted_again: int, end: float) -> Outcome:
        return Outcome(
            self.requests,
            self.refused,
            self.uses,
            self.hits,
            self.hit_tokens,
            self.input_tokens,
            self.hit_pairs,
            evicted,
            wanted_again,
            self.waits,
            self.wait_seconds,
            end,
        )


def demand_of(request: Request, number: int, block_tokens: int) -> Demand:
    """The last block of a prompt, where the trace names it though it is not full, takes the first of the answer."""
    blocks = len(request.names) // NAME_BYTES
    whole = -(-(request.input_tokens + request.output_tokens) // block_tokens)
    return Demand(number, blocks, max(whole - blocks, len(request.published) // NAME_BYTES))


def demands(trace: Trace) -> Iterator[tuple[Request, Demand]]:
    """The requests of ``trace`` and what they want.

    :raises TraceError: when the trace cannot be read.
    """
    for number, request in enumerate(trace):
        yield request, demand_of(request, number, trace.info.block_tokens)


def run(
    requests: Iterable[tuple[Request, Demand]],
    pool: Pool[Held],
    block_tokens: int,
    service: Service,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Send ``requests`` through ``pool``. ``on_progress(requests so far)`` is called now and then, and at the end.

    :raises InvalidRequest: when a rate of ``service`` is not above zero.
    """
    course = _Course(pool, service.checked(), block_tokens)
    count = 0
    for count, (request, demand) in enumerate(requests, 1):
        course.take(request, demand)
        if on_progress is not None and not count % _EVERY:
            on_progress(count)
    if on_progress is not None:
        on_progress(count)
    return course.close()


class _Course(Generic[Held]):
    """The requests in flight, and the clock."""

    def __init__(self, pool: Pool[Held], service: Service, block_tokens: int) -> None:
        self._pool = pool
        self._service = service
        self._running: list[_Running[Held]] = []
        self._now = self._end = 0.0
        self._tally = _Tally(block_tokens)

    def take(self, request: Request, demand: Demand) -> None:
        """Admit the next request, once there is room for it."""
        self._tally.asked(request, demand.blocks)
        if demand.blocks + demand.private > self._pool.capacity:
            self._tally.refused += 1
            return
        self._now = max(self._now, request.arrival)
        while self._running and self._running[0].end <= self._now:
            self._finish_first()
        held, found = self._admit(request, demand)
        computed = self._tally.found(request, found)
        end = self._now + self._service.seconds(computed, request.output_tokens)
        heapq.heappush(self._running, _Running(end, demand.number, held))

    def close(self) -> Outcome:
        """Let all that runs come to its end."""
        while self._running:
            self._finish_first()
        pool = self._pool
        return self._tally.outcome(evicted=pool.evicted, wanted_again=pool.wanted_again, end=self._end)

    def _admit(self, request: Request, demand: Demand) -> tuple[Held, int]:
        admitted = self._pool.admit(request, demand, self._now)
        while admitted is None:
            if not self._running:
                raise ContractBroken("nothing runs, and yet a request that fits into the pool found no room in it")
            self._now = max(self._now, self._finish_first())
            admitted = self._pool.admit(request, demand, self._now)
        self._tally.waits += self._now > request.arrival
        self._tally.wait_seconds += self._now - request.arrival
        return admitted

    def _finish_first(self) -> float:
        first = heapq.heappop(self._running)
        self._end = max(self._end, first.end)
        self._pool.finish(first.held, first.end)
        return first.end
