"""What ranks do when something goes wrong, in jobs of ``ranks_rig.py``; the model is the fake one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from octavo import AsyncEngine, EngineConfig
from octavo.engine.model.attention.kv_tensors import LayerGeometry
from octavo.engine.model.parallel.following import Follower
from octavo.engine.model.parallel.job import join, require_job
from octavo.engine.model.parallel.line import Line, Patience
from octavo.engine.model.parallel.runner import ParallelRunner
from octavo.engine.model.runner import StepInput
from octavo.engine.testing import FakeRunner
from octavo.errors import DeviceOutOfMemory, ModelError, OctavoError
from octavo.tests.system.ranks_families import BLOCK, GREEDY, NEW, RANKS, Found, Ids, refusal

CPU = torch.device("cpu")
FOREVER = 600.0
SWIFT = Patience(answer=timedelta(seconds=30), failure=timedelta(seconds=0.5))
LOCAL = (LayerGeometry(1, 1, 1),)
WHOLE = (LayerGeometry(RANKS, 1, 1),)
"""A slot of the fake model is eight bytes: as if K and V were a number of four bytes each."""


def faults(_folder: Path, rank: int) -> Found:
    """Calls that fail on one rank or on both, of a runner that stays usable."""
    found: Found = {}
    failing = FailingRunner(rank)
    line = a_line()
    if rank:
        Follower(failing, line, CPU).follow()
        return {"closed": failing.is_closed}
    runner = parallel(failing, line)
    config = EngineConfig(num_blocks=64, block_size=BLOCK)

    async def ask() -> None:
        async with AsyncEngine(runner=FakeRunner(), config=config) as engine:
            expected = await answer(engine, [5, 6, 7])
        async with AsyncEngine(runner=runner, config=config) as engine:
            found["well"] = await answer(engine, [5, 6, 7]) == expected
            for token, fault in FAULTS.items():
                found[f"{fault.error.__name__} on {fault.rank}"] = await answer(engine, [token, 6, 7])
            found["well again"] = await answer(engine, [5, 6, 7]) == expected
            long = [int(token) for token in np.random.default_rng(0).integers(5, 60, 200)]
            found["long"] = len(await answer(engine, long)) == NEW
            found["memory"] = memory_goes_round(runner)

    asyncio.run(ask())
    found["closed"] = failing.is_closed
    return found


def stuck(_folder: Path, rank: int) -> Found:
    """A rank fails while the other one waits for it in the middle of the step."""
    line = a_line()

    def in_the_middle(_step: StepInput) -> None:
        if rank:
            raise RuntimeError("half way")
        dist.all_reduce(torch.ones(1))

    shard = FakeRunner(before_step=in_the_middle)
    if rank:
        return {"error": refusal(Follower(shard, line, CPU).follow), "closed": shard.is_closed}
    return broken(shard, line, lambda: None)


def killed(folder: Path, rank: int) -> Found:
    """A rank dies while the other one waits for it in the middle of the step."""
    line = a_line()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def in_the_middle(_step: StepInput) -> None:
        if rank:
            time.sleep(FOREVER)
        dist.all_reduce(torch.ones(1))

    shard = FakeRunner(before_step=in_the_middle)
    if rank:
        Follower(shard, line, CPU).follow()
        return {}
    return broken(shard, line, lambda: os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL))


def left_alone(folder: Path, rank: int) -> Found:
    """Rank 0 dies without a word."""
    line = a_line()
    if not rank:
        while not (folder / "ready").exists():
            time.sleep(0.01)
        os._exit(3)
    (folder / "ready").touch()
    shard = FakeRunner()
    return {"error": refusal(Follower(shard, line, CPU).follow), "closed": shard.is_closed}


def frozen(folder: Path, rank: int) -> Found:
    """A rank stands still, with its sockets open, when there is more to send than they take."""
    line = a_line()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    line.together(lambda: None)
    if rank:
        time.sleep(FOREVER)
    other = int((folder / "pid-1").read_text())
    os.kill(other, signal.SIGSTOP)
    vars(line)["_patience"] = SWIFT._replace(answer=timedelta(seconds=0.5))
    try:
        return {"error": refusal(lambda: line.send_order(bytes(2**26)))}
    finally:
        line.leave()
        os.kill(other, signal.SIGKILL)


class Fault(NamedTuple):
    """What goes wrong with prompts that begin with a certain token, and on which rank."""

    rank: int
    error: type[Exception]


FAULTS: MappingProxyType[int, Fault] = MappingProxyType(
    {1: Fault(1, ModelError), 2: Fault(1, ValueError), 3: Fault(0, ValueError), 4: Fault(1, DeviceOutOfMemory)}
)


class FailingRunner(FakeRunner):
    """Fails in first steps, out of memory in those of more than one token."""

    def __init__(self, rank: int) -> None:
        super().__init__(before_step=self._fail)
        self._rank = rank

    def _fail(self, step: StepInput) -> None:
        fault = FAULTS.get(int(step.tokens[0])) if step.positions[0] == 0 else None
        if fault is None or fault.rank != self._rank:
            return
        if fault.error is not DeviceOutOfMemory or len(step.tokens) > 1:
            raise fault.error("no good")


def a_line() -> Line:
    job = require_job(RANKS)
    return Line(job.rank, job.size, join(job, CPU, SWIFT.answer), SWIFT)


def parallel(shard: FakeRunner, line: Line) -> ParallelRunner:
    return ParallelRunner(shard, line, CPU, local=LOCAL, whole=WHOLE, geometry="2 numbers")


async def answer(engine: AsyncEngine, prompt: Ids) -> Ids | str:
    """The tokens, or why there are none."""
    try:
        return list((await engine.complete(prompt, GREEDY))[0].token_ids)
    except OctavoError as error:
        return f"{type(error).__name__}: {error}"


def memory_goes_round(runner: ParallelRunner) -> bool:
    """Blocks that were imported are exported as they were."""
    rows = np.random.default_rng(0).integers(0, 256, (3, runner.info.bytes_per_block), dtype=np.uint8)
    blocks, out = np.array([7, 2, 9], dtype=np.int32), np.empty_like(rows)
    runner.import_blocks(blocks, [memoryview(row) for row in rows])
    runner.export_blocks(blocks, out)
    return bool((out == rows).all())


def broken(shard: FakeRunner, line: Line, harm: Callable[[], None]) -> Found:
    """What becomes of an engine whose job breaks in a step, at the ``harm``."""

    async def ask() -> Found:
        async with AsyncEngine(runner=parallel(shard, line), config=EngineConfig(num_blocks=64)) as engine:
            asking = asyncio.create_task(answer(engine, [5, 6, 7]))
            await asyncio.sleep(0.3)
            harm()
            return {"first": await asking, "second": await answer(engine, [5, 6, 7])}

    return {**asyncio.run(ask()), "closed": shard.is_closed}
