"""What lies between two steps of the model, and whether the event loop stays free while they run.

    python examples/benchmarks/loop_gap.py                  # about two minutes
    python examples/benchmarks/loop_gap.py --quick          # fewer rounds, rough
    python examples/benchmarks/loop_gap.py --json F --plot F

*gap*: from the end of one step to the begin of the next, both as the model's thread sees them: handing over, commit,
plan, packing. *lag*: from the moment at which another process writes a line to the moment at which a task in the same
event loop has it, while readers take every token of every request; no timer of the loop is used, since those are up to
a millisecond late by themselves. Both while the whole batch decodes, with outputs delivered beside the next step
(*overlap*) and before it (*in turn*). *share*: the gap's part of step and gap.

What was there before the requests came is out of the garbage collector's sight, as in ``octavo serve``.

Two models: one that sleeps for about as long as SmolLM2 computes, with a tokenizer that writes one character for a
token, so that what is seen is the engine; and SmolLM2-135M itself in bfloat16. All arms take turns, round by round.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import torch

from octavo import Acceleration, AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.model import loader
from octavo.engine.model.runner import (
    Int32Array,
    ModelInfo,
    ModelRunner,
    Row,
    RowOutput,
    SampledToken,
    StepInput,
    StepOutput,
    UInt8Array,
)
from octavo.engine.testing import FakeCodec

if TYPE_CHECKING:
    from octavo.examples.benchmarks.report import (
        Report,
        Sheet,
        Spread,
        Target,
        bars,
        panels,
        parser_of,
        this_machine,
        turns,
    )
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from report import Report, Sheet, Spread, Target, bars, panels, parser_of, this_machine, turns

STEP_SECONDS = MappingProxyType({1: 0.013, 32: 0.032, 128: 0.1})
"""Of the model that sleeps, by rows: about as long as SmolLM2 takes on two cores."""
VOCABULARY = 1_000
CONFIG = EngineConfig(num_blocks=4_096, block_size=16, max_running=128, max_batch_tokens=2_048, dtype="bfloat16")
PROMPT = 256
TICK = 0.002
PINGS = "import sys, time\nwhile True:\n    time.sleep(float(sys.argv[1]))\n    print(time.perf_counter(), flush=True)"
"""A program that writes when it wrote: the clock is the same in all processes of a machine."""
LAG_LIMIT = 0.1
"""Of a median step: the 99th percentile of the lag shall be below."""


class Arm(NamedTuple):
    """What is measured in one turn."""

    model: str
    rows: int
    overlap: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.rows} rows, {'overlap' if self.overlap else 'in turn'}"


class Sleeping:
    """A model whose steps take their time and nothing else."""

    info = ModelInfo("sleeping", "sleeping", VOCABULARY, 4_096, frozenset(), 0, MappingProxyType({}))

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def allocate(self, num_blocks: int, block_size: int) -> None: ...

    def execute(self, step: StepInput) -> StepOutput:
        time.sleep(self._seconds)
        return StepOutput(tuple(map(self._output, step.rows)))

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None: ...

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None: ...

    def close(self) -> None: ...

    @staticmethod
    def _output(row: Row) -> RowOutput:
        return RowOutput() if row.sampling is None else RowOutput((SampledToken(row.context % 64, -1.0),))


class Step(NamedTuple):
    """When a step ran, and for how many rows and tokens."""

    began: float
    ended: float
    rows: int
    tokens: int


@dataclass(slots=True)
class Tap:
    """A runner that notes when its steps begin and end."""

    runner: ModelRunner
    steps: list[Step] = field(default_factory=list)

    @property
    def info(self) -> ModelInfo:
        return self.runner.info

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.runner.allocate(num_blocks, block_size)

    def execute(self, step: StepInput) -> StepOutput:
        began = perf_counter()
        output = self.runner.execute(step)
        self.steps.append(Step(began, perf_counter(), len(step.rows), len(step.tokens)))
        return output

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        self.runner.export_blocks(blocks, out)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        self.runner.import_blocks(blocks, payloads)

    def close(self) -> None:
        self.runner.close()


@dataclass(frozen=True, slots=True)
class Found:
    """One arm in one turn; seconds."""

    step: float
    gap: float
    lag_median: float
    lag_p99: float


@asynccontextmanager
async def _engine_of(arm: Arm) -> AsyncIterator[tuple[AsyncEngine, Tap]]:
    config = replace(CONFIG, acceleration=Acceleration(overlap=arm.overlap))
    if arm.model == "sleeping":
        tap = Tap(Sleeping(STEP_SECONDS[arm.rows]))
        async with AsyncEngine(runner=tap, codec=FakeCodec(VOCABULARY), config=config) as engine:
            yield engine, tap
        return
    taps: list[Tap] = []
    load = loader.load

    def tapped(*args: str, **options: object) -> loader.LoadedModel:
        loaded = load(*args, **options)  # type: ignore[arg-type]  # as the engine calls it
        taps.append(Tap(loaded.runner))
        return loaded._replace(runner=taps[0])

    with patch.object(loader, "load", tapped):
        async with AsyncEngine.open("smollm2", config) as engine:
            yield engine, taps[0]


async def _measured(arm: Arm, tokens: int) -> Found:
    """The steps in which all rows decode."""
    lags: list[tuple[float, float]] = []
    async with _engine_of(arm) as (engine, tap), _watched(lags):
        gc.collect()
        gc.freeze()
        await asyncio.gather(*(_read(engine, number, tokens) for number in range(arm.rows)))
    steps = [
        (one, two) for one, two in pairwise(tap.steps) if one.rows == one.tokens == two.rows == two.tokens == arm.rows
    ]
    begin, end = steps[0][0].began, steps[-1][1].ended
    late = [lag for at, lag in lags if begin <= at <= end]
    return Found(
        median(two.ended - two.began for _, two in steps),
        median(two.began - one.ended for one, two in steps),
        median(late),
        quantiles(late, n=100)[98],
    )


@asynccontextmanager
async def _watched(lags: list[tuple[float, float]]) -> AsyncIterator[None]:
    """Meanwhile, note when something came from outside, and how much later it was seen."""
    pings = await asyncio.create_subprocess_exec(sys.executable, "-c", PINGS, str(TICK), stdout=asyncio.subprocess.PIPE)
    watching = asyncio.create_task(_watch(pings.stdout, lags))
    try:
        yield
    finally:
        watching.cancel()
        pings.kill()
        await pings.wait()


async def _watch(lines: asyncio.StreamReader | None, lags: list[tuple[float, float]]) -> None:
    if lines is not None:
        async for line in lines:
            sent = float(line)
            lags.append((sent, perf_counter() - sent))


async def _read(engine: AsyncEngine, number: int, tokens: int) -> None:
    prompt = [number, *range(100, 100 + PROMPT)]
    async for _ in engine.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)):
        pass


def _sheet(found: dict[Arm, list[Found]]) -> Sheet:
    rows = []
    for arm, values in found.items():
        step, gap = Spread.of(1e3 * each.step for each in values), Spread.of(1e3 * each.gap for each in values)
        lag = Spread.of(1e3 * each.lag_median for each in values)
        worst = Spread.of(1e3 * each.lag_p99 for each in values)
        share = 100 * gap.median / (gap.median + step.median)
        rows.append((str(arm), step.text(), gap.text(2), f"{share:.1f}", lag.text(2), worst.text(2)))
    columns = ("arm", "step ms", "gap ms", "share %", "lag p50 ms", "lag p99 ms")
    return Sheet("between two steps", columns, rows)


def _targets(found: dict[Arm, list[Found]]) -> list[Target]:
    return [
        Target(f"lag p99 / step, {arm}", median(each.lag_p99 / each.step for each in values), LAG_LIMIT, at_most=True)
        for arm, values in found.items()
        if arm.overlap
    ]


def _draw(found: dict[Arm, list[Found]], path: Path) -> None:
    figure, (gaps, lags) = panels("Between two steps of the model", 2)
    groups = {f"{arm.model}, {arm.rows}": arm for arm in found}
    for axes, title, name in ((gaps, "gap", "gap"), (lags, "event loop lag, p99", "lag_p99")):
        values: dict[str, dict[str, float]] = {group: {} for group in groups}
        for arm, each in found.items():
            way = "overlap" if arm.overlap else "in turn"
            values[f"{arm.model}, {arm.rows}"][way] = 1e3 * median(getattr(one, name) for one in each)
        bars(axes, values, unit="ms")
        axes.set_title(title)
    figure.savefig(path)


def main() -> int:
    """Measure, show and save."""
    options = parser_of(__doc__).parse_args()
    rounds, tokens = (1, 48) if options.quick else (3, 96)
    shapes = (("sleeping", 1), ("sleeping", 32), ("sleeping", 128), ("smollm2", 1), ("smollm2", 32))
    arms = [Arm(model, rows, overlap) for model, rows in shapes for overlap in (True, False)]
    found: dict[Arm, list[Found]] = {arm: [] for arm in arms}
    for arm in turns(arms, rounds):
        found[arm].append(asyncio.run(_measured(arm, tokens)))
    numbers = [{"arm": arm, "rounds": values} for arm, values in found.items()]
    report = Report("loop_gap", this_machine(torch.get_num_threads()), [_sheet(found)], numbers, _targets(found))
    report.show()
    report.save(options.json)
    if options.plot is not None:
        _draw(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
