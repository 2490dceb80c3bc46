"""The load: when which request is sent. A closed loop keeps so many conversations going; an open one lets them come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, count, islice, repeat
from random import Random

import anyio

from ...errors import InvalidRequest
from ...policies.simulator.readers import open_trace
from .client import Client, Place
from .clock import Clock
from .recorder import Recorder
from .settings import Arrivals, Load, Target
from .transcript import request_body, transcript_of
from .workload import Conversation, Workload

GONE_AFTER = 20
"""Requests in a row without a connection: the server is gone, and the rest would say nothing else."""


class Budget:
    """How many requests may still be sent, and until when."""

    def __init__(self, clock: Clock, requests: int | None, duration: float | None = None) -> None:
        """Without both, there is no end. ``duration``: seconds from now."""
        self._clock = clock
        self._left = math.inf if requests is None else requests
        self._until = math.inf if duration is None else clock.now() + duration

    def take(self, *, at: float = 0.0) -> bool:
        """Whether one more may be sent, at that moment or now, whichever comes later; then it is taken."""
        if self._left < 1 or max(at, self._clock.now()) >= self._until:
            return False
        self._left -= 1
        return True

    def close(self) -> None:
        self._left = 0


class Driver:
    """Sends the conversations of a workload."""

    def __init__(
        self, client: Client, workload: Workload, target: Target, model: str, recorder: Recorder, clock: Clock
    ) -> None:
        self._client = client
        self._workload = workload
        self._target = target
        self._model = model
        self._recorder = recorder
        self._clock = clock

    async def closed_loop(self, budget: Budget, workers: int, numbers: Iterator[int] | None = None) -> None:
        """``workers`` conversations at a time. ``numbers``: of the conversations; from 0 unless given."""
        shared = count() if numbers is None else numbers
        async with anyio.create_task_group() as tasks:
            for _ in range(workers):
                tasks.start_soon(self._work, budget, shared)

    async def open_loop(self, budget: Budget, arrivals: Iterable[float]) -> None:
        """A conversation begins at each of ``arrivals``, in seconds from now."""
        start = self._clock.now()
        async with anyio.create_task_group() as tasks:
            for number, arrival in enumerate(arrivals):
                if not budget.take(at=start + arrival):
                    break
                await self._clock.sleep_until(start + arrival)
                conversation = self._workload.conversation(number)
                tasks.start_soon(self._converse, budget, number, conversation, start + arrival)

    async def _work(self, budget: Budget, numbers: Iterator[int]) -> None:
        while budget.take():
            number = next(numbers)
            await self._converse(budget, number, self._workload.conversation(number), self._clock.now())

    async def _converse(self, budget: Budget, number: int, conversation: Conversation, due: float) -> None:
        """All turns, or until one fails. The first one is taken from the budget already."""
        transcript = transcript_of(conversation, self._target.endpoint)
        for place, turn in enumerate(conversation.turns):
            if place:
                due = self._clock.now() + turn.think
                if not budget.take(at=due):
                    return
                await self._clock.sleep_until(due)
            body = request_body(self._target, self._model, turn, transcript.ask(turn))
            row, text = await self._client.send(body, Place(number, place, due))
            if not row.is_ok:
                self._give_up_if_gone(budget)
                return
            transcript.answered(text)

    def _give_up_if_gone(self, budget: Budget) -> None:
        if self._recorder.without_connection >= GONE_AFTER:
            budget.close()


def arrivals_of(load: Load, turns: int) -> Iterator[float]:
    """When conversations of ``turns`` requests begin, in seconds, for an open loop.

    :raises InvalidRequest: when it is a closed one.
    :raises TraceError: when the trace cannot be read.
    """
    pace = load.pace
    if pace.trace is not None:  # read whole: a bad line is told before the load begins
        requests = islice(open_trace(pace.trace, seed=load.seed), load.requests)
        return iter([request.arrival / pace.speed for request in requests])
    if pace.rate is None:
        raise InvalidRequest("arrivals need --rate or --trace")
    rate = pace.rate / turns
    if pace.arrivals is Arrivals.CONSTANT:
        return (number / rate for number in count())
    draw = Random(f"octavo bench {load.seed} arrivals")  # noqa: S311  # a workload, no secret
    return accumulate(draw.expovariate(rate) for _ in repeat(None))
