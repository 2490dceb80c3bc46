"""What a simulated fleet did."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..trace import Request
from .flight import Flight
from .machine import Started


class FleetOutcome(NamedTuple):
    """One trace through one fleet. Blocks are whole ones of prompts; a request that is sent again asks again."""

    requests: int
    """That were in the trace: ``answered + refused + unanswered``."""
    answered: int
    refused: int
    """Larger than the pool of a replica: all their blocks count as asked for and missed."""
    unanswered: int
    """No replica was left for them."""
    sent_again: int
    """Times that a request had to be sent to another replica because one had died."""
    uses: int
    """Blocks asked for."""
    hits: int
    """Blocks that were in the cache of the replica."""
    tier_hits: int
    """Blocks that were not, and that the shared tier had."""
    input_tokens: int
    """Of all prompts that were asked for."""
    hit_tokens: int
    """In ``hits``."""
    tier_hit_tokens: int
    """In ``tier_hits``."""
    evicted: int
    """Blocks, of all replicas."""
    wanted_again: int
    """Evicted runs that a replica was asked for while it remembered them."""
    computed_tokens: Sequence[int]
    """By replica: tokens of prompts that nobody had, and of answers."""
    replica_requests: Sequence[int]
    """By replica: requests that it admitted."""
    window_balance: float
    """As ``work_balance``, in windows, weighted by the work in each."""
    waits: int
    """Answered requests that were not begun with as they came: there was no room, or the replica died."""
    wait_seconds: float
    """Sum of their waits, from arrival until the replica that answered began."""
    wait_p50: float
    wait_p99: float
    ttft_p50: float
    """Seconds from arrival to the first token."""
    ttft_p99: float
    blocks_up: int
    """Written into the shared tier."""
    blocks_down: int
    """Loaded from it."""
    bytes_up: int
    bytes_down: int
    end: float
    """When the last request was answered, in seconds of the trace."""

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that were in the cache of the replica; 0 for an empty trace."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def hit_ratio_with_tier(self) -> float:
        """Share of the prompt tokens that were there or in the shared tier."""
        return (self.hit_tokens + self.tier_hit_tokens) / self.input_tokens if self.input_tokens else 0.0

    @property
    def work_balance(self) -> float:
        """Tokens that the busiest replica computed, over the mean: 1 is even, the number of replicas is the worst."""
        return peak_over_mean(self.computed_tokens)

    @property
    def request_balance(self) -> float:
        """The same of requests."""
        return peak_over_mean(self.replica_requests)


def peak_over_mean(loads: Sequence[int]) -> float:
    """1 where there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


class _Windows:
    """Compares the load of replicas over windows of time; holds one window."""

    def __init__(self, replicas: int, seconds: float) -> None:
        self._seconds = seconds
        self._number = 0
        self._now = dict[int, int]()
        self._replicas = replicas
        self._peaks = self._all = 0

    def add(self, replica: int, tokens: int, now: float) -> None:
        if now // self._seconds != self._number:
            self._close()
            self._number = int(now // self._seconds)
        self._now[replica] = self._now.get(replica, 0) + tokens

    def balance(self) -> float:
        self._close()
        return self._peaks * self._replicas / self._all if self._all else 1.0

    def _close(self) -> None:
        if self._now:
            self._peaks += max(self._now.values())
            self._all += sum(self._now.values())
            self._now.clear()


class Tally:
    """What an outcome is made of: 16 bytes a request, and 16 a replica."""

    def __init__(self, replicas: int, block_tokens: int, window: float) -> None:
        self.requests = self.answered = self.refused = self.unanswered = self.sent_again = 0
        self._block_tokens = block_tokens
        self._uses = self._hits = self._tier_hits = 0
        self._input_tokens = self._hit_tokens = self._tier_hit_tokens = 0
        self._computed = [0] * replicas
        self._requests = [0] * replicas
        self._windows = _Windows(replicas, window)
        self._waits = array("d")
        self._first_tokens = array("d")
        self._end = 0.0

    def refuse(self, request: Request, blocks: int) -> None:
        """It fits nowhere."""
        self.refused += 1
        self._asked(request, blocks)

    def start(self, replica: int, flight: Flight, did: Started) -> None:
        """A replica has admitted a request."""
        request, whole = flight.request, flight.request.input_tokens
        self._asked(request, flight.demand.blocks)
        self._hits += did.found
        self._tier_hits += did.loaded
        hit_tokens = min(did.found * self._block_tokens, whole)
        self._hit_tokens += hit_tokens
        self._tier_hit_tokens += min((did.found + did.loaded) * self._block_tokens, whole) - hit_tokens
        work = did.computed + request.output_tokens
        self._computed[replica] += work
        self._requests[replica] += 1
        self._windows.add(replica, work, flight.admitted)

    def answer(self, flight: Flight, now: float) -> None:
        """It is over."""
        self.answered += 1
        self._end = max(self._end, now)
        self._waits.append(flight.admitted - flight.request.arrival)
        first = flight.admitted if flight.first_token is None else flight.first_token
        self._first_tokens.append(first - flight.request.arrival)

    def outcome(
        self, *, evicted: int, wanted_again: int, blocks_up: int, blocks_down: int, block_bytes: int
    ) -> FleetOutcome:
        """Of everything so far."""
        waits, first_tokens = np.array(self._waits), np.array(self._first_tokens)
        wait_p50, wait_p99 = _percentiles(waits)
        ttft_p50, ttft_p99 = _percentiles(first_tokens)
        return FleetOutcome(
            requests=self.requests,
            answered=self.answered,
            refused=self.refused,
            unanswered=self.unanswered,
            sent_again=self.sent_again,
            uses=self._uses,
            hits=self._hits,
            tier_hits=self._tier_hits,
            input_tokens=self._input_tokens,
            hit_tokens=self._hit_tokens,
            tier_hit_tokens=self._tier_hit_tokens,
            evicted=evicted,
            wanted_again=wanted_again,
            computed_tokens=tuple(self._computed),
            replica_requests=tuple(self._requests),
            window_balance=self._windows.balance(),
            waits=int((waits > 0).sum()),
            wait_seconds=float(waits.sum()),
            wait_p50=wait_p50,
            wait_p99=wait_p99,
            ttft_p50=ttft_p50,
            ttft_p99=ttft_p99,
            blocks_up=blocks_up,
            blocks_down=blocks_down,
            bytes_up=blocks_up * block_bytes,
            bytes_down=blocks_down * block_bytes,
            end=self._end,
        )

    def _asked(self, request: Request, blocks: int) -> None:
        self._uses += blocks
        self._input_tokens += request.input_tokens


def _percentiles(seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The 50th and the 99th; 0 of nothing."""
    if not seconds.size:
        return 0.0, 0.0
    half, most = np.percentile(seconds, (50, 99))
    return float(half), float(most)
