"""What each switch of ``Acceleration`` does to a step of the demo model, added one after the other.

    python examples/benchmarks/levers.py            # two minutes
    python examples/benchmarks/levers.py --quick    # few repetitions
    python examples/benchmarks/levers.py --json levers.json --plot levers.png

SmolLM2 in bfloat16, steps of the runner alone (forward pass and greedy choice), milliseconds, all ways in turns. Blocks
lie scattered, as after hours of traffic. *overlap* is no part of a step: see ``loop_gap.py``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from octavo import Acceleration, SamplingParams
from octavo.engine.model.loader import load
from octavo.engine.model.runner import Int32Array, Int64Array, ModelRunner, Row, RowSampling, StepInput

if TYPE_CHECKING:
    from octavo.examples.benchmarks.report import Report, Sheet, Spread, bars, panels, parser_of, this_machine, turns
else:
    from report import Report, Sheet, Spread, bars, panels, parser_of, this_machine, turns

BLOCK_SIZE, BLOCKS = 16, 1_536
VOCABULARY = 40_000
LEVERS = ("packed", "fused", "native", "shared_prefix")
"""In the order in which they are added."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Shape(NamedTuple):
    """A step of equal rows."""

    name: str
    rows: int
    length: int
    context: int
    shared: int = 0


SHAPES = (
    Shape("1 x 200", 1, 1, 200),
    Shape("8 x 576, 512 shared", 8, 1, 576, 512),
    Shape("32 x 576, 512 shared", 32, 1, 576, 512),
    Shape("32 x 576", 32, 1, 576),
    Shape("prefill 512", 1, 512, 512),
)


def ways() -> Mapping[str, Acceleration]:
    """None of the levers, then one more each time."""
    off = dict.fromkeys(LEVERS, False)
    made = {"none": Acceleration(**off)}
    for count, lever in enumerate(LEVERS, 1):
        made[f"+ {lever}"] = Acceleration(**off | dict.fromkeys(LEVERS[:count], True))
    return made


def step_of(shape: Shape, block_size: int = BLOCK_SIZE) -> StepInput:
    """Rows whose first ``shared`` tokens lie in the same blocks, and the rest anywhere in the pool."""
    random = np.random.default_rng(0)
    free = list(random.permutation(BLOCKS * BLOCK_SIZE // block_size).astype(np.int32))
    common = [free.pop() for _ in range(shape.shared // block_size)]
    own = -(-shape.context // block_size) - len(common)
    tables = [np.array(common + [free.pop() for _ in range(own)], dtype=np.int32) for _ in range(shape.rows)]
    positions = np.arange(shape.context - shape.length, shape.context, dtype=np.int32)
    history = random.integers(0, VOCABULARY, shape.context).astype(np.int32)
    return StepInput(
        tokens=np.tile(history[positions], shape.rows),
        positions=np.tile(positions, shape.rows),
        slots=np.concatenate([_slots(table, positions, block_size) for table in tables]),
        rows=tuple(_row(at, shape, table, history) for at, table in enumerate(tables)),
        copies=np.zeros((0, 2), dtype=np.int32),
    )


def measure(rounds: int, repeats: int) -> Mapping[str, Mapping[str, Spread]]:
    """Milliseconds by way and shape, one median of ``repeats`` for each round."""
    steps = {shape.name: step_of(shape) for shape in SHAPES}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    runners = {name: _runner(how) for name, how in ways().items()}
    for name in turns(list(runners), rounds):
        for shape, step in steps.items():
            found[name][shape].append(_milliseconds(runners[name], step, repeats))
    for runner in runners.values():
        runner.close()
    return {name: {shape: Spread.of(values) for shape, values in found[name].items()} for name in runners}


def sheet_of(found: Mapping[str, Mapping[str, Spread]]) -> Sheet:
    """A row for each way."""
    rows = [[name, *(spread.text() for spread in shapes.values())] for name, shapes in found.items()]
    return Sheet("milliseconds a step", ["levers", *(shape.name for shape in SHAPES)], rows)


def _runner(how: Acceleration) -> ModelRunner:
    runner = load("smollm2", dtype="bfloat16", acceleration=how).runner
    runner.allocate(BLOCKS, BLOCK_SIZE)
    return runner


def _milliseconds(runner: ModelRunner, step: StepInput, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        began = perf_counter()
        runner.execute(step)
        times.append((perf_counter() - began) * 1e3)
    return median(times[1:])  # the first one finds cold caches


def _slots(table: Int32Array, positions: Int32Array, block_size: int) -> Int64Array:
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size


def _row(at: int, shape: Shape, table: Int32Array, history: Int32Array) -> Row:
    sampling = RowSampling(GREEDY, (at,), history, shape.context)
    return Row(at * shape.length, shape.length, shape.context, table, sampling)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show."""
    options = parser_of(__doc__).parse_args(arguments)
    rounds, repeats = (1, 1) if options.quick else (3, 5)
    found = measure(rounds, repeats)
    report = Report("levers", this_machine(torch.get_num_threads()), [sheet_of(found)], found)
    report.show()
    report.save(options.json)
    if options.plot is not None:
        figure, axes = panels("A step, lever by lever", 1)
        values = {shape.name: {name: shapes[shape.name].median for name, shapes in found.items()} for shape in SHAPES}
        bars(axes[0], values, unit="milliseconds")
        figure.savefig(options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
