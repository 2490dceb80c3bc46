"""How near a step of the model comes to what this machine can do, and where its time goes.

    python examples/benchmarks/roofline.py                  # some minutes
    python examples/benchmarks/roofline.py --quick          # fewer batches and chunks, rough
    python examples/benchmarks/roofline.py --json F --plot F

The machine: *bandwidth* is that of reading half a gigabyte, *rate* that of the fastest large matrix product (oneDNN on
packed weights, or ``torch.matmul``), at the threads of the model and in its dtype, or in float32 where the processor
does not multiply that, measured in every round beside the steps. The model: SmolLM2-135M. A step has to read every
weight once and the K and V of its batch, once where blocks are shared; what it has to compute follows from its tokens
and their contexts. *bound*: the larger of bytes / bandwidth and operations / rate: no program is faster (Williams et
al., "Roofline", CACM 2009). *of roofline*: bound / measured; *of bandwidth*: bytes / bandwidth / measured, and *of
rate*: operations / rate / measured. Which of the two is the tighter bound depends on the batch: the larger it is, the
more it is the rate.

The steps are real: an engine runs prompts of 560 tokens, of which they share 512 or none, and a step with about 576
tokens of context for each is repeated on the model alone, all kinds of steps in turn. *attention* is timed around the
backend, *products* (projections and MLP) and *head* by torch's profiler in a run right after, *sampling* by the runner
itself; *rest* is what remains of a step: norms, position encoding, writes of K and V, and Python between. *engine*:
from the end of one step to the begin of the next while the same batch runs in the engine: commit, plan, and handing
over. Milliseconds.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from octavo.examples.benchmarks.report import Report, Sheet, Spread, Target, panels, parser_of, this_machine, turns
    from octavo.examples.benchmarks.step_taps import CONFIG, Case, Tap, phases_of, real_cases
    from octavo.examples.benchmarks.step_work import (
        ATTENTION,
        Limits,
        Work,
        bandwidth_probe,
        rate_probe,
        seconds,
        work_of,
    )
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from report import Report, Sheet, Spread, Target, panels, parser_of, this_machine, turns
    from step_taps import CONFIG, Case, Tap, phases_of, real_cases
    from step_work import ATTENTION, Limits, Work, bandwidth_probe, rate_probe, seconds, work_of

BATCHES, CHUNKS = (1, 8, 32, 64), (64, 128, 256, 512, 1_024, 2_048)
QUICK_BATCHES, QUICK_CHUNKS = (1, 32), (512,)
ENOUGH = 0.25
"""Seconds after which a step was repeated often enough in one turn."""
PHASES = (ATTENTION, "products", "head", "sampling", "rest")
DECODE_TARGET, PREFILL_TARGET = 0.6, 0.6
JUDGED_BATCH, JUDGED_CHUNK = 32, 512


@dataclass(frozen=True, slots=True)
class Result:
    """One kind of step. Times in seconds."""

    name: str
    tokens: int
    context: int
    work: dict[str, Work]
    measured: Spread
    phases: dict[str, float]
    engine: float | None
    """Between two steps in the engine."""

    @property
    def whole(self) -> Work:
        return sum(self.work.values(), Work(0, 0))

    def of_roofline(self, limits: Limits) -> float:
        return self.whole.bound(limits) / self.measured.median

    def of_bandwidth(self, limits: Limits) -> float:
        return self.whole.bytes / limits.bandwidth / self.measured.median

    def of_rate(self, limits: Limits) -> float:
        return self.whole.operations / limits.rate / self.measured.median

    def phase_of_roofline(self, phase: str, limits: Limits) -> float | None:
        """``None``: there is no bound for it, or no time."""
        work, time = self.work.get(phase), self.phases.get(phase)
        return work.bound(limits) / time if work is not None and time else None


def measure(tap: Tap, cases: Sequence[Case], rounds: int) -> tuple[Limits, list[Result]]:
    """The machine and all steps in turn, then where the time of each goes."""
    ways: dict[str, Callable[[], float]] = {"bandwidth": bandwidth_probe(), "matrix rate": rate_probe()}
    for case in cases:
        ways[case.name] = lambda step=case.step: repeated(lambda: tap.repeat(step))  # type: ignore[misc]
    found: dict[str, list[float]] = defaultdict(list)
    for name in turns(list(ways), rounds):
        found[name].append(ways[name]())
    limits = Limits(median(found["bandwidth"]), median(found["matrix rate"]))
    return limits, [_result(tap, case, Spread.of(found[case.name])) for case in cases]


def repeated(work: Callable[[], object]) -> float:
    """Median seconds of a call, after one that does not count."""
    work()
    times = [seconds(work)]
    while sum(times) < ENOUGH:
        times.append(seconds(work))
    return median(times)


def _result(tap: Tap, case: Case, measured: Spread) -> Result:
    phases = phases_of(tap, case.step, measured.median)
    work = work_of(case.step, CONFIG.block_size)
    return Result(case.name, len(case.step.tokens), case.context, work, measured, phases, case.engine_gap)


# the report


def bounds_sheet(results: Sequence[Result], limits: Limits) -> Sheet:
    """What a step takes beside what it must take."""
    columns = ("step", "context", "MB", "GFLOP", "bound", "measured", "of roofline", "of bandwidth", "of rate")
    return Sheet("whole steps", columns, [_bounds(each, limits) for each in results])


def _bounds(result: Result, limits: Limits) -> list[str]:
    work = result.whole
    return [
        result.name,
        f"{result.context:,}",
        f"{work.bytes / 1e6:,.0f}",
        f"{work.operations / 1e9:,.1f}",
        f"{1e3 * work.bound(limits):,.1f}",
        Spread.of(1e3 * value for value in result.measured.values).text(),
        f"{result.of_roofline(limits):.0%}",
        f"{result.of_bandwidth(limits):.0%}",
        f"{result.of_rate(limits):.0%}",
    ]


def phases_sheet(results: Sequence[Result], limits: Limits) -> Sheet:
    """Where the time goes, and what share of the roofline each phase reaches."""
    rows = [[each.name, *(_phase(each, name, limits) for name in PHASES), _engine(each)] for each in results]
    return Sheet("phases: ms, and of their own roofline", ("step", *PHASES, "engine"), rows)


def _phase(result: Result, phase: str, limits: Limits) -> str:
    time, share = result.phases.get(phase), result.phase_of_roofline(phase, limits)
    if time is None:
        return "-"
    return f"{1e3 * time:,.1f}" if share is None else f"{1e3 * time:,.1f} ({share:.0%})"


def _engine(result: Result) -> str:
    return "-" if result.engine is None else f"{1e3 * result.engine:.2f}"


def targets(results: Sequence[Result], limits: Limits) -> list[Target]:
    """Of the batch and the chunk that are judged, if they were looked at."""
    found = []
    for each in results:
        if each.name == f"decode {JUDGED_BATCH} shared":
            found += [
                Target(f"{each.name}, of the roofline", each.of_roofline(limits), DECODE_TARGET),
                Target(f"{each.name}, of the bandwidth alone", each.of_bandwidth(limits), DECODE_TARGET),
            ]
        if each.name == f"prefill {JUDGED_CHUNK}":
            found.append(Target(f"{each.name}, of the matrix rate", each.of_rate(limits), PREFILL_TARGET))
    return found


def save_plot(results: Sequence[Result], limits: Limits, path: Path) -> None:
    """The roofline with every step below it, and the phases."""
    figure, (roof, stacked) = panels("Steps below the roofline", 2)
    knee = limits.rate / limits.bandwidth
    intensities = [knee / 64, knee, knee * 64]
    attained = [min(each * limits.bandwidth, limits.rate) / 1e9 for each in intensities]
    roof.loglog(intensities, attained, color="black", label="roofline")
    for kind in ("decode", "prefill"):
        chosen = [each for each in results if each.name.startswith(kind)]
        points = [each.whole.operations / each.whole.bytes for each in chosen]
        speeds = [each.whole.operations / each.measured.median / 1e9 for each in chosen]
        if chosen:
            roof.plot(points, speeds, "o", label=kind)
    roof.set_xlabel("operations by byte")
    roof.set_ylabel("billion operations a second")
    roof.legend(fontsize="small")
    _stack(stacked, results)
    figure.savefig(path)


def _stack(axes: Axes, results: Sequence[Result]) -> None:
    """Shares of the phases."""
    left = [0.0] * len(results)
    for phase in PHASES:
        shares = [each.phases.get(phase, 0.0) / sum(each.phases.values()) for each in results]
        axes.barh([each.name for each in results], shares, left=left, label=phase)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_xlabel("share of the step")
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(PHASES))


def numbers(results: Sequence[Result], limits: Limits) -> Mapping[str, object]:
    """For the JSON."""
    return {
        "limits": limits,
        "steps": [
            {
                "step": each,
                "of_roofline": each.of_roofline(limits),
                "of_bandwidth": each.of_bandwidth(limits),
                "of_rate": each.of_rate(limits),
                "phases_of_roofline": {phase: each.phase_of_roofline(phase, limits) for phase in PHASES},
            }
            for each in results
        ],
    }


def _sizes(
    quick: bool, batches: Sequence[int] | None, chunks: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Batches and chunks to look at. Who names some of one kind wants none of the other."""
    if batches is not None or chunks is not None:
        return batches or (), chunks or ()
    return (QUICK_BATCHES, QUICK_CHUNKS) if quick else (BATCHES, CHUNKS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--batches", nargs="*", type=int, metavar="N", help=f"of decode steps; default: {BATCHES}")
    parser.add_argument("--chunks", nargs="*", type=int, metavar="N", help=f"tokens of prefill; default: {CHUNKS}")
    chosen = parser.parse_args(arguments)
    tap, cases = asyncio.run(real_cases(*_sizes(chosen.quick, chosen.batches, chosen.chunks)))
    limits, results = measure(tap, cases, 2 if chosen.quick else 3)
    report = Report(
        "roofline",
        this_machine(torch.get_num_threads()),
        [bounds_sheet(results, limits), phases_sheet(results, limits)],
        numbers(results, limits),
        targets(results, limits),
        [f"bandwidth {limits.bandwidth / 1e9:.1f} GB/s, matrix rate {limits.rate / 1e9:,.0f} GFLOP/s"],
    )
    report.show()
    report.save(chosen.json)
    if chosen.plot is not None:
        save_plot(results, limits, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
