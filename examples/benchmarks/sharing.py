"""What sharing of blocks brings: throughput, latency and memory, beside the same requests without sharing.

    python examples/benchmarks/sharing.py                       # some minutes
    python examples/benchmarks/sharing.py --quick               # less than a minute, rough
    python examples/benchmarks/sharing.py --scenarios n=8       # one of them
    python examples/benchmarks/sharing.py --json F --plot F     # all numbers; a picture

Figures 12, 14 and 16 of "Efficient Memory Management for Large Language Model Serving with PagedAttention" (Kwon et
al., SOSP 2023) in small, with SmolLM2 in bfloat16. Requests come at random (Poisson, the same moments and the same
tokens for every arm) at several rates; no prefix is warm when a run begins.

*prefix*: 512 tokens that all requests share, and 32 of their own. Arms: *no sharing* (``enable_prefix_caching=False``)
and *prefix sharing*. *n=4*, *n=8*, *beam 4*: prompts of 256 tokens, continued several times. Arms: as many *separate*
requests without sharing, the same with *prefix sharing*, and one request whose samples or beams share blocks
*copy-on-write*. The separate requests beside beams are greedy: as many tokens, without what a beam search adds.

*tokens/s*: output tokens of all samples, from the first request to the end of the last. *latency*: seconds to the end
of a request (of all its samples) by output token of one sample, mean: "normalised latency" in the paper. *held*: most
blocks in use at a moment; *unshared*: most that the same requests would have needed at a moment, had each sample all
of its own; *saved*: 1 - held / unshared, both averaged over the run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.insight.under_way import RequestView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from octavo.examples.benchmarks.report import Report, Sheet, panels, parser_of, this_machine, turns
    from octavo.examples.benchmarks.sharing_requests import (
        QUICK,
        SCENARIOS,
        UNSHARED,
        Arrival,
        Cell,
        Scenario,
        arrivals,
        calls,
    )
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from report import Report, Sheet, panels, parser_of, this_machine, turns
    from sharing_requests import QUICK, SCENARIOS, UNSHARED, Arrival, Cell, Scenario, arrivals, calls

CONFIG = EngineConfig(num_blocks=1024, max_batch_tokens=512, max_running=64, dtype="bfloat16")
LOOK = 0.05
"""Seconds between two looks at the memory."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one run found."""

    scenario: str
    rate: float
    """Requests a second, as asked for."""
    arm: str
    tokens_per_second: float
    latency: float
    """Seconds by output token."""
    held: int
    """Most blocks in use at a moment."""
    unshared: int
    """Most that would have been needed without sharing."""
    saved: float
    """Share of the blocks, averaged over the run."""


class Memory:
    """Looks at the memory of an engine again and again while something runs."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._held: list[int] = []
        self._unshared: list[int] = []

    @property
    def held(self) -> int:
        return max(self._held, default=0)

    @property
    def unshared(self) -> int:
        return max(self._unshared, default=0)

    @property
    def saved(self) -> float:
        needed = sum(self._unshared)
        return 1 - sum(self._held) / needed if needed else 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look until the block ends."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        block_size = self._engine.config.block_size
        while True:
            cache = self._engine.stats().cache
            self._held.append(cache.total - cache.free - cache.idle)
            self._unshared.append(sum(blocks_alone(view, block_size) for view in self._engine.requests()))
            await asyncio.sleep(LOOK)


def blocks_alone(view: RequestView, block_size: int) -> int:
    """Blocks that a request would hold if each of its samples had all of its own; 0 for one that holds none."""
    if view.state != "running":
        return 0
    tokens = view.prompt_tokens + -(-view.generated_tokens // view.samples)
    return view.samples * -(-tokens // block_size)


async def run(engine: AsyncEngine, cell: Cell) -> Result:
    """Send everything, wait for the last."""
    scenario = cell.scenario
    began = perf_counter()

    async def user(arrival: Arrival) -> tuple[float, int]:
        """:returns: seconds it took, and output tokens."""
        await asyncio.sleep(began + arrival.at - perf_counter())
        sent = perf_counter()
        params = calls(scenario, cell.arm, arrival.seed)
        answers = await asyncio.gather(*(engine.complete(arrival.prompt, each) for each in params))
        return perf_counter() - sent, sum(len(output.token_ids) for answer in answers for output in answer)

    memory = Memory(engine)
    async with memory.watched():
        done = await asyncio.gather(*map(user, arrivals(scenario, cell.rate)))
    seconds = perf_counter() - began
    return Result(
        scenario=scenario.name,
        rate=cell.rate,
        arm=cell.arm,
        tokens_per_second=sum(tokens for _, tokens in done) / seconds,
        latency=sum(latency for latency, _ in done) / len(done) / scenario.output,
        held=memory.held,
        unshared=memory.unshared,
        saved=memory.saved,
    )


async def measure(scenarios: Sequence[Scenario]) -> list[Result]:
    """All runs of all scenarios, the arms of a rate one after the other."""
    cells = [Cell(each, rate, arm) for each in scenarios for rate in each.rates for arm in each.arms]
    async with AsyncExitStack() as stack:
        sharing = await stack.enter_async_context(AsyncEngine.open("smollm2", CONFIG))
        alone = await stack.enter_async_context(
            AsyncEngine.open("smollm2", replace(CONFIG, enable_prefix_caching=False))
        )
        for engine in (sharing, alone):
            await engine.complete([1] * CONFIG.block_size, SamplingParams(max_tokens=4, ignore_eos=True))
        return [await run(alone if cell.arm == UNSHARED else sharing, cell) for cell in turns(cells, 1)]


# the report


def by_arm(results: Sequence[Result], scenario: str, rate: float) -> Mapping[str, Result]:
    """The runs of one rate."""
    return {each.arm: each for each in results if each.scenario == scenario and each.rate == rate}


def sheets(results: Sequence[Result]) -> Iterator[Sheet]:
    """One table for each scenario."""
    columns = ("arm", "requests/s", "tokens/s", "ratio", "s/token", "ratio", "held", "unshared", "saved")
    for scenario in dict.fromkeys(each.scenario for each in results):
        rows = [each for each in results if each.scenario == scenario]
        lines = [_line(each, by_arm(results, scenario, each.rate)[UNSHARED]) for each in rows]
        yield Sheet(f"{scenario}; ratios to the arm without sharing at the same rate", columns, lines)


def _line(result: Result, base: Result) -> list[str]:
    return [
        result.arm,
        f"{result.rate:g}",
        f"{result.tokens_per_second:,.1f}",
        f"{result.tokens_per_second / base.tokens_per_second:.2f}",
        f"{result.latency:.3f}",
        f"{result.latency / base.latency:.2f}",
        f"{result.held:,}",
        f"{result.unshared:,}",
        f"{result.saved:.0%}",
    ]


def save_plot(results: Sequence[Result], path: Path) -> None:
    """For each scenario throughput, latency and memory, each over the rate."""
    scenarios = list(dict.fromkeys(each.scenario for each in results))
    figure, axes = panels("What sharing of blocks brings", 3 * len(scenarios))
    for at, scenario in enumerate(scenarios):
        rows = [each for each in results if each.scenario == scenario]
        speed, latency, memory = axes[3 * at : 3 * at + 3]
        _curves(speed, rows, "tokens_per_second", f"{scenario}: output tokens/s")
        _curves(latency, rows, "latency", f"{scenario}: seconds by output token")
        latency.set_yscale("log")
        _curves(memory, rows, "held", f"{scenario}: most blocks held")
    figure.savefig(path)


def _curves(axes: Axes, rows: Sequence[Result], value: str, title: str) -> None:
    for arm in dict.fromkeys(each.arm for each in rows):
        points = [(each.rate, getattr(each, value)) for each in rows if each.arm == arm]
        axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    axes.set_title(title)
    axes.set_xlabel("requests/s")
    axes.legend(fontsize="small")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    names = [each.name for each in SCENARIOS]
    parser = parser_of(__doc__)
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rates", nargs="+", type=float, metavar="RATE", help="requests a second, in place of its own")
    chosen = parser.parse_args(arguments)
    wanted = [
        replace(each, rates=tuple(chosen.rates or each.rates))
        for each in (QUICK if chosen.quick else SCENARIOS)
        if each.name in chosen.scenarios
    ]
    results = asyncio.run(measure(wanted))
    report = Report("sharing", this_machine(torch.get_num_threads()), list(sheets(results)), results)
    report.show()
    report.save(chosen.json)
    if chosen.plot is not None:
        save_plot(results, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
