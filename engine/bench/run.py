"""Bench: one run from the first question to the report. What it has found can be had at any moment."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from itertools import count
from typing import NamedTuple

import anyio
import httpx

from .client import Client
from .clock import Clock
from .file_workload import read_workload
from .live import Phase, Screen
from .load import GONE_AFTER, Budget, Driver, arrivals_of
from .recorder import Recorder
from .report import Environment, Report, environment, make_report
from .server import served_model, server_version, vocabulary_of, wait_for_server
from .settings import DEFAULT_REQUESTS, Settings
from .vocabulary import Vocabulary
from .workload import Synthetic, Workload

CONNECT_TIMEOUT = 10.0
"""Seconds."""


class _Plan(NamedTuple):
    """What is known before the load begins."""

    http: httpx.AsyncClient
    model: str
    workload: Workload
    arrivals: Iterator[float] | None
    """``None``: a closed loop."""
    requests: int | None


class Bench:
    """One run."""

    def __init__(
        self,
        settings: Settings,
        headers: Mapping[str, str],
        clock: Clock,
        began: dt.datetime,
        *,
        wait: float = 0.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``headers``: of every request; they are in no report. ``wait``: seconds for the server to come up.
        ``transport``: the network, unless given."""
        self.settings = settings
        self.recorder = Recorder()
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", **headers}
        self._clock = clock
        self._began = began
        self._wait = wait
        self._transport = transport
        self._environment: Environment | None = None

    async def run(self, screen: Screen) -> None:
        """To its end. Cancelled, it leaves what it has found.

        :raises InvalidRequest: when the server or the workload is not what the settings want.
        :raises TraceError: when the trace of arrivals cannot be read.
        """
        async with self._http() as http:
            plan = await self._prepared(http)
            await self._warm_up(plan, screen)
            load = self.settings.load
            phase = Phase("running", self.recorder, self._clock.now(), of=plan.requests, duration=load.duration)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, phase, screen)
                await self._measure(plan)
                tasks.cancel_scope.cancel()
        screen.show(phase.look(self._clock.now()))

    def report(self, *, interrupted: bool = False) -> Report | None:
        """Of what there is so far. ``None``: it ended before it knew the server."""
        if self._environment is None:
            return None
        notes = []
        if interrupted:
            notes.append(f"it was interrupted, with {self.recorder.unfinished:,} requests under way")
        if self.recorder.without_connection >= GONE_AFTER:
            notes.append(f"it ended early: {self.recorder.without_connection} requests in a row found no server")
        return make_report(self.settings, self._environment, self.recorder, notes)

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.settings.target.base_url,
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=self._transport,
            trust_env=False,  # a proxy would be measured with the server
        )

    async def _prepared(self, http: httpx.AsyncClient) -> _Plan:
        target, load, prompts = self.settings.target, self.settings.load, self.settings.prompts
        await wait_for_server(http, self._clock, self._wait)
        model = target.model or await served_model(http)
        vocabulary = Vocabulary(prompts.form)
        if prompts.file is not None:
            workload: Workload = read_workload(prompts.file, target.endpoint, prompts.lengths.output_tokens)
        else:
            vocabulary = await vocabulary_of(http, model, prompts.form)
            workload = Synthetic(prompts, vocabulary, load.seed)
        arrivals = None if load.pace.concurrency is not None else arrivals_of(load, prompts.turns_each)
        self._environment = environment(model, await server_version(http), vocabulary, self._began)
        return _Plan(http, model, workload, arrivals, self._bound(workload))

    def _bound(self, workload: Workload) -> int | None:
        load = self.settings.load
        if load.requests is not None or load.duration is not None or load.pace.trace is not None:
            return load.requests
        return workload.conversations or DEFAULT_REQUESTS

    async def _warm_up(self, plan: _Plan, screen: Screen) -> None:
        load = self.settings.load
        if not load.warmup:
            return
        recorder = Recorder()
        phase = Phase("warming up", recorder, self._clock.now(), of=load.warmup)
        budget = Budget(self._clock, load.warmup)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, phase, screen)
            await self._driver(plan, recorder).closed_loop(budget, load.workers, count(-1, -1))
            tasks.cancel_scope.cancel()

    async def _measure(self, plan: _Plan) -> None:
        load = self.settings.load
        budget = Budget(self._clock, plan.requests, load.duration)
        driver = self._driver(plan, self.recorder)
        if plan.arrivals is None:
            await driver.closed_loop(budget, load.workers)
        else:
            await driver.open_loop(budget, plan.arrivals)

    def _driver(self, plan: _Plan, recorder: Recorder) -> Driver:
        target, load = self.settings.target, self.settings.load
        client = Client(plan.http, target, self._clock, recorder, load.max_in_flight)
        return Driver(client, plan.workload, target, plan.model, recorder, self._clock)

    async def _watch(self, phase: Phase, screen: Screen) -> None:
        while True:
            screen.show(phase.look(self._clock.now()))
            await anyio.sleep(screen.interval)
