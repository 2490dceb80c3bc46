"""Run as a script: for each job, a line of JSON on stdin, fork a process that serves requests until it is killed.

What the process does is told in lines of JSON on stdout, each when it has happened: its id, what it was asked, what
came out, what is safe by now. Forking keeps a kill cheap: everything is imported once. A process that has ended is kept
until the next line on stdin, so that its id does not become another's before.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import anyio
import torch

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.storage.disk.tier import DiskTier

BLOCK = 4
COUNT = 5
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
TENANTS = (None, "a", "b")
VOCAB = 64
WORKERS = 4
MIB = 2**20


class Job(NamedTuple):
    """What a process is to do."""

    kind: str
    """``serve``, ``small`` (a disk that is too small for all), ``snapshot``, ``compact`` or ``close``."""
    folder: str
    seed: int
    demotion: str
    texts: int
    """How many different prompts there are."""
    requests: int
    """The process ends by itself after so many of each worker."""
    model: str | None
    """Directory of a real one; ``None``: the fake one."""

    @property
    def snapshot(self) -> Path:
        return Path(self.folder) / "snapshot"

    @property
    def disk(self) -> Path:
        return Path(self.folder) / "disk"

    @property
    def disk_bytes(self) -> int:
        return (2 if self.kind == "small" else 64) * MIB


def prompt(number: int) -> list[int]:
    """One of three beginnings, then something of its own; never whole blocks, so that the last one is never full."""
    rng = Random(number)  # noqa: S311  # to be the same every time
    shared = [(number % 3 * 17 + at * 5) % VOCAB for at in range(BLOCK * 3 + 1)]
    own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    tokens = shared + own
    return tokens if len(tokens) % BLOCK else [*tokens, 1]


def whole(number: int) -> int:
    """Tokens in whole blocks of a prompt."""
    return len(prompt(number)) // BLOCK * BLOCK


def engine(job: Job, *, clock: Callable[[], float] | None = None, restore: Path | None = None) -> AsyncEngine:
    """An engine over the job's folder, or, with ``restore``, over nothing but its snapshot."""
    tiers: dict[str, object] = {
        "tiers": ("disk",),
        "disk_path": job.disk,
        "disk_bytes": job.disk_bytes,
        "tier_options": {"disk": {"segment_bytes": MIB // 8, "free_floor": 0}},
        "demotion": job.demotion,
    }
    settings = EngineConfig(
        num_blocks=512 if restore or job.kind == "snapshot" else 64,
        block_size=BLOCK,
        checkpoint_interval=0,
        promotion="wait",
        tier_deadline=30.0,
        eviction_policy="octavo.policies.eviction.lru:Lru",  # by path: quicker than looking it up
        scheduling_policy="octavo.policies.scheduling.fcfs:Fcfs",
        **({} if restore else tiers),  # type: ignore[arg-type]  # the constructor checks the values
    )
    if job.model is not None:
        return AsyncEngine.open(job.model, settings, restore=restore)
    if clock is None:
        return AsyncEngine(runner=FakeRunner(vocab_size=VOCAB), config=settings, restore=restore)
    return AsyncEngine(runner=FakeRunner(vocab_size=VOCAB), config=settings, restore=restore, clock=clock)


def tell(what: str, *details: object) -> None:
    """One line, written at once: a kill cannot cut it."""
    os.write(1, json.dumps([what, *details]).encode() + b"\n")


class Life:
    """What one process does until it is killed."""

    def __init__(self, job: Job, served: AsyncEngine) -> None:
        self._job = job
        self._engine = served
        self._rng = Random(job.seed)  # noqa: S311  # to be the same every time
        self._done: list[tuple[str | None, int]] = []

    async def run(self) -> None:
        beside = {"snapshot": self._snapshots, "compact": self._compactions}.get(self._job.kind, self._checkpoints)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beside)
            async with anyio.create_task_group() as workers:
                for _ in range(WORKERS):
                    workers.start_soon(self._work)
            tasks.cancel_scope.cancel()

    async def _work(self) -> None:
        for _ in range(self._job.requests):
            tenant, number = self._rng.choice(TENANTS), self._rng.randrange(self._job.texts)
            tell("asked", tenant, number)
            (output,) = await self._engine.complete(prompt(number), GREEDY, tenant=tenant)
            tell("said", tenant, number, output.token_ids)
            self._done.append((tenant, number))

    async def _every(self, act: Callable[[Sequence[tuple[str | None, int]]], Awaitable[None]]) -> None:
        while True:
            await act(tuple(self._done))
            await anyio.sleep(0.002)

    async def _checkpoints(self) -> None:
        parts = self._engine._life.parts

        async def make(done: Sequence[tuple[str | None, int]]) -> None:
            await parts.tiering.checkpoint.make(parts.loop, 30.0)
            tell("safe", done)

        await self._every(make)

    async def _snapshots(self) -> None:
        async def write(done: Sequence[tuple[str | None, int]]) -> None:
            tell("writing", done)
            await self._engine.snapshot(self._job.snapshot, tiers=False)
            tell("written", done)

        await self._every(write)

    async def _compactions(self) -> None:
        tier = self._engine._life.parts.tiering.manager._mounts[0].tier
        if not isinstance(tier, DiskTier):
            raise TypeError(tier)

        async def compact(done: Sequence[tuple[str | None, int]]) -> None:
            for tenant, number in self._rng.sample(done, min(3, len(done))):
                tell("forgetting", tenant, number)
                await self._engine.evict(prompt(number)[: whole(number)], tenant=tenant)
                tell("forgotten", tenant, number)
            await tier.compact()
            tell("compacted")

        await self._every(compact)


async def live(job: Job) -> None:
    """Serve; then close, which is a part of life where a kill may come as well."""
    async with engine(job) as served:
        life = Life(job, served)
        tell("open")
        await life.run()
        tell("closing")
    tell("safe", life._done)
    tell("closed")


def serve() -> None:
    """Fork a process for each line."""
    while line := sys.stdin.readline():
        job = Job(*json.loads(line))
        child = os.fork()
        if not child:
            try:
                tell("pid", os.getpid())
                asyncio.run(live(job))
            finally:
                tell("over")
                os._exit(0)
        sys.stdin.readline()
        os.waitpid(child, 0)
        tell("ended")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:  # before the fork: it takes seconds
        import transformers  # noqa: F401  # only where a real model is wanted
    serve()
